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

function colorBy(number) {
  column = columns[number];
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

// Cells as fedssl.text_table makes them: a spreadsheet computes text that begins with one of these signs.
const FORMULA = /^[\s\u200b-\u200d\ufeff]*[=+\-@]/;
const NUMBER_OR_SIGNS = /^([+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[\s+\-@]*)$/i;
const withoutControls = (text) => text.replaceAll(/[\0-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]/g, " ");

function safeText(text) {
  const cell = withoutControls(text);
  return FORMULA.test(cell) && !NUMBER_OR_SIGNS.test(cell) ? `'${cell}` : cell;
}

function safePath(text) {
  const cell = withoutControls(text);
  return FORMULA.test(cell) ? `./${cell}` : cell; // the same path
}

function csv() {
  const quoted = (text) => `"${String(text).replaceAll('"', '""')}"`;
  const header = ["name", ...columns.map((of) => safeText(of.title)), "distance_to_neighbors", "distance_to_center", "x", "y"];
  const lines = [...selection].sort((one, other) => one - other).map((row) => [
    safePath(names[row]),
    ...columns.map((of) => (of.codes[row] === of.missing ? "" : safeText(textOf(of, row)))),
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

columns.forEach((of, number) => $("color").append(element("option", { value: number, textContent: of.title })));
$("color").addEventListener("change", (event) => colorBy(Number(event.target.value)));
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
colorBy(0);
selectionChanged();
readTheme();
resize();
