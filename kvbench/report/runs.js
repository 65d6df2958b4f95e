// One run over time: batch, queue and ledger on one axis, and its requests below.
const REQUESTS_HEIGHT = 300;

function runs(section) {
  const select = find("#run"), place = find("#run-charts"), said = find("#view");
  options(select, CONTENT.runs.map((run) => [run.point, run.label]));
  let charts = [], requests = null, end = 0, view = null, chosen = 0;

  function show(wanted) {
    const width = wanted ? Math.max(wanted[1] - wanted[0], end * 1e-5) : end;
    const from = wanted ? Math.min(Math.max(wanted[0], 0), Math.max(end - width, 0)) : 0;
    view = width >= end * 0.9999 ? null : [from, from + width];
    charts.forEach((each) => each.show(view || [0, end]));
    requests?.draw(view || [0, end]);
    said.textContent = view ? `${number(view[0])} to ${number(view[1])} s of ${number(end)} s` : `all ${number(end)} s`;
    const part = view ? `@${number(view[0], 6)}-${number(view[1], 6)}`.replaceAll(",", "") : "";
    if (chosen) history.replaceState(null, "", `#point-${select.value}${part}`);
  }
  function change(how) {
    const [from, to] = view || [0, end], width = to - from, middle = (from + to) / 2;
    if (how === "in") show([middle - width / 4, middle + width / 4]);
    if (how === "out") show([middle - width, middle + width]);
    if (how === "left") show([from - width / 4, to - width / 4]);
    if (how === "right") show([from + width / 4, to + width / 4]);
    if (how === "all") show(null);
  }
  const KEYS = { "+": "in", "=": "in", "-": "out", "0": "all" };
  section.addEventListener("keydown", (event) => {
    if (["INPUT", "SELECT"].includes(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
    const how = event.shiftKey && event.key.startsWith("Arrow") ? { ArrowLeft: "left", ArrowRight: "right" }[event.key] : KEYS[event.key];
    if (!how) return;
    event.preventDefault();
    chosen = 1;
    change(how);
  });
  for (const button of section.querySelectorAll("[data-view]")) {
    button.addEventListener("click", () => { chosen = 1; change(button.dataset.view); });
  }

  async function load(wanted) {
    const run = CONTENT.runs.find((each) => each.point === select.value);
    const { steps, requests: asked } = carried(`${run.key}-data`);
    const columns = steps && (await unpacked(steps.packed));
    const people = asked && (await unpacked(asked.packed));
    if (run.point !== select.value) return; // another was chosen meanwhile
    end = Math.max(columns ? columns.edges_s.at(-1) : 0, people ? people.finish_s.reduce((a, b) => Math.max(a, b), 0) : 0);
    charts = columns ? stepCharts(place, steps, columns, (wanted) => { chosen = 1; show(wanted); }) : [];
    if (!columns) place.replaceChildren();
    find("#run-resolution").textContent = `${run.label}. ` + (!steps
      ? "This point was run with records=summary: it kept no iterations."
      : steps.is_exact
        ? `Every one of its ${number(steps.num_iterations)} iterations is shown as it was.`
        : `${number(steps.num_iterations)} iterations in ${number(steps.num_buckets)} buckets of ${number(columns.edges_s[1])} s: lines are means over time, bands and ranges run from the smallest to the largest value, so no extreme is lost.`);
    requests = people ? requestTimeline(find("#requests"), asked, people) : null;
    for (const row of document.querySelectorAll("tr.is-chosen")) row.classList.remove("is-chosen");
    if (chosen) document.getElementById(`point-${run.point}`)?.classList.add("is-chosen");
    show(wanted);
    section.dataset.ready = run.point;
  }
  select.addEventListener("change", () => { chosen = 1; load(null); });
  redraws.push(() => load(view));
  whenResized(place, () => requests?.draw(view || [0, end]));
  load(null);
  return (point, wanted) => { select.value = point; chosen = 1; return load(wanted); };
}

function stepCharts(place, steps, columns, onView) {
  const x = columns.edges_s;
  const full = (name, scale = 1) => Float64Array.from(x, (_, at) => columns[name][Math.min(at, x.length - 2)] * scale);
  const series = (name, label, color, scale = 1) => ({
    label, color, values: full(name, scale),
    ...(steps.is_exact ? {} : { low: full(`${name}_low`, scale), high: full(`${name}_high`, scale) }),
  });
  const places = [0, 1, 2].map(() => element("div"));
  const moment = element("p", { class: "reading", "aria-live": "off" });
  place.replaceChildren(moment, ...places);
  const onTime = (time) => { moment.textContent = time == null ? "" : `at ${number(time, 6)} s`; };
  const common = { x, steps: true, onView, onTime };
  const percent = 100 / steps.num_slots;
  return [
    chart({ ...common, place: places[0], title: "Batch", height: 190, yLabel: "requests", series: [series("num_running", "running", "#0072B2")] }),
    chart({ ...common, place: places[1], title: "Queue", height: 170, yLabel: "requests", series: [series("num_waiting", "waiting", "#D55E00")] }),
    chart({
      ...common, place: places[2], title: `Pool of ${number(steps.num_slots)} slots, by what they are for`, height: 270, stacked: true, top: 100,
      yLabel: "% of the pool", xLabel: "time (s)",
      series: steps.classes.map((name) => series(name, name.replaceAll("_", " "), PALETTE.classes[name], percent)),
    }),
  ];
}

// A row for each request that is there in the part shown, in order of arrival: waiting, then computed.
function requestTimeline(place, asked, columns) {
  const { arrival_s: arrival, first_token_s: first, finish_s: finish, num_preemptions: lost } = columns;
  const canvas = element("canvas", {
    class: "lines", tabindex: 0, role: "img",
    "aria-label": "Requests over time, one row each in order of arrival. Up and down arrows read them one by one.",
  });
  const reading = element("p", { class: "reading", "aria-live": "polite" });
  const swatch = (color, label) => element("li", {}, element("span", { class: "swatch", style: `display:inline-block;background:${color}` }), ` ${label}`);
  const colors = { wait: PALETTE.wait, run: "#0072B2", lost: "#E69F00", never: "#CC79A7" };
  place.replaceChildren(element("ul", { class: "legend", style: "gap:.2rem 1rem" },
    swatch(colors.wait, "waits for its first token"), swatch(colors.run, "from its first token to its last"),
    swatch(colors.lost, "the same, preempted on the way"), swatch(colors.never, "rejected")), canvas, reading);
  find("#requests-meaning").textContent = asked.every > 1
    ? `${number(asked.num_kept)} of ${number(asked.num_requests)} requests: every ${asked.every}th in order of arrival.`
    : `All ${number(asked.num_requests)} requests.`;
  let shown = [], span = [0, 1], chosen = -1;
  const sort = Uint32Array.from(arrival.keys());

  function draw(view) {
    span = view;
    const width = Math.max(place.clientWidth, 200), height = REQUESTS_HEIGHT;
    const pen = sized(canvas, width, height);
    const left = AXIS_WIDTH, right = width - RIGHT_PADDING;
    const at = (time) => left + ((Math.min(Math.max(time, view[0]), view[1]) - view[0]) / (view[1] - view[0])) * (right - left);
    shown = [...sort].filter((index) => arrival[index] <= view[1] && Math.max(finish[index], arrival[index]) >= view[0]);
    pen.clearRect(0, 0, width, height);
    const row = height / Math.max(shown.length, 1), thick = Math.max(Math.min(row * 0.85, 14), 0.6);
    shown.forEach((index, line) => {
      const y = line * row;
      const bar = (from, to, color) => { pen.fillStyle = color; pen.fillRect(at(from), y, Math.max(at(to) - at(from), 0.7), thick); };
      if (finish[index] < 0) return bar(arrival[index], arrival[index], colors.never);
      bar(arrival[index], first[index], colors.wait);
      bar(first[index], finish[index], lost[index] ? colors.lost : colors.run);
    });
    pen.fillStyle = themed("--soft");
    pen.font = "12px system-ui, sans-serif";
    pen.fillText(number(shown.length), 4, 12);
    pen.fillText("requests", 4, 26);
    if (chosen >= 0 && chosen < shown.length) {
      pen.strokeStyle = themed("--ink");
      pen.strokeRect(left, chosen * row - 1, right - left, Math.max(row, 2));
    }
  }
  function read(line) {
    chosen = Math.min(Math.max(line, 0), shown.length - 1);
    const index = shown[chosen];
    reading.textContent = index === undefined ? "" : described(columns, index);
    draw(span);
  }
  canvas.addEventListener("pointermove", (event) => read(Math.floor((event.offsetY / REQUESTS_HEIGHT) * shown.length)));
  canvas.addEventListener("keydown", (event) => {
    if (!["ArrowUp", "ArrowDown"].includes(event.key)) return;
    event.preventDefault();
    read(chosen + (event.key === "ArrowUp" ? -1 : 1));
  });
  slowest(find("#slowest > div"), columns);
  return { draw };
}

function described(columns, index) {
  const { id, arrival_s: arrival, first_token_s: first, finish_s: finish, prompt_len: prompt, output_len: output, num_preemptions: lost } = columns;
  const start = `Request ${id[index]}: prompt ${prompt[index]}, output ${output[index]} tokens, arrives at ${number(arrival[index], 6)} s`;
  if (finish[index] < 0) return `${start}, never served`;
  return `${start}, first token after ${number(first[index] - arrival[index])} s, done after ${number(finish[index] - arrival[index])} s, preempted ${lost[index]} times`;
}

function slowest(place, columns) {
  const { id, arrival_s: arrival, first_token_s: first, finish_s: finish, prompt_len: prompt, output_len: output, num_preemptions: lost } = columns;
  const latency = (index) => (finish[index] - arrival[index]) / output[index];
  const served = [...id.keys()].filter((index) => finish[index] >= 0);
  const rows = served.sort((a, b) => latency(b) - latency(a)).slice(0, 20).map((index) => [
    id[index], arrival[index], prompt[index], output[index], first[index] - arrival[index], finish[index] - arrival[index], latency(index), lost[index],
  ]);
  const heads = ["request", "arrives (s)", "prompt (tokens)", "output (tokens)", "first token after (s)", "done after (s)", "latency (s/token)", "preempted"];
  const table = element("table", {}, element("caption", {}, "The 20 of highest latency per output token, of those that this page has"),
    element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col", class: "number" }, head)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((value) => element("td", { class: "number", "data-value": value }, number(value)))))));
  place.replaceChildren(element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Slowest requests" }, table));
  sortable(table);
}
