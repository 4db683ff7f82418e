// One prompt over updates at full size: arrow keys and a slider walk through it. An open picture stays as new ones come.
import PhotoSwipe from "./photoswipe.min.js";

let open = null;

const items = (strip) => [...strip.querySelectorAll("a[data-caption]")].map((link) => {
  const image = link.querySelector("img");
  const [width, height] = [image.getAttribute("width"), image.getAttribute("height")].map(Number);
  // A small image fills the screen with hard edges, as the strip shows it.
  const scale = Math.max(1, Math.floor(768 / Math.max(width, height)));
  return {
    src: link.getAttribute("href"), msrc: image.getAttribute("src"), width: width * scale, height: height * scale,
    alt: image.alt, caption: link.dataset.caption, how: link.dataset.how, pixels: image.classList.contains("pixels"),
  };
});

const keyOf = (strip) => strip.closest("section.row").querySelector(".prompt").textContent;

const show = (strip, index) => {
  const viewer = new PhotoSwipe({
    dataSource: items(strip), index, bgOpacity: 0.94, loop: false, wheelToZoom: true, showHideAnimationType: "none",
    preload: [2, 2], padding: { top: 44, bottom: 92, left: 12, right: 12 },
  });
  viewer.on("uiRegister", () => viewer.ui.registerElement({
    name: "walk", order: 9, isButton: false, appendTo: "root",
    onInit: (box) => {
      viewer.element.setAttribute("aria-label", "Image, over updates");
      const slider = document.createElement("input"), caption = document.createElement("p");
      slider.type = "range";
      slider.min = 0;
      slider.setAttribute("aria-label", "update");
      slider.addEventListener("input", () => viewer.goTo(Number(slider.value)));
      // Arrow keys belong to the slider while it has the focus, and walk all the same.
      for (const name of ["pointerdown", "keydown", "click"]) slider.addEventListener(name, (event) => event.stopPropagation());
      box.append(slider, caption);
      const tell = () => {
        const all = viewer.options.dataSource, one = all[viewer.currIndex];
        slider.max = all.length - 1;
        slider.value = viewer.currIndex;
        slider.hidden = all.length < 2;
        caption.textContent = `${one.caption} · ${one.how}`;
      };
      viewer.on("change", tell);
      viewer.on("more", tell);
      tell();
    },
  }));
  viewer.on("contentAppend", ({ content }) => content.element?.classList.toggle("pixels", content.data.pixels));
  viewer.on("close", () => { open = null; });
  open = { viewer, key: keyOf(strip) };
  viewer.init();
};

/** Gives the open viewer what the page has got since. */
export const more = (root) => {
  if (!open) return;
  const strip = [...root.querySelectorAll(".strip")].find((one) => keyOf(one) === open.key);
  if (!strip) return;
  const known = open.viewer.options.dataSource, now = items(strip);
  const seen = known.map((one) => one.src);
  const added = now.filter((one) => !seen.includes(one.src));
  known.push(...added);
  if (added.length) {
    open.viewer.dispatch("more");
    open.viewer.refreshSlideContent(known.length - added.length);
  }
};

export const bind = (root) => root.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-caption]");
  if (!link || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  const strip = link.closest(".strip");
  show(strip, [...strip.querySelectorAll("a[data-caption]")].indexOf(link));
});
