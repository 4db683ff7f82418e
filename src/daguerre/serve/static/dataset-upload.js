// Files that are dropped or chosen: one PUT each, one after the other; into a new folder or the one that is shown.
import { post } from "./post.js";

const $ = (selector) => document.querySelector(selector);
const drop = $("#drop"), input = $("#files"), form = $("#new"), bar = $("#sent"), text = $("#sent-text"), refused = $("#refused");
const MOST = 5000;
let busy = false;

const put = (address, file, moved) => new Promise((done, failed) => {
  const request = new XMLHttpRequest(); // fetch does not say how far it is
  request.open("PUT", address);
  request.setRequestHeader("x-daguerre", "1");
  request.upload.onprogress = (event) => moved(event.loaded);
  request.onload = () => (request.status === 200 ? done(JSON.parse(request.responseText)) : failed(new Error(request.responseText.trim())));
  request.onerror = () => failed(new Error("the server does not answer"));
  request.send(file);
});

const refuse = (line) => {
  const one = document.createElement("li");
  one.textContent = line;
  refused.append(one);
};

const folder = async () => {
  if (!form) return "";
  const answer = await post("new", { root: Number(form.elements.root.value), name: form.elements.name.value.trim() });
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return `${(await answer.json()).id}/`;
};

const sendAll = async (files) => {
  if (busy || !files.length) return;
  if (form && !form.elements.name.value.trim()) { form.elements.name.focus(); text.textContent = "Give the folder a name first."; return; }
  if (files.length > MOST) { text.textContent = `${files.length} files at once: up to ${MOST} are taken; copy more into the folder.`; return; }
  busy = true;
  refused.replaceChildren();
  const whole = files.reduce((sum, one) => sum + one.size, 0);
  let sent = 0, kept = 0;
  bar.hidden = false;
  bar.max = whole || 1;
  try {
    const base = await folder();
    for (const file of files) {
      text.textContent = `${kept} of ${files.length} files: ${file.name}`;
      try {
        await put(`${base}upload?name=${encodeURIComponent(file.name)}`, file, (loaded) => { bar.value = sent + loaded; });
        kept += 1;
      } catch (error) { refuse(error.message); }
      sent += file.size;
      bar.value = sent;
    }
    text.textContent = `${kept} of ${files.length} files are there.`;
    if (base && kept && !refused.children.length) location.href = base;
    else if (base && kept) {
      const link = document.createElement("a");
      link.href = base;
      link.textContent = "Open the folder";
      text.append(" ", link);
    } else if (!base) document.querySelector("#show").dispatchEvent(new Event("change"));
  } catch (error) { refuse(error.message); } finally {
    busy = false;
    bar.hidden = true;
    input.value = "";
  }
};

/** The files of a drop, those in folders too. */
const dropped = async (transfer) => {
  const waiting = [...transfer.items].map((one) => one.webkitGetAsEntry?.()).filter(Boolean), found = [];
  if (!waiting.length) return [...transfer.files];
  while (waiting.length && found.length <= MOST) {
    const entry = waiting.shift();
    if (entry.isFile) found.push(await new Promise((done, failed) => { entry.file(done, failed); }));
    else {
      const reader = entry.createReader();
      for (let some; (some = await new Promise((done, failed) => { reader.readEntries(done, failed); })).length;) waiting.push(...some);
    }
  }
  return found.filter((one) => !one.name.startsWith("."));
};

for (const name of ["dragenter", "dragover"]) drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
for (const name of ["dragleave", "drop"]) drop.addEventListener(name, () => drop.classList.remove("over"));
drop.addEventListener("drop", async (event) => { event.preventDefault(); sendAll(await dropped(event.dataTransfer)); });
// A file that misses the place would open in the window, and the page be gone.
for (const name of ["dragover", "drop"]) window.addEventListener(name, (event) => event.preventDefault());
input.addEventListener("change", () => sendAll([...input.files]));
form?.addEventListener("submit", (event) => event.preventDefault());
