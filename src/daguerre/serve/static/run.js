// The page of a run: parts are replaced where they say something new, and nothing that one looks at moves.
import { show, tools } from "./charts.js";
import { follow } from "./events.js";
import { post } from "./post.js";
import { bind, more } from "./viewer.js";

const MOST_TAILS = 300;
const about = JSON.parse(document.querySelector("#about").textContent);
const lost = document.querySelector(".lost-line");
const LIVE = ["running", "paused"];
let version = "", step = -1, tails = 0, fetching = false, state = null;

const places = (element) => [...element.querySelectorAll(".strip, pre, .scroll")].map((one) => (
  [one.scrollLeft, one.scrollTop, one.scrollHeight - one.clientHeight, one.scrollWidth - one.clientWidth]));
/** True for a row of images whose newest one is the last; on a phone it is the first. */
const endsNew = (one) => one.classList.contains("strip") && getComputedStyle(one).flexDirection === "row";

const replace = async (part, mark) => {
  const answer = await fetch(`part/${part.dataset.part}`);
  if (!answer.ok) return;
  const html = await answer.text(), before = places(part);
  const opened = [...part.querySelectorAll("details")].map((one) => one.open);
  const focused = part.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  part.dataset.mark = answer.headers.get("x-mark") ?? mark;
  part.innerHTML = html;
  if (part.dataset.part !== "head") part.parentElement.hidden = !html; // what is hidden cannot be scrolled
  [...part.querySelectorAll("details")].forEach((one, i) => { one.open = opened[i] ?? one.open; });
  [...part.querySelectorAll(".strip, pre, .scroll")].forEach((one, i) => {
    const [left, top, room, wide] = before[i] ?? [0, 0, 0, 0];
    one.scrollLeft = endsNew(one) && left >= wide - 2 ? one.scrollWidth : left;
    // A log that was read to its end goes on to its end.
    one.scrollTop = one.classList.contains("log") && (!before[i] || top >= room - 2) ? one.scrollHeight : top;
  });
  if (focused) part.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  if (part.dataset.part === "images") more(part);
};

const curves = async (now) => {
  if (fetching || (now.version === version && now.step === step)) return;
  fetching = true;
  try {
    const tail = now.version === version && tails < MOST_TAILS;
    const answer = await fetch(tail ? `curves?version=${encodeURIComponent(version)}&after=${step}` : "curves");
    if (!answer.ok) return;
    const found = await answer.json();
    // The server may have begun anew since: then it sends everything.
    found.tail = tail && found.version === version;
    tails = found.tail ? tails + 1 : 0;
    [version, step] = [found.version, found.step];
    const shown = show(found);
    document.querySelector("#none").hidden = shown.charts.length > 0;
  } finally {
    fetching = false;
  }
};

const control = document.querySelector("#control"), answer = document.querySelector("#answer");
const wait = (seconds) => new Promise((done) => { setTimeout(done, 1000 * seconds); });

const ask = async (kind, values) => {
  const name = control.querySelector(`[data-action="${kind}"]`).textContent.replace(" ...", "");
  answer.textContent = `${name}: asked; the run looks between two updates`;
  const sent = await post("action", values ? { kind, values } : { kind });
  if (!sent.ok) { answer.textContent = `${name}: ${await sent.text()}`; return; }
  const { id } = await sent.json();
  for (let i = 0; i < 1200; i += 1) {
    await wait(1);
    const found = await fetch(`action/${id}`).then((one) => (one.ok ? one.json() : null)).catch(() => null);
    if (found) { answer.textContent = `${name}: ${found.state === "done" ? "" : "refused: "}${found.reason}`; return; }
  }
  answer.textContent = `${name}: the run has not answered`;
};

control?.addEventListener("click", (event) => {
  const kind = event.target.dataset?.action;
  if (!kind) return;
  const form = document.querySelector(`#form-${kind}`);
  if (form) form.showModal();
  else if (!["stop", "release"].includes(kind) || confirm(`${event.target.title}. ${event.target.textContent} this run?`)) ask(kind);
});
for (const dialog of document.querySelectorAll("dialog[data-asks]")) {
  const form = dialog.querySelector("form");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const prompts = form.elements.prompts.value.split("\n").map((line) => line.trim()).filter(Boolean);
    const values = prompts.length ? { prompts } : {};
    for (const box of form.querySelectorAll("input")) {
      if (box.value.trim() !== "") values[box.name] = box.type === "number" ? Number(box.value) : box.value.trim();
    }
    dialog.close();
    ask(dialog.dataset.asks, values);
  });
  dialog.querySelector(".cancel").addEventListener("click", () => dialog.close());
}

const notice = (now) => {
  const share = now.done == null ? "" : `${Math.floor(100 * now.done)} % · `;
  document.title = `${now.state === "running" ? share : `${now.words} · `}${now.name} · Daguerre`;
  if (LIVE.includes(state) && !LIVE.includes(now.state) && "Notification" in window && Notification.permission === "granted") {
    new Notification(`${now.name}: ${now.words}`, { body: now.reason || undefined, tag: about.id });
  }
  state = now.state;
  if (!control) return;
  control.hidden = !LIVE.includes(state);
  const paused = state === "paused";
  control.querySelector("[data-action=pause]").hidden = paused;
  control.querySelector("[data-action=continue]").hidden = !paused;
};

const update = async (now) => {
  if (now.gone) {
    lost.textContent = `This run cannot be followed any more: ${now.gone}`;
    lost.hidden = false;
    return;
  }
  notice(now);
  const reading = document.querySelector(".reading");
  reading.hidden = now.read == null;
  if (now.read != null) reading.textContent = `Reading the metrics: ${Math.floor(100 * now.read)} %`;
  const stale = [...document.querySelectorAll("[data-part]")].filter((part) => part.dataset.part in now.parts && now.parts[part.dataset.part] !== part.dataset.mark);
  await Promise.all([...stale.map((part) => replace(part, now.parts[part.dataset.part])), curves(now)]);
};

let last = Promise.resolve();
follow((now) => { last = last.then(() => update(now)).catch(() => {}); });

const tell = document.querySelector("#tell");
if ("Notification" in window && Notification.permission === "default") {
  tell.hidden = false;
  tell.addEventListener("click", async () => { await Notification.requestPermission(); tell.hidden = true; });
}

const compare = document.querySelector("#compare");
compare.href = `../../?pick=${about.id}`;

document.querySelector("#edit")?.addEventListener("click", () => document.querySelector("#notes").showModal());
document.querySelector("#notes form")?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const form = event.target;
  const answer = await post("note", {
    name: form.elements.name.value, note: form.elements.note.value, archived: form.elements.archived.checked,
  });
  if (answer.ok) document.querySelector("#notes").close();
  else document.querySelector("#notes .wrong").textContent = await answer.text();
});
document.querySelector("#notes .cancel")?.addEventListener("click", () => document.querySelector("#notes").close());

tools();
bind(document);
for (const log of document.querySelectorAll("pre.log")) log.scrollTop = log.scrollHeight;
for (const strip of document.querySelectorAll(".strip")) if (endsNew(strip)) strip.scrollLeft = strip.scrollWidth;
