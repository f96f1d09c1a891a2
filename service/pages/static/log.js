// The trainer's log: its last lines, then what is added.
import { address } from "./live.js";

const log = document.getElementById("log"), find = document.getElementById("find"), follow = document.getElementById("follow");
const MOST = 2_000_000;
let offset = null, text = "";

async function more() {
  if (document.hidden) return;
  const answer = await fetch(address(`/jobs/${log.dataset.job}/logs?${offset === null ? "tail=2000" : `offset=${offset}`}`));
  if (!answer.ok) return;
  const added = await answer.text();
  offset = answer.headers.get("X-Next-Offset");
  document.getElementById("log-empty").hidden = Boolean(text || added);
  if (!added) return;
  text = (text + added).slice(-MOST);
  show();
}

function show() {
  const wanted = find.value.toLowerCase();
  const found = wanted ? text.split("\n").filter((line) => line.toLowerCase().includes(wanted)).join("\n") : text;
  log.textContent = found || (text && `No line has “${find.value}”.`);
  if (follow.checked) log.scrollTop = log.scrollHeight;
}

find.addEventListener("input", show);
more();
setInterval(more, 1500);
