// The page of a folder of pictures: cards come from the server, a page of them at a time; one opens with its caption.
import { post } from "./post.js";

export const about = JSON.parse(document.querySelector("#about").textContent);
export const state = { ids: [], page: 0, pages: 1 };
export const $ = (selector) => document.querySelector(selector);
const cards = $("#cards"), way = $("#way"), filter = $("#filter"), show = $("#show"), said = $("#said");
const viewer = $("#viewer");

export const say = (text) => { said.textContent = text; };

/** How the folder is read, as the server wants it. */
export const query = (more = {}) => {
  const found = new URLSearchParams(more);
  for (const { name, value } of way.elements) if (value) found.set(name, value);
  return found;
};

export const send = async (address, body) => {
  const answer = await post(`${address}?${query()}`, body);
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return answer.json();
};

const pager = () => {
  const box = $("#pager");
  box.replaceChildren();
  if (state.pages < 2) return;
  const button = (text, to, label) => {
    const one = document.createElement("button");
    one.type = "button";
    one.textContent = text;
    one.setAttribute("aria-label", label);
    one.disabled = to < 0 || to >= state.pages;
    one.addEventListener("click", async () => { await refresh(to); cards.querySelector("a")?.focus(); });
    return one;
  };
  const where = document.createElement("span");
  where.textContent = `page ${state.page + 1} of ${state.pages}`;
  box.append(button("«", 0, "first page"), button("‹", state.page - 1, "page before"), where,
    button("›", state.page + 1, "next page"), button("»", state.pages - 1, "last page"));
};

let asked = 0;

/** Fetches the cards again; what is chosen, folds and the place on the page stay. */
export const refresh = async (page = state.page) => {
  const mine = ++asked;
  const given = query({ q: filter.value.trim(), show: show.value, page });
  const answer = await fetch(`shown?${given}`);
  if (mine !== asked) return;
  if (!answer.ok) { say((await answer.text()).trim()); return; }
  const found = await answer.json();
  const chosen = new Set([...cards.querySelectorAll(".pick:checked")].map((one) => one.value));
  const open = new Set([...document.querySelectorAll("#facts details[open]")].map((one) => one.id));
  const focus = document.activeElement?.closest?.("article")?.id, kind = document.activeElement?.className;
  $("#facts").innerHTML = found.facts;
  for (const one of document.querySelectorAll("#facts details")) one.open = open.has(one.id);
  for (const one of document.querySelectorAll("#facts .scroll")) one.tabIndex = 0; // else no key scrolls it
  cards.innerHTML = found.cards;
  for (const one of cards.querySelectorAll(".pick")) one.checked = chosen.has(one.value);
  if (focus) cards.querySelector(`#${focus} .${kind}`)?.focus({ preventScroll: true });
  Object.assign(state, { ids: found.ids, page: found.page, pages: found.pages, undo: found.undo });
  $("#count").textContent = found.count;
  given.delete("page");
  history.replaceState(null, "", `?${[...given].filter(([, value]) => value && value !== "all").map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&")}${location.hash}`);
  pager();
  document.dispatchEvent(new CustomEvent("shown"));
};

let waiting = 0;
filter.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => refresh(0), 250); });
show.addEventListener("change", () => refresh(0));
way.addEventListener("change", () => {
  const run = way.elements.as.value !== "";
  way.elements.resolution.disabled = run;
  way.elements.shapes.disabled = run;
  refresh(0);
});
way.addEventListener("submit", (event) => event.preventDefault());

const opened = () => [...cards.querySelectorAll("article")];
let at = null;
/** The picture that is open, with its caption as the server has it. */
export const current = { id: "", text: "" };

const open = async (card) => {
  at = card.id;
  const link = card.querySelector("a.open"), id = card.querySelector(".pick").value;
  $("#v-name").textContent = card.dataset.name;
  $("#v-about").textContent = link.dataset.about;
  const cut = link.querySelector(".cut").cloneNode(true), image = cut.querySelector("img");
  image.loading = "eager";
  image.src = link.getAttribute("href");
  // As large as the window lets it, in its own proportions.
  const [width, height] = [image.width, image.height].map(Number);
  $("#v-cut").style.setProperty("--wide", `min(100%, ${(60 * width) / height}vh)`);
  $("#v-cut").replaceChildren(...cut.childNodes);
  $("#v-beside").replaceChildren();
  $("#viewer .wrong").textContent = "";
  $("#v-said").textContent = "";
  // Nothing can be written before the caption is there.
  const box = $("#v-text"), save = $("#viewer [type=submit]");
  Object.assign(current, { id, text: "" });
  box.value = "";
  box.readOnly = true;
  if (save) save.disabled = true;
  const all = opened(), place = all.indexOf(card);
  $("#v-before").disabled = place <= 0;
  $("#v-after").disabled = place >= all.length - 1;
  if (document.activeElement.disabled) $("#viewer .cancel").focus();
  if (!viewer.open) viewer.showModal();
  const answer = await fetch(`caption/${id}?${query()}`);
  if (!answer.ok) { $("#viewer .wrong").textContent = await answer.text(); return; }
  const found = await answer.json();
  if (current.id !== id) return; // another one was opened since
  current.text = found.text;
  box.value = found.text;
  box.readOnly = !about.control || found.refused !== "";
  if (save) save.disabled = box.readOnly;
  if (about.control) $("#viewer .wrong").textContent = found.refused;
  $("#v-beside").replaceChildren(...found.beside.map((name, i) => {
    const figure = document.createElement("figure"), image = document.createElement("img"), text = document.createElement("figcaption");
    image.src = `picture/${id}/beside/${i}`;
    image.alt = name;
    text.textContent = name;
    figure.append(image, text);
    return figure;
  }));
};

cards.addEventListener("click", (event) => {
  const link = event.target.closest("a.open");
  if (!link || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  open(link.closest("article"));
});

cards.addEventListener("error", ({ target }) => {
  const said = document.createElement("span");
  said.className = "lost";
  said.textContent = "cannot be shown";
  target.replaceWith(said);
}, true);

export const step = (by) => {
  const all = opened(), next = all[all.findIndex((one) => one.id === at) + by];
  if (next) open(next);
};
const unsaved = () => about.control && !$("#v-text").readOnly && $("#v-text").value.trim() !== current.text.trim();
const leave = () => !unsaved() || confirm("The caption is not saved. Leave it?");
$("#v-before").addEventListener("click", () => { if (leave()) step(-1); });
$("#v-after").addEventListener("click", () => { if (leave()) step(1); });
viewer.addEventListener("keydown", (event) => {
  if (event.target.tagName === "TEXTAREA" && !event.altKey) return;
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by && leave()) { event.preventDefault(); step(by); }
});
viewer.addEventListener("cancel", (event) => { if (!leave()) event.preventDefault(); });
$("#viewer .cancel").addEventListener("click", () => { if (leave()) viewer.close(); });
viewer.addEventListener("close", () => cards.querySelector(`#${at} a`)?.focus());
$("#viewer form").addEventListener("submit", (event) => event.preventDefault());

const given = new URLSearchParams(location.search);
if (given.has("q")) filter.value = given.get("q");
for (const [name, box] of [["show", show], ...["as", "resolution", "shapes"].map((one) => [one, way.elements[one]])]) {
  if (given.has(name) && [...box.options].some((one) => one.value === given.get(name))) box.value = given.get(name);
}
way.dispatchEvent(new Event("change"));
