// The amounts at the moment under the pointer. The page is whole without it.
"use strict";
for (const figure of document.querySelectorAll("figure.account")) {
  const data = JSON.parse(figure.querySelector("script").textContent), kinds = Object.values(data.kinds);
  const area = figure.querySelector(".moments"), line = figure.querySelector(".at");
  const moment = figure.querySelector(".moment"), amounts = figure.querySelectorAll(".key b");
  const usual = [moment, ...amounts].map((e) => e.textContent);
  const human = (n) => {
    for (const unit of ["B", "KiB", "MiB"]) {
      if (n < 1000) return Number(n.toPrecision(3)) + " " + unit;
      n /= 1024;
    }
    return Number(n.toPrecision(3)) + " GiB";
  };
  const show = (event) => {
    const box = area.getBoundingClientRect(), end = data.t_s.at(-1) || 1e-9;
    const t = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * end;
    let k = 0;
    while (k + 1 < data.t_s.length && data.t_s[k + 1] <= t) k++;
    const mark = data.marks.filter((m) => m[0] <= t).at(-1) || [0, "", ""];
    for (const name of ["x1", "x2"]) line.setAttribute(name, (data.t_s[k] / end) * 1000);
    const total = kinds.reduce((sum, values) => sum + values[k], 0);
    moment.textContent = (data.t_s[k] * 1e3).toFixed(1) + " ms, " + mark[1] + " of step " + mark[2] + ": " + human(total);
    kinds.forEach((values, nth) => (amounts[nth].textContent = human(values[k])));
  };
  area.addEventListener("pointermove", show);
  area.addEventListener("pointerdown", show);
  area.addEventListener("pointerleave", () => {
    for (const name of ["x1", "x2"]) line.setAttribute(name, -9);
    [moment, ...amounts].forEach((e, nth) => (e.textContent = usual[nth]));
  });
}
