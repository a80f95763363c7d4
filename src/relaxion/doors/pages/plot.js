// A line plot in SVG: linear or logarithmic, several series, lines to stay below, a cursor that follows the clock.
"use strict";
(() => {
  const { make, svg, number } = Relaxion;
  const DASHES = ["", "7 4", "2 4", "10 3 2 3", "5 2", "1 3"];
  const EDGE = { left: 62, right: 14, top: 10, bottom: 40 };

  Relaxion.parts.plot = (part, page) => {
    const drawing = make("div", { class: "plot" });
    const entries = [...(part.series.length > 1 ? part.series.map(legendEntry) : []), ...(part.limits ?? []).map(limitEntry)];
    const legend = entries.length > 0 ? make("ul", { class: "legend" }, ...entries) : null;
    const plot = new Plot(part, drawing, page);
    new ResizeObserver(() => plot.draw()).observe(drawing);
    const root = make("div", {}, legend, drawing, numbers(part));
    root.style.cssText = "display:flex;flex-direction:column;flex:1;min-width:0";
    return root;
  };

  function legendEntry(series, i) {
    const sample = svg("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" });
    sample.append(svg("line", { x1: 1, x2: 25, y1: 5, y2: 5, style: stroke(i) }));
    return make("li", {}, sample, series.name);
  }

  function limitEntry(limit) {
    const sample = svg("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" });
    sample.append(svg("line", { class: "limit", x1: 1, x2: 25, y1: 5, y2: 5 }));
    return make("li", {}, sample, limit.label);
  }

  const stroke = (i) => `stroke:var(--s${i % 6});stroke-width:${i === 0 ? 2.5 : 1.75};stroke-dasharray:${DASHES[i % 6] || "none"}`;

  // the same numbers for those who do not see the curve; built when asked for
  function numbers(part) {
    const details = make("details", {}, make("summary", {}, `${part.title}: the numbers`));
    details.addEventListener("toggle", () => {
      if (!details.open || details.querySelector("table")) return;
      const calls = [...new Set(part.series.flatMap((series) => series.x))].sort((a, b) => a - b);
      const rows = calls.map((call) => ({
        cells: [call, ...part.series.map((series) => number(series.y[series.x.indexOf(call)], 5))],
      }));
      details.append(Relaxion.table({
        caption: `${part.title}, ${part.y_label}`,
        columns: [{ label: part.x_label }, ...part.series.map((series) => ({ label: series.name }))],
        rows,
      }));
    });
    return details;
  }

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
      const usable = (value) => Number.isFinite(value) && value !== null && (!part.log || value > 0);
      const values = [...part.series.flatMap((series) => series.y), ...(part.limits ?? []).map((limit) => limit.value)].filter(usable);
      const map = part.log ? Math.log10 : (value) => value;
      let low = Math.min(...values.map(map)), high = Math.max(...values.map(map));
      if (values.length === 0) [low, high] = [0, 1];
      const room = (high - low || 1) * 0.06;
      const last = Math.max(2, ...part.series.flatMap((series) => series.x));
      const width = this.drawing.clientWidth, height = this.drawing.clientHeight;
      const x = (value) => EDGE.left + ((value - 1) / (last - 1)) * (width - EDGE.left - EDGE.right);
      const y = (value) => EDGE.top + (1 - (map(value) - low + room) / (high - low + 2 * room)) * (height - EDGE.top - EDGE.bottom);
      return { low: low - room, high: high + room, last, width, height, x, y, usable };
    }

    draw() {
      const scale = (this.seen = this.scale());
      if (scale.width < 40 || scale.height < 40) return;
      const { part } = this;
      const name = `${part.title}: ${part.summary}`;
      const picture = svg("svg", { role: "img", "aria-label": name, viewBox: `0 0 ${scale.width} ${scale.height}` });
      this.axes(picture, scale);
      for (const limit of part.limits ?? []) this.limit(picture, scale, limit);
      [...part.series.keys()].reverse().forEach((i) => this.series(picture, scale, part.series[i], i));
      this.cursor = svg("line", { class: "cursor", y1: EDGE.top, y2: scale.height - EDGE.bottom });
      if (this.page.clock) picture.append(this.cursor);
      this.drawing.replaceChildren(picture);
      this.point();
    }

    axes(picture, scale) {
      const bottom = scale.height - EDGE.bottom, right = scale.width - EDGE.right;
      for (const { value, label } of this.part.log ? decades(scale) : ticks(scale.low, scale.high, 5)) {
        const y = scale.y(value);
        picture.append(svg("line", { class: "grid", x1: EDGE.left, x2: right, y1: y, y2: y }));
        picture.append(svg("text", { x: EDGE.left - 8, y: y + 4, "text-anchor": "end" }, label));
      }
      const wholes = ticks(1, scale.last, Math.max(2, Math.floor(scale.width / 80))).filter(({ value }) => Number.isInteger(value) && value >= 1);
      for (const { value } of wholes) {
        picture.append(svg("line", { class: "frame", x1: scale.x(value), x2: scale.x(value), y1: bottom, y2: bottom + 4 }));
        picture.append(svg("text", { x: scale.x(value), y: bottom + 17, "text-anchor": "middle" }, value));
      }
      picture.append(svg("line", { class: "frame", x1: EDGE.left, x2: right, y1: bottom, y2: bottom }));
      picture.append(svg("text", { x: (EDGE.left + right) / 2, y: scale.height - 6, "text-anchor": "middle" }, this.part.x_label));
      const middle = (EDGE.top + bottom) / 2;
      picture.append(svg("text", { x: 13, y: middle, "text-anchor": "middle", transform: `rotate(-90 13 ${middle})` }, this.part.y_label));
    }

    limit(picture, scale, limit) {
      const y = scale.y(limit.value), right = scale.width - EDGE.right;
      picture.append(svg("line", { class: "limit", x1: EDGE.left, x2: right, y1: y, y2: y }));
    }

    series(picture, scale, series, i) {
      let path = "", pen = "M";
      series.x.forEach((x, k) => {
        if (!scale.usable(series.y[k])) { pen = "M"; return; }
        path += `${pen}${scale.x(x).toFixed(1)} ${scale.y(series.y[k]).toFixed(1)}`;
        pen = "L";
      });
      picture.append(svg("path", { class: "series", d: path, style: stroke(i) }));
      if (series.x.length > 80) return;
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

  // powers of ten, with 2 and 5 between them where there is little else
  function decades(scale) {
    const few = scale.high - scale.low < 2.5;
    const every = Math.max(1, Math.ceil((scale.high - scale.low) / 7));
    const found = [];
    for (let power = Math.floor(scale.low); power <= Math.ceil(scale.high); power += 1) {
      for (const times of few ? [1, 2, 5] : [1]) {
        const place = power + Math.log10(times);
        if (place < scale.low || place > scale.high || power % every !== 0) continue;
        found.push({ value: times * 10 ** power, label: number(times * 10 ** power, 1) });
      }
    }
    return found;
  }
})();
