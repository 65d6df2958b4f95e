// The memory map, played: the pools of several runs on one clock. Purposes are worked out as in kvbench/memory_map/map.py.
const FREE = 0, TOKENS = 1, RESERVED = 2, OVERRESERVED = 3, PADDING = 4, SHARED = 5, COPIED = 6, LOST = 7;
const NOBODY = -2;
const BEGAN_COPIED = 2, ENDED_PREEMPTED = 2, ENDED_SWAPPED = 3;
const OVERVIEW_HEIGHT = 150;
const TINTS = { [TOKENS]: 0, [SHARED]: 0, [RESERVED]: 0.5, [OVERRESERVED]: 0.75, [PADDING]: 0.88 };
const FLASH = { [COPIED]: [240, 228, 66], [LOST]: [213, 0, 90] };

// What a span's slot is for, in a step.
function purposeOf(spans, index, offset, step) {
  const position = spans.position[index] + offset;
  const final = spans.final_len[index], requested = spans.requested[index];
  if (spans.is_held[index]) return position < Math.max(final, requested) ? OVERRESERVED : PADDING;
  if (position < Math.min(step - spans.origin_step[index], final)) return TOKENS;
  if (position < final) return RESERVED;
  return position < requested ? OVERRESERVED : PADDING;
}

// The step that is computed at a time, -1 where none is.
function stepAt(steps, time) {
  let low = 0, high = steps.end_s.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps.end_s[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low < steps.end_s.length && steps.start_s[low] <= time ? low : -1;
}

function painter(by) {
  const purposes = [...PALETTE.purposes, PALETTE.shared].map((each) => rgb(each.color));
  const hues = PALETTE.owners.concat(PALETTE.shared.color, "#CC79A7", "#56B4E9", "#8c6d00", "#6a51a3").map(rgb);
  return (purpose, owner) => {
    if (FLASH[purpose]) return FLASH[purpose];
    if (by === "purpose" || purpose === FREE) return purposes[purpose];
    const hue = owner < 0 ? [110, 110, 110] : hues[owner % hues.length];
    return hue.map((part) => Math.round(part + (255 - part) * TINTS[purpose]));
  };
}

// One run's pool: its map over time, and its slots at a moment.
function pool(run, spans, steps, end, seek, choose) {
  const { num_slots: slots, block_size: block } = run;
  const unit = block > 1 && block <= 64 ? block : 16;
  const perCell = Math.ceil(slots / 40000);
  const cells = Math.ceil(slots / perCell);
  const columns = Math.max(unit, Math.round(Math.sqrt(2 * cells) / unit) * unit);
  const rows = Math.ceil(cells / columns);
  const over = element("canvas", { role: "img", "aria-label": `${run.label}: address over time` });
  const now = element("div", { class: "now" });
  const grid = element("canvas", { tabindex: 0, role: "img", "aria-label": `${run.label}: the pool now. Arrow keys move from slot to slot, Enter chooses its request.` });
  const reading = element("p", { class: "reading", "aria-live": "polite" });
  const counts = element("p", { class: "reading" });
  const box = element("div", { class: "map" }, element("h4", {}, run.label), element("div", { class: "over", click: (event) => seek((event.offsetX / over.clientWidth) * end) }, over, now), counts, grid, reading);
  const purpose = new Uint8Array(slots), isToken = new Uint8Array(slots), owner = new Int32Array(slots), holder = new Int32Array(slots), holders = new Uint16Array(slots);
  const present = new Set([FREE]); // what the legend lists
  if (spans.began.includes(BEGAN_COPIED)) present.add(COPIED);
  if (spans.ended.includes(ENDED_PREEMPTED) || spans.ended.includes(ENDED_SWAPPED)) present.add(LOST);
  let cursor = -1, moment = 0, paint = painter("purpose"), chosenRequest = null;

  function fill(time) {
    purpose.fill(FREE); isToken.fill(0); owner.fill(NOBODY); holder.fill(-1); holders.fill(0);
    const step = stepAt(steps, time);
    const recent = stepAt(steps, Math.max(time - end / 80, 0));
    for (let index = 0; index < spans.address.length && spans.from_step[index] <= step; index++) {
      const address = spans.address[index], last = address + spans.length[index];
      if (spans.to_step[index] <= step) {
        const lost = spans.ended[index] === ENDED_PREEMPTED || spans.ended[index] === ENDED_SWAPPED;
        if (lost && recent >= 0 && spans.to_step[index] > recent) for (let at = address; at < last; at++) if (!holders[at]) purpose[at] = LOST;
        continue;
      }
      const flashes = spans.began[index] === BEGAN_COPIED && recent >= 0 && spans.from_step[index] > recent;
      for (let at = address; at < last; at++) {
        const what = purposeOf(spans, index, at - address, step);
        if (what === TOKENS) isToken[at] = 1;
        purpose[at] = flashes ? COPIED : holders[at]++ && what === TOKENS ? SHARED : what;
        if (flashes) holders[at]++;
        if (owner[at] === NOBODY || spans.request[index] < owner[at]) { owner[at] = spans.request[index]; holder[at] = index; }
      }
    }
    return step;
  }
  function frame(time) {
    moment = time;
    const step = fill(time);
    const image = new ImageData(columns, rows), paper = [...rgb(themed("--paper")), 255];
    for (let cell = 0; cell < columns * rows; cell++) {
      const at = cell * perCell;
      if (at >= slots) { image.data.set(paper, cell * 4); continue; }
      let color = paint(purpose[at], owner[at]);
      if (chosenRequest !== null && owner[at] !== chosenRequest) color = color.map((part, channel) => 0.2 * part + 0.8 * paper[channel]);
      image.data.set(color, cell * 4);
      image.data[cell * 4 + 3] = 255;
    }
    const width = Math.max(grid.clientWidth, 100), side = width / columns;
    const pen = sized(grid, width, side * rows);
    const flat = new OffscreenCanvas(columns, rows);
    flat.getContext("2d").putImageData(image, 0, 0);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(flat, 0, 0, width, side * rows);
    pen.strokeStyle = themed("--paper");
    pen.lineWidth = 0.6;
    if (side >= 2.4 && block > 1 && block <= 64) {
      pen.beginPath();
      for (let column = 0; column <= columns; column += block) { pen.moveTo(column * side, 0); pen.lineTo(column * side, side * rows); }
      for (let row = 0; row <= rows; row++) { pen.moveTo(0, row * side); pen.lineTo(width, row * side); }
      pen.stroke();
    }
    if (cursor >= 0) {
      pen.strokeStyle = themed("--ink");
      pen.lineWidth = 2;
      pen.strokeRect((cursor % columns) * side - 1, Math.floor(cursor / columns) * side - 1, side + 2, side + 2);
    }
    now.style.left = `${(100 * time) / end}%`;
    let tokens = 0, free = 0;
    for (let at = 0; at < slots; at++) { tokens += isToken[at]; free += !holders[at]; }
    const row = step < 0 ? null : step;
    counts.textContent = row === null ? "nothing runs" : `${steps.num_running[row]} run, ${steps.num_waiting[row]} wait; tokens ${number((100 * tokens) / slots, 3)} %, free ${number((100 * free) / slots, 3)} %`;
    read();
  }
  function read() {
    if (cursor < 0) return;
    const at = Math.min(cursor * perCell, slots - 1), index = holder[at];
    const words = [...PALETTE.purposes, PALETTE.shared, { label: "just copied to" }, { label: "just lost to preemption" }];
    if (index < 0) { reading.textContent = `Slot ${at}: ${words[purpose[at]].label}`; return; }
    const position = spans.position[index] + at - spans.address[index];
    const whose = owner[at] < 0 ? "shared prefix" : `request ${owner[at]}, stream ${spans.stream[index]}`;
    reading.textContent = `Slot ${at}: ${whose}, token ${position}` + (block > 1 && block <= 64 ? `, logical block ${Math.floor(position / block)} in physical block ${Math.floor(at / block)}` : "") + `, held by ${holders[at]}: ${words[purpose[at]].label}`;
  }
  function overview() {
    const width = Math.min(Math.max(Math.round(over.clientWidth), 100), 900), height = OVERVIEW_HEIGHT;
    const image = new ImageData(width, height), steps_ = Int32Array.from({ length: width }, (_, column) => stepAt(steps, ((column + 0.5) * end) / width));
    const seen = new Uint8Array(width * height);
    const free = rgb(PALETTE.classes.free), paper = rgb(themed("--paper"));
    for (let column = 0; column < width; column++) {
      const done = ((column + 0.5) * end) / width > steps.end_s.at(-1);
      for (let row = 0; row < height; row++) image.data.set([...(done ? paper : free), 255], 4 * (row * width + column));
    }
    const edges = Array.from({ length: height }, (_, row) => Math.floor(((height - row - 0.5) * slots) / height));
    let from = 0;
    for (let index = 0; index < spans.address.length; index++) {
      while (from < width && steps_[from] >= 0 && steps_[from] < spans.from_step[index]) from++;
      const address = spans.address[index], last = address + spans.length[index];
      const lowest = Math.min(Math.floor(height - (address * height) / slots) + 1, height), highest = Math.max(Math.floor(height - (last * height) / slots) - 1, 0);
      for (let column = from; column < width; column++) {
        const step = steps_[column];
        if (step < 0 || step < spans.from_step[index]) continue;
        if (step >= spans.to_step[index]) break;
        for (let row = highest; row < lowest; row++) {
          const at = edges[row];
          if (at < address || at >= last) continue;
          const place = row * width + column;
          const what = purposeOf(spans, index, at - address, step);
          const shown = seen[place]++ && what === TOKENS ? SHARED : what;
          present.add(shown);
          image.data.set(paint(shown, spans.request[index]), 4 * place);
        }
      }
    }
    over.width = width; over.height = height;
    over.style.height = `${height}px`;
    over.getContext("2d").putImageData(image, 0, 0);
  }
  const cellAt = (event) => Math.floor((event.offsetY / grid.clientHeight) * rows) * columns + Math.floor((event.offsetX / grid.clientWidth) * columns);
  const point = (cell) => { cursor = Math.min(Math.max(cell, 0), cells - 1); frame(moment); };
  const pick = () => choose(owner[Math.min(cursor * perCell, slots - 1)]);
  grid.addEventListener("pointermove", (event) => point(cellAt(event)));
  grid.addEventListener("click", (event) => { point(cellAt(event)); pick(); });
  grid.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (by) point(cursor + by);
    else if (event.key === "Enter") pick();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  return { box, frame, overview, present, use: (by) => { paint = painter(by); }, mark: (request) => { chosenRequest = request; } };
}

async function player(place) {
  const group = carried(place.dataset.map), end = group.end_s;
  let time = 0, playing = false, before = 0, marked = null;
  const pools = [];
  for (const run of group.runs) pools.push(pool(run, await unpacked(run.spans), run.loaded = await unpacked(run.steps), end, (to) => seek(to), choose));
  const play = element("button", { type: "button", "data-play": true, "aria-pressed": "false", title: "play or pause (space)", click: toggle }, "▶ Play");
  const scrub = element("input", { type: "range", min: 0, max: 1000, step: 1, value: 0, "aria-label": "Time", input: () => seek((scrub.value / 1000) * end) });
  const clock = element("output", {});
  const speed = element("select", {}, ...[[10, "in 10 s"], [20, "in 20 s"], [60, "in 60 s"], [end, "as it was"]].map(([value, label]) => element("option", { value }, label)));
  speed.value = "20";
  const by = element("select", { change: () => all() }, element("option", { value: "purpose" }, "what a slot is for"), element("option", { value: "owner" }, "whose it is"));
  const nudge = (sign) => () => {
    const ends = group.runs.map((run) => run.loaded.end_s);
    const marks = ends.flatMap((each) => [...each].filter((at) => (sign > 0 ? at > time + 1e-6 : at < time - 1e-6)));
    seek(sign > 0 ? Math.min(end, ...[marks.reduce((a, b) => Math.min(a, b), Infinity)]) : marks.reduce((a, b) => Math.max(a, b), 0));
  };
  const names = [...PALETTE.purposes.slice(1), PALETTE.shared, PALETTE.purposes[0], { label: "just copied to", color: "#f0e442" }, { label: "just lost to preemption", color: "#d5005a" }];
  const codes = [TOKENS, RESERVED, OVERRESERVED, PADDING, SHARED, FREE, COPIED, LOST];
  const legend = element("ul", { class: "legend", style: "gap:.2rem 1rem" });
  function drawLegend() {
    const owners = by.value === "owner", paint = painter(by.value);
    const there = codes.map((code, at) => ({ code, ...names[at] })).filter(({ code }) => pools.some((each) => each.present.has(code)) && !(owners && code === SHARED));
    legend.replaceChildren(...there.map(({ code, label, color }) => element("li", {},
      element("span", { class: "swatch", style: `display:inline-block;background:${FLASH[code] ? color : `rgb(${paint(code, 0)})`}` }),
      ` ${owners && code === TOKENS ? "tokens, a colour for each request" : label}`)));
  }
  place.setAttribute("role", "group");
  place.setAttribute("aria-label", `Memory map ${group.name}: space plays and pauses, left and right arrows step, Home and End jump`);
  place.append(
    element("h3", {}, group.name),
    element("div", { class: "controls" }, play,
      element("button", { type: "button", "aria-label": "Previous iteration", title: "previous iteration (←)", click: nudge(-1) }, "◀|"),
      element("button", { type: "button", "aria-label": "Next iteration", title: "next iteration (→)", click: nudge(1) }, "|▶"),
      scrub, clock, element("label", {}, "Play all ", speed), element("label", {}, "Colour: ", by)),
    legend, element("div", { class: "maps" }, ...pools.map((each) => each.box)), element("p", { class: "note" }, group.runs[0].source));

  function seek(to) {
    time = Math.min(Math.max(to, 0), end);
    scrub.value = Math.round((1000 * time) / end);
    scrub.setAttribute("aria-valuetext", `${number(time)} s of ${number(end)} s`);
    clock.textContent = `${time.toFixed(2)} of ${number(end)} s`;
    pools.forEach((each) => each.frame(time));
    place.dataset.time = time;
  }
  function choose(request) {
    marked = request === marked || request === NOBODY ? null : request;
    pools.forEach((each) => each.mark(marked));
    seek(time);
  }
  function toggle() {
    playing = !playing;
    if (playing && time >= end) time = 0;
    play.textContent = playing ? "❚❚ Pause" : "▶ Play";
    play.setAttribute("aria-pressed", String(playing));
    before = performance.now();
    if (playing) requestAnimationFrame(tick);
    else history.replaceState(null, "", `#${place.id}@${time.toFixed(2)}`);
  }
  function tick(at) {
    if (!playing) return;
    seek(time + (Math.max(at - before, 0) / 1000) * (end / Number(speed.value)));
    before = at;
    if (time >= end) toggle();
    else requestAnimationFrame(tick);
  }
  place.addEventListener("keydown", (event) => {
    if (["SELECT", "BUTTON"].includes(event.target.tagName) && event.key === " ") return;
    if (event.target.tagName === "SELECT") return;
    const action = { " ": toggle, ArrowLeft: nudge(-1), ArrowRight: nudge(1), Home: () => seek(0), End: () => seek(end) }[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  const all = () => { pools.forEach((each) => { each.use(by.value); each.overview(); }); drawLegend(); seek(time); };
  redraws.push(all);
  whenResized(place, all);
  all();
  seek(end / 3);
  place.dataset.ready = "";
  return seek;
}
