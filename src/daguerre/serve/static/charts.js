// Curves by uPlot, in the frame of the report's charts. What one looks at stays: a zoom outlives every new number.
const STEP = "step";
const LOG_RATIO = 8;
const figures = new Map();
const state = { over: STEP, smooth: 0, log: true, outliers: false, range: null };
let numbers = null;

const css = (text, element = document.documentElement) => {
  // Canvas knows no variables: the browser works a colour out where it is styled.
  const probe = document.createElement("i");
  probe.style.color = text;
  element.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
};

const short = (value) => {
  if (value == null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (value && (size < 1e-4 || size >= 1e6)) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
  return size >= 1e4 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
};

const tick = (value) => {
  for (const [unit, size] of [["M", 1e6], ["k", 1e3]]) {
    if (Math.abs(value) >= size * 0.9995 && Math.abs(value) < 1e9) return Number((value / size).toPrecision(4)) + unit;
  }
  return value === 0 ? "0" : short(value);
};

/** The mean of what came before, by how much is remembered; without bias at its start. */
export const smoothed = (ys, strength) => {
  const keep = strength <= 0 ? 0 : 1 - 1 / (1 + (strength / 100) ** 2 * Math.max(5, ys.length / 4));
  let total = 0, weight = 0;
  return ys.map((y) => {
    total = keep * total + (1 - keep) * y;
    weight = keep * weight + (1 - keep);
    return total / weight;
  });
};

/** From updates to what curves are drawn over. */
const converter = (clock) => {
  if (state.over === STEP || !clock?.[state.over]) return (step) => step;
  const steps = clock[`${state.over}_steps`], values = clock[state.over];
  const first = state.over === "time" ? values[0] : 0;
  const scale = state.over === "samples" ? 1 : 3600;
  return (step) => {
    let a = 0, b = steps.length - 1;
    while (a < b) {
      const middle = (a + b) >> 1;
      if (steps[middle] < step) a = middle + 1; else b = middle;
    }
    if (a === 0 || steps[a] <= step) return (values[a] - first) / scale;
    const share = (step - steps[a - 1]) / (steps[a] - steps[a - 1]);
    return (values[a - 1] + share * (values[a] - values[a - 1]) - first) / scale;
  };
};

const lines = (chart) => {
  const found = [];
  for (const line of chart.lines) {
    const points = numbers.metrics[line.metric];
    if (!points || !points.x.length) continue;
    const convert = converter(numbers.clocks ? numbers.clocks[line.clock] : numbers.clock);
    const x = points.x.map(convert), scale = chart.factor;
    if (line.raw && state.smooth > 0) {
      const rawX = points.raw_x ? points.raw_x.map(convert) : x;
      found.push({ ...line, label: "each interval", faint: true, x: rawX, y: (points.raw_y ?? points.y).map((v) => v * scale) });
    }
    const y = line.smoothed ? smoothed(points.y, state.smooth) : points.y;
    found.push({ ...line, label: line.raw && state.smooth === 0 ? "each interval" : line.label, x, y: y.map((v) => v * scale) });
  }
  return found;
};

const range = (figure, chart) => (u, low, high) => {
  const [from, to] = state.range ?? [-Infinity, Infinity];
  const seen = [];
  for (const line of figure.lines) {
    line.x.forEach((x, i) => { if (x >= from && x <= to) seen.push(line.y[i]); });
  }
  if (!seen.length) return [low ?? 0, high ?? 1];
  seen.sort((a, b) => a - b);
  const cut = state.outliers ? Math.floor(seen.length * 0.02) : 0;
  low = seen[cut];
  high = seen[seen.length - 1 - cut];
  if (figure.log) return [low / 1.12, high * 1.12];
  if (chart.zero && low >= 0) return [0, high * 1.08 || 1];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
};

const frame = (chart) => {
  const figure = document.createElement("figure");
  figure.className = "chart live";
  const caption = document.createElement("figcaption"), title = document.createElement("b"), unit = document.createElement("span");
  title.textContent = chart.title;
  caption.append(title, unit);
  const legend = document.createElement("div"), place = document.createElement("div");
  legend.className = "legend";
  place.className = "plot";
  place.tabIndex = 0;
  place.setAttribute("role", "group");
  place.setAttribute("aria-label", `${chart.title}: arrow keys walk along it, + and - zoom, 0 shows the whole range`);
  figure.append(caption, legend, place);
  const made = { element: figure, unit, legend, place };
  place.addEventListener("keydown", (event) => { if (made.plot && pressed(made, event.key)) event.preventDefault(); });
  place.addEventListener("blur", () => { if (made.tip) made.tip.hidden = true; });
  return made;
};

/** What a key does in a chart that has the focus; false for one that does nothing. */
const pressed = ({ plot }, key) => {
  const { min, max } = plot.scales.x, wide = plot.over.clientWidth, at = plot.cursor.left >= 0 ? plot.cursor.left : wide / 2;
  const xs = plot.data[0], walk = { ArrowLeft: -1, ArrowRight: 1 }[key], zoom = { "+": 0.25, "=": 0.25, "-": 1 }[key];
  if (walk) plot.setCursor({ left: Math.min(wide, Math.max(0, at + (walk * wide) / 40)), top: plot.over.clientHeight / 2 });
  else if (zoom) {
    const half = zoom * (max - min), middle = plot.posToVal(at, "x");
    const found = [Math.max(xs[0], middle - half), Math.min(xs[xs.length - 1], middle + half)];
    if (found[0] <= xs[0] && found[1] >= xs[xs.length - 1]) resetRange(); else setRange(found);
  } else if (key === "0") resetRange();
  return walk || zoom || key === "0";
};

const options = (figure, chart) => {
  const ink = css("var(--soft)"), grid = css("var(--line)");
  const font = `11.5px ${getComputedStyle(document.body).fontFamily}`;
  const axis = { stroke: ink, font, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
  return {
    width: Math.max(200, figure.place.clientWidth),
    height: 210,
    legend: { show: false },
    padding: [10, 18, 0, 0],
    cursor: {
      sync: { key: "curves" },
      drag: { x: true, y: false, setScale: true },
      points: { size: 7 },
      bind: { dblclick: (u, target, handler) => () => { resetRange(); return null; } },
    },
    scales: { x: { time: false }, y: { distr: figure.log ? 3 : 1, range: range(figure, chart) } },
    axes: [
      { ...axis, size: 30, gap: 6, grid: { show: false }, values: (u, at) => at.map(tick), space: 60 },
      { ...axis, size: 46, gap: 5, values: (u, at) => at.map((v) => (v == null ? "" : tick(v))), space: figure.log ? 26 : 34 },
    ],
    series: [
      {},
      ...figure.lines.map((line) => ({
        label: line.label,
        stroke: line.faint ? css(`color-mix(in oklab, ${line.color} 35%, transparent)`) : css(line.color),
        width: line.faint ? 1 : 1.8,
        spanGaps: true,
        points: { show: line.dots || line.x.length === 1, size: 5, fill: css(line.color), width: 0 },
      })),
    ],
    hooks: {
      setCursor: [(u) => showTip(figure, u)],
      setSelect: [(u) => { if (u.select.width > 2) setRange([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]); }],
    },
  };
};

const showTip = (figure, u) => {
  const { left, idx } = u.cursor;
  if (!(u.over.matches(":hover") || figure.place === document.activeElement) || left < 0 || idx == null) {
    figure.tip.hidden = true;
    return;
  }
  const x = u.posToVal(left, "x"), head = document.createElement("b");
  const nearest = (xs) => {
    let a = 0, b = xs.length - 1;
    while (b - a > 1) {
      const middle = (a + b) >> 1;
      if (xs[middle] < x) a = middle; else b = middle;
    }
    return x - xs[a] < xs[b] - x ? a : b;
  };
  head.textContent = `${document.querySelector("#over")?.selectedOptions[0]?.text ?? "update"} ${short(x)}`;
  const rows = figure.lines.filter((line) => !line.faint).map((line) => {
    const row = document.createElement("span"), key = document.createElement("i"), value = document.createElement("em");
    key.style.background = line.color;
    value.textContent = short(line.y[nearest(line.x)]);
    row.append(key, line.label, value);
    return row;
  });
  figure.tip.replaceChildren(head, ...rows);
  figure.tip.hidden = false;
  const wide = u.over.clientWidth, onLeft = left < wide / 2;
  figure.tip.style.left = onLeft ? `${u.over.offsetLeft + left + 14}px` : "auto";
  figure.tip.style.right = onLeft ? "auto" : `${figure.place.clientWidth - u.over.offsetLeft - left + 14}px`;
};

const build = (figure, chart) => {
  figure.plot?.destroy();
  figure.plot = new uPlot(options(figure, chart), data(figure), figure.place);
  figure.tip = document.createElement("div");
  figure.tip.className = "tip";
  figure.tip.hidden = true;
  figure.place.append(figure.tip);
  if (state.range) figure.plot.setScale("x", { min: state.range[0], max: state.range[1] });
};

const data = (figure) => uPlot.join(figure.lines.map(merged));

/** uPlot wants rising x: of equal ones the last counts, but for what is least and most of one bucket. */
const merged = (line) => {
  const xs = [], ys = [];
  line.x.forEach((x, i) => {
    if (xs.length && x <= xs[xs.length - 1]) {
      if (!line.faint) ys[ys.length - 1] = line.y[i];
    } else {
      xs.push(x);
      ys.push(line.y[i]);
    }
  });
  return [xs, ys];
};

const key = (chart) => `${chart.title}\n${chart.unit}`;

const draw = (chart) => {
  let figure = figures.get(key(chart));
  if (!figure) {
    figure = frame(chart);
    figures.set(key(chart), figure);
    document.querySelector("#charts").append(figure.element);
  }
  const before = JSON.stringify([figure.lines?.map((line) => [line.label, line.faint]), figure.log]);
  figure.lines = lines(chart);
  figure.element.hidden = !figure.lines.length;
  if (!figure.lines.length) return;
  const every = figure.lines.flatMap((line) => line.y);
  const low = every.reduce((a, b) => Math.min(a, b), Infinity), high = every.reduce((a, b) => Math.max(a, b), -Infinity);
  figure.log = chart.log && state.log && low > 0 && high / low > LOG_RATIO;
  figure.unit.textContent = figure.log ? `${chart.unit}, log scale` : chart.unit;
  figure.legend.replaceChildren(...(figure.lines.length > 1 ? figure.lines.map((line) => {
    const item = document.createElement("span"), mark = document.createElement("i");
    mark.style.background = line.color;
    if (line.faint) mark.className = "faint";
    item.append(mark, line.label);
    return item;
  }) : []));
  const same = before === JSON.stringify([figure.lines.map((line) => [line.label, line.faint]), figure.log]);
  if (!same || !figure.plot) build(figure, chart);
  else {
    figure.plot.setData(data(figure), !state.range);
    if (state.range) figure.plot.setScale("x", { min: state.range[0], max: state.range[1] });
  }
};

const redraw = (again = false) => {
  if (!numbers) return;
  if (again) for (const figure of figures.values()) { figure.plot?.destroy(); figure.plot = null; }
  const wanted = new Set(numbers.charts.map(key));
  for (const [name, figure] of figures) {
    if (!wanted.has(name)) { figure.plot?.destroy(); figure.element.remove(); figures.delete(name); }
  }
  numbers.charts.forEach(draw);
};

const setRange = (found) => {
  state.range = found;
  document.querySelector("#whole").hidden = false;
  for (const { plot } of figures.values()) plot?.setScale("x", { min: found[0], max: found[1] });
};

export const resetRange = () => {
  state.range = null;
  document.querySelector("#whole").hidden = true;
  redraw();
  for (const { plot } of figures.values()) plot?.setData(plot.data, true);
};

/** Shows numbers: all of them, or what came after those that are shown. */
export const show = (found) => {
  if (found.tail && numbers) {
    for (const [name, points] of Object.entries(found.metrics)) {
      const own = (numbers.metrics[name] ??= { x: [], y: [] });
      for (const part of Object.keys(points)) (own[part] ??= []).push(...points[part]);
    }
    for (const [name, values] of Object.entries(found.clock)) (numbers.clock[name] ??= []).push(...values);
    numbers = { ...found, metrics: numbers.metrics, clock: numbers.clock };
  } else numbers = found;
  redraw();
  return numbers;
};

const remember = () => {
  try {
    localStorage.setItem("daguerre-curves", JSON.stringify({ over: state.over, smooth: state.smooth, log: state.log, outliers: state.outliers }));
  } catch { /* a private window keeps nothing */ }
};

/** Binds the tools above the charts. */
export const tools = () => {
  const [over, slider, log, outliers] = ["#over", "#smooth", "#log-axis", "#outliers"].map((id) => document.querySelector(id));
  state.smooth = Number(slider.defaultValue);
  try {
    Object.assign(state, JSON.parse(localStorage.getItem("daguerre-curves") ?? "{}"));
  } catch { /* nothing was kept */ }
  if (over) over.value = state.over; else state.over = STEP;
  slider.value = state.smooth;
  log.checked = state.log;
  outliers.checked = state.outliers;
  over?.addEventListener("change", () => { state.over = over.value; state.range = null; document.querySelector("#whole").hidden = true; remember(); redraw(true); });
  slider.addEventListener("input", () => { state.smooth = Number(slider.value); remember(); redraw(); });
  log.addEventListener("change", () => { state.log = log.checked; remember(); redraw(true); });
  outliers.addEventListener("change", () => { state.outliers = outliers.checked; remember(); redraw(true); });
  document.querySelector("#whole").addEventListener("click", resetRange);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw(true));
  let waiting = 0;
  new ResizeObserver(() => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => {
      for (const { plot, place } of figures.values()) {
        if (plot && place.clientWidth && plot.width !== place.clientWidth) plot.setSize({ width: place.clientWidth, height: 210 });
      }
    });
  }).observe(document.querySelector("#charts"));
};

/** For tests: the range of x that is shown. */
export const shownRange = () => [...figures.values()].map(({ plot }) => plot && [plot.scales.x.min, plot.scales.x.max]);
window.daguerreCharts = { shownRange };
