// The readout under the pointer, a finger or the arrow keys. The page is whole without it.
"use strict";
for (const figure of document.querySelectorAll("figure.chart")) {
  if (!figure.querySelector(".plot")) continue;
  const data = JSON.parse(figure.querySelector("script").textContent);
  const area = figure.querySelector(".area"), cursor = figure.querySelector(".cursor"), readout = figure.querySelector(".readout");
  const usual = readout.innerHTML, longest = data.lines.reduce((a, b) => (b.x.length > a.x.length ? b : a));
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };
  const number = (v) => (Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : String(Number(v.toPrecision(4))));
  let at = -1;
  const show = (index) => {
    at = Math.max(0, Math.min(longest.x.length - 1, index));
    const step = longest.x[at];
    cursor.style.opacity = 0.45;
    cursor.style.left = ((step - data.first) / (data.last - data.first || 1)) * 100 + "%";
    readout.textContent = "step " + Math.round(step).toLocaleString("en");
    for (const line of data.lines) {
      const i = nearest(line.x, step), bold = document.createElement("b");
      bold.textContent = number(line.y[i]);
      readout.append(data.lines.length > 1 ? " · " + line.name + " " : " · ", bold);
      if (line.low && line.high[i] > line.low[i]) readout.append(" (" + number(line.low[i]) + " to " + number(line.high[i]) + ")");
    }
  };
  const hide = () => {
    at = -1;
    cursor.style.opacity = 0;
    readout.innerHTML = usual;
  };
  const point = (event) => {
    const box = area.getBoundingClientRect();
    show(nearest(longest.x, data.first + ((event.clientX - box.left) / box.width) * (data.last - data.first)));
  };
  area.addEventListener("pointermove", point);
  area.addEventListener("pointerdown", point);
  area.addEventListener("pointerleave", hide);
  figure.addEventListener("blur", hide);
  figure.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    show(at < 0 ? (by > 0 ? 0 : longest.x.length - 1) : at + by);
  });
}
