// Charts: uPlot with a legend of buttons, keys, and colours of the theme.
const AXIS_WIDTH = 72, RIGHT_PADDING = 24;

// One chart in a place of its own. `series`: {label, color, dash, values, low, high, points}; returns {plot, setX, move}.
function chart({ place, title, x, series, height, xLabel, yLabel, stacked, steps, log, top, onView, onTime }) {
  const hidden = new Set();
  const legend = element("ul", { class: "legend" });
  const target = element("div", {
    class: "plot", tabindex: 0, role: "group",
    "aria-label": `${title || yLabel}: chart. Left and right arrows move along it, the values are in the buttons above.`,
  });
  place.replaceChildren(title ? element("h3", {}, title) : "", legend, target);
  place.classList.add("chart");
  const outputs = series.map((each, index) => {
    const output = element("output", {});
    const button = element("button", { type: "button", "aria-pressed": "true", title: "hide or show", click: () => {
      hidden.has(index) ? hidden.delete(index) : hidden.add(index);
      button.setAttribute("aria-pressed", String(!hidden.has(index)));
      build();
    } }, element("span", { class: "swatch", style: `background:${colored(each.color)}` }), each.label, output);
    legend.append(element("li", {}, button));
    return output;
  });
  const path = steps ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.linear();
  const made = { plot: null, view: null, target };

  function build() {
    made.plot?.destroy();
    const soft = themed("--soft"), grid = themed("--grid");
    const drawn = [], data = [x], bands = [];
    const below = stacked ? new Float64Array(x.length) : null;
    series.forEach((each, index) => {
      if (hidden.has(index)) return;
      const color = colored(each.color);
      if (stacked) {
        each.values.forEach((value, at) => (below[at] += value));
        data.push(Float64Array.from(below));
        drawn.push({ label: each.label, stroke: color, fill: faint(each.color, 0.85), width: 0.5, paths: path, points: { show: false } });
        if (drawn.length > 1) bands.push({ series: [drawn.length, drawn.length - 1] });
      } else {
        data.push(each.values);
        drawn.push({
          label: each.label, stroke: color, width: 1.6, dash: each.dash, paths: path, spanGaps: true,
          points: { show: Boolean(each.points), size: 7, fill: color },
        });
        if (each.low) {
          for (const edge of [each.high, each.low]) {
            data.push(edge);
            drawn.push({ label: each.label, stroke: "transparent", width: 0, paths: path, points: { show: false } });
          }
          bands.push({ series: [drawn.length - 1, drawn.length], fill: faint(each.color, 0.25) });
        }
      }
    });
    const axis = { stroke: soft, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 } };
    const yRange = (plot, low, high) => (top ? [0, top] : log ? [low || 1e-3, high || 1] : [0, (high || 1) * 1.05]);
    made.plot = new uPlot({
      width: Math.max(place.clientWidth, 200), height, bands,
      legend: { show: false },
      scales: {
        x: { time: false, range: (plot, low, high) => (made.view ? made.view : steps ? [low, high] : [low - (high - low) * 0.03, high + (high - low) * 0.03]) },
        y: log ? { distr: 3 } : { range: yRange },
      },
      axes: [{ ...axis, label: xLabel, size: 34, labelSize: 18, values: (plot, ticks) => ticks.map((tick) => number(tick)) },
             { ...axis, label: yLabel, size: AXIS_WIDTH - 20, labelSize: 20, values: (plot, ticks) => ticks.map((tick) => (tick == null ? "" : number(tick, 3))) }],
      series: [{}, ...drawn],
      padding: [8, RIGHT_PADDING, 0, 0],
      cursor: {
        drag: { x: true, y: false, setScale: false }, y: false, points: { show: !steps },
        dataIdx: (plot, index, closest, value) => (steps && x[closest] > value ? Math.max(closest - 1, 0) : closest),
        sync: steps ? { key: "time", setSeries: false } : undefined,
        bind: { dblclick: () => () => { onView?.(null); return null; } },
      },
      hooks: {
        setCursor: [(plot) => told(plot.cursor.idx)],
        setSelect: [(plot) => {
          if (plot.select.width > 4) onView?.([plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")]);
          if (plot.select.width) plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
      },
    }, data, target);
    made.plot.root.setAttribute("role", "presentation");
    find("canvas", target).setAttribute("aria-hidden", "true");
  }
  function told(index) {
    series.forEach((each, at) => {
      const value = index == null ? null : each.values[index];
      const range = index != null && each.low && each.low[index] !== each.high[index] ? ` (${number(each.low[index], 3)} to ${number(each.high[index], 3)})` : "";
      outputs[at].textContent = value == null ? "" : number(value, 3) + (stacked ? " %" : "") + range;
    });
    onTime?.(index == null ? null : x[index]);
  }
  made.show = (view) => {
    made.view = view;
    const [from, to] = view || [x[0], x[x.length - 1]];
    made.plot.setScale("x", { min: from, max: to });
  };
  made.move = (by) => {
    const [low, high] = [made.plot.scales.x.min, made.plot.scales.x.max];
    const inside = [...x.keys()].filter((at) => x[at] >= low && x[at] <= high);
    const stride = Math.max(1, Math.round(inside.length / 200));
    const now = inside.indexOf(made.plot.cursor.idx);
    const index = inside[Math.min(Math.max((now < 0 ? 0 : now + by * stride), 0), inside.length - 1)];
    if (index != null) made.plot.setCursor({ left: made.plot.valToPos(x[index], "x"), top: 10 }, true, true);
  };
  target.addEventListener("keydown", (event) => {
    if (event.shiftKey || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    made.move(event.key === "ArrowLeft" ? -1 : 1);
  });
  made.build = build;
  build();
  whenResized(place, () => made.plot.setSize({ width: place.clientWidth, height }));
  return made;
}

// Results against a parameter: one line for each system, and for what else tells points apart.
function sweep(place) {
  const { axes, metrics, systems, rows } = CONTENT.sweep;
  const [metric, axis, panel, log, meaning] = ["metric", "axis", "panel", "log", "meaning"].map((name) => find(`#sweep-${name}`, place));
  options(metric, Object.keys(metrics).map((name) => [name, name.replaceAll("_", " ")]));
  options(axis, axes.map((name) => [name, name.replaceAll("_", " ")]));
  const panels = [...new Set(rows.map((row) => row.panel))];
  options(panel, panels.map((name) => [name, name]));
  find("#sweep-panel-label").hidden = panels.length < 2;
  if (metrics.normalized_latency_mean_s) metric.value = "normalized_latency_mean_s";

  function draw() {
    const of = axes.indexOf(axis.value), what = Object.keys(metrics).indexOf(metric.value);
    const lines = new Map();
    const here = rows.filter((row) => row.panel === panel.value && row.x[of] != null);
    for (const row of here) {
      const more = row.labels.filter((label, at) => here.some((other) => other.labels[at] !== label));
      const key = [systems[row.system].label, ...more].join(", ");
      if (!lines.has(key)) lines.set(key, { look: systems[row.system], at: new Map() });
      const value = row.y[what];
      if (typeof value === "number") lines.get(key).at.set(row.x[of], [...(lines.get(key).at.get(row.x[of]) || []), value]);
    }
    const x = [...new Set([...lines.values()].flatMap((line) => [...line.at.keys()]))].sort((a, b) => a - b);
    const mean = (values) => (values ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
    const unit = metrics[metric.value].unit;
    meaning.textContent = `${metric.value}: ${metrics[metric.value].meaning}${unit ? ` (${unit})` : ""}. Means where points have repeats.`;
    chart({
      place: find("#sweep-chart"), x, height: 300, log: log.checked, xLabel: axis.value.replaceAll("_", " "),
      yLabel: metric.value.replaceAll("_", " ") + (unit ? ` (${unit})` : ""),
      series: [...lines].map(([label, line]) => ({
        label, color: line.look.color, dash: line.look.dash, points: true, values: x.map((value) => mean(line.at.get(value))),
      })),
    });
  }
  for (const control of [metric, axis, panel, log]) control.addEventListener("change", draw);
  redraws.push(draw);
  draw();
}
