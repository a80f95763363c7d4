// A plot in SVG: lines, stairs or dots, linear or logarithmic, lines to compare with, a cursor that follows the clock.
"use strict";
(() => {
  const { make, svg, number } = Relaxion;
  const DASHES = ["", "7 4", "2 4", "10 3 2 3", "5 2", "1 3"];
  const EDGE = { left: 68, right: 14, top: 10, bottom: 40 };
  const MOST_DOTS = 80; // of a line: more would hide it

  Relaxion.parts.plot = (part, page) => {
    const drawing = make("div", { class: "plot" });
    const legend = make("ul", { class: "legend" });
    const plot = new Plot(part, drawing, page);
    const label = (shown) => {
      const entries = [...(shown.series.length > 1 ? shown.series.map(legendEntry) : []), ...(shown.limits ?? []).map(limitEntry)];
      legend.replaceChildren(...entries);
      legend.hidden = entries.length === 0;
    };
    label(part);
    new ResizeObserver(() => plot.draw()).observe(drawing);
    const table = numbers(() => plot.part);
    const root = make("div", {}, legend, drawing, part.note ? make("p", { class: "small" }, part.note) : null, table);
    root.style.cssText = "display:flex;flex-direction:column;flex:1;min-width:0";
    root.update = (newer) => {
      plot.part = newer;
      label(newer);
      plot.draw();
      table.renew();
    };
    return root;
  };

  function legendEntry(series, i) {
    const sample = svg("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" });
    if (series.mode === "dots") sample.append(mark(13, 5, series.style ?? i));
    else sample.append(svg("line", { x1: 1, x2: 25, y1: 5, y2: 5, style: stroke(series.style ?? i) }));
    return make("li", {}, sample, series.name);
  }

  function limitEntry(limit) {
    const sample = svg("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" });
    sample.append(svg("line", { ...limitLook(limit), x1: 1, x2: 25, y1: 5, y2: 5 }));
    return make("li", {}, sample, limit.label);
  }

  const limitLook = (limit) => (limit.style === undefined ? { class: "limit" } : { class: "reference", style: `stroke-dasharray:${DASHES[limit.style % 6]}` });
  const stroke = (i) => `stroke:var(--s${i % 6});stroke-width:${i === 0 ? 2.5 : 1.75};stroke-dasharray:${DASHES[i % 6] || "none"}`;

  // one shape per series, for those who see no colours
  function mark(x, y, i) {
    const style = `fill:var(--s${i % 6});fill-opacity:0.55;stroke:var(--s${i % 6});stroke-width:1`;
    const shapes = [
      () => svg("circle", { cx: x, cy: y, r: 3.6, style }),
      () => svg("rect", { x: x - 3, y: y - 3, width: 6, height: 6, style }),
      () => svg("path", { d: `M${x} ${y - 4}L${x + 4} ${y + 3}L${x - 4} ${y + 3}Z`, style }),
    ];
    return shapes[i % 3]();
  }

  // the same numbers for those who do not see the curve; built when asked for
  function numbers(part) {
    const details = make("details", {}, make("summary", {}, `${part().title}: the numbers`));
    const fill = () => {
      details.querySelector(".scroll")?.remove();
      if (details.open) details.append(Relaxion.table(part().table ?? tableOf(part())));
    };
    details.addEventListener("toggle", () => { if (details.open && !details.querySelector("table")) fill(); });
    details.renew = () => { if (!details.contains(document.activeElement)) fill(); };
    return details;
  }

  function tableOf(part) {
    const places = part.series.map((series) => new Map(series.x.map((x, k) => [x, k])));
    const calls = [...new Set(part.series.flatMap((series) => series.x))].sort((a, b) => a - b);
    return {
      caption: `${part.title}, ${part.y_label}`,
      columns: [{ label: part.x_label }, ...part.series.map((series) => ({ label: series.name }))],
      rows: calls.map((call) => ({
        cells: [whole(call), ...part.series.map((series, i) => number(series.y[places[i].get(call)], 5))],
      })),
    };
  }

  // 20 000 with a thin space; others as they are read
  const whole = (value) => (Number.isInteger(value) ? String(value).replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f") : number(value, 3));

  class Plot {
    constructor(part, drawing, page) {
      this.part = part;
      this.drawing = drawing;
      this.page = page;
      page.clock?.follow(() => this.point());
      drawing.addEventListener("click", (event) => this.jump(event));
    }

    scale() {
      const { part } = this;
      const finite = (value) => value !== null && Number.isFinite(value);
      const usable = (value) => finite(value) && (!part.log || value > 0);
      const map = part.log ? Math.log10 : (value) => value;
      const across = part.x_log ? Math.log10 : (value) => value;
      const values = [...part.series.flatMap((series) => series.y), ...(part.limits ?? []).map((limit) => limit.value)].filter(usable);
      const [low, high] = part.y_range ? part.y_range.map(map) : widened(values.map(map));
      const steps = part.series.flatMap((series) => series.x).filter((x) => finite(x) && (!part.x_log || x > 0));
      const first = part.x_range?.[0] ?? 1;
      const last = part.x_range?.[1] ?? Math.max(first + 1, ...steps);
      const width = this.drawing.clientWidth, height = this.drawing.clientHeight;
      const x = (value) => EDGE.left + ((across(value) - across(first)) / (across(last) - across(first))) * (width - EDGE.left - EDGE.right);
      const y = (value) => EDGE.top + (1 - (map(value) - low) / (high - low)) * (height - EDGE.top - EDGE.bottom);
      return { low, high, first, last, width, height, x, y, usable };
    }

    draw() {
      const scale = (this.seen = this.scale());
      if (scale.width < 40 || scale.height < 40) return;
      const { part } = this;
      const name = `${part.title}: ${part.summary}`;
      const picture = svg("svg", { role: "img", "aria-label": name, viewBox: `0 0 ${scale.width} ${scale.height}` });
      this.axes(picture, scale);
      if (part.diagonal) this.diagonal(picture, scale);
      for (const limit of part.limits ?? []) this.limit(picture, scale, limit);
      [...part.series.keys()].reverse().forEach((i) => this.series(picture, scale, part.series[i], part.series[i].style ?? i));
      this.cursor = svg("line", { class: "cursor", y1: EDGE.top, y2: scale.height - EDGE.bottom });
      if (this.page.clock) picture.append(this.cursor);
      if (part.series.every((series) => series.x.length === 0)) {
        picture.append(svg("text", { x: scale.width / 2, y: scale.height / 2 - 10, "text-anchor": "middle" }, part.empty ?? "nothing yet"));
      }
      this.drawing.replaceChildren(picture);
      this.point();
    }

    axes(picture, scale) {
      const bottom = scale.height - EDGE.bottom, right = scale.width - EDGE.right;
      for (const { value, label } of this.part.log ? decades(scale.low, scale.high) : ticks(scale.low, scale.high, 5)) {
        const y = scale.y(value);
        picture.append(svg("line", { class: "grid", x1: EDGE.left, x2: right, y1: y, y2: y }));
        picture.append(svg("text", { x: EDGE.left - 8, y: y + 4, "text-anchor": "end" }, label));
      }
      for (const { value, label } of this.below(scale)) {
        picture.append(svg("line", { class: "frame", x1: scale.x(value), x2: scale.x(value), y1: bottom, y2: bottom + 4 }));
        const last = scale.x(value) > right - 14; // its middle would leave the picture
        picture.append(svg("text", { x: last ? scale.width : scale.x(value), y: bottom + 17, "text-anchor": last ? "end" : "middle" }, label));
      }
      picture.append(svg("line", { class: "frame", x1: EDGE.left, x2: right, y1: bottom, y2: bottom }));
      picture.append(svg("text", { x: (EDGE.left + right) / 2, y: scale.height - 6, "text-anchor": "middle" }, this.part.x_label));
      const middle = (EDGE.top + bottom) / 2;
      picture.append(svg("text", { x: 13, y: middle, "text-anchor": "middle", transform: `rotate(-90 13 ${middle})` }, this.part.y_label));
    }

    below(scale) {
      if (this.part.x_log) return decades(Math.log10(scale.first), Math.log10(scale.last), this.part.x_log);
      const found = ticks(scale.first, scale.last, Math.max(2, Math.floor(scale.width / (scale.last > 9999 ? 110 : 80))));
      if (this.part.x_parts) return found;
      return found.filter(({ value }) => Number.isInteger(value) && value >= scale.first).map(({ value }) => ({ value, label: whole(value) }));
    }

    limit(picture, scale, limit) {
      const y = scale.y(limit.value), right = scale.width - EDGE.right;
      picture.append(svg("line", { ...limitLook(limit), x1: EDGE.left, x2: right, y1: y, y2: y }));
    }

    // where both axes say the same
    diagonal(picture, scale) {
      const back = (value) => (this.part.log ? 10 ** value : value);
      const from = Math.max(scale.first, back(scale.low)), to = Math.min(scale.last, back(scale.high));
      picture.append(svg("line", { class: "diagonal", x1: scale.x(from), y1: scale.y(from), x2: scale.x(to), y2: scale.y(to) }));
    }

    series(picture, scale, series, i) {
      if (series.mode === "dots") {
        series.x.forEach((x, k) => scale.usable(series.y[k]) && x !== null && picture.append(mark(scale.x(x), scale.y(series.y[k]), i)));
        return;
      }
      let path = "", pen = "M", before = null;
      series.x.forEach((x, k) => {
        if (!scale.usable(series.y[k])) { pen = "M"; return; }
        const height = scale.y(series.y[k]).toFixed(1);
        if (series.mode === "stairs" && pen === "L") path += `L${scale.x(x).toFixed(1)} ${before}`;
        path += `${pen}${scale.x(x).toFixed(1)} ${height}`;
        before = height;
        pen = "L";
      });
      picture.append(svg("path", { class: "series", d: path, style: stroke(i) }));
      if (series.x.length > MOST_DOTS || series.mode === "stairs") return;
      series.x.forEach((x, k) => {
        if (!scale.usable(series.y[k])) return;
        const open = series.open?.[k] === true;
        const dot = svg("circle", { cx: scale.x(x), cy: scale.y(series.y[k]), r: i === 0 ? 3.5 : 2.2, style: `fill:var(--s${i % 6});stroke:var(--s${i % 6});stroke-width:1.5` });
        if (open) dot.style.fill = "var(--card)";
        picture.append(dot);
      });
    }

    point() {
      if (!this.cursor || !this.page.clock) return;
      const x = this.seen.x(Math.min(this.page.clock.position, this.seen.last));
      this.cursor.setAttribute("x1", x);
      this.cursor.setAttribute("x2", x);
    }

    // a click in the plot shows that force call
    jump(event) {
      if (!this.seen || !this.page.clock) return;
      const { width, last } = this.seen;
      const x = event.clientX - this.drawing.getBoundingClientRect().left;
      this.page.clock.pause();
      this.page.clock.go(Math.round(1 + ((x - EDGE.left) / (width - EDGE.left - EDGE.right)) * (last - 1)));
    }
  }

  // the ends of the values, with some room
  function widened(values) {
    let low = Infinity, high = -Infinity;
    for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
    if (values.length === 0) [low, high] = [0, 1];
    const room = (high - low || 1) * 0.06;
    return [low - room, high + room];
  }

  // round numbers between two ends
  function ticks(low, high, wanted) {
    const rough = (high - low) / wanted;
    const size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((times) => times * size).find((candidate) => candidate >= rough);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k += 1) {
      found.push({ value: k * step, label: (k * step).toFixed(Math.min(digits, 8)).replace("-", "−") });
    }
    return found;
  }

  // powers of ten, with 2 and 5 between them where there is little else; `marks`: these and no others
  function decades(low, high, marks) {
    if (Array.isArray(marks)) {
      return marks.filter((value) => Math.log10(value) >= low - 1e-9 && Math.log10(value) <= high + 1e-9).map((value) => ({ value, label: number(value, 3) }));
    }
    const few = high - low < 2.5;
    const every = Math.max(1, Math.ceil((high - low) / 7));
    const found = [];
    for (let power = Math.floor(low); power <= Math.ceil(high); power += 1) {
      for (const times of few ? [1, 2, 5] : [1]) {
        const place = power + Math.log10(times);
        if (place < low || place > high || power % every !== 0) continue;
        found.push({ value: times * 10 ** power, label: number(times * 10 ** power, 1) });
      }
    }
    return found;
  }
})();
