// Keeps a page as the server would show it now: fetches it again and changes what differs, nothing else.
// <main data-poll="3000"> asks every 3 s, <main data-events="URL" data-after="7"> when an event comes.
// What has data-keep is left alone: a chart, a log, a field that somebody types into. With a value, until that changes.

const main = document.getElementById("main");
const connection = document.getElementById("connection");
// An address of the service, which a proxy may have below a path.
export const address = (path) => document.documentElement.dataset.root + path;

let asked = 0, source = null, timer = 0, waiting = 0;

const isKept = (old, next) => old.dataset?.keep !== undefined && old.dataset.keep === next.dataset?.keep && old.id === next.id;
const isTypedInto = (node) => node === document.activeElement && node.matches("input, select, textarea");

function morph(fresh) {
  Idiomorph.morph(main, fresh, {
    morphStyle: "outerHTML",
    callbacks: {
      beforeNodeMorphed: (old, next) => !(isKept(old, next) || isTypedInto(old)),
      beforeAttributeUpdated: (name, node) =>
        !((name === "open" && node.tagName === "DETAILS") || (name === "checked" && node.tagName === "INPUT")),
    },
  });
  showTimes(main);
  document.dispatchEvent(new CustomEvent("page:changed"));
}

export async function refresh() {
  const mine = ++asked;
  clearTimeout(timer);
  const answer = await fetch(location.href, { headers: { Accept: "text/html" }, cache: "no-store" }).catch(() => null);
  const text = await answer?.text().catch(() => null);
  if (mine !== asked) return;
  if (answer?.redirected && new URL(answer.url).pathname === address("/sign-in")) return location.assign(answer.url);
  if (text == null || answer.status === 503 || answer.status === 429) {
    say("reconnecting …");
    return schedule();
  }
  const page = new DOMParser().parseFromString(text, "text/html");
  const gone = new CustomEvent("page:gone", { cancelable: true });
  if (!answer.ok && !document.dispatchEvent(gone)) return; // a form that somebody fills in stays
  if (!answer.ok || releaseOf(page) !== releaseOf(document)) return location.reload(); // gone; or the service is newer
  morph(page.getElementById("main"));
  document.title = page.title;
  listen();
  if (!source || source.readyState === EventSource.OPEN) say("");
  schedule();
}

const releaseOf = (page) => page.querySelector('script[type="module"]')?.getAttribute("src").split("/").at(-2);

export function say(text) {
  connection.textContent = text;
}

function schedule() {
  clearTimeout(timer);
  const every = Number(main.dataset.poll) || (connection.textContent ? 2000 : 0);
  if (every && !document.hidden) timer = setTimeout(refresh, every);
}

function soon() {
  // Events come in groups: one look at the page shows them all.
  clearTimeout(waiting);
  waiting = setTimeout(refresh, 150);
}

// A browser closes the stream for good when the job has ended (204), and when the service is not there yet.
function listen() {
  const wanted = main.dataset.events;
  if (document.hidden || (source && source.wanted === wanted)) return;
  source?.close();
  source = null;
  if (!wanted) return;
  source = Object.assign(new EventSource(`${wanted}?after=${main.dataset.after}`), { wanted });
  for (const type of main.dataset.types.split(" ")) source.addEventListener(type, soon);
  source.onopen = () => say("");
  source.onerror = () => {
    say("reconnecting …");
    if (source.readyState !== EventSource.CLOSED) return;
    source = null;
    setTimeout(() => refresh().then(listen), 2000);
  };
}

export function showTimes(root) {
  for (const each of root.querySelectorAll("time[data-at]")) {
    const at = new Date(Number(each.dataset.at) * 1000);
    const today = at.toDateString() === new Date().toDateString();
    each.textContent = today
      ? at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" })
      : at.toLocaleString([], { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
    each.title = at.toString();
  }
}

// A browser has six connections to a service: pages that nobody sees hold none.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) return refresh();
  clearTimeout(timer);
  source?.close();
  source = null;
});
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
  document.dispatchEvent(new CustomEvent("page:theme"));
});
showTimes(document);
listen();
schedule();
