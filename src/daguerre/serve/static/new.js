// A new run: the form and the YAML say the same; what is wrong stands beside its setting.
import { post } from "./post.js";

const about = JSON.parse(document.querySelector("#about").textContent);
const settings = document.querySelector("#settings"), yaml = document.querySelector("#yaml"), wrong = document.querySelector("#wrong");
const recipe = document.querySelector("#recipe"), search = document.querySelector("#search"), found = document.querySelector("#found");
const doing = document.querySelector("#doing"), plan = document.querySelector("#plan"), said = document.querySelector("#said");
const [check, attempt, add] = ["check", "try", "add"].map((id) => document.querySelector(`#${id}`)), buttons = [check, attempt, add];
const devices = document.querySelector("#devices");
const was = new Map();
let turn = 0, last = Promise.resolve();
const kept = () => `daguerre-draft ${location.search}`;

const message = (change = {}) => ({
  recipe: about.run ? "" : recipe.value, run: about.run, goes_on: about.goes_on, yaml: yaml.value, change,
  devices: devices ? Number(devices.value) : 1,
});

const rowOf = (path) => settings.querySelector(`[data-path="${CSS.escape(path)}"]`);

const mark = (problems) => {
  for (const one of settings.querySelectorAll(".wrong")) one.hidden = true;
  for (const one of settings.querySelectorAll("[aria-invalid]")) one.removeAttribute("aria-invalid");
  const rest = [];
  for (const [path, text] of problems) {
    const row = rowOf(path);
    if (!row) { rest.push(path ? `${path}: ${text}` : text); continue; }
    const line = row.querySelector(":scope > .wrong"), box = row.querySelector("[name]");
    line.textContent = text;
    line.hidden = false;
    line.id = `wrong-${path}`;
    box.setAttribute("aria-invalid", "true");
    box.setAttribute("aria-describedby", line.id);
    row.hidden = false;
    row.closest("details").open = true;
  }
  wrong.textContent = rest.join("\n\n");
  return problems.length;
};

const draw = (groups) => {
  const active = document.activeElement, focused = settings.contains(active) ? { id: active.id, value: active.value, back: active.classList.contains("back") } : null;
  const open = new Map([...settings.querySelectorAll(":scope > details")].map((one) => [one.dataset.group, one.open]));
  const old = new Map([...settings.querySelectorAll(".setting")].map((one) => [one.dataset.path, one]));
  const fresh = groups.map(({ title, rows }) => {
    const group = document.createElement("details");
    group.dataset.group = title;
    group.open = open.get(title) ?? title === "";
    const name = document.createElement("summary");
    name.textContent = title === "" ? "This recipe, and what is set most often" : `${title} (${rows.length} more)`;
    group.append(name);
    for (const [path, html] of rows) {
      let row = old.get(path);
      if (!row || was.get(path) !== html) {
        const holder = document.createElement("template");
        holder.innerHTML = html;
        row = holder.content.firstElementChild;
      }
      was.set(path, html);
      group.append(row);
    }
    return group;
  });
  settings.replaceChildren(...fresh);
  if (focused) {
    const again = document.getElementById(focused.id);
    again?.focus({ preventScroll: true });
  }
  filter();
};

const filter = () => {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const group of settings.querySelectorAll(":scope > details")) {
    let inside = 0;
    for (const row of group.querySelectorAll(".setting")) {
      row.hidden = !words.every((word) => row.dataset.search.includes(word));
      inside += !row.hidden;
    }
    group.hidden = inside === 0;
    if (words.length) group.open = inside > 0;
    count += inside;
  }
  found.textContent = words.length ? `${count} ${count === 1 ? "setting" : "settings"}` : "";
};

const refresh = (change) => {
  const mine = ++turn;
  last = last.then(async () => {
    if (mine !== turn && !change) return;
    const answer = await post("draft", message(change));
    if (!answer.ok) { wrong.textContent = await answer.text(); return; }
    const now = await answer.json();
    if (now.yaml !== null) yaml.value = now.yaml;
    sessionStorage.setItem(kept(), yaml.value);
    draw(now.groups);
    mark(now.problems);
    document.querySelector("#command").textContent = now.command;
    const description = document.querySelector("#description");
    if (description) description.textContent = now.about;
    plan.replaceChildren();
    said.parentElement.hidden = true;
  }).catch(() => { wrong.textContent = "The server does not answer."; });
  return last;
};

settings.addEventListener("change", (event) => { if (event.target.name) refresh({ [event.target.name]: event.target.value }); });
settings.addEventListener("click", (event) => {
  if (!event.target.classList.contains("back")) return;
  const { path } = event.target.closest(".setting").dataset;
  refresh({ [path]: "" }).then(() => rowOf(path)?.querySelector("[name]")?.focus({ preventScroll: true }));
});
let waiting = 0;
yaml.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(refresh, 600); });
recipe?.addEventListener("change", () => { history.replaceState(null, "", `?recipe=${encodeURIComponent(recipe.value)}`); refresh(); });
search.addEventListener("input", filter);

let pressed = null;
const busy = (text) => {
  const active = document.activeElement;
  if (text && buttons.includes(active)) pressed = active;
  doing.textContent = text;
  for (const button of buttons) button.disabled = text !== "";
  if (text) return;
  if (active === document.body) pressed?.focus({ preventScroll: true }); // a disabled button has lost it
  pressed = null;
};

const asked = async (name) => {
  await last;
  plan.replaceChildren();
  busy("Checked as daguerre train checks it: this takes a few seconds ...");
  try {
    const answer = await post(name, message());
    if (!answer.ok) { wrong.textContent = await answer.text(); return null; }
    const now = await answer.json();
    if (mark(now.problems)) {
      settings.querySelector("[aria-invalid]")?.focus();
      return null;
    }
    said.textContent = now.said;
    said.parentElement.hidden = false;
    return now;
  } catch {
    wrong.textContent = "The server does not answer.";
    return null;
  } finally {
    busy("");
  }
};

const shown = async (name, text) => {
  busy(text);
  const answer = await post(name, message()).catch(() => null);
  if (answer?.ok) plan.innerHTML = await answer.text();
  else plan.textContent = answer ? await answer.text() : "The server does not answer.";
  busy("");
};

check.addEventListener("click", async () => {
  if (!await asked("check")) return;
  await shown("plan", "Nothing is wrong. Planned: what it takes, and for how long ...");
  doing.textContent = "Nothing is wrong.";
});
attempt.addEventListener("click", async () => {
  await last;
  plan.replaceChildren();
  await shown("try", "Ten updates are made and measured, and nothing of them is kept ...");
});
add.addEventListener("click", async () => {
  const now = await asked("add");
  if (!now) return;
  sessionStorage.removeItem(kept());
  location.href = `./#entry-${now.id}`;
});
// What was written is there again after a reload, and after a look at another page; a new visit begins anew.
const [visit] = performance.getEntriesByType("navigation");
if (["reload", "back_forward"].includes(visit?.type)) yaml.value = sessionStorage.getItem(kept()) ?? yaml.value;
refresh();
