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

