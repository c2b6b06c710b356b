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

