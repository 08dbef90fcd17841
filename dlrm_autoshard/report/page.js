// Turns the page's columns into rows, draws the charts, and fills the tables for the selected epoch.
"use strict";

const page = JSON.parse(document.getElementById("page").textContent);
const rows = (columns) => {
  const names = Object.keys(columns);
  return (columns[names[0]] || []).map((_, i) => Object.fromEntries(names.map((name) => [name, columns[name][i]])));
};
const tableRows = (tables, epochs) => {
  const share = (at, i) => { // percent of the step; null if the table was split otherwise, or nothing was sampled
    const cost = tables.at[at].cost[i];
    return cost === null || !epochs[at].step_ms ? null : 100 * cost / epochs[at].step_ms;
  };
  const first = epochs.findIndex((line) => line.step_ms);
  return tables.at.flatMap((use, at) =>
    tables.name.map((name, i) => {
      const now = share(at, i), start = first < 0 ? null : share(first, i);
      return {
        at, name, rank: use.rank[i], cost: use.cost[i], rows: tables.rows[i], dim: tables.dim[i], mib: tables.mib[i],
        pooling: use.pooling[i], reuse: use.reuse[i], share: now, start,
        change: now === null || start === null ? null : now - start,
      };
    }).filter((line) => line.rank !== null) // null: the table was split otherwise in that epoch
      .sort((a, b) => b.cost - a.cost));
};

const data = Object.fromEntries(
  Object.entries(page.data).filter(([name]) => name !== "tables").map(([name, columns]) => [name, rows(columns)]));
if (page.data.tables) data.placement = tableRows(page.data.tables, data.epochs);
const views = [];
const dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
// Swaps the charts' colours for dark mode, as the style sheet does for text.
const coloured = (spec) => !dark ? spec : JSON.parse(
  JSON.stringify(spec).replace(/#[0-9a-f]{6}/g, (colour) => page.dark[colour] || colour));
const control = document.getElementById("epoch");
const rank = document.getElementById("rank");
const chosen = () => (control ? Number(control.value) : 0);
const ofRank = (line) => !rank || rank.value === "" || line.rank === undefined || String(line.rank) === rank.value;

async function draw(chart) {
  const place = document.getElementById(`chart-${chart.id}`);
  const params = chart.spec.params.map((param) => (param.name === "at" ? { ...param, value: chosen() } : param));
  const datasets = Object.fromEntries(chart.data.map((name) => [name, data[name] || []]));
  const spec = { ...coloured(chart.spec), params, datasets };
  // A line through a few points needs no wide chart.
  if (chart.points) place.style.maxWidth = `${Math.max(22, 3.2 * chart.points + 8)}rem`;
  // Level 1 logs errors only: Vega warns of axes without data, which an epoch without a prediction has.
  const options = { actions: false, renderer: "svg", config: coloured(page.config), logLevel: 1 };
  const { view } = await vegaEmbed(place, spec, options);
  const svg = place.querySelector("svg");
  // Screen readers get one image with one label; the figures are in the text and tables.
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", place.dataset.label);
  for (const part of svg.querySelectorAll("[aria-label], [aria-roledescription]")) {
    for (const name of ["aria-label", "aria-roledescription", "role"]) part.removeAttribute(name);
  }
  views.push(view);
}

// A chart inside a closed <details> has no width, so it is drawn when that is first opened.
async function drawOrWait(chart) {
  const fold = document.getElementById(`chart-${chart.id}`).closest("details");
  if (!fold || fold.open) return draw(chart);
  fold.addEventListener("toggle", () => draw(chart).then(countDrawn), { once: true });
}
const countDrawn = () => { document.documentElement.dataset.drawn = String(views.length); }; // read by tests

function fill(table, columns, lines) {
  const body = table.tBodies[0];
  body.replaceChildren(...lines.map((line) => {
    const row = document.createElement("tr");
    columns.forEach((column, i) => {
      const cell = document.createElement(i === 0 ? "th" : "td");
      if (i === 0) cell.scope = "row";
      const value = line[column];
      cell.textContent = value === null || value === undefined ? "–"
        : typeof value !== "number" ? value
        : value.toLocaleString("en", Number.isInteger(value) ? {} : { maximumSignificantDigits: 4 });
      row.append(cell);
    });
    return row;
  }));
}

async function show() {
  const at = chosen();
  const label = data.epochs[at].label;
  document.getElementById("epoch-text").textContent = data.epochs[at].text;
  for (const place of document.querySelectorAll(".epoch-name")) place.textContent = label;
  const none = document.getElementById("no-prediction");
  if (none) none.hidden = data.predictions.some((row) => row.at === at);
  for (const table of document.querySelectorAll("table[data-rows]")) {
    const columns = table.dataset.columns.split(",");
    const lines = data[table.dataset.rows].filter((row) => "every" in table.dataset || (row.at === at && ofRank(row)));
    fill(table, columns, lines);
  }
  await Promise.all(views.map((view) => view.signal("at", at).runAsync()));
}

async function start() {
  for (const chart of page.charts) await drawOrWait(chart);
  if (control) {
    control.addEventListener("change", show);
    rank.addEventListener("change", () => {
      for (const place of document.querySelectorAll("details:has(table[data-rows]:not([data-every]))")) place.open = true;
      show();
    });
    await show();
  }
  countDrawn();
}
start();
