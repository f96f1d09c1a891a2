// The table of jobs: curves of the loss, the order of the queue by drag or keys, jobs to compare.
import { address, refresh } from "./live.js";
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
  const answer = await fetch(address(`/jobs/${svg.dataset.job}/metrics?points=40&fields=loss`));
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

// A higher priority goes first, and of two alike the one submitted first. So that `moved` stands where it should, it gets
// the lowest priority that takes it there; those ahead of it are raised where they have to be.
function priorities(order, moved) {
  const wanted = new Map();
  let behind = null;
  for (const row of [...order].reverse()) {
    const own = Number(row.dataset.priority);
    const least = behind === null ? -100 : wanted.get(behind) + (row.id < behind.id ? 0 : 1);
    wanted.set(row, behind === null ? own : row === moved ? least : Math.max(own, least));
    if (row === moved && behind === null) wanted.set(row, lowest(order, moved));
    behind = row;
  }
  return [...wanted].filter(([row, priority]) => priority !== Number(row.dataset.priority)).reverse();
}

// For the last one: below the one that is now before it.
function lowest(order, moved) {
  const before = order[order.length - 2];
  return Number(before.dataset.priority) - (before.id < moved.id ? 0 : 1);
}

async function move(row, place) {
  const order = waiting().filter((each) => each !== row);
  order.splice(place, 0, row);
  const changes = priorities(order, row);
  if (changes.some(([, priority]) => Math.abs(priority) > 100))
    return toast("It cannot go further: priorities go from -100 to 100", { bad: true });
  const before = changes.map(([each]) => [each, Number(each.dataset.priority)]).reverse();
  const name = row.querySelector(".name a").textContent;
  if (await prioritize(changes)) toast(`Moved ${name}`, { undo: () => prioritize(before) });
}

async function prioritize(changes) {
  let done = true;
  try {
    for (const [each, priority] of changes) await send("PATCH", address(`/jobs/${each.id}`), { priority });
  } catch (error) {
    done = false;
    toast(error.message, { bad: true });
  }
  await refresh();
  return done;
}

function step(row, up) {
  const rows = waiting(), place = rows.indexOf(row) + (up ? -1 : 1);
  if (place >= 0 && place < rows.length) return move(row, place);
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
  move(dragged, waiting().indexOf(row));
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
  location.assign(address(`/compare?jobs=${chosen.join(",")}`));
});
document.addEventListener("page:changed", () => (watchCurves(), offerComparison()));
addEventListener("pageshow", offerComparison); // after "back" a browser checks boxes again
watchCurves();
