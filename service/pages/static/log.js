// The trainer's log: its last lines, then what is added.
import { address } from "./live.js";

const log = document.getElementById("log"), find = document.getElementById("find"), follow = document.getElementById("follow");
const warnings = document.getElementById("warnings"), LINE = /^\d{4}-\d\d-\d\d [\d:,]+ ([A-Z]+) /;
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

// Lines at least as severe as asked for, with what follows each of them, such as a traceback.
function severe(lines) {
  let is = false;
  return lines.filter((line) => (is = LINE.test(line) ? !["INFO", "DEBUG"].includes(LINE.exec(line)[1]) : is));
}

function show() {
  const wanted = find.value.toLowerCase(), all = text.split("\n");
  const found = (warnings.checked ? severe(all) : all).filter((line) => line.toLowerCase().includes(wanted)).join("\n");
  log.textContent = found || (text && (wanted ? `No ${warnings.checked ? "such " : ""}line has “${find.value}”.` : "No warnings and no errors."));
  if (follow.checked) log.scrollTop = log.scrollHeight;
}

find.addEventListener("input", show);
warnings.addEventListener("change", show);
more();
setInterval(more, 1500);
