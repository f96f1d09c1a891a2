// A file that is dropped or chosen goes to the service as it is: the browser streams it, whatever its size.
import { csrf } from "./actions.js";
import { address } from "./live.js";

const drop = document.getElementById("drop"), input = document.getElementById("file"), place = document.getElementById("sending");
const endings = drop.dataset.endings.split(" ").sort((a, b) => b.length - a.length);
const TRIES = 30;
let sending = null;

export function chosenFile(take) {
  input.addEventListener("change", () => input.files[0] && take(input.files[0]));
  document.addEventListener("dragover", (event) => (event.preventDefault(), drop.classList.add("over")));
  document.addEventListener("dragleave", (event) => event.relatedTarget || drop.classList.remove("over"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
  });
}

function tell(text, bad) {
  place.className = bad ? "wrong" : "";
  place.replaceChildren(text);
}

const figure = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
function size(bytes) {
  const unit = Math.min(4, Math.floor(Math.log2(bytes || 1) / 10));
  return `${figure.format(bytes / 1024 ** unit)} ${["bytes", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

// The names that its content may get, first its own: one that is taken by a file of another size is passed over.
function* names(file) {
  const ending = endings.find((each) => file.name.toLowerCase().endsWith(each));
  const letters = file.name.slice(0, -ending.length).replaceAll("ß", "ss").normalize("NFKD").replace(/\p{M}/gu, ""); // Übung: Ubung
  const own = letters.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[^A-Za-z0-9]+/, "");
  const stem = own.slice(0, 100) || "rows";
  const taken = new Map([...document.getElementById("uploaded").options].map((each) => [each.value, Number(each.dataset.bytes)]));
  for (let number = 1; ; number++) {
    const name = (number > 1 ? `${stem}-${number}` : stem) + ending;
    if ((taken.get(`dataset:${name}`) ?? file.size) === file.size) yield name;
  }
}

function put(file, name) {
  return new Promise((done, failed) => {
    const request = (sending = new XMLHttpRequest());
    const bar = document.createElement("progress"), text = document.createElement("span"), stop = document.createElement("button");
    bar.setAttribute("aria-label", `Upload of ${file.name}`);
    stop.type = "button";
    stop.textContent = "Stop";
    stop.addEventListener("click", () => request.abort());
    text.textContent = `${file.name}, ${size(file.size)}`;
    place.className = "";
    place.replaceChildren(text, bar, stop);
    request.upload.onprogress = ({ loaded, total }) => {
      bar.max = total;
      bar.value = loaded;
      text.textContent = loaded < total ? `${file.name}: ${size(loaded)} of ${size(total)}` : `${file.name}: being stored`;
    };
    request.onload = () => {
      const said = JSON.parse(request.responseText);
      if (request.status < 300) done(said);
      else failed(Object.assign(new Error(said.error.message), said.error, { status: request.status }));
    };
    request.onabort = () => failed(Object.assign(new Error("The upload was stopped; nothing of it is left."), { refused: true }));
    request.onerror = () => failed(new Error("the connection broke off again and again: choose the file once more"));
    request.open("PUT", address(`/datasets/${name}`));
    for (const [header, value] of Object.entries(csrf())) request.setRequestHeader(header, value);
    request.send(file);
  });
}

// The data set that its rows have become; null: it was refused, and the page says why.
export async function uploading(file, persist) {
  sending?.abort();
  if (!endings.some((each) => file.name.toLowerCase().endsWith(each))) {
    tell(`${file.name} does not say what it holds: the name of a file of rows ends in ${drop.dataset.endings.replaceAll(" ", ", ")}`, true);
    return null;
  }
  if (file.size > Number(drop.dataset.most)) {
    tell(`${file.name} has ${size(file.size)}, and an upload ${size(Number(drop.dataset.most))} at most (LONGHAUL_MAX_UPLOAD_GB): compress it (.zst), or put it into the data directory and name it below`, true);
    return null;
  }
  for (const name of names(file)) {
    let tries = 0;
    try {
      const done = await persist(() => put(file, name), () => ++tries < TRIES);
      tell(`${file.name}, ${size(done.bytes)}, is uploaded as ${done.uri}`);
      return done;
    } catch (error) {
      if (error.code === "dataset_exists") continue; // of the same size, with other content
      tell(error.hint ? `${error.message}: ${error.hint}` : error.message, true);
      return null;
    }
  }
}
