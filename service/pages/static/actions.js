// Buttons that change something: <button data-method="POST" data-url="/jobs/ID/pause" data-undo="…" data-confirm="…">.
// data-next="/sweeps/{id}" is the page to go to then; {id} stands for the id in the answer.
import { refresh } from "./live.js";

const toasts = document.getElementById("toasts");
const dialog = document.getElementById("confirm");

export const csrf = () => ({ "X-CSRF-Token": document.querySelector('meta[name="csrf-token"]').content });

export async function send(method, url, body, more = {}) {
  const headers = { ...csrf(), ...more };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(url, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  const text = await answer.text();
  const said = text ? JSON.parse(text) : null;
  if (!answer.ok) throw Object.assign(new Error(said.error.message), said.error, { status: answer.status });
  return said;
}

export function toast(text, { undo, bad } = {}) {
  const each = document.createElement("div");
  each.className = bad ? "toast bad" : "toast";
  each.append(text);
  if (undo) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Undo";
    button.addEventListener("click", () => (each.remove(), typeof undo === "function" ? undo() : act(undo)));
    each.append(button);
  }
  toasts.replaceChildren(each);
  setTimeout(() => each.remove(), bad ? 15000 : 8000);
}

function confirmed(text) {
  document.getElementById("confirm-text").textContent = text;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true }));
}

async function act({ method = "POST", url, body, confirm, undo, done, next }) {
  if (confirm && !(await confirmed(confirm))) return;
  try {
    const said = await send(method, url, body === undefined ? undefined : JSON.parse(body));
    if (next) return location.assign(next.replace("{id}", said?.id));
    if (done) toast(done, { undo: undo && { url: undo, done: "Taken back" } });
  } catch (error) {
    toast(error.hint ? `${error.message} – ${error.hint}` : error.message, { bad: true });
  }
  await refresh();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-url]");
  if (button) act(button.dataset);
});
