// The table of jobs: curves of the loss, the order of the queue by drag or keys, jobs to compare.
import { refresh } from "./live.js";
import { send, toast } from "./actions.js";

const main = document.getElementById("main");
const SVG = "http://www.w3.org/2000/svg";

// -- curves -------------------------------------------------------------------------------------------------------------

const seen = new IntersectionObserver((entries) => {
  for (const each of entries) if (each.isIntersecting) draw(each.target);
});

async function draw(svg) {
  if (svg.dataset.drawn === svg.dataset.keep) return;
  svg.dataset.drawn = svg.dataset.keep;
  const answer = await fetch(`/jobs/${svg.dataset.job}/metrics?points=40&fields=loss`);
  if (!answer.ok) return;
  const losses = (await answer.json()).data.map((row) => row.loss);
  const low = Math.min(...losses), high = Math.max(...losses), last = Math.max(1, losses.length - 1);
  const line = document.createElementNS(SVG, "polyline");
  const y = (loss) => 18 - (16 * (loss - low)) / (high - low || 1);
  line.setAttribute("points", losses.map((loss, at) => `${((80 * at) / last).toFixed(1)},${y(loss).toFixed(1)}`).join(" "));
  svg.replaceChildren(line);
}

function watchCurves() {
  for (const svg of document.querySelectorAll("svg.spark")) seen.unobserve(svg), seen.observe(svg);
}

// -- the queue ----------------------------------------------------------------------------------------------------------

const waiting = () =>
  [...document.querySelectorAll("tr[data-waiting]")].sort((a, b) => a.dataset.waiting - b.dataset.waiting);

// A higher priority goes first; of two alike the one that was submitted first.
async function move(row, target, before) {
  const own = Number(row.dataset.priority), other = Number(target.dataset.priority);
  const older = row.id < target.id;
  const priority = before ? (older ? other : other + 1) : older ? other - 1 : other;
  if (priority === own) return;
  if (Math.abs(priority) > 100) return toast("It cannot go further: priorities end at 100", { bad: true });
  try {
    await send("PATCH", `/jobs/${row.id}`, { priority });
    toast(`Priority ${priority}`);
  } catch (error) {
    toast(error.message, { bad: true });
  }
  await refresh();
}

function step(row, up) {
  const rows = waiting(), at = rows.indexOf(row), target = rows[at + (up ? -1 : 1)];
  if (target) return move(row, target, up);
}

main.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-move]");
  if (button) step(button.closest("tr"), button.dataset.move === "up");
});
main.addEventListener("keydown", (event) => {
  const row = event.target.closest?.("tr[data-waiting]");
  if (!row || !event.altKey || !["ArrowUp", "ArrowDown"].includes(event.key)) return;
  event.preventDefault();
  step(row, event.key === "ArrowUp");
});
let dragged = null;
main.addEventListener("dragstart", (event) => (dragged = event.target.closest("tr[data-waiting]")));
main.addEventListener("dragover", (event) => {
  const row = event.target.closest("tr[data-waiting]");
  if (dragged && row && row !== dragged) event.preventDefault();
});
main.addEventListener("drop", (event) => {
  const row = event.target.closest("tr[data-waiting]");
  if (!dragged || !row || row === dragged) return;
  event.preventDefault();
  move(dragged, row, Number(row.dataset.waiting) < Number(dragged.dataset.waiting));
});
main.addEventListener("dragend", () => (dragged = null));

// -- compare ------------------------------------------------------------------------------------------------------------

function offerComparison() {
  const bar = document.getElementById("compare");
  if (!bar) return;
  const chosen = [...document.querySelectorAll('input[name="compare"]:checked')].map((each) => each.value);
  bar.hidden = chosen.length < 2;
  bar.querySelector("span").textContent = chosen.length > 10 ? "10 jobs at most" : `${chosen.length} jobs`;
  bar.querySelector("button").disabled = chosen.length > 10;
}

main.addEventListener("change", offerComparison);
main.addEventListener("submit", (event) => {
  if (event.target.id !== "compare") return;
  event.preventDefault();
  const chosen = [...document.querySelectorAll('input[name="compare"]:checked')].map((each) => each.value);
  location.assign(`/compare?jobs=${chosen.join(",")}`);
});
document.addEventListener("page:changed", () => (watchCurves(), offerComparison()));
watchCurves();
