// The list of runs: rows that say something new are changed cell by cell; filter and choice stay.
import { follow } from "./events.js";

const runs = document.querySelector("#runs");
const filter = document.querySelector("#filter"), archived = document.querySelector("#archived");
const compare = document.querySelector("#compare"), count = document.querySelector("#count");
let found = null;

const ago = () => {
  for (const time of runs.querySelectorAll("time")) {
    const seconds = (Date.now() - Date.parse(time.dateTime)) / 1000;
    const [number, unit] = seconds < 90 ? [Math.max(0, seconds), "s"] : seconds < 5400 ? [seconds / 60, "min"]
      : seconds < 129600 ? [seconds / 3600, "h"] : [seconds / 86400, "d"];
    time.textContent = `${Math.round(number)} ${unit} ago`;
    time.title = time.dateTime;
  }
};

const arrange = () => {
  let shown = 0, running = 0;
  for (const row of runs.children) {
    const id = row.id.slice(4);
    row.hidden = (found !== null && !found.has(id)) || (row.classList.contains("archived") && !archived.checked);
    shown += !row.hidden;
    running += !row.hidden && row.querySelector(".state.running") !== null;
  }
  count.textContent = `${shown.toLocaleString("en")} run${shown === 1 ? "" : "s"}, ${running} training now`;
  document.querySelector("#none").hidden = runs.children.length > 0;
  choose();
};

const chosen = () => [...runs.querySelectorAll(".pick:checked")].map((one) => one.value);

const choose = () => {
  const ids = chosen();
  compare.disabled = ids.length < 2;
  compare.textContent = ids.length < 2 ? "Compare" : `Compare ${ids.length}`;
};

const search = async () => {
  const text = filter.value.trim();
  history.replaceState(null, "", text ? `?q=${encodeURIComponent(text)}` : "./");
  if (!text) found = null;
  else {
    const answer = await fetch(`match?q=${encodeURIComponent(text)}`);
    if (!answer.ok || text !== filter.value.trim()) return;
    found = new Set((await answer.json()).ids);
  }
  arrange();
};

let waiting = 0;
filter.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(search, 250); });
archived.addEventListener("change", arrange);
runs.addEventListener("change", choose);
compare.addEventListener("click", () => { location.href = `compare?${chosen().map((id) => `run=${id}`).join("&")}`; });

const update = (rows) => {
  for (const [id, html] of Object.entries(rows)) {
    const now = document.querySelector(`#run-${CSS.escape(id)}`);
    if (html === null) {
      now?.remove();
      continue;
    }
    const holder = document.createElement("template");
    holder.innerHTML = html;
    const row = holder.content.firstElementChild;
    if (!now) runs.prepend(row);
    else {
      now.className = row.className;
      const cells = now.querySelectorAll(".cell");
      row.querySelectorAll(".cell").forEach((cell, i) => {
        // As it came: `ago` has changed the text of a time.
        if (cells[i].dataset.was !== cell.outerHTML) { cell.dataset.was = cell.outerHTML; cells[i].replaceWith(cell); }
      });
    }
  }
  ago();
  if (found) search(); else arrange();
};

/** News say what has changed since this page began to listen: after a while without, the whole list is compared. */
const whole = async () => {
  const answer = await fetch("./").catch(() => null);
  if (!answer?.ok) return;
  const now = new DOMParser().parseFromString(await answer.text(), "text/html");
  const rows = [...now.querySelectorAll("#runs > article")].map((row) => [row.id.slice(4), row.outerHTML]);
  const gone = [...runs.children].map((row) => [row.id.slice(4), null]);
  update(Object.fromEntries([...gone, ...rows]));
};

follow(({ rows, problem }) => {
  const said = document.querySelector("#problem");
  if (said) { said.textContent = problem; said.hidden = !problem; }
  update(rows);
}, whole);

const given = new URLSearchParams(location.search);
for (const id of given.getAll("pick")) {
  const box = document.querySelector(`#run-${CSS.escape(id)} .pick`);
  if (box) box.checked = true;
}
if (given.has("q")) { filter.value = given.get("q"); search(); }
ago();
setInterval(ago, 10000);
arrange();
