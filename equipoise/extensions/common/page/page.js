"use strict";
// Comfort only: the page says everything without it. Values under the pointer, a light and dark switch.

const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);

function show(content, event) {
  tip.replaceChildren(...[content].flat());
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const right = event.clientX + 16 + box.width > innerWidth;
  const below = event.clientY + 18 + box.height <= innerHeight;
  tip.style.left = Math.max(4, right ? event.clientX - 12 - box.width : event.clientX + 14) + "px";
  tip.style.top = Math.max(4, below ? event.clientY + 16 : event.clientY - 10 - box.height) + "px";
}

function number(value) {
  if (!isFinite(value)) return String(value).toLowerCase();
  const size = Math.abs(value);
  if (size >= 1000 && size < 1e6) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (Math.abs(value) >= 1023.95 && unit < 5) { value /= 1024; unit += 1; }
  return value.toFixed(unit ? 1 : 0) + " " + units[unit];
}

function span(value) {
  if (value < 60) return Number(value.toPrecision(3)) + " s";
  const seconds = Math.round(value), minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  const parts = [[Math.floor(hours / 24), "d"], [hours % 24, "h"], [minutes % 60, "min"], [seconds % 60, "s"]];
  const first = parts.findIndex(([count]) => count);
  return parts.slice(first, first + 2).filter(([count]) => count).map((part) => part.join(" ")).join(" ");
}

const words = { number, bytes, seconds: span, step: (value) => "step " + Math.round(value).toLocaleString("en") };

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  return x - xs[low] < xs[high] - x ? low : high;
}

// Whether a line has values around an x. One that ended long before says nothing of it.
function reaches(xs, x) {
  const first = xs[0], last = xs[xs.length - 1], step = (last - first) / Math.max(1, xs.length - 1);
  return first - step <= x && x <= last + step;
}

// The key to a line, in its colour.
function keyOf(line) {
  const key = document.createElement("i");
  key.className = "key " + line.className.baseVal.replace(/\b(line|run-\d+|strong)\b/g, "");
  return key;
}

// Of many values the eight nearest to the pointer.
function nearby(values, plot, down) {
  if (values.length <= 8) return values;
  const [low, high, kind] = plot.dataset.up.split(" "), straight = kind === "log" ? Math.log : (y) => y;
  const bottom = Number(plot.dataset.bottom), range = straight(Number(high)) - straight(Number(low));
  const at = straight(Number(low)) + (range * (bottom - down)) / (bottom - 8);
  const gap = ([, value]) => { const away = Math.abs(straight(value) - at); return isFinite(away) ? away : Infinity; };
  const few = [...values].sort((one, other) => (gap(one) < gap(other) ? -1 : 1)).slice(0, 8);
  return few.sort((one, other) => other[1] - one[1]);
}

// The values of a line.
function valuesOf(line) {
  return [line.dataset.x.split(" ").map(Number), line.dataset.y.split(" ").map(Number)];
}

// Round values from one to another, at most about six: as the page chooses them for the whole range.
const clock = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200];
function ticksBetween(low, high, plot) {
  const unit = plot.dataset.x, least = (high - low) / 6, power = 10 ** Math.floor(Math.log10(least));
  if (plot.dataset.log && high >= 100 * low) {
    const first = Math.ceil(Math.log10(low)), last = Math.floor(Math.log10(high));
    return Array.from({ length: last - first + 1 }, (_, index) => 10 ** (first + index));
  }
  const isClock = unit === "seconds" && least >= 1 && least <= 43200;
  const sizes = isClock ? clock : [power, 2 * power, 5 * power, 10 * power];
  // Rounding must lose neither a size nor a tick at an end.
  const size = sizes.find((each) => each >= 0.999999 * least);
  const step = unit === "step" ? Math.max(1, size) : size;
  const first = Math.ceil(low / step - 1e-6), last = Math.floor(high / step + 1e-6);
  return Array.from({ length: last - first + 1 }, (_, index) => (first + index) * step);
}

// A chart: values under the pointer; a range is enlarged by dragging over it.
function prepareChart(plot) {
  const straight = plot.dataset.log ? Math.log : (x) => x, back = plot.dataset.log ? Math.exp : (x) => x;
  const whole = [straight(Number(plot.dataset.low)), straight(Number(plot.dataset.high))];
  let [low, high] = whole, lines = null, cross = null, drag = null;
  const shareAt = (event) => {
    const box = plot.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };

  // What stands at a share of the width.
  const placed = [];
  for (const piece of plot.querySelectorAll("text:not(.tick), circle, line:not(.rule)")) {
    for (const name of ["x", "cx", "x1", "x2"]) {
      if (piece.getAttribute(name)?.endsWith("%")) placed.push([piece, name, parseFloat(piece.getAttribute(name)) / 100]);
    }
  }
  const tools = document.createElement("div");
  tools.className = "tools";
  const tool = (text, act) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.addEventListener("click", act);
    tools.append(button);
    return button;
  };
  const reset = tool("Whole range", () => zoom(0, 1));
  prepareScale(plot, tool);
  tool("CSV", () => save(plot));
  const figure = plot.closest("figure");
  (figure.querySelector("figcaption") ?? figure).prepend(tools);

  function zoom(from, to) {
    low = whole[0] + (whole[1] - whole[0]) * from;
    high = whole[0] + (whole[1] - whole[0]) * to;
    for (const [piece, name, share] of placed) {
      const at = (share - from) / (to - from);
      piece.setAttribute(name, 100 * at + "%");
      piece.classList.toggle("outside", at < -0.001 || at > 1.001);
    }
    for (const inner of plot.querySelectorAll("svg")) {
      Object.assign(inner.viewBox.baseVal, { x: 1000 * from, width: 1000 * (to - from) });
    }
    plot.classList.toggle("zoomed", to - from < 1);
    for (const word of plot.querySelectorAll(".tick.fresh")) word.remove();
    for (const value of to - from < 1 ? ticksBetween(back(low), back(high), plot) : []) {
      const word = document.createElementNS("http://www.w3.org/2000/svg", "text");
      word.setAttribute("class", "tick fresh");
      word.setAttribute("x", (100 * (straight(value) - low)) / (high - low) + "%");
      word.setAttribute("y", Number(plot.dataset.bottom) + 18);
      word.setAttribute("text-anchor", "middle");
      word.textContent = words[plot.dataset.x](value).replace("step ", "");
      plot.append(word);
    }
    reset.hidden = !(to - from < 1);
  }
  reset.hidden = true;

  plot.addEventListener("pointerdown", (event) => {
    // A finger scrolls the page.
    if (event.pointerType === "touch" || event.button) return;
    event.preventDefault();
    plot.setPointerCapture(event.pointerId);
    const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    rect.setAttribute("class", "dragged");
    rect.setAttribute("height", plot.dataset.bottom);
    plot.append(rect);
    drag = { begun: shareAt(event), rect };
  });
  plot.addEventListener("pointerup", (event) => {
    if (!drag) return;
    const [from, to] = [drag.begun, shareAt(event)].sort((one, other) => one - other);
    drag.rect.remove();
    drag = null;
    if (to - from < 0.02) return;
    const at = (share) => (low + (high - low) * share - whole[0]) / (whole[1] - whole[0]);
    zoom(at(from), at(to));
  });
  plot.addEventListener("pointercancel", () => { drag?.rect.remove(); drag = null; });
  plot.addEventListener("dblclick", () => zoom(0, 1));
  plot.addEventListener("pointermove", (event) => {
    if (drag) {
      drag.rect.setAttribute("x", 100 * Math.min(drag.begun, shareAt(event)) + "%");
      drag.rect.setAttribute("width", 100 * Math.abs(drag.begun - shareAt(event)) + "%");
    }
    lines ??= [...plot.querySelectorAll(".line")].map((line) => {
      const [x, y] = valuesOf(line);
      return { line, label: line.dataset.label, x, y };
    });
    const seen = lines.filter(({ line }) => !line.classList.contains("off"));
    if (!seen.length) return;
    const at = back(low + (high - low) * shareAt(event));
    const places = seen.map((line) => line.x[nearest(line.x, at)]);
    const x = places.reduce((best, each) => (Math.abs(each - at) < Math.abs(best - at) ? each : best));
    if (!cross) {
      cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
      cross.setAttribute("class", "cross");
      cross.setAttribute("y1", 0);
      cross.setAttribute("y2", plot.dataset.bottom);
      plot.append(cross);
    }
    cross.removeAttribute("visibility");
    for (const end of ["x1", "x2"]) cross.setAttribute(end, (100 * (straight(x) - low)) / (high - low) + "%");
    const down = event.clientY - plot.getBoundingClientRect().top;
    const near = seen.filter((line) => reaches(line.x, x));
    const values = nearby(near.map((line) => [line, line.y[nearest(line.x, x)]]), plot, down);
    const told = values.flatMap(([line, value]) => ["\n", keyOf(line.line), line.label + "  " + words[plot.dataset.y](value)]);
    const mark = event.target.closest(".mark");
    show([words[plot.dataset.x](x), ...told, ...(mark ? ["\n" + mark.dataset.tip] : [])], event);
  });
  plot.addEventListener("pointerleave", () => { tip.hidden = true; cross?.setAttribute("visibility", "hidden"); });
}

// Whether the axis up is logarithmic, by the title of a chart; it outlives the content of a page that is refreshed.
const scaled = {};
const titleOf = (plot) => {
  const parts = [...(plot.closest("figure").querySelector("h3")?.childNodes ?? [])];
  return parts.filter((part) => part.nodeType === Node.TEXT_NODE).map((part) => part.data).join("") || "values";
};

// A switch for the axis up, where its values span a decade.
function prepareScale(plot, tool) {
  const values = [...plot.querySelectorAll(".line")].flatMap((line) => valuesOf(line)[1]).filter(isFinite);
  const [least, most] = values.reduce(([low, high], each) => [Math.min(low, each), Math.max(high, each)], [Infinity, -Infinity]);
  if (plot.dataset.y !== "number" || !(least > 0 && most >= 10 * least)) return;
  const title = titleOf(plot), drawn = plot.dataset.up, isLog = () => plot.dataset.up.endsWith("log");
  const button = tool("Log scale", () => {
    scaled[title] = !isLog();
    for (const other of document.querySelectorAll(".plot")) if (titleOf(other) === title) other.dispatchEvent(new Event("scale"));
  });
  plot.addEventListener("scale", () => {
    if (scaled[title] !== isLog()) {
      const air = 0.04 * (most - least), linear = `${least - air} ${most + air} linear`;
      const ends = drawn.endsWith("log") === scaled[title] ? drawn : scaled[title] ? `${least} ${most} log` : linear;
      plot.dataset.up = ends;
      drawUp(plot);
    }
    button.setAttribute("aria-pressed", isLog());
  });
  button.setAttribute("aria-pressed", isLog());
  if (title in scaled) plot.dispatchEvent(new Event("scale"));
}

// From a value to pixels from the top of a chart.
function downIn(plot) {
  const [low, high, kind] = plot.dataset.up.split(" "), straight = kind === "log" ? Math.log : (y) => y;
  const [least, most] = [straight(Number(low)), straight(Number(high))], bottom = Number(plot.dataset.bottom);
  return (value) => 8 + (1 - (straight(value) - least) / (most - least)) * (bottom - 8);
}

// From a value to thousandths of the width of a chart.
function acrossIn(plot) {
  const straight = plot.dataset.log ? Math.log : (x) => x;
  const [left, right] = [straight(Number(plot.dataset.low)), straight(Number(plot.dataset.high))];
  return (value) => (1000 * (straight(value) - left)) / (right - left);
}

function drawUp(plot) {
  const [low, high] = plot.dataset.up.split(" ").map(Number), down = downIn(plot), across = acrossIn(plot);
  // 1. The lines. A value that is no finite number leaves a gap.
  for (const line of plot.querySelectorAll(".line")) {
    const [xs, ys] = valuesOf(line), path = line.querySelector("path:not(.raw)"), dots = [...line.querySelectorAll("circle")];
    const heights = ys.map((y) => (isFinite(y) ? down(y) : NaN)), drawn = heights.filter(isFinite);
    path.dataset.whole = heights.map((y, index) => (isFinite(y) ? (isFinite(heights[index - 1]) ? "L" : "M") + across(xs[index]) + " " + y : "")).join("");
    path.setAttribute("d", path.dataset.whole);
    dots.forEach((dot, index) => dot.setAttribute("cy", drawn[drawn.length - dots.length + index]));
  }
  plot.closest("section").querySelector(".smoothing input")?.dispatchEvent(new Event("input"));

  // 2. The words beside the axis, and their lines.
  const ticks = plot.dataset.up.endsWith("log") ? powersBetween(low, high) : ticksBetween(low, high, { dataset: { x: "number" } });
  const make = (name, parts) => {
    const piece = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(parts)) piece.setAttribute(key, value);
    return piece;
  };
  for (const rule of plot.querySelectorAll(".rule")) rule.remove();
  plot.prepend(...ticks.map((tick) => make("line", { class: "rule", x1: 0, x2: "100%", y1: down(tick), y2: down(tick) })));
  const labels = plot.parentElement.querySelector(".labels"), told = ticks.map(number);
  const width = 10 + Math.round(6.3 * Math.max(...told.map((word) => word.length)));
  labels.setAttribute("width", width);
  labels.replaceChildren(...ticks.map((tick, index) => {
    const word = make("text", { x: width - 8, y: down(tick) + 4, "text-anchor": "end" });
    word.textContent = told[index];
    return word;
  }));
}

// Powers of ten, with 2 and 5 times each where they are few.
function powersBetween(low, high) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))], stride = Math.ceil((last - first) / 6);
  const sizes = last - first > 2 ? [1] : [1, 2, 5], values = [];
  for (let power = first; power <= last; power += stride) values.push(...sizes.map((size) => size * 10 ** power));
  return values.filter((value) => value >= low && value <= high);
}

// A table of all values of a chart. No name begins a formula of a spreadsheet.
function save(plot) {
  const quoted = (text) => '"' + text.replace(/^(?=[=+\-@\t\r])/, "'").replaceAll('"', '""') + '"';
  const rows = [["line", plot.dataset.x, "value"].join(",")];
  for (const line of plot.querySelectorAll(".line")) {
    const [xs, ys] = valuesOf(line);
    xs.forEach((x, index) => rows.push([quoted(line.dataset.label), x, ys[index]].join(",")));
  }
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([rows.join("\n") + "\n"], { type: "text/csv" }));
  link.download = titleOf(plot).replace(/[^\w.-]+/g, "_") + ".csv";
  link.click();
  URL.revokeObjectURL(link.href);
}

// The strength of smoothing by the heading of a section; it outlives the content of a page that is refreshed.
const smoothed = {};

// A mean in which a value counts for less the farther its step lies behind; the line as it was stays, faintly.
function smooth(line, strength) {
  const path = line.querySelector("path");
  path.dataset.whole ??= path.getAttribute("d");
  line.classList.toggle("smooth", strength > 0);
  line.querySelector(".raw")?.remove();
  if (!strength) { path.setAttribute("d", path.dataset.whole); return; }
  const plot = line.closest(".plot"), [xs, ys] = valuesOf(line), down = downIn(plot), across = acrossIn(plot);
  const step = (xs[xs.length - 1] - xs[0]) / (xs.length - 1);
  let mean = null, before = null, commands = "";
  xs.forEach((x, index) => {
    // A mean of places is one of logarithms on a logarithmic axis.
    const value = down(ys[index]);
    if (!isFinite(value)) return;
    mean = mean === null ? value : mean + (1 - strength ** ((x - before) / step)) * (value - mean);
    before = x;
    commands += (commands ? "L" : "M") + across(x) + " " + mean;
  });
  const raw = path.cloneNode();
  raw.setAttribute("class", "raw");
  raw.setAttribute("d", path.dataset.whole);
  path.before(raw);
  path.setAttribute("d", commands);
}

function prepareSmoothing(section) {
  const heading = section.querySelector("h2"), title = heading?.firstChild?.textContent;
  const lines = [...section.querySelectorAll(".plot[data-x='step'] .line")];
  const long = lines.filter((line) => valuesOf(line)[0].length > 10);
  if (!title || !long.length) return;
  const label = document.createElement("label"), slider = document.createElement("input");
  label.className = "smoothing";
  Object.assign(slider, { type: "range", min: 0, max: 0.98, step: 0.02, value: smoothed[title] ?? 0 });
  label.append("Smoothing ", slider);
  const apply = () => { for (const line of long) smooth(line, Number(slider.value)); };
  slider.addEventListener("input", () => { smoothed[title] = slider.value; apply(); });
  heading.after(label);
  if (smoothed[title] > 0) apply();
}

function prepare(root) {
  for (const plot of root.querySelectorAll(".plot")) prepareChart(plot);
  for (const section of root.querySelectorAll("section")) prepareSmoothing(section);

  // What a browser would show late and by itself is shown at once.
  for (const piece of root.querySelectorAll(".cell, .group, .mark")) {
    const title = piece.querySelector("title");
    if (!title) continue;
    piece.dataset.tip = title.textContent;
    piece.setAttribute("role", "img");
    piece.setAttribute("aria-label", title.textContent);
    title.remove();
    if (piece.classList.contains("mark")) continue;
    piece.addEventListener("pointermove", (event) => show(piece.dataset.tip, event));
    piece.addEventListener("pointerleave", () => { tip.hidden = true; });
  }
  for (const picture of root.querySelectorAll(".plot > title, .treemap > title, .gantt > title")) {
    picture.parentElement.setAttribute("aria-label", picture.textContent);
    picture.remove();
  }

  for (const code of root.querySelectorAll(".copied")) {
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", () => {
      navigator.clipboard.writeText(code.textContent).then(
        () => { button.textContent = "Copied"; },
        () => { getSelection().selectAllChildren(code); },
      );
    });
    code.after(button);
  }

  // What scrolls is reached by keys as well.
  for (const wide of root.querySelectorAll(".scroll, pre, .error .cause")) {
    if (wide.scrollWidth <= wide.clientWidth && wide.scrollHeight <= wide.clientHeight) continue;
    wide.tabIndex = 0;
    wide.setAttribute("role", "group");
    wide.setAttribute("aria-label", wide.closest("section").querySelector("h2").firstChild.textContent);
  }
}
prepare(document);

// A word that would be cut is shortened.
function fit() {
  for (const text of document.querySelectorAll(".treemap text")) {
    const room = text.parentElement.querySelector("rect").getBoundingClientRect().width - 9;
    const whole = (text.dataset.whole ??= text.textContent);
    if (room <= 0) continue;
    text.textContent = whole;
    for (let length = whole.length; length > 1 && text.getComputedTextLength() > room; ) {
      length = Math.min(length - 1, Math.floor((length * room) / text.getComputedTextLength()));
      text.textContent = length > 2 ? whole.slice(0, length) + "\u2026" : "";
    }
  }
}
addEventListener("resize", fit);
for (const peak of document.querySelectorAll(".peak")) peak.addEventListener("toggle", fit);
fit();
addEventListener("beforeprint", () => { for (const peak of document.querySelectorAll(".peak")) peak.open = true; });

const button = document.createElement("button");
button.className = "theme";
button.type = "button";
button.textContent = "\u25d0";
button.title = "Light or dark";
button.setAttribute("aria-label", "Light or dark");
button.addEventListener("click", () => {
  const root = document.documentElement;
  const now = root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
});
document.querySelector("header").append(button);
