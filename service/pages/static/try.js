// Asking the model of a job: the answer comes in server-sent events, over a POST.
import { csrf } from "./actions.js";

const form = document.getElementById("try"), answers = document.getElementById("try-answers");
const status = document.getElementById("try-status"), stop = document.getElementById("try-stop");
const TITLES = { trained: "After training", base: "Before training" };
let asked = null;

function body() {
  const { input, second, checkpoint, base, temperature, max_new_tokens } = form.elements;
  const given = { stream: true, base: base.checked };
  if (second) given.messages = [input, second].map((each) => ({ role: "user", content: each.value })); // a pair of texts
  else given.input = input.value;
  if (checkpoint.value) given.checkpoint = checkpoint.value;
  if (temperature) given.temperature = Number(temperature.value); // a classifier writes nothing
  if (max_new_tokens?.value) given.max_new_tokens = Number(max_new_tokens.value);
  return given;
}

function tile(model) {
  const found = answers.querySelector(`[data-model="${model}"] .text`);
  if (found) return found;
  const section = document.createElement("section"), title = document.createElement("h2"), text = document.createElement("div");
  section.className = "tile";
  section.dataset.model = model;
  title.textContent = TITLES[model];
  text.className = "text";
  text.tabIndex = 0;
  section.append(title, text);
  answers.append(section);
  return text;
}

// As shares_alike in jobs/text/units.py.
function share(part) {
  const near = (100 * part).toFixed(1);
  if (near === "100.0" && part < 1) return "> 99.9 %";
  return near === "0.0" && part > 0 ? "< 0.1 %" : `${near} %`;
}

function classes(labels, given) {
  const list = labels.slice(0, 10).map((each) => `${each.label}  ${share(each.probability)}`);
  return [given ? `The model gives: ${given}` : "The model gives no label: none is above 50 %", ...list].join("\n");
}

function how(answer) {
  const place = answer.device === "cpu" ? "the CPU" : "the GPU";
  const speed = answer.tokens_per_s ? `, ${answer.tokens_per_s.toFixed(1)} tokens/s` : "";
  const cut = answer.outputs.some((each) => each.input_cut) ? "; the end of the text was cut off at the job's limit" : "";
  return `On ${place}${answer.why ? ` (${answer.why})` : ""}${speed}${cut}.`;
}

function part(type, data) {
  if (type === "waiting") status.textContent = data.ahead ? `Waiting behind at most ${data.ahead} ${data.ahead === 1 ? "request" : "requests"} …` : "Waiting …";
  else if (type === "loading") status.textContent = "Loading the model …";
  else if (type === "loaded") status.textContent = "Answering …";
  else if (type === "text") tile(data.model).textContent += data.text;
  else if (type === "output" && data.labels) tile(data.model).textContent = classes(data.labels, data.text);
  else if (type === "output") tile(data.model).textContent = data.text;
  else if (type === "done") status.textContent = how(data);
  else if (type === "error") refuse(data.error);
}

function refuse(error) {
  status.textContent = error.hint ? `${error.message} – ${error.hint}` : error.message;
}

async function ask() {
  asked = new AbortController();
  answers.replaceChildren();
  status.textContent = "Asking …";
  stop.disabled = false;
  try {
    const headers = { ...csrf(), "Content-Type": "application/json" };
    const answer = await fetch(form.dataset.url, { method: "POST", headers, body: JSON.stringify(body()), signal: asked.signal });
    if (!answer.ok) return refuse((await answer.json()).error);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (let next = await reader.read(); !next.done; next = await reader.read()) {
      const blocks = (rest + next.value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const found = /^event: (.*)\ndata: (.*)$/.exec(block);
        if (found) part(found[1], JSON.parse(found[2]));
      }
    }
  } catch (error) {
    status.textContent = error.name === "AbortError" ? "Stopped." : "The service does not answer: ask again.";
  } finally {
    stop.disabled = true;
  }
}

form?.addEventListener("submit", (event) => {
  event.preventDefault();
  asked?.abort();
  ask();
});
stop?.addEventListener("click", () => asked?.abort());
