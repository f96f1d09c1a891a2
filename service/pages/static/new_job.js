// A new job. Its answers become a dry run, which the page shows as it shows all else: by being fetched again. Each
// change of an answer makes another dry run, in place of the one before.
import { address, refresh, say } from "./live.js";
import { send } from "./actions.js";
import { chosenFile, uploading } from "./upload.js";

const form = document.getElementById("new-job"), start = document.getElementById("start");
const recognizers = form.dataset.recognizers.split(" ");
const WAIT_MS = 700, AGAIN_MS = 2000;
let turn = 0, timer = 0, dirty = false, tried = 0, handled = "", gone = false;

const check = () => document.getElementById("check").dataset;
const field = (key) => document.getElementById(`field-${key}`);
const later = (ms) => new Promise((done) => setTimeout(done, ms));

// Does it until the service answers, be it restarted meanwhile; stops when nobody wants it any more.
async function persist(work, wanted) {
  for (;;) {
    try {
      const found = await work();
      say("");
      return found;
    } catch (error) {
      if (error.refused || ![undefined, 429, 502, 503, 504].includes(error.status) || !wanted()) throw error;
      say("reconnecting …");
      await later(AGAIN_MS);
    }
  }
}

// -- answers ------------------------------------------------------------------------------------------------------------

// As `longhaul submit --set` reads a value: JSON where the field takes such a value, else the text itself.
function typed(text, types) {
  try {
    const value = JSON.parse(text);
    const type = value === null ? "null" : Array.isArray(value) ? "array" : typeof value;
    if (types.includes(type) || (type === "number" && types.includes("integer"))) return value;
  } catch {} // a text, or a mistake that the service explains
  return text;
}

function answers() {
  const job = {};
  for (const each of form.querySelectorAll("[name]")) {
    if (each.disabled || (each.type === "radio" && !each.checked)) continue;
    if (each.value.trim() === "" || each.value === each.dataset.default) continue;
    const value = each.dataset.types ? typed(each.value, each.dataset.types.split(" ")) : JSON.parse(each.value);
    const names = each.name.split("."), last = names.pop();
    // A part that is switched on is `true` until one of its keys is set.
    names.reduce((place, name) => (place[name]?.constructor === Object ? place[name] : (place[name] = {})), job)[last] = value;
  }
  return job;
}

// Fields of LoRA count with LoRA only, those of a part that is switched off never.
function switchFields() {
  for (const each of form.querySelectorAll("[data-of]")) {
    each.hidden = form.elements[each.dataset.of].value !== each.dataset.when;
    for (const control of each.querySelectorAll("[name]")) control.disabled = each.hidden;
  }
}

// A JSON merge patch; null takes a key away, so it cannot set one to null (undefined: no patch says it).
function patch(before, after) {
  const found = {};
  for (const key of new Set([...Object.keys(before), ...Object.keys(after)])) {
    const [old, fresh] = [before[key], after[key]];
    if (JSON.stringify(old) === JSON.stringify(fresh)) continue;
    if (fresh === null) return undefined;
    if (fresh?.constructor !== Object) found[key] = fresh ?? null;
    else if ((found[key] = patch(old?.constructor === Object ? old : {}, fresh)) === undefined) return undefined;
  }
  return found;
}

function make(job, key, dryRun) {
  const query = dryRun ? "?dry_run=true" : "";
  const { source, beganWith } = form.dataset;
  const changes = source ? patch(JSON.parse(beganWith), job) : undefined;
  const [url, body] = changes ? [address(`/jobs/${source}/clone`), changes] : [address("/jobs"), job];
  return send("POST", url + query, body, { "Idempotency-Key": key });
}

// -- errors at their fields ---------------------------------------------------------------------------------------------

function fieldOf(param) {
  for (const names = (param ?? "").split("."); names.length && names[0]; names.pop()) {
    const key = names.join("."), found = field(key) ?? field(`${key}.type`);
    if (found) return found;
  }
  return null;
}

// One error, or all of a job: "3 errors:\n- training.epochs: …\n- …".
function parts({ message, param, hint }) {
  const several = message.split("\n- ").slice(1);
  if (!several.length) return [{ param, text: hint ? `${message}\n${hint}` : message }];
  return several.map((text) => ({ param: text.match(/^[\w.]+(?=[: ])/)?.[0], text: text.replace("\n  hint:", "\n") }));
}

function showErrors(error, alone) {
  for (const each of form.querySelectorAll(".wrong")) (each.hidden = true), (each.textContent = "");
  for (const each of form.querySelectorAll("[aria-invalid]")) each.removeAttribute("aria-invalid");
  const box = document.getElementById("errors");
  box.replaceChildren();
  const found = error ? parts(error) : [], several = found.length > 1;
  for (const { param, text } of found) {
    const at = fieldOf(param), line = document.createElement("p");
    if (at) {
      const place = document.getElementById(`error-${at.name}`);
      place.textContent += (place.textContent ? "\n" : "") + text.replace(`${param}: `, "");
      place.hidden = false;
      at.setAttribute("aria-invalid", "true");
      for (let above = at.closest("details"); above; above = above.parentElement.closest("details")) above.open = true;
      if (!alone) continue; // the page has the link
      const link = document.createElement("a");
      link.href = `#${at.id}`;
      link.textContent = at.name;
      line.append("See ", link, ".");
    } else if (alone || several) line.append(text);
    box.append(line);
  }
  box.hidden = !box.textContent;
}

// -- dry runs -----------------------------------------------------------------------------------------------------------

// Of this tab: an address may name any job.
const own = new Set(JSON.parse(sessionStorage.getItem("dry-runs") ?? "[]"));
const remember = (job) => sessionStorage.setItem("dry-runs", JSON.stringify([...own.add(job)]));

// Nobody looks at a dry run of other answers: what lists do not show goes, or at least costs nothing more.
async function discard(job, ended) {
  if (!own.has(job)) return;
  await send(...(ended ? ["DELETE", address(`/jobs/${job}`)] : ["POST", address(`/jobs/${job}/cancel`)])).catch(() => undefined);
}

const ended = (state) => ["validated", "failed", "cancelled"].includes(state);

async function plan() {
  const mine = ++turn;
  clearTimeout(timer);
  const job = answers(), recognize = !job.model;
  if (!job.data?.train) return;
  if (recognize) job.model = job.data.target ? recognizers.at(-1) : recognizers[tried]; // a language model takes any columns
  const once = `dry-${key()}`;
  let made;
  try {
    made = await persist(() => make(job, once, true), () => mine === turn);
  } catch (error) {
    if (mine === turn) showErrors(error, true);
    return;
  }
  remember(made.id);
  if (mine !== turn) return discard(made.id, false);
  showErrors(null);
  const query = new URLSearchParams(location.search), before = query.get("check"), { state } = check();
  if (state === "validated") {
    discard(query.get("shown"), true);
    query.set("shown", before);
  } else discard(before, ended(state));
  query.set("check", made.id);
  query.delete("data");
  if (recognize) query.set("recognize", "true"), query.delete("kind");
  else query.delete("recognize");
  history.replaceState(null, "", `?${query}`);
  dirty = gone = false;
  await refresh();
}

const key = () => [...crypto.getRandomValues(new Uint8Array(12))].map((each) => each.toString(16).padStart(2, "0")).join("");

function changed(wait) {
  dirty = true;
  start.disabled = true;
  turn++;
  clearTimeout(timer);
  timer = setTimeout(plan, wait);
}

// What the page shows now is acted upon once.
function arrived() {
  const { job, state, kind, code, error } = check(), query = new URLSearchParams(location.search);
  start.disabled = dirty || !start.dataset.ready;
  if (gone) document.getElementById("check").textContent = "The check is gone: somebody deleted it. The next change plans again.";
  if (job === handled || !ended(state) || dirty) return;
  handled = job;
  if (state === "validated") {
    discard(query.get("shown"), true);
    query.delete("shown");
    query.set("kind", kind);
    const recognized = query.get("recognize") && !field("model").value;
    if (!recognized) query.delete("recognize");
    history.replaceState(null, "", `?${query}`);
    if (recognized) choose(document.getElementById("models").dataset.first);
  } else if (query.get("recognize") && code === "no_usable_columns" && tried + 1 < recognizers.length) {
    tried++;
    plan();
  } else if (error) showErrors(JSON.parse(error), false);
}

// What the page wrote into a field, and nobody since, goes with the rows that it was written for.
function fillIn(key, value) {
  field(key).value = field(key).dataset.filled = value;
}

// Somebody says which columns are meant: planned is what is said of both.
function fill(button) {
  const { fill: key, column } = button.dataset;
  fillIn(key, column && `{${column}}`);
  for (const each of form.querySelectorAll("[data-fill]")) if (each.dataset.fill === key) each.ariaPressed = each === button;
  if (form.querySelectorAll('[data-fill][aria-pressed="true"]').length === 2) changed(0);
}

function choose(model) {
  field("model").value = model;
  changed(0);
}

// Other rows may suit another model, unless somebody chose this one, and have a name and columns of their own.
function otherRows() {
  const query = new URLSearchParams(location.search);
  tried = 0;
  for (const key of ["name", "data.input", "data.target"]) if (field(key).value === field(key).dataset.filled) field(key).value = "";
  if (!form.dataset.source && field("model").value === document.getElementById("models").dataset.first) {
    field("model").value = "";
    query.delete("kind");
    history.replaceState(null, "", `?${query}`);
  }
}

form.addEventListener("input", (event) => {
  if (!event.target.name) return;
  if (event.target.name === "data.train") otherRows();
  switchFields();
  changed(WAIT_MS);
});
form.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-model]");
  if (button) choose(button.dataset.model);
  const column = event.target.closest("button[data-fill]");
  if (column) fill(column);
});
form.addEventListener("keydown", (event) => {
  // Enter in a field asks for its plan; what starts a job is the button alone.
  if (event.key !== "Enter" || event.target.tagName !== "INPUT") return;
  event.preventDefault();
  if (event.target.type === "file") event.target.click();
  else if (dirty || !check().job) plan();
});
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (start.disabled) return;
  start.disabled = true;
  const { job: checked, state } = check(), shown = new URLSearchParams(location.search).get("shown");
  try {
    const made = await persist(() => make(answers(), `new-${checked}`, false), () => true);
    await Promise.all([discard(checked, ended(state)), discard(shown, true)]);
    history.replaceState(null, "", address(`/new?clone=${made.id}`));
    location.assign(address(`/jobs/${made.id}`));
  } catch (error) {
    showErrors(error, true);
    start.disabled = false;
  }
});
chosenFile(async (file) => {
  turn++;
  clearTimeout(timer);
  const uploaded = await uploading(file, persist);
  if (!uploaded) return;
  field("data.train").value = uploaded.uri;
  otherRows();
  if (!field("name").value) fillIn("name", uploaded.name.split(".")[0].slice(0, 64));
  changed(0);
});
document.addEventListener("page:changed", arrived);
document.addEventListener("page:gone", (event) => {
  const query = new URLSearchParams(location.search);
  if (!query.has("check")) return;
  event.preventDefault();
  for (const each of ["check", "shown", "recognize"]) query.delete(each);
  history.replaceState(null, "", `?${query}`);
  gone = true;
  refresh();
});
switchFields();
arrived();
if (form.dataset.begins) plan();
