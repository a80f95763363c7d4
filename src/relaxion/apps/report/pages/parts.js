// The plain parts: tiles, tables, the numbers of plots, facts, notes.
"use strict";
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
