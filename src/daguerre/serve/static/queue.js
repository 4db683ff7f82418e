// The queue: rows that say something new are replaced, in their order; what has the focus keeps it.
import { follow } from "./events.js";
import { post } from "./post.js";

const main = document.querySelector("main"), answer = document.querySelector("#answer");
const pauseAll = document.querySelector("#pause-all");
const lists = ["running", "waiting", "ended"].map((name) => document.querySelector(`#${name}`));
const row = (id) => document.querySelector(`#entry-${id}`);
const idOf = (element) => element.id.slice(6);

/** Gives the focus to a button of an entry, or to what took its place. */
const give = (id, kind) => (row(id)?.querySelector(`[data-do="${kind}"]`) ?? row(id)?.querySelector("[data-do]") ?? pauseAll)?.focus({ preventScroll: true });

const ask = async (message) => {
  const held = document.activeElement; // a disabled button loses the focus
  for (const button of document.querySelectorAll("button")) button.disabled = true;
  try {
    const sent = await post("change", message);
    answer.textContent = sent.ok ? (await sent.json()).said : await sent.text();
  } catch {
    answer.textContent = "The server does not answer: nothing was changed.";
  }
  for (const button of document.querySelectorAll("button")) button.disabled = false;
  if (document.activeElement === document.body) held.focus({ preventScroll: true });
};

const moved = (id, up) => {
  const order = [...document.querySelector("#waiting").children].map(idOf), at = order.indexOf(id);
  if (up) return at > 0 ? order[at - 1] : null;
  if (at === order.length - 1) return null;
  return order[at + 2] ?? "last";
};

main.addEventListener("click", async (event) => {
  const kind = event.target.dataset?.do;
  if (!kind) return;
  const button = event.target, entry = button.closest("article"), id = idOf(entry);
  if (kind === "up" || kind === "down") {
    const where = moved(id, kind === "up");
    if (where) await ask({ kind: "move", id, where });
  } else if (!["stop", "kill", "remove"].includes(kind) || confirm(`${button.title}. ${button.textContent} this run?`)) {
    await ask({ kind: kind === "kill" ? "stop" : kind, id });
  }
  give(id, kind);
});
pauseAll?.addEventListener("click", () => ask({ kind: pauseAll.getAttribute("aria-pressed") === "true" ? "resume_all" : "pause_all" }));

const show = (now) => {
  const active = document.activeElement, held = active?.dataset?.do && { id: idOf(active.closest("article")), kind: active.dataset.do };
  for (const [id, html] of Object.entries(now.rows)) {
    const holder = document.createElement("template");
    holder.innerHTML = html;
    const fresh = holder.content.firstElementChild, old = row(id);
    if (!old) lists[0].append(fresh);
    else if (old.outerHTML !== fresh.outerHTML) old.replaceWith(fresh);
  }
  const known = new Set(Object.values(now.lists).flat());
  for (const one of document.querySelectorAll(".queue > article")) if (!known.has(idOf(one))) one.remove();
  for (const list of lists) {
    now.lists[list.id].forEach((id, i) => {
      const one = row(id);
      if (list.children[i] !== one) list.insertBefore(one, list.children[i] ?? null);
    });
  }
  for (const list of lists) list.parentElement.hidden = !list.children.length; // once no row moves any more
  if (held && !document.activeElement?.dataset?.do) give(held.id, held.kind);
  document.querySelector("#none").hidden = known.size > 0;
  document.querySelector("#said").textContent = now.said;
  if (pauseAll) {
    pauseAll.setAttribute("aria-pressed", String(now.paused));
    pauseAll.textContent = now.paused ? "Go on with the queue" : "Pause the queue";
  }
  document.title = `${now.lists.running.length} training, ${now.lists.waiting.length} waiting · Queue · Daguerre`;
};

follow(show);
