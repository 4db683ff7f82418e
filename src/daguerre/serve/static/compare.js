// Several runs: their curves, and the images of one prompt at one update next to each other.
import { show, tools } from "./charts.js";

const fetchNumbers = async () => {
  const answer = await fetch(`compare.json${location.search}`);
  if (answer.ok) show(await answer.json());
};

tools();
fetchNumbers();
setInterval(() => { if (!document.hidden) fetchNumbers(); }, 15000);

const images = document.querySelector("#images");
if (images) {
  const data = JSON.parse(document.querySelector("#image-data").textContent);
  const prompt = document.querySelector("#prompt"), at = document.querySelector("#at"), text = document.querySelector("#at-text");
  const draw = () => {
    const step = data.steps[Number(at.value)], of = data.prompts[prompt.value] ?? {};
    text.textContent = step.toLocaleString("en");
    for (const figure of images.querySelectorAll("figure")) {
      const list = (of[figure.dataset.run] ?? []).filter((one) => one.step <= step), one = list[list.length - 1];
      const frame = figure.querySelector(".frame");
      let image = frame.querySelector("img");
      frame.dataset.step = one ? (one.step === step ? "" : `update ${one.step.toLocaleString("en")}`) : "none yet";
      if (!one) { image?.remove(); continue; }
      if (!image) {
        image = document.createElement("img");
        image.addEventListener("load", () => image.classList.toggle("pixels", Math.max(image.naturalWidth, image.naturalHeight) <= 128));
        frame.append(image);
      }
      if (image.getAttribute("src") !== one.src) image.src = one.src;
      image.alt = `${prompt.value}, update ${one.step}`;
    }
  };
  at.addEventListener("input", draw);
  prompt.addEventListener("change", draw);
  document.addEventListener("keydown", (event) => {
    if (event.target.matches?.("input, select, textarea") || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    at.value = Number(at.value) + (event.key === "ArrowRight" ? 1 : -1);
    draw();
    event.preventDefault();
  });
  draw();
}
