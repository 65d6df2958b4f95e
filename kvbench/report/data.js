// What the other scripts share: data that the page carries, elements, numbers as text, colours of the current theme.
"use strict";
document.documentElement.classList.add("js");

const find = (selector, root = document) => root.querySelector(selector);
const carried = (id) => JSON.parse(document.getElementById(id).textContent);
const CONTENT = carried("content-data");
const PALETTE = CONTENT.palette;

// Columns that kvbench/report/packing.py packed: name -> typed array.
async function unpacked(packed) {
  if (!window.DecompressionStream) throw new Error("this browser cannot unpack the page's data; one from 2023 on can");
  const bytes = Uint8Array.from(atob(packed.data), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const columns = {};
  let at = 0;
  for (const [name, type, length] of packed.columns) {
    const Type = window[type + "Array"];
    const end = at + length * Type.BYTES_PER_ELEMENT;
    columns[name] = new Type(buffer.slice(at, end));
    at = end;
  }
  return columns;
}

// An element with attributes (listeners as functions) and children.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

function options(select, entries) {
  select.replaceChildren(...entries.map(([value, label]) => element("option", { value }, label)));
}

function number(value, digits = 4) {
  if (value == null || Number.isNaN(value)) return "-";
  const size = Math.abs(value);
  if (size >= 1e5 || (Number.isInteger(value) && size >= 1e4)) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
}

const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// A colour of the figures on this theme: black is ink, and the greys stand out from the paper.
function colored(color) {
  if (color === "#000000") return themed("--ink");
  const grey = ["free", "padding"].find((name) => color === PALETTE.classes[name]);
  return grey ? themed(`--${grey}`) : color;
}
const rgb = (color) => [1, 3, 5].map((at) => parseInt(colored(color).slice(at, at + 2), 16));
const faint = (color, share) => `rgba(${rgb(color).join(",")},${share})`;
const redraws = [];
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((redraw) => redraw()));
function whenResized(target, action) {
  let width = 0;
  new ResizeObserver(() => {
    if (target.clientWidth && target.clientWidth !== width) {
      width = target.clientWidth;
      requestAnimationFrame(action);
    }
  }).observe(target);
}
// A canvas of so many CSS pixels, sharp on any screen; returns what draws on it.
function sized(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  return pen;
}
