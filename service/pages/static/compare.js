// The losses of several jobs in one picture, by step, tokens or hours.
import { LABEL, color, figure, lineStyle, newest, newestLoss } from "./charts.js";
import { address } from "./live.js";

const place = document.getElementById("overlay"), axis = document.getElementById("axis");
const ids = place.dataset.jobs.split(","), names = JSON.parse(place.dataset.names);
const FIELDS = "loss,tokens_per_s,step_s,epoch", HEIGHT = 340, EVERY_MS = 10_000;
let jobs = [], plot = null;

// Rows of a job with what the axes show. Time in which it did not train does not count.
function measured(rows) {
  let step = 0, hours = 0, tokens = 0;
  return rows.map((row) => {
    const seconds = Math.max(0, row.step - step) * row.step_s;
    step = row.step;
    hours += seconds / 3600;
    tokens += seconds * (row.tokens_per_s ?? 0);
    return { step, hours, tokens, loss: row.loss };
  });
}

async function load() {
  const answers = await Promise.all(ids.map((id) => fetch(address(`/jobs/${id}/metrics?points=800&fields=${FIELDS}`))));
  if (!answers.every((each) => each.ok)) return;
  jobs = (await Promise.all(answers.map((each) => each.json()))).map((each) => measured(each.data));
  draw();
}

function draw() {
  plot?.destroy();
  place.replaceChildren();
  const some = jobs.some((rows) => rows.length);
  document.getElementById("no-curves").hidden = some;
  if (!some) return;
  const box = document.createElement("div");
  place.append(box);
  const text = color("--dim"), grid = { stroke: color("--line"), width: 1 };
  const data = uPlot.join(jobs.map((rows) => [rows.map((row) => row[axis.value]), rows.map((row) => row.loss)]));
  const lines = jobs.map((_, at) => ({
    label: `${"ABCDEFGHIJ"[at]} ${names[at]}`,
    ...lineStyle(at),
    spanGaps: true,
    points: { show: false },
    value: newestLoss,
  }));
  plot = new uPlot(
    {
      width: box.clientWidth || 600,
      height: HEIGHT,
      title: "training loss",
      series: [{ label: axis.value, value: newest }, ...lines],
      scales: { x: { time: false } },
      axes: [
        { stroke: text, grid, ticks: grid, size: 28, label: axis.value, labelSize: 16, labelGap: 0, labelFont: LABEL },
        { stroke: text, grid, ticks: grid, size: 62, values: (_, ticks) => ticks.map(figure) },
      ],
    },
    data,
    box,
  );
  place.dataset.drawn = data[0].length;
}

axis.addEventListener("change", draw);
document.addEventListener("page:theme", draw);
new ResizeObserver(() => plot?.setSize({ width: plot.root.parentNode.clientWidth, height: HEIGHT })).observe(place);
const retry = () => load().catch(() => undefined); // live.js says that the connection is lost
retry();
setInterval(() => document.hidden || !document.getElementById("main").dataset.poll || retry(), EVERY_MS);
