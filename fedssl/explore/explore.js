"use strict";
// The map, the gallery and the details share three things: the rows that are shown (search and legend), the current
// image, and the selection. All text of the data is set as textContent, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const { names, columns, atlas, groups, pairs } = data;
const count = names.length;
const points = decode(data.points, Float32Array);
const neighbors = decode(data.neighbors, Uint32Array);
const cosines = decode(data.cosines, Float32Array);
const unusual = decode(data.unusual, Float32Array);
const distances = decode(data.distances, Float32Array);
const perImage = neighbors.length / Math.max(count, 1);
for (const column of columns) column.codes = decode(column.codes, Uint32Array);
const clusters = columns.find((column) => column.title === "cluster");
const searched = names.map((name, row) => [name, ...columns.map((column) => textOf(column, row))].join("\n").toLowerCase());

// Each has a contrast of at least 3 with the light and the dark ground.
const PALETTE = ["#2f7fd0", "#c7681a", "#2f9158", "#d0476f", "#8c66d9", "#9a7b12", "#15909c", "#b15fb4", "#5f8f16", "#d2523f", "#6b7fb8"];
const OTHER = "#7c8288";
const THUMB = Math.max(32, Math.min(atlas.size, 48)); // of the map, in CSS pixels; those of the sheets are fastest
const PER_PAGE = 60; // images of the gallery
const GROUPS_PER_PAGE = 6;
const EXTREMES = 8; // typical and atypical images of a cluster

let current = -1;
let hovered = -1;
let filter = ""; // of the search
let category = -1; // of the legend; -1: all
let column = columns[0];
let shown = new Uint8Array(count).fill(1);
let page = 0;
let view = "all";
const selection = new Set();

function decode(text, type) {
  return new type(Uint8Array.from(atob(text), (character) => character.charCodeAt(0)).buffer);
}

function textOf(of, row) {
  return of.values[of.codes[row]];
}

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// Thumbnails ---------------------------------------------------------------------------------------------------------

const sheets = atlas.sheets.map(() => null);
const waiting = atlas.sheets.map(async (content, number) => {
  const image = new Image();
  image.src = `data:image/webp;base64,${content}`;
  await image.decode();
  sheets[number] = await createImageBitmap(image); // an image may be decoded again at every frame
});

function drawThumb(context, row, x, y, size) {
  const sheet = sheets[Math.floor(row / atlas.per_sheet)];
  if (!sheet) return false;
  const place = row % atlas.per_sheet;
  const left = (place % atlas.columns) * atlas.size;
  context.drawImage(sheet, left, Math.floor(place / atlas.columns) * atlas.size, atlas.size, atlas.size, x, y, size, size);
  return true;
}

function thumbOf(row, size) {
  const canvas = element("canvas", { width: size * 2, height: size * 2 });
  canvas.style.width = canvas.style.height = `${size}px`;
  canvas.setAttribute("aria-hidden", "true");
  waiting[Math.floor(row / atlas.per_sheet)].then(() => {
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = atlas.size > 32; // pixels of small images stay visible
    drawThumb(context, row, 0, 0, size * 2);
  });
  return canvas;
}

// Map ----------------------------------------------------------------------------------------------------------------

const map = $("map");
const context = map.getContext("2d");
const camera = { x: 0, y: 0, scale: 1 };
let order = []; // rows by color
let colors = []; // of each row
let [width, height, ratio] = [1, 1, 1]; // of the map in CSS pixels, and its pixels per CSS pixel
let framed = false;
const theme = {};
let box = null; // [x, y, x, y] of the rows to select, in CSS pixels
let placed = []; // [row, x, y] of the thumbnails in the last frame

function resize() {
  [width, height, ratio] = [map.clientWidth, map.clientHeight, window.devicePixelRatio || 1];
  map.width = Math.round(width * ratio);
  map.height = Math.round(height * ratio);
  redraw();
}

function readTheme() {
  const style = getComputedStyle(document.body);
  for (const name of ["ink", "ground", "line"]) theme[name] = style.getPropertyValue(`--${name}`);
  redraw();
}

function redraw() {
  if (framed) return;
  framed = true;
  requestAnimationFrame(() => {
    framed = false;
    draw();
  });
}

function half() {
  return (Math.min(width, height) / 2 - THUMB / 2) * camera.scale;
}

function screenX(row) {
  return width / 2 + (points[2 * row] - camera.x) * half();
}

function screenY(row) {
  return height / 2 - (points[2 * row + 1] - camera.y) * half();
}

function draw() {
  const { ink, ground, line } = theme;
  const unit = half();
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.fillStyle = ground;
  context.fillRect(0, 0, width, height);
  const radius = Math.min(Math.max(1.5 * Math.sqrt(camera.scale), count > 3000 ? 1.5 : 2.5), 5);
  const middleX = width / 2 - camera.x * unit - radius;
  const middleY = height / 2 + camera.y * unit - radius;
  let last = "";
  for (const hidden of [true, false]) {
    for (const row of order) {
      if (Boolean(shown[row]) === hidden) continue;
      const x = middleX + points[2 * row] * unit;
      const y = middleY - points[2 * row + 1] * unit;
      if (x < -radius || y < -radius || x > width || y > height) continue;
      const color = hidden ? line : colors[row];
      if (color !== last) context.fillStyle = last = color;
      context.fillRect(x, y, 2 * radius, 2 * radius);
    }
  }
  placed = $("thumbs").checked ? placeThumbs() : [];
  context.imageSmoothingEnabled = atlas.size > 32;
  for (const [row, x, y] of placed) framedThumb(row, x, y, THUMB, colors[row]);
  for (const row of selection) ring(row, 5, ink, 1.5);
  if (current >= 0) {
    neighborsOf(current).forEach((row) => ring(row, 7, ink, 1));
    framedThumb(current, screenX(current), screenY(current), 1.6 * THUMB, ink);
  }
  if (hovered >= 0 && hovered !== current) framedThumb(hovered, screenX(hovered), screenY(hovered), 1.6 * THUMB, colors[hovered]);
  if (box) {
    context.strokeStyle = ink;
    context.strokeRect(box[0], box[1], box[2] - box[0], box[3] - box[1]);
  }
}

function ring(row, radius, color, width) {
  context.beginPath();
  context.arc(screenX(row), screenY(row), radius, 0, 2 * Math.PI);
  context.strokeStyle = color;
  context.lineWidth = width;
  context.stroke();
}

function framedThumb(row, x, y, size, color) {
  const [left, top] = [Math.round(x - size / 2), Math.round(y - size / 2)];
  context.fillStyle = color;
  context.fillRect(left - 2, top - 2, size + 4, size + 4);
  drawThumb(context, row, left, top, size);
}

// One thumbnail per cell of a grid that moves with the points, so that panning changes none.
function placeThumbs() {
  const taken = new Set();
  const found = [];
  const cell = THUMB + 12;
  const unit = half();
  const [middleX, middleY] = [width / 2 - camera.x * unit, height / 2 + camera.y * unit];
  for (let row = 0; row < count; row++) {
    const x = middleX + points[2 * row] * unit;
    const y = middleY - points[2 * row + 1] * unit;
    if (!shown[row] || x < 0 || y < 0 || x > width || y > height) continue;
    const key = Math.floor((points[2 * row] * unit) / cell) * 1e6 + Math.floor((points[2 * row + 1] * unit) / cell);
    if (taken.has(key)) continue;
    taken.add(key);
    found.push([row, x, y]);
  }
  return found;
}

function neighborsOf(row) {
  return [...neighbors.subarray(row * perImage, (row + 1) * perImage)];
}

function rowAt(x, y) {
  for (const [row, left, top] of placed) {
    if (Math.max(Math.abs(left - x), Math.abs(top - y)) <= THUMB / 2) return row;
  }
  let [best, least] = [-1, 15 ** 2];
  for (let row = 0; row < count; row++) {
    const distance = (screenX(row) - x) ** 2 + (screenY(row) - y) ** 2;
    if (shown[row] && distance < least) [best, least] = [row, distance];
  }
  return best;
}

// Return the nearest image in a direction; an image off the line costs more.
function rowTowards(dx, dy) {
  if (current < 0) return shown.indexOf(1);
  let [best, least] = [current, Infinity];
  for (let row = 0; row < count; row++) {
    const [x, y] = [screenX(row) - screenX(current), screenY(row) - screenY(current)];
    const along = x * dx + y * dy;
    const aside = Math.abs(x * dy - y * dx);
    if (!shown[row] || row === current || along <= 0) continue;
    if (along + 2 * aside < least) [best, least] = [row, along + 2 * aside];
  }
  return best;
}

function zoom(factor, x = width / 2, y = height / 2) {
  const [dx, dy] = [x - width / 2, y - height / 2];
  const before = half();
  camera.scale = Math.min(Math.max(camera.scale * factor, 0.5), 500);
  camera.x += dx / before - dx / half();
  camera.y -= dy / before - dy / half();
  redraw();
}

function pan(dx, dy) {
  camera.x -= dx / half();
  camera.y += dy / half();
  redraw();
}

function showAll() {
  Object.assign(camera, { x: 0, y: 0, scale: 1 });
  redraw();
}

const pointers = new Map(); // by identity: [x, y]
let moved = 0;

map.addEventListener("pointerdown", (event) => {
  map.setPointerCapture(event.pointerId);
  pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
  if (pointers.size === 1) moved = 0;
  const boxed = pointers.size === 1 && (event.shiftKey || $("boxed").getAttribute("aria-pressed") === "true");
  box = boxed ? [event.offsetX, event.offsetY, event.offsetX, event.offsetY] : null;
});

map.addEventListener("pointermove", (event) => {
  const [x, y] = [event.offsetX, event.offsetY];
  const before = pointers.get(event.pointerId);
  if (!before) {
    const row = rowAt(x, y);
    if (row !== hovered) redraw();
    hovered = row;
    return;
  }
  moved += Math.abs(x - before[0]) + Math.abs(y - before[1]);
  if (box) {
    box.splice(2, 2, x, y);
    redraw();
  } else if (pointers.size === 2) {
    const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
    const spread = (place) => Math.hypot(place[0] - other[0], place[1] - other[1]) || 1;
    zoom(spread([x, y]) / spread(before), (x + other[0]) / 2, (y + other[1]) / 2);
  } else {
    pan(x - before[0], y - before[1]);
  }
  pointers.set(event.pointerId, [x, y]);
});

map.addEventListener("pointerup", (event) => {
  if (!pointers.delete(event.pointerId)) return;
  if (box && moved > 4) selectBox();
  else if (moved <= 4) setCurrent(rowAt(event.offsetX, event.offsetY));
  box = null;
  redraw();
});

map.addEventListener("pointercancel", (event) => {
  pointers.delete(event.pointerId);
  box = null;
});

map.addEventListener("pointerleave", () => {
  hovered = -1;
  redraw();
});

map.addEventListener("wheel", (event) => {
  event.preventDefault();
  zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.002)), event.offsetX, event.offsetY);
}, { passive: false });

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const KEYS = { "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), "0": showAll, " ": () => toggle(current), Escape: () => setCurrent(-1) };

map.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const arrow = ARROWS[event.key];
  if (arrow && event.shiftKey) pan(-60 * arrow[0], -60 * arrow[1]);
  else if (arrow) setCurrent(rowTowards(...arrow), { centered: true });
  else if (KEYS[event.key]) KEYS[event.key]();
  else return;
  event.preventDefault();
});

// Current image ------------------------------------------------------------------------------------------------------

function setCurrent(row, { centered = false } = {}) {
  current = row;
  if (row >= 0 && centered) {
    const [x, y] = [screenX(row), screenY(row)];
    const edge = THUMB;
    if (x < edge || y < edge || x > width - edge || y > height - edge) {
      [camera.x, camera.y] = [points[2 * row], points[2 * row + 1]];
    }
  }
  showDetails();
  for (const tile of document.querySelectorAll(".tile")) markTile(tile);
  redraw();
}

function describe(row) {
  return [names[row], ...columns.map((of) => `${of.title} ${textOf(of, row)}`)].join(", ");
}

function showDetails() {
  const details = $("details");
  details.replaceChildren();
  $("toggle").disabled = current < 0;
  $("toggle").textContent = selection.has(current) ? "Remove from selection" : "Add to selection";
  if (current < 0) {
    details.append(element("p", { className: "faint", textContent: "Choose an image on the map or in the list." }));
    $("status").textContent = "";
    return;
  }
  const list = element("dl");
  const entries = columns.map((of) => [of.title, textOf(of, current)]);
  entries.push(["distance to neighbors", unusual[current].toFixed(3)]);
  for (const [title, text] of entries) list.append(element("dt", { textContent: title }), element("dd", { textContent: text }));
  details.append(thumbOf(current, Math.max(atlas.size, 96)), element("p", { className: "name", textContent: names[current] }), list);
  if (perImage) {
    const start = current * perImage;
    const tiles = neighborsOf(current).map((row, place) => tile(row, cosines[start + place].toFixed(3)));
    details.append(element("h3", { textContent: "Nearest neighbors (cosine)" }), element("ul", { className: "tiles small" }, ...tiles));
  }
  $("status").textContent = `Current image: ${describe(current)}${selection.has(current) ? ", selected" : ""}`;
}

// Gallery ------------------------------------------------------------------------------------------------------------

function shortName(row) {
  return names[row].split("/").pop();
}

function tile(row, caption = shortName(row)) {
  const button = element("button", { type: "button", className: "tile", title: names[row] });
  button.dataset.row = row;
  button.setAttribute("aria-label", describe(row));
  button.append(thumbOf(row, 64), element("span", { textContent: caption }));
  button.addEventListener("click", () => setCurrent(row, { centered: true }));
  markTile(button);
  return element("li", {}, button);
}

function markTile(button) {
  const row = Number(button.dataset.row);
  button.setAttribute("aria-current", row === current);
  button.classList.toggle("selected", selection.has(row));
}

// Arrow keys move the focus between the tiles of a list, by columns and rows.
document.addEventListener("keydown", (event) => {
  const tileOf = event.target.closest(".tile");
  if (!tileOf) return;
  if (event.key === "s") return toggle(Number(tileOf.dataset.row));
  const arrow = ARROWS[event.key];
  if (!arrow) return;
  event.preventDefault();
  const tiles = [...tileOf.closest(".tiles").querySelectorAll(".tile")];
  const top = tileOf.getBoundingClientRect().top;
  const wide = tiles.filter((other) => other.getBoundingClientRect().top === top).length;
  tiles[tiles.indexOf(tileOf) + arrow[0] + wide * arrow[1]]?.focus();
});

// Return what a view lists: titles with rows, several on a page.
function listed() {
  const kept = (rows) => [...rows].filter((row) => shown[row]);
  const all = kept(names.keys());
  if (view === "clusters") {
    return clusters.values.flatMap((name, code) => {
      const rows = all.filter((row) => clusters.codes[row] === code).sort((one, other) => distances[one] - distances[other]);
      const [typical, atypical] = [rows.slice(0, EXTREMES), rows.slice(EXTREMES).slice(-EXTREMES).reverse()];
      const title = `Cluster ${name}: ${rows.length.toLocaleString("en")} images`;
      return [[`${title}, the most typical`, typical], [`Cluster ${name}, the least typical`, atypical]].filter((part) => part[1].length);
    });
  }
  if (view === "duplicates") {
    const equal = groups.filter((rows) => kept(rows).length).map((rows) => [`Equal pixels: ${rows.length} images`, rows]);
    const near = pairs.filter((pair) => shown[pair[0]] || shown[pair[1]]);
    return [...equal, ...near.map(([one, other, cosine]) => [`Cosine ${cosine.toFixed(4)}`, [one, other]])];
  }
  if (view === "outliers") all.sort((one, other) => unusual[other] - unusual[one]);
  const rows = view === "selection" ? [...selection] : all;
  const parts = [];
  for (let start = 0; start < rows.length; start += PER_PAGE) parts.push(["", rows.slice(start, start + PER_PAGE)]);
  return parts;
}

function showGallery() {
  const parts = listed();
  const each = ["clusters", "duplicates"].includes(view) ? GROUPS_PER_PAGE : 1;
  const pages = Math.max(Math.ceil(parts.length / each), 1);
  page = Math.min(page, pages - 1);
  const gallery = $("gallery");
  gallery.replaceChildren();
  for (const [title, rows] of parts.slice(page * each, (page + 1) * each)) {
    if (title) gallery.append(element("h3", { textContent: title }));
    const caption = (row) => (view === "outliers" ? `${unusual[row].toFixed(3)} ${shortName(row)}` : shortName(row));
    gallery.append(element("ul", { className: "tiles" }, ...rows.slice(0, PER_PAGE).map((row) => tile(row, caption(row)))));
    if (rows.length > PER_PAGE) gallery.append(element("p", { textContent: `and ${rows.length - PER_PAGE} more` }));
  }
  if (!parts.length) gallery.append(element("p", { className: "faint", textContent: "No images." }));
  $("caption").textContent = data.captions[view];
  $("place").textContent = `Page ${page + 1} of ${pages.toLocaleString("en")}`;
  $("previous").disabled = page === 0;
  $("next").disabled = page === pages - 1;
  for (const button of document.querySelectorAll("[data-view]")) button.setAttribute("aria-pressed", button.dataset.view === view);
}

function turn(step) {
  page += step;
  showGallery();
  $("gallery").querySelector(".tile")?.focus();
}

// Search, colors and legend ------------------------------------------------------------------------------------------

function applyFilter() {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  let found = 0;
  for (let row = 0; row < count; row++) {
    const hit = (category < 0 || column.codes[row] === category) && words.every((word) => searched[row].includes(word));
    shown[row] = Number(hit);
    found += shown[row];
  }
  $("found").textContent = `${found.toLocaleString("en")} of ${count.toLocaleString("en")} images`;
  $("add").textContent = `Select these ${found.toLocaleString("en")}`;
  page = 0;
  showGallery();
  redraw();
}

function colorBy(title) {
  column = columns.find((of) => of.title === title);
  category = -1;
  const sizes = new Uint32Array(column.values.length);
  column.codes.forEach((code) => sizes[code]++);
  // Values without a meaning, such as "no label", are gray, and so are the rarest ones if there are too many.
  const ranked = [...sizes.keys()].filter((code) => code !== column.missing).sort((one, other) => sizes[other] - sizes[one]);
  const colored = new Map(ranked.slice(0, PALETTE.length).sort((one, other) => one - other).map((code, place) => [code, PALETTE[place]]));
  colors = Array.from(column.codes, (code) => colored.get(code) ?? OTHER);
  order = [...names.keys()].sort((one, other) => (colors[one] < colors[other] ? -1 : colors[one] > colors[other] ? 1 : one - other));
  const legend = $("legend");
  legend.replaceChildren();
  column.values.forEach((text, code) => {
    const swatch = element("span", { className: "swatch" });
    swatch.style.background = colored.get(code) ?? OTHER;
    const button = element("button", { type: "button" }, swatch, `${text} (${sizes[code].toLocaleString("en")})`);
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => {
      category = category === code ? -1 : code;
      [...legend.querySelectorAll("button")].forEach((other, place) => other.setAttribute("aria-pressed", place === category));
      applyFilter();
    });
    legend.append(element("li", {}, button));
  });
  applyFilter();
}

// Selection ----------------------------------------------------------------------------------------------------------

function select(rows) {
  for (const row of rows) selection.add(row);
  selectionChanged();
}

function selectBox() {
  const [left, right] = [Math.min(box[0], box[2]), Math.max(box[0], box[2])];
  const [top, bottom] = [Math.min(box[1], box[3]), Math.max(box[1], box[3])];
  select([...names.keys()].filter((row) => {
    const [x, y] = [screenX(row), screenY(row)];
    return shown[row] && x >= left && x <= right && y >= top && y <= bottom;
  }));
}

function toggle(row) {
  if (row < 0) return;
  if (!selection.delete(row)) selection.add(row);
  selectionChanged();
}

function selectionChanged() {
  const text = selection.size.toLocaleString("en");
  $("selected").textContent = `${text} selected`;
  $("download").disabled = $("clear").disabled = selection.size === 0;
  if (view === "selection") showGallery();
  showDetails();
  for (const button of document.querySelectorAll(".tile")) markTile(button);
  redraw();
}

// A spreadsheet computes text that begins with these; a path with ./ is the same path.
function safe(text, prefix) {
  return /^[=+\-@\t\r]/.test(text) ? prefix + text : text;
}

function csv() {
  const quoted = (text) => `"${String(text).replaceAll('"', '""')}"`;
  const header = ["name", ...columns.map((of) => of.title), "distance_to_neighbors", "distance_to_center", "x", "y"];
  const lines = [...selection].sort((one, other) => one - other).map((row) => [
    safe(names[row], "./"),
    ...columns.map((of) => (of.codes[row] === of.missing ? "" : safe(textOf(of, row), "'"))),
    ...[unusual[row], distances[row], points[2 * row], points[2 * row + 1]].map((value) => Number(value.toPrecision(6))),
  ]);
  return [header, ...lines].map((line) => line.map(quoted).join(",") + "\r\n").join("");
}

function download() {
  const link = element("a", { download: "selection.csv", href: URL.createObjectURL(new Blob([csv()], { type: "text/csv" })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Start --------------------------------------------------------------------------------------------------------------

for (const of of columns) $("color").append(element("option", { value: of.title, textContent: of.title }));
$("color").addEventListener("change", (event) => colorBy(event.target.value));
$("search").addEventListener("input", (event) => {
  filter = event.target.value;
  applyFilter();
});
$("thumbs").addEventListener("change", redraw);
$("zoom-in").addEventListener("click", () => zoom(1.5));
$("zoom-out").addEventListener("click", () => zoom(1 / 1.5));
$("zoom-all").addEventListener("click", showAll);
$("boxed").addEventListener("click", (event) => event.target.setAttribute("aria-pressed", event.target.getAttribute("aria-pressed") !== "true"));
$("toggle").addEventListener("click", () => toggle(current));
$("add").addEventListener("click", () => select([...names.keys()].filter((row) => shown[row])));
$("clear").addEventListener("click", () => {
  selection.clear();
  selectionChanged();
});
$("download").addEventListener("click", download);
$("previous").addEventListener("click", () => turn(-1));
$("next").addEventListener("click", () => turn(1));
for (const button of document.querySelectorAll("[data-view]")) {
  button.addEventListener("click", () => {
    [view, page] = [button.dataset.view, 0];
    showGallery();
  });
}
new ResizeObserver(resize).observe(map);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", readTheme);
Promise.allSettled(waiting).then(redraw);
$("page").hidden = false;
colorBy(columns[0].title);
selectionChanged();
readTheme();
resize();
