"use strict";
// Comfort only: the page says everything without it. Values under the pointer, a light and dark switch.

const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);

function show(text, event) {
  tip.textContent = text;
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
  const seconds = Math.round(value), hours = Math.floor(seconds / 3600), minutes = Math.floor(seconds / 60) % 60;
  return (hours ? hours + " h " : "") + minutes + " min" + (hours ? "" : " " + (seconds % 60) + " s");
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

function prepare(root) {
  for (const plot of root.querySelectorAll(".plot")) {
    const straight = plot.dataset.log ? Math.log : (x) => x, back = plot.dataset.log ? Math.exp : (x) => x;
    const low = straight(Number(plot.dataset.low)), high = straight(Number(plot.dataset.high));
    let lines = null, cross = null;
    plot.addEventListener("pointermove", (event) => {
      lines ??= [...plot.querySelectorAll(".line")].map((line) => ({
        line, label: line.dataset.label, x: line.dataset.x.split(" ").map(Number), y: line.dataset.y.split(" ").map(Number),
      }));
      const seen = lines.filter(({ line }) => !line.classList.contains("off"));
      if (!seen.length) return;
      const box = plot.getBoundingClientRect();
      const at = back(low + (high - low) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)));
      const gaps = seen.map((line) => line.x[nearest(line.x, at)]);
      const x = gaps.reduce((best, each) => (Math.abs(each - at) < Math.abs(best - at) ? each : best));
      if (!cross) {
        cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
        cross.setAttribute("class", "cross");
        cross.setAttribute("y1", 0);
        cross.setAttribute("y2", plot.dataset.bottom);
        plot.append(cross);
      }
      cross.removeAttribute("visibility");
      for (const end of ["x1", "x2"]) cross.setAttribute(end, (100 * (straight(x) - low)) / (high - low) + "%");
      const values = nearby(seen.map((line) => [line.label, line.y[nearest(line.x, x)]]), plot, event.clientY - box.top);
      const told = values.map(([label, value]) => label + "  " + words[plot.dataset.y](value));
      const mark = event.target.closest(".mark");
      show([words[plot.dataset.x](x), ...told, ...(mark ? [mark.dataset.tip] : [])].join("\n"), event);
    });
    plot.addEventListener("pointerleave", () => { tip.hidden = true; cross?.setAttribute("visibility", "hidden"); });
  }

  // What a browser would show late and by itself is shown at once.
  for (const piece of root.querySelectorAll(".cell, .group, .mark")) {
    const title = piece.querySelector("title");
    if (!title) continue;
    piece.dataset.tip = title.textContent;
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

  // What scrolls is reached by keys as well.
  for (const wide of root.querySelectorAll(".scroll, .configuration")) {
    if (wide.scrollWidth <= wide.clientWidth) continue;
    wide.tabIndex = 0;
    wide.setAttribute("role", "region");
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
  const root = document.documentElement, dark = getComputedStyle(root).colorScheme === "dark";
  root.dataset.theme = dark ? "light" : "dark";
});
document.querySelector("header").append(button);
