"use strict";
const SVG = "http://www.w3.org/2000/svg", WIDTH = 360, HEIGHT = 180, LEFT = 46, BOTTOM = 18, TOP = 8, RIGHT = 8;
const PAUSE = 2000, MAX_PAUSE = 30000;
const TITLES = {
  loss: "mean loss of the clients", model_cosine: "cosine of clients' models with the global one",
  participants: "clients that took part", bytes: "bytes sent and received, all clients", seconds: "seconds of a round",
  rank: "effective rank of representations", layers: "cosines of layers, mean over clients",
};
const byId = (id) => document.getElementById(id);
let selected = location.hash.slice(1), failures = 0, timer;

function make(parent, tag, text, attributes = {}) {
  const element = parent.namespaceURI === SVG || tag === "svg" ? document.createElementNS(SVG, tag) : document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  parent.append(element);
  return element;
}

// Changes the text only if it differs, so that a selection stays.
function write(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

function number(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size >= 1e4) for (const [unit, factor] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]])
    if (size >= factor) return `${Number((value / factor).toPrecision(3))} ${unit}`;
  return size !== 0 && size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} days`;
}

// Draws lines {label, points, color, dash} in the figure of this name; level lines have a single value.
function chart(container, name, title, lines, unit = "") {
  lines = lines.filter((line) => line.level !== undefined || line.points?.length);
  let figure = [...container.children].find((child) => child.dataset.name === name);
  if (!lines.some((line) => line.points)) return figure?.remove();
  if (!figure) {
    figure = make(container, "figure", undefined, { "data-name": name });
    make(figure, "figcaption");
    make(figure, "svg", undefined, { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: 0, role: "img" });
    make(figure, "p", undefined, { class: "legend" });
    const [, svg] = figure.children;
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      moveTo(figure, figure.scale.round(((event.clientX - box.left) / box.width) * WIDTH));
    });
    svg.addEventListener("pointerleave", () => moveTo(figure, null));
    svg.addEventListener("blur", () => moveTo(figure, null));
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const rounds = figure.rounds, at = rounds.indexOf(figure.cursor);
      moveTo(figure, rounds[Math.min(rounds.length - 1, Math.max(0, at < 0 ? rounds.length - 1 : at + step))]);
    });
  }
  write(figure.children[0], title + (unit ? ` (${unit})` : ""));
  figure.rounds = [...new Set(lines.flatMap((line) => (line.points || []).map((point) => point[0])))].sort((a, b) => a - b);
  Object.assign(figure, { lines, title });
  plot(figure);
  moveTo(figure, figure.cursor ?? null);
}

function plot(figure) {
  const { lines, rounds } = figure, svg = figure.children[1];
  const values = lines.flatMap((line) => (line.points ? line.points.map((point) => point[1]) : [line.level]));
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) [low, high] = [low - (Math.abs(low) / 10 || 1), high + (Math.abs(high) / 10 || 1)];
  const first = rounds[0], last = Math.max(rounds[rounds.length - 1], first + 1);
  const x = (round) => LEFT + ((round - first) / (last - first)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + ((high - value) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const nearest = (at) => rounds.reduce((best, round) => (Math.abs(x(round) - at) < Math.abs(x(best) - at) ? round : best));
  figure.scale = { x, y, round: nearest };
  svg.replaceChildren();
  for (const value of [low, (low + high) / 2, high]) {
    make(svg, "line", undefined, { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) });
    make(svg, "text", number(value), { x: LEFT - 4, y: y(value) + 4, "text-anchor": "end" });
  }
  make(svg, "text", rounds.length > 1 ? first : `round ${first}`, { x: LEFT, y: HEIGHT - 4 });
  if (rounds.length > 1) make(svg, "text", `round ${last}`, { x: WIDTH - RIGHT, y: HEIGHT - 4, "text-anchor": "end" });
  for (const { points, level, color, dash, thin } of lines) {
    const path = points ? points : [[first, level], [last, level]];
    const style = `stroke: ${color}${thin ? "; stroke-width: 1" : ""}`;
    const at = path.map((point) => `${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`).join(" ");
    make(svg, "polyline", undefined, { points: at, style, ...(dash ? { "stroke-dasharray": dash } : {}) });
    if (path.length === 1) make(svg, "circle", undefined, { cx: x(path[0][0]), cy: y(path[0][1]), r: 3, style: `fill: ${color}` });
  }
}

// Shows the values of a round, or the last ones, in the legend.
function moveTo(figure, round) {
  figure.cursor = round ?? undefined;
  const [, svg, legend] = figure.children;
  svg.querySelector(".cursor")?.remove();
  if (round !== null) make(svg, "line", undefined, { class: "cursor", x1: figure.scale.x(round), x2: figure.scale.x(round), y1: TOP, y2: HEIGHT - BOTTOM });
  legend.replaceChildren();
  if (round !== null) make(legend, "span", `round ${round}`);
  const named = figure.lines.filter((line) => line.label);
  const texts = named.map(({ label, points, level, color, dash }) => {
    const at = points ? (round === null ? points[points.length - 1] : points.find((point) => point[0] === round)) : [0, level];
    const text = `${label} ${at ? number(at[1]) : "-"}`, entry = make(legend, "span");
    make(entry, "i", undefined, { style: `border-color: ${color}; border-top-style: ${dash ? "dashed" : "solid"}`, "aria-hidden": "true" });
    entry.append(text);
    return text;
  });
  svg.setAttribute("aria-label", `${figure.title}, ${round === null ? "last values" : `round ${round}`}: ${texts.join(", ")}`);
}

const color = (index) => `var(--c${index % 7})`;

function showRuns({ runs, waiting, more }) {
  const body = byId("runs").tBodies[0], rows = new Map([...body.rows].map((row) => [row.dataset.id, row]));
  for (const run of runs) {
    let row = rows.get(run.id);
    rows.delete(run.id);
    if (!row) {
      row = make(body, "tr", undefined, { "data-id": run.id });
      for (let column = 0; column < 7; column++) make(row, "td", undefined, column && column !== 1 && column !== 5 ? { class: "number" } : {});
      make(row.cells[0], "a", run.name, { href: `#${run.id}` });
    }
    const results = Object.entries(run.results).map(([name, value]) => `${name} ${number(value)}`).join(", ");
    const state = run.state + (run.warnings ? " ⚠" : "");
    const age = run.age === null ? "-" : `${duration(run.age)} ago`;
    [state, `${run.done}/${run.rounds ?? "?"}`, duration(run.left), number(run.loss), results, age].forEach((text, column) => write(row.cells[column + 1], text));
    if (run.id === selected) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
    if (body.rows[runs.indexOf(run)] !== row) body.insertBefore(row, body.rows[runs.indexOf(run)] ?? null);
  }
  for (const row of rows.values()) row.remove();
  const curves = runs.filter((run) => run.curve?.points.length);
  const name = curves[0]?.curve.name, same = curves.filter((run) => run.curve.name === name);
  const lines = same.map((run, index) => ({ label: run.name, points: run.curve.points, color: color(index), dash: index > 6 ? "5 3" : "" }));
  chart(byId("comparison"), "comparison", `${name} of all runs`, runs.length > 1 ? lines : []);
  const notes = [`${runs.length + more} runs, ${runs.filter((run) => run.state === "running").length} running`];
  if (more) notes.push(`${more} older ones are not listed`);
  for (const folder of waiting) notes.push(`waiting for a run in ${folder}`);
  write(byId("status"), `${notes.join("; ")}. Read at ${new Date().toLocaleTimeString()}.`);
  if (!runs.some((run) => run.id === selected) && runs.length && !byId("run").dataset.id) selected = runs[0].id;
}

function list(id, texts) {
  const element = byId(id);
  if (JSON.stringify(texts) === element.dataset.texts) return; // else an alert would be read aloud again
  element.dataset.texts = JSON.stringify(texts);
  element.replaceChildren();
  for (const text of texts) make(element, "li", text);
}

function showRun(run) {
  const section = byId("run"), charts = byId("charts");
  section.hidden = false;
  if (section.dataset.id !== run.id) charts.replaceChildren();
  section.dataset.id = run.id;
  write(section.querySelector("h2"), run.name);
  const facts = [run.state, `${run.done} of ${run.rounds ?? "?"} rounds`];
  if (run.left !== null) facts.push(`${duration(run.left)} left`);
  facts.push(...[run.reason, run.note].filter(Boolean));
  write(byId("facts"), facts.join(", "));
  list("problems", run.problems);
  list("dropped", run.dropped.length ? run.dropped.map(([round, reasons]) => `round ${round}: ${Object.entries(reasons).map(([client, reason]) => `client ${client}: ${reason}`).join("; ")}`.slice(0, 400)) : ["none"]);
  write(byId("log"), run.log.join("\n"));
  write(byId("command"), run.command);
  const { values } = run;
  Object.keys(run.evaluation).forEach((name) => {
    const lines = [{ label: "federated", points: run.evaluation[name], color: color(0) }];
    for (const [kind, dash] of [["untrained", "6 3"], ["pixels", "2 3"]])
      if (run.baselines[kind]?.[name] !== undefined) lines.push({ label: kind, level: run.baselines[kind][name], color: color(5), dash });
    chart(charts, `evaluation ${name}`, name, lines, run.units[name]);
  });
  const one = (name, label) => [{ label, points: values[name], color: color(1) }];
  chart(charts, "loss", TITLES.loss, one("loss", "loss"));
  chart(charts, "cosine", TITLES.model_cosine, [...one("model_cosine", "all weights"), { label: "mean over layers by size", points: values.layer_cosine, color: color(0) }]);
  const layers = Object.entries(run.layers), lowest = [...layers].sort((a, b) => a[1].at(-1)[1] - b[1].at(-1)[1]).slice(0, 3).map(([name]) => name);
  const shade = (index) => `hsl(${Math.round(260 - (200 * index) / Math.max(1, layers.length - 1))} 60% 50%)`;
  chart(charts, "layers", `${TITLES.layers}${run.layers_cut ? ", last rounds" : ""}; the lowest are named`, layers.map(([name, points], index) => ({ label: lowest.includes(name) ? name : "", points, color: shade(index), thin: true })));
  chart(charts, "participants", TITLES.participants, [
    ...one("clients", "used"), { label: "dropped", points: values.dropped, color: color(0) }, { label: "late", points: values.late, color: color(4) },
  ]);
  chart(charts, "rank", TITLES.rank, [...one("rank_global", "global model"), { label: "clients", points: values.rank_clients, color: color(3) }]);
  chart(charts, "bytes", TITLES.bytes, one("bytes", "bytes"));
  chart(charts, "seconds", TITLES.seconds, one("seconds", "seconds"));
}

async function request(address) {
  const response = await fetch(address, { cache: "no-store" });
  if (!response.ok) throw new Error(`status ${response.status}`);
  return response.json();
}

async function poll() {
  clearTimeout(timer);
  try {
    showRuns(await request("runs.json"));
    if (selected) {
      const run = await request(`run.json?id=${encodeURIComponent(selected)}`);
      if (run) showRun(run);
      else write(byId("facts"), "The folder of this run is no longer there; these are its last values.");
    }
    failures = 0;
  } catch (error) {
    failures++;
    write(byId("status"), `No answer from fedssl-watch (${error.message}). It has ended, or the connection is lost; trying again.`);
  }
  timer = setTimeout(poll, Math.min(MAX_PAUSE, PAUSE * 2 ** failures));
}

addEventListener("hashchange", () => {
  selected = location.hash.slice(1);
  poll();
});
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : poll()));
poll();
