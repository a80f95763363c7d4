// Lines, stairs and dots, drawn by uPlot: lines to compare with, a readout under the mouse, a mark that follows the clock.
"use strict";
(() => {
  const { make, svg, colour, number, whole } = Relaxion;
  const DASHES = [[], [7, 4], [2, 4], [10, 3, 2, 3], [5, 2], [1, 3]];
  const CORNERS = [24, 4, 3]; // of dots: a shape per series, for those who see no colours
  const MOST_DOTS = 80; // of a line: more would hide it

  Relaxion.parts.plot = (part, page) => {
    const drawing = make("div", { class: "plot", role: "img" });
    const legend = make("ul", { class: "legend" });
    const mark = make("div", { class: "mark" });
    let shown = part, plot = null;
    const follow = () => { if (plot?.scales.x.max && page.clock) mark.style.left = `${plot.valToPos(Math.min(page.clock.position, plot.scales.x.max), "x")}px`; };
    const draw = () => {
      const lines = linesOf(shown), { clientWidth: width, clientHeight: height } = drawing, mouse = plot?.cursor;
      const entries = lines.filter((line) => line.limit || (line.name && shown.series.length > 1)).reverse();
      legend.replaceChildren(...entries.map(legendEntry));
      legend.hidden = entries.length === 0;
      drawing.setAttribute("aria-label", `${shown.title}: ${shown.summary}`);
      if (width < 40 || height < 40) return;
      plot?.destroy();
      plot = new uPlot({ width, height, ...optionsOf(shown, lines, follow) }, columnsOf(lines), drawing);
      if (page.clock) plot.over.append(mark);
      if (shown.series.every((series) => series.x.length === 0)) plot.over.append(make("p", { class: "absent" }, shown.empty ?? "nothing yet"));
      if (mouse?.left >= 0) plot.setCursor({ left: mouse.left, top: mouse.top });
    };
    drawing.addEventListener("click", (event) => { // shows that force call
      if (!plot || !page.clock) return;
      page.clock.pause();
      page.clock.go(Math.round(plot.posToVal(event.clientX - plot.over.getBoundingClientRect().left, "x")));
    });
    page.clock?.follow(follow);
    page.whenThemed(draw);
    new ResizeObserver(draw).observe(drawing);
    const table = Relaxion.numbers(() => shown);
    const root = make("div", { class: "stack" }, legend, drawing, part.note ? make("p", { class: "small" }, part.note) : null, table);
    root.update = (newer) => { shown = newer; draw(); table.renew(); };
    return root;
  };

  const rangeOf = (part) => part.x_range ?? [1, Math.max(2, ...part.series.flatMap((series) => series.x))];

  // all that is drawn, the first series last so that it lies on top; rejected points are hollow dots over their line
  function linesOf(part) {
    const usable = (y) => (Number.isFinite(y) && (!part.log || y > 0) ? y : null);
    const series = part.series.map((one, i) => ({ style: i, ...one, y: one.y.map(usable) }))
      .map((one) => ({ ...one, hue: `s${one.style % 6}`, dash: DASHES[one.style % 6], width: one.style === 0 ? 2.5 : 1.75 }));
    const hollow = series.filter((one) => one.open?.includes(true)).map((one) => (
      { ...one, name: "", mode: "hollow", x: one.x.filter((_, k) => one.open[k]), y: one.y.filter((_, k) => one.open[k]) }));
    const across = (y, look) => ({ mode: "line", width: 1.5, x: rangeOf(part), y, ...look });
    const limits = (part.limits ?? []).map(({ value, label, style }) => across([value, value], {
      name: label, limit: true, hue: style === undefined ? "good" : "text", dash: style === undefined ? [5, 4] : DASHES[style % 6] }));
    const diagonal = part.diagonal ? [across(part.y_range, { hue: "muted", dash: [3, 3], width: 1 })] : [];
    return [...diagonal, ...limits.reverse(), ...series.reverse(), ...hollow];
  }

  // one column of x for all lines; of dots several may share an x, so that each has a row of its own
  function columnsOf(lines) {
    if (!lines.some((line) => line.mode === "dots")) return uPlot.join(lines.map((line) => [line.x, line.y]));
    const dots = lines.flatMap((line, column) => line.x.map((x, k) => [x, column, line.y[k]])).sort((a, b) => a[0] - b[0]);
    return [dots.map(([x]) => x), ...lines.map((_, column) => dots.map(([, own, y]) => (own === column ? y : undefined)))];
  }

  function optionsOf(part, lines, follow) {
    const font = `12px ${getComputedStyle(document.body).fontFamily}`, stroke = () => colour("muted"), [first, last] = rangeOf(part);
    const axis = (label, log, more) => ({
      label, font, labelFont: font, labelSize: 18, labelGap: 0, stroke, border: { show: true, stroke, width: 1 },
      values: (_, splits, index, space, step) => splits.map((value) => (log ? number(value) : whole(value, step))),
      ...(log ? { splits: (plot, index, low, high) => decades(low, high, log), filter: (_, splits) => splits } : {}), ...more,
    });
    const below = { size: 26, space: part.x_parts ? 80 : last > 9999 ? 70 : 46, grid: { show: false }, ticks: { stroke, width: 1, size: 4 } };
    const wholes = [...Array(13).keys()].flatMap((power) => [1, 2, 5].map((times) => times * 10 ** power));
    const range = (_, low, high) => part.y_range ?? (low === null ? [0.1, 1] : part.log ? [low / 1.25, high * 1.25] : uPlot.rangeNum(low, high, 0.1, true));
    return {
      legend: { show: false }, padding: [10, 14, 0, 0],
      scales: { x: { time: false, distr: part.x_log ? 3 : 1, range: () => [first, last] }, y: { distr: part.log ? 3 : 1, range } },
      axes: [axis(part.x_label, part.x_log, part.x_parts ? below : { ...below, incrs: wholes }),
        axis(part.y_label, part.log, { size: widthOf, space: 26, ticks: { show: false }, grid: { stroke: () => colour("line"), width: 1 } })],
      series: [{}, ...lines.map(seriesOf)],
      cursor: {
        show: !lines.some((line) => line.mode === "dots"), y: false, drag: { x: false, y: false, setScale: false },
        dataIdx: (plot, column, row) => (plot.data[column][row] === undefined ? null : row),
      },
      hooks: { draw: [follow], setCursor: [(plot) => readout(plot, part, lines)] },
    };
  }

  // of the marks of an axis, so that none lies over its label
  const widthOf = (_, marks) => Math.max(54, 14 + 7.2 * Math.max(0, ...(marks ?? []).map((mark) => mark.length)));

  // powers of ten, with 2 and 5 between them where there is little else; or those of a list
  function decades(low, high, list) {
    const times = Math.log10(high / low) < 2.5 ? [1, 2, 5] : [1];
    const powers = [...Array(41).keys()].flatMap((power) => times.map((digit) => Number(`${digit}e${power - 20}`)));
    return (Array.isArray(list) ? list : powers).filter((value) => value >= low * 0.999999 && value <= high * 1.000001);
  }

  function seriesOf(line) {
    const stroke = () => colour(line.hue), dots = line.mode === "dots", hollow = line.mode === "hollow";
    const fill = () => (hollow ? colour("card") : stroke() + (dots ? "8c" : "")); // dots shine through each other
    const points = { show: dots || hollow || (!line.mode && line.x.length <= MOST_DOTS), size: line.style === 0 ? 8 : 5.5, width: dots ? 1 : 1.5, stroke, fill };
    const paths = dots || hollow ? () => null : line.mode === "stairs" ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.linear();
    return { stroke, width: line.width, dash: line.dash, paths, points: dots ? { ...points, paths: shapes(CORNERS[line.style % 3]) } : points };
  }

  const shapes = (corners) => (plot, column) => {
    const path = new Path2D(), radius = 4 * devicePixelRatio;
    plot.data[column].forEach((value, row) => {
      if (value === null || value === undefined) return;
      const x = plot.valToPos(plot.data[0][row], "x", true), y = plot.valToPos(value, "y", true);
      for (let corner = 0; corner < corners; corner += 1) {
        const angle = (2 * Math.PI * (corner + (corners === 4 ? 0.5 : 0))) / corners;
        path[corner ? "lineTo" : "moveTo"](x + radius * Math.sin(angle), y - radius * Math.cos(angle));
      }
      path.closePath();
    });
    return { fill: path, stroke: path, flags: 3 };
  };

  function readout(plot, part, lines) {
    const { idx, left } = plot.cursor, width = plot.over.clientWidth;
    const box = plot.over.querySelector(".readout") ?? plot.over.appendChild(make("div", { class: "readout" }));
    const values = lines.map((line, i) => (line.name && !line.limit && idx !== null ? plot.data[i + 1][idx] : undefined));
    const words = lines.map((line, i) => `${line.name} ${number(values[i])}`).filter((_, i) => values[i] !== undefined).reverse();
    box.hidden = words.length === 0;
    box.style.cssText = left > width / 2 ? `right:${width - left + 10}px` : `left:${left + 10}px`;
    if (!box.hidden) box.replaceChildren(...[`${part.x_label} ${whole(plot.data[0][idx])}`, ...words].map((line) => make("div", {}, line)));
  }

  function legendEntry(line) {
    const sample = svg("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" });
    const look = `stroke:var(--${line.hue});stroke-width:${line.width};stroke-dasharray:${line.dash.join(" ") || "none"}`;
    if (line.mode === "dots") sample.append(svg("text", { x: 8, y: 10, style: `fill:var(--${line.hue})` }, "●■▲"[line.style % 3]));
    else sample.append(svg("line", { x1: 1, x2: 25, y1: 5, y2: 5, style: look }));
    return make("li", {}, sample, line.name);
  }
})();
