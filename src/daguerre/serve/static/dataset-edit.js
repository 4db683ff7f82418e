// Changes of captions, and pictures that are put away: asked of the server, which writes them.
import { $, current, query, refresh, say, send, state } from "./dataset.js";

const cards = $("#cards"), every = $("#every"), many = $("#many"), undo = $("#undo");
const chosen = () => [...cards.querySelectorAll(".pick:checked")];

const named = (runs) => (runs.length ? ` Runs that read this folder and may go on: ${runs.join(", ")}.` : "");

const arrange = () => {
  const some = chosen(), away = some.filter((one) => one.closest("article").dataset.away);
  for (const button of document.querySelectorAll("#chosen [data-to]")) {
    button.disabled = button.dataset.to === "back" ? !away.length : !some.some((one) => one.closest("article").dataset.away !== button.dataset.to);
  }
  every.checked = some.length > 0 && some.length === cards.querySelectorAll(".pick").length;
  undo.hidden = !state.undo;
  undo.textContent = `Undo: ${state.undo}`;
};

cards.addEventListener("change", arrange);
document.addEventListener("shown", arrange);
every.addEventListener("change", () => {
  for (const one of cards.querySelectorAll(".pick")) one.checked = every.checked;
  arrange();
});

$("#chosen").addEventListener("click", async (event) => {
  const to = event.target.dataset?.to;
  if (!to) return;
  try {
    const found = await send("move", { ids: chosen().map((one) => one.value), to });
    const words = { left_out: "left out", trash: "moved to the trash", back: "restored" };
    say(`${found.moved} ${found.moved === 1 ? "picture" : "pictures"} ${words[to]}.${named(found.runs)}`);
    await refresh();
    if (event.target.disabled) every.focus(); // else the keys have lost their place
  } catch (error) { say(error.message); }
});

$("#viewer form").addEventListener("submit", async () => {
  const text = $("#v-text").value;
  try {
    const found = await send("edit", { kind: "caption", id: current.id, was: current.text, text });
    current.text = found.text;
    $("#viewer .wrong").textContent = "";
    $("#v-said").textContent = `saved.${named(found.runs)}`;
    await refresh();
  } catch (error) { $("#viewer .wrong").textContent = error.message; }
});
$("#v-text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); $("#viewer form").requestSubmit(); }
});

undo.addEventListener("click", async () => {
  try {
    const found = await send("edit", { kind: "undo" });
    const stayed = found.stayed.length ? ` Changed since, and left as they are: ${found.stayed.join(", ")}.` : "";
    say(`Undone: ${found.title}.${stayed}${named(found.runs)}`);
    await refresh();
    if (undo.hidden) $("#change").focus();
  } catch (error) { say(error.message); }
});

const form = many.querySelector("form"), change = form.querySelector("[type=submit]"), preview = $("#preview");

const wanted = (try_only) => {
  const of = form.elements, kind = of.kind.value;
  const picked = chosen().filter((one) => !one.closest("article").dataset.away).map((one) => one.value);
  const how = kind === "replace" ? { kind, find: of.find.value, by: of.by.value, any_case: of.any_case.checked }
    : kind === "remove" ? { kind, tag: of.tag.value } : { kind, tag: of.tag.value, to: of.to.value };
  const all = !$("#filter").value.trim() && $("#show").value === "all";
  return { kind: "many", ids: picked.length ? picked : all ? null : state.ids, change: how, try_only };
};

const arrangeForm = () => {
  for (const part of form.querySelectorAll("[data-for]")) part.hidden = !part.dataset.for.split(" ").includes(form.elements.kind.value);
  for (const option of form.elements.to.options) option.hidden = form.elements.kind.value === "add" && ["up", "down"].includes(option.value);
  if (form.elements.kind.value === "add" && ["up", "down"].includes(form.elements.to.value)) form.elements.to.value = "last";
};

let asked = 0;
const attempt = async () => {
  const mine = ++asked, { change: how } = wanted(true);
  change.disabled = true;
  preview.replaceChildren();
  many.querySelector(".wrong").textContent = "";
  if (!(how.find ?? how.tag).trim() && !how.find) return;
  try {
    const found = await send("edit", wanted(true));
    if (mine !== asked) return;
    const line = document.createElement("p");
    const refused = Object.entries(found.refused).map(([why, count]) => ` ${count} cannot be changed: ${why}.`).join("");
    line.textContent = `${found.changed} captions would change.${refused}`;
    preview.append(line);
    for (const [name, before, after] of found.examples) {
      const example = document.createElement("p"), old = document.createElement("del"), now = document.createElement("ins");
      example.title = name;
      old.textContent = before;
      now.textContent = after;
      example.append(old, " ", now);
      preview.append(example);
    }
    change.disabled = !found.changed;
  } catch (error) { if (mine === asked) many.querySelector(".wrong").textContent = error.message; }
};

let waiting = 0;
form.addEventListener("input", () => { arrangeForm(); change.disabled = true; clearTimeout(waiting); waiting = setTimeout(attempt, 250); });
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (change.disabled) return;
  try {
    const found = await send("edit", wanted(false));
    many.close();
    say(`${found.changed} captions changed.${named(found.runs)}`);
    await refresh();
  } catch (error) { many.querySelector(".wrong").textContent = error.message; }
});
many.querySelector(".cancel").addEventListener("click", () => many.close());
$("#change").addEventListener("click", () => {
  const { ids } = wanted(true), picked = chosen().length > 0;
  $("#of-which").textContent = `${(ids ?? state.ids).length.toLocaleString("en")} pictures: ${picked ? "those that are chosen" : "all that the filter shows, on all pages"}`;
  arrangeForm();
  many.showModal();
  attempt();
});

const job = $("#job");
let watching = false;
const watch = async () => {
  if (watching) return;
  watching = true;
  try {
    for (let was = null; ;) {
      const found = await fetch("job").then((one) => (one.ok ? one.json() : null)).catch(() => null);
      if (!found) return;
      job.hidden = false;
      const held = document.activeElement;
      const done = $("#job-done"), text = $("#job-text"), end = text.scrollTop >= text.scrollHeight - text.clientHeight - 2;
      done.hidden = $("#job-stop").hidden = !found.running;
      if (found.share) { [done.value, done.max] = found.share; } else done.removeAttribute("value");
      text.textContent = found.text || "starting …";
      if (end) text.scrollTop = text.scrollHeight;
      $("#job-file").textContent = found.file ? `Written to ${found.file}` : found.running || found.done ? "" : "It has ended with an error.";
      $("#job-plan").hidden = !found.file || found.kind === "plan";
      $("#job-start").hidden = !found.start;
      if (found.start) $("#job-start").href = found.start;
      $("#job-recipe").hidden = !found.recipe;
      $("#job-recipe").textContent = found.recipe ?? "";
      if (held.hidden) text.focus({ preventScroll: true });
      if (was?.running && !found.running) await refresh();
      if (!found.running) return;
      was = found;
      await new Promise((go) => { setTimeout(go, 1000); });
    }
  } finally { watching = false; }
};

const start = async (body) => {
  try {
    await send("job", body);
    job.hidden = false;
    $("#job-text").textContent = "starting …";
    job.scrollIntoView({ block: "nearest" });
    watch();
  } catch (error) {
    job.hidden = false;
    $("#job-text").textContent = error.message;
  }
};
$("#by-network").addEventListener("submit", (event) => {
  event.preventDefault();
  start({ kind: "caption", by: event.target.elements.by.value, path: event.target.elements.path.value.trim() });
});
$("#recipe").addEventListener("submit", (event) => {
  event.preventDefault();
  const of = event.target.elements;
  start({ kind: "init", name: of.name.value, base: of.base.value });
});
$("#job-plan").addEventListener("click", () => start({ kind: "plan" }));
$("#job-stop").addEventListener("click", () => send("job", { kind: "stop" }).catch(() => {}));
watch();
