// Values under the pointer: a line through the chart and the nearest point of each series. Nothing else.
"use strict";
{
  const numbers = new WeakMap();

  const nearest = (xs, x) => {
    let a = 0, b = xs.length - 1;
    while (b - a > 1) {
      const middle = (a + b) >> 1;
      if (xs[middle] < x) a = middle; else b = middle;
    }
    return x - xs[a] < xs[b] - x ? a : b;
  };

  const show = (figure, svg, event) => {
    const cursor = figure.querySelector(".cursor");
    const tip = figure.querySelector(".tip");
    if (!numbers.has(figure)) numbers.set(figure, JSON.parse(figure.querySelector("script").textContent));
    const data = numbers.get(figure);
    const [low, high, left, right] = data.x;
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * data.width;
    const x = low + (Math.min(right, Math.max(left, at)) - left) / (right - left) * (high - low);
    const anchor = data.series.map((s) => s.xs[nearest(s.xs, x)])
      .reduce((best, step) => Math.abs(step - x) < Math.abs(best - x) ? step : best);
    const position = left + (anchor - low) / (high - low) * (right - left);
    cursor.setAttribute("x1", position);
    cursor.setAttribute("x2", position);
    const head = document.createElement("b");
    head.textContent = data.over + " " + anchor.toLocaleString("en");
    const rows = data.series.map((s) => {
      const row = document.createElement("span"), key = document.createElement("i");
      const i = nearest(s.xs, anchor);
      key.style.background = s.color;
      row.append(key, s.name, document.createElement("em"));
      const elsewhere = s.xs[i] === anchor ? "" : " at " + s.xs[i].toLocaleString("en");
      row.lastChild.textContent = Number(s.ys[i].toPrecision(4)) + elsewhere;
      return row;
    });
    tip.replaceChildren(head, ...rows);
    const outer = figure.getBoundingClientRect();
    const x_px = box.left - outer.left + position / data.width * box.width;
    const onLeft = x_px < outer.width / 2;
    tip.style.top = box.top - outer.top + 8 + "px";
    tip.style.left = onLeft ? x_px + 12 + "px" : "auto";
    tip.style.right = onLeft ? "auto" : outer.width - x_px + 12 + "px";
    figure.classList.add("hover");
  };

  // Asked of the whole page, so that charts may come and go.
  const over = (event) => {
    const svg = event.target.closest?.("figure.chart:not(.bars) > svg");
    for (const other of document.querySelectorAll("figure.chart.hover")) {
      if (!svg || other !== svg.parentElement) other.classList.remove("hover");
    }
    if (svg && svg.parentElement.querySelector(".cursor")) show(svg.parentElement, svg, event);
  };
  document.addEventListener("pointermove", over);
  document.addEventListener("pointerdown", over);
  document.documentElement.addEventListener("pointerleave", over);
}
