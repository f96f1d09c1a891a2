// Curves of a job: all of its rows as means of stretches, then row by row what is added.
import { address } from "./live.js";

let place = null; // there once the first figures are
const POINTS = 1500, EVERY_MS = 2000, MOST_ADDED = 600, HEIGHT = 220;
const GIB = 2 ** 30;
const PANELS = [
  { title: "loss", fields: ["loss", "loss_min", "loss_max"], evaluations: true, smooth: true },
  { title: "rows/s", fields: ["rows_per_s"], names: ["rows/s at this step"], smooth: true },
  { title: "learning rate", fields: ["learning_rate"] },
  { title: "gradient norm", fields: ["grad_norm"], smooth: true },
  { title: "MFU", fields: ["mfu"], scale: 100, unit: "%" },
  { title: "memory", fields: ["memory_bytes", "memory_planned_bytes"], names: ["allocated", "predicted"], scale: 1 / GIB, unit: "GiB" },
  // On a CPU all that the process holds: nothing was predicted of that.
  { title: "resident memory", fields: ["memory_bytes"], scale: 1 / GIB, unit: "GiB" },
];
const ASKED = ["loss", "rows_per_s", "learning_rate", "grad_norm", "mfu", "memory_bytes", "memory_planned_bytes", "epoch"];
let rows = [], added = 0, plots = [], axis = "step", smoothing = 0, range = null, logarithmic = false;

const marks = () => JSON.parse(document.getElementById("marks").dataset.marks);
const probe = document.createElement("i");
probe.hidden = true;
document.body.append(probe);
// A colour of the style sheet as a canvas takes it, in the theme that is shown.
export const color = (name) => ((probe.style.color = `var(${name})`), getComputedStyle(probe).color);

async function ask(query) {
  const answer = await fetch(address(`/jobs/${place.dataset.job}/metrics?fields=${ASKED.join(",")}&${query}`));
  if (!answer.ok) throw new Error(answer.status);
  return (await answer.json()).data;
}

async function load() {
  const found = await ask(`points=${POINTS}`), known = JSON.stringify(rows);
  rows = found;
  added = 0;
  if (!plots.length || JSON.stringify(found) !== known) draw(); // an attempt that has only begun has nothing new
}

async function follow() {
  if (document.hidden || !document.getElementById("marks")) return;
  const last = rows.length ? rows[rows.length - 1].step : -1;
  const told = document.getElementById("marks");
  if (!told.dataset.live && Number(told.dataset.step) <= last) return;
  const fresh = await ask(`after_step=${last}&limit=1000`);
  if ((rows.length ? rows[rows.length - 1].step : -1) !== last) return; // a slow answer: another has come meanwhile
  if (Number(told.dataset.step) < last || added + fresh.length > MOST_ADDED) return load(); // taken up again, or many
  if (!fresh.length) return;
  rows.push(...fresh);
  added += fresh.length;
  update();
}

function smoothed(values, weight) {
  if (!weight) return values;
  let mean = null, scale = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = (mean ?? 0) * weight + value * (1 - weight);
    scale = scale * weight + (1 - weight);
    return mean / scale;
  });
}

const evaluations = () => marks().filter((mark) => mark.kind === "evaluation").sort((a, b) => where(a.step) - where(b.step));

// Columns of a panel: x, one for each field, and the evaluations.
function columns(panel) {
  if (panel.metrics) {
    const found = evaluations();
    return [found.map((mark) => where(mark.step)), ...panel.metrics.map((name) => found.map((mark) => mark[panel.of][name] ?? null))];
  }
  const scale = panel.scale ?? 1;
  const value = (row, field) => {
    const raw = row[field] ?? (field.startsWith("loss_") ? row.loss : null);
    return raw === null || raw === undefined || (isLogarithmic(panel) && raw <= 0) ? null : raw * scale;
  };
  const x = rows.map((row) => row[axis]);
  const lines = panel.fields.map((field, at) => {
    const values = rows.map((row) => value(row, field));
    return panel.smooth && at === 0 ? smoothed(values, smoothing) : values;
  });
  if (!panel.evaluations) return [x, ...lines];
  const evaluated = evaluations();
  return uPlot.join([[x, ...lines], [evaluated.map((mark) => where(mark.step)), evaluated.map((mark) => mark.loss)]]);
}

// Where a step is on the x axis.
function where(step) {
  if (axis === "step" || !rows.length) return step;
  let low = 0, high = rows.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle].step < step) low = middle + 1;
    else high = middle;
  }
  return rows[low][axis];
}

const isLogarithmic = (panel) => logarithmic && panel.title === "loss";

// Where memory ran out, and where an attempt began: a line in each panel, its words in the first.
const marked = {
  hooks: {
    draw: (plot) => {
      const { ctx, bbox } = plot;
      const free = [-Infinity, -Infinity]; // where words end, in two lines
      ctx.save();
      ctx.textAlign = "left";
      ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
      for (const mark of marks().sort((a, b) => a.step - b.step)) {
        if (mark.kind === "evaluation") continue;
        const at = plot.valToPos(where(mark.step), "x", true);
        if (at < bbox.left || at > bbox.left + bbox.width) continue;
        ctx.strokeStyle = color(mark.kind === "oom" ? "--bad" : "--dim");
        ctx.setLineDash([4, 4]);
        ctx.beginPath();
        ctx.moveTo(at, bbox.top);
        ctx.lineTo(at, bbox.top + bbox.height);
        ctx.stroke();
        if (!plots.length || plots[0].plot === plot) {
          ctx.fillStyle = ctx.strokeStyle;
          const [width, right] = [ctx.measureText(mark.text).width, bbox.left + bbox.width];
          const left = Math.min(at + 4, right - width);
          const line = free.findIndex((end) => left > end);
          if (line < 0 || left < bbox.left) continue;
          ctx.fillText(mark.text, left, bbox.top + (12 + 13 * line) * devicePixelRatio);
          free[line] = left + width;
        }
      }
      ctx.restore();
    },
  },
};

function options(panel, width) {
  const text = color("--dim"), grid = { stroke: color("--line"), width: 1 };
  const line = (name, extra) => ({ label: name, value: newest, ...extra });
  const name = axis === "at" ? "time" : axis;
  const series = [{ label: name, ...(axis === "at" ? {} : { value: newest }) }]; // of a time uPlot has words
  if (panel.title === "loss") {
    series.push(line("training", { value: newestLoss, stroke: color("--accent"), width: 1.5 }));
    const bound = { value: newestLoss, width: 0, stroke: "transparent", points: { show: false }, class: "bound" };
    series.push(line("lowest", bound), line("highest", bound));
    series.push(line("validation", { value: newestLoss, stroke: color("--good"), width: 1.5, spanGaps: true, points: { show: true, size: 6 } }));
  } else if (panel.metrics) {
    panel.metrics.forEach((name, at) => series.push(line(name, { ...lineStyle(at), spanGaps: true, points: { show: true, size: 5 } })));
  } else {
    panel.fields.forEach((field, at) =>
      series.push(line(panel.names?.[at] ?? panel.title, { stroke: color(at ? "--dim" : "--accent"), width: 1.5, dash: at ? [6, 4] : undefined })));
  }
  return {
    width,
    height: HEIGHT,
    title: panel.unit ? `${panel.title}, ${panel.unit}` : panel.title,
    series,
    bands: panel.title === "loss" ? [{ series: [3, 2], fill: color("--band") }] : undefined,
    scales: { x: { time: axis === "at", range: across }, y: { distr: isLogarithmic(panel) ? 3 : 1 } },
    axes: [
      { stroke: text, grid, ticks: grid, size: 28, label: name, labelSize: 16, labelGap: 0, labelFont: LABEL },
      { stroke: text, grid, ticks: grid, size: wide, values: (_, ticks) => ticks.map((tick) => (tick === null ? null : figure(tick))) },
    ],
    cursor: { sync: { key: "job" }, drag: { x: true, y: false } },
    hooks: { setSelect: [(plot) => plot.select.width && zoom(plot)] },
    plugins: [marked],
    legend: { live: true },
  };
}

// Of a single point uPlot would show as much again on both sides: twice the steps of a short job, or a day.
const across = ({ data: [points] }, low, high) => {
  if (points.length !== 1 || range !== null) return [low, high];
  return axis === "at" ? [points[0] - 60, points[0] + 60] : [0, Math.max(points[0], 1)];
};

// Room for the longest figure of an axis.
const wide = (_, shown) => 22 + 7.5 * Math.max(4, ...(shown ?? []).map((each) => each?.length ?? 0));
export const LABEL = "12px system-ui, sans-serif";
const LINES = 10;

// Of the line with this number of a chart: a colour of its own; after the tenth they are dashed.
export const lineStyle = (at) => ({ stroke: color(`--line-${at % LINES}`), width: 1.5, dash: at < LINES ? undefined : [6, 4] });

// In a legend: the value below the cursor, or the last one.
const inLegend = (write) => (plot, value, series, at) => {
  const shown = at === null || at === undefined ? plot.data[series].findLast((each) => each !== null && each !== undefined) : value;
  return shown === null || shown === undefined ? "–" : write(shown);
};
// As format_figure in jobs/text/units.py.
const PLACES = { minimumFractionDigits: 4, maximumFractionDigits: 4 };
export const newest = inLegend((value) => figure(value)), newestLoss = inLegend((loss) => loss.toLocaleString("en", PLACES));

// As format_number in jobs/text/units.py.
export function figure(value) {
  if (!value || !Number.isFinite(value)) return String(value);
  const [mantissa, power] = value.toExponential(3).split("e");
  if (power < -3) return `${Number(mantissa)}e${Number(power)}`;
  return Math.abs(value) >= 999.5 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

function zoom(plot) {
  range = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
  for (const { plot: each } of plots) each.setScale("x", { min: range[0], max: range[1] });
}

function known(panel) {
  if (panel.metrics) return panel.metrics.length > 0;
  if (panel.title.endsWith("memory")) return (panel.title === "memory") === Boolean(place.dataset.gpu);
  return rows.some((row) => row[panel.fields[0]] !== null && row[panel.fields[0]] !== undefined);
}

function draw() {
  for (const { plot } of plots) plot.destroy();
  place.replaceChildren();
  plots = [];
  const names = (of) => [...new Set(evaluations().flatMap((mark) => Object.keys(mark[of])))];
  const scales = { shares: "0 to 1", scores: "0 to 100", correlations: "-1 to 1" };
  const measured = Object.entries(scales).map(([of, unit]) => ({ title: "metrics", unit, of }));
  const [loss, ...others] = PANELS;
  for (const panel of [loss, ...measured.map((panel) => ({ ...panel, metrics: names(panel.of) })), ...others].filter(known)) {
    const box = document.createElement("div");
    place.append(box);
    plots.push({ panel, plot: new uPlot(options(panel, box.clientWidth || 400), columns(panel), box) });
  }
  place.dataset.drawn = rows.length;
}

function update() {
  const started = performance.now();
  for (const { panel, plot } of plots) {
    plot.setData(columns(panel), range === null);
    if (range !== null) plot.setScale("x", { min: range[0], max: range[1] });
  }
  place.dataset.drawn = rows.length;
  // What a measurement reads: uPlot draws in microtasks, which come before this one.
  queueMicrotask(() => (place.dataset.updateMs = (performance.now() - started).toFixed(2)));
  place.dataset.values = plots.reduce((sum, { plot }) => sum + plot.data.length * plot.data[0].length, 0);
}

const retry = (work) => work().catch(() => undefined); // live.js says that the connection is lost
const sized = new ResizeObserver(() => {
  for (const { plot } of plots) plot.setSize({ width: plot.root.parentNode.clientWidth, height: HEIGHT });
});

function begin() {
  const shown = document.getElementById("charts");
  if (!shown) return; // the job has not trained yet, or waits
  if (shown === place) return void (plots.length && update());
  const first = !place;
  place = shown; // a job that waits again has none, and then has new ones
  document.getElementById("axis").addEventListener("change", (event) => ((axis = event.target.value), (range = null), draw()));
  document.getElementById("smoothing").addEventListener("input", (event) => ((smoothing = Number(event.target.value)), update()));
  document.getElementById("log-scale").addEventListener("change", (event) => ((logarithmic = event.target.checked), draw()));
  document.getElementById("reset").addEventListener("click", () => ((range = null), update()));
  sized.observe(place);
  if (!first) return draw();
  document.addEventListener("page:theme", () => document.getElementById("charts") && draw());
  retry(load);
  setInterval(() => retry(rows.length ? follow : load), EVERY_MS);
}

document.addEventListener("page:changed", begin);
begin();
