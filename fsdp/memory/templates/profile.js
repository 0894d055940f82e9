const data = JSON.parse(document.getElementById("data").textContent);
const plot = document.querySelector(".plot"), line = document.getElementById("cursor"), total_text = document.getElementById("total");
const human = n => { for (const u of ["B", "KiB", "MiB"]) { if (n < 1000) return n.toPrecision(3) * 1 + " " + u; n /= 1024; }
  return n.toPrecision(3) * 1 + " GiB"; };
const at = where => {
  const box = plot.getBoundingClientRect(), end = data.t_s.at(-1) || 1e-9;
  const t = Math.min(1, Math.max(0, (where - box.left) / box.width)) * end;
  let k = 0; while (k + 1 < data.t_s.length && data.t_s[k + 1] <= t) k++;
  const mark = data.marks.filter(m => m[0] <= t).at(-1) || [0, "", ""];
  const x = (data.t_s[k] / end * 1000).toFixed(1);
  line.setAttribute("x1", x); line.setAttribute("x2", x);
  const total = Object.values(data.kinds).reduce((sum, values) => sum + values[k], 0);
  total_text.textContent = `${(data.t_s[k] * 1e3).toFixed(1)} ms, ${mark[1]} of step ${mark[2]}: ${human(total)}`;
  for (const [kind, values] of Object.entries(data.kinds))
    document.getElementById("at-" + kind).textContent = human(values[k]);
};
plot.addEventListener("pointermove", event => at(event.clientX));
plot.addEventListener("pointerdown", event => at(event.clientX));
