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
const clusters = columns.at(-2); // the last two columns are computed; others may have the same titles
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

