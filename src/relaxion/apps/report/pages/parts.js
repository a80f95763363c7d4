// Elements are made here and nowhere else. Everything that comes from data is set as text, never as markup.
"use strict";
const Relaxion = { parts: {} };

// make("p", {class: "small"}, "text", child, ...)
Relaxion.make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined).map((child) =>
    child instanceof Node ? child : document.createTextNode(String(child))));
  return element;
};

Relaxion.svg = (tag, attributes = {}, text = null) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  if (text !== null) element.textContent = String(text);
  return element;
};

let lastIdentity = 0;
Relaxion.identity = (word) => `${word}-${++lastIdentity}`;

// A number as people read it: 3 significant digits, no exponent where none is needed.
Relaxion.number = (value, digits = 3) => {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(digits - 1).replace("e+", "e").replace("-", "−");
  const text = size >= 1000 ? value.toFixed(0) : Number(value.toPrecision(digits)).toString();
  return text.replace("-", "−");
};

// On an axis with this distance between its marks, or by itself: 20 000 with a thin space.
Relaxion.whole = (value, step = 1) => {
  if (step === 1 && !Number.isInteger(value)) return Relaxion.number(value);
  let digits = 0; // as many as tell two neighbouring marks apart: two for steps of 0.25
  while (digits < 8 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-9) digits += 1;
  return value.toFixed(digits).replace(/\B(?=(\d{3})+(?!\d))(?<!\.\d*)/g, "\u202f").replace("-", "−");
};

// Text in which names with underscores, such as those of settings, stay whole at the end of a line; or whatever else is to be `kept`.
Relaxion.words = (text, kept = /(\w+_\w+)/) => String(text).split(kept).map((piece, k) => (k % 2 ? Relaxion.make("span", { class: "name" }, piece) : piece));

Relaxion.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
Relaxion.still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

// The plain parts: tiles, tables, the numbers of plots, facts, notes.
(() => {
  const { make, parts } = Relaxion;

  parts.tiles = (part) => make("dl", { class: "tiles" }, ...part.tiles.map((tile) =>
    make("div", { class: `tile ${tile.tone ?? ""}` },
      make("dt", {}, tile.label),
      make("dd", {},
        make("div", { class: "value" }, tile.value, tile.unit ? make("span", { class: "unit" }, tile.unit) : null),
        tile.note ? make("div", { class: "note" }, tile.note) : null))));

  Relaxion.table = (part) => {
    const kind = (i) => `${part.columns[i].text || i === 0 ? "text" : ""} ${part.columns[i].long ? "long" : ""}`.trim();
    const head = make("tr", {}, ...part.columns.map((column, i) => make("th", { scope: "col", class: kind(i) }, column.label)));
    const rows = part.rows.map((row) => make("tr", { class: row.best ? "best" : row.tone ?? "" }, ...row.cells.map((cell, i) =>
      i === 0 ? make("th", { scope: "row", class: kind(i) }, make("span", {}, cell))
        : make("td", { class: kind(i) }, ...(part.columns[i].long ? Relaxion.words(cell, /(\S+)/) : [cell])))));
    const table = make("table", {}, make("caption", {}, make("span", {}, part.caption)), make("thead", {}, head), make("tbody", {}, ...rows));
    return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": part.caption }, table);
  };

  parts.table = (part) => {
    const table = Relaxion.table(part);
    return make("div", {}, part.search ? search(table, part) : null, table, part.note ? make("p", { class: "small" }, part.note) : null);
  };

  // shows only the rows that contain all words
  function search(table, part) {
    const rows = [...table.querySelectorAll("tbody tr")];
    const texts = rows.map((row) => [...row.children].map((cell) => cell.textContent).join(" ").toLowerCase());
    const found = make("span", { class: "small", role: "status" });
    const box = make("input", { type: "search", placeholder: part.search, "aria-label": `Search: ${part.caption}` });
    box.addEventListener("input", () => {
      const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
      const shown = texts.map((text) => words.every((word) => text.includes(word)));
      rows.forEach((row, k) => { row.hidden = !shown[k]; });
      found.textContent = words.length ? `${shown.filter(Boolean).length} of ${rows.length}` : "";
    });
    return make("p", { class: "search" }, box, found);
  }

  // the numbers of a plot for those who do not see the curve; built when asked for
  Relaxion.numbers = (part) => {
    const details = make("details", {}, make("summary", {}, `${part().title}: the numbers`));
    const fill = () => {
      details.querySelector(".scroll")?.remove();
      if (details.open) details.append(Relaxion.table(part().table ?? tableOf(part())));
    };
    details.addEventListener("toggle", () => { if (details.open && !details.querySelector("table")) fill(); });
    details.renew = () => { if (!details.contains(document.activeElement)) fill(); };
    return details;
  };

  function tableOf(part) {
    const columns = part.series.map((series) => new Map(series.x.map((x, k) => [x, series.y[k]])));
    const every = [...new Set(part.series.flatMap((series) => series.x))].sort((a, b) => a - b);
    return {
      caption: `${part.title}, ${part.y_label}`,
      columns: [{ label: part.x_label }, ...part.series.map((series) => ({ label: series.name }))],
      rows: every.map((x) => ({ cells: [Relaxion.whole(x), ...columns.map((column) => Relaxion.number(column.get(x), 5))] })),
    };
  }

  parts.facts = (part) => make("dl", { class: "facts" }, ...part.facts.flatMap((fact) => [
    make("dt", {}, fact.label),
    make("dd", {}, ...(fact.code ? [code(fact.value, fact.label)] : Relaxion.words(fact.value))),
  ]));

  parts.notes = (part) => make("ul", { class: "notes" }, ...part.notes.map((note) => make("li", {}, ...Relaxion.words(note))));

  // text to be copied; a line ends between two words of it, never at the dashes of an option
  function code(text, label) {
    const block = make("pre", {}, make("code", {}, ...Relaxion.words(text, /(\S+)/)));
    const button = make("button", { type: "button", "aria-label": `Copy: ${label}` }, "Copy");
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(block); // no clipboard here: then it is at least selected
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    return make("div", { class: "code" }, block, button);
  }
})();
