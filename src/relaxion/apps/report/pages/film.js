// Structures in 3D, one or several side by side, with one play bar over the force calls.
"use strict";
(() => {
  const { make, colour } = Relaxion;
  const SMOOTH_ATOMS = 400; // above, frames follow each other without motion between them
  const MOST_ARROWS = 250; // per frame and kind: the longest ones
  const FACTORS = [1, 2, 5, 10, 20, 50, 100, 200, 500];
  const LARGEST_FIT = 50; // by itself no arrow is drawn longer than so many times
  const LONGEST_ARROW = 2.2; // Å as drawn, where arrows are drawn to fit
  const SHORTEST_ARROW = 0.08; // Å as drawn
  const DEGREES_PER_SECOND = 14;

  // between this colour and that of the ground: 3Dmol draws no single atoms translucent
  const pale = (shade) => {
    const ground = colour("stage");
    const channel = (k) => Math.round(0.35 * parseInt(shade.slice(k, k + 2), 16) + 0.65 * parseInt(ground.slice(k, k + 2), 16));
    return `#${[1, 3, 5].map((k) => channel(k).toString(16).padStart(2, "0")).join("")}`;
  };

  // ---- data: lengths come as whole thousandths of an Å; later frames as differences from the first
  class Film {
    constructor(plain) {
      Object.assign(this, plain);
      this.count = plain.species.length;
      this.start = plain.start.map((value) => value / 1000);
      this.frames = plain.shifts.map((shift) => shift.map((value, i) => this.start[i] + value / 1000));
      this.moving = this.count <= SMOOTH_ATOMS;
    }

    // nothing moves and nothing was counted: a structure to look at
    get still() { return this.frames.length === 1 && !this.readings[0]; }

    // the atoms and corners of the cell that have to be in the picture
    outline(indices) {
      const corners = (cell) => [0, 1, 2, 3, 4, 5, 6, 7].map((k) => [0, 1, 2].map((axis) => (
        (k & 1) * cell[axis] + ((k >> 1) & 1) * cell[3 + axis] + (k >> 2) * cell[6 + axis])));
      return indices.flatMap((index) => [
        ...this.species.map((_, i) => this.frames[index].slice(3 * i, 3 * i + 3)),
        ...(this.cells === null ? [] : corners(this.cell(index)))]);
    }

    // index of the last frame at or before a force call
    at(position) {
      let index = 0;
      while (index + 1 < this.calls.length && this.calls[index + 1] <= position + 1e-9) index += 1;
      return index;
    }

    // positions between two frames
    positions(position) {
      const index = this.at(position);
      const next = Math.min(index + 1, this.frames.length - 1);
      if (!this.moving || next === index) return this.frames[index];
      const share = Math.min(1, (position - this.calls[index]) / (this.calls[next] - this.calls[index]));
      const eased = share * share * (3 - 2 * share);
      if (eased === 0) return this.frames[index];
      return this.frames[index].map((value, i) => value + eased * (this.frames[next][i] - value));
    }

    cell(index) {
      return this.cells === null ? null : this.cells[this.cells.length === 1 ? 0 : index];
    }

    // the move from here to the next frame: where it begins, what was executed, what had been proposed
    move(index) {
      const next = index + 1;
      if (next >= this.frames.length || !this.bases) return null;
      const base = this.calls.indexOf(this.bases[next]);
      if (base < 0) return null;
      const from = this.frames[base];
      const executed = this.frames[next].map((value, i) => value - from[i]);
      const proposed = this.proposed && this.proposed[next] ? this.proposed[next].map((value) => value / 1000) : null;
      return { from, executed, proposed };
    }

    // the longest displacement of the next move, Å; proposals count by a third, they may leave the picture
    longest(position) {
      const move = this.move(this.at(position));
      let found = 0;
      for (const [rows, share] of move ? [[move.executed, 1], [move.proposed ?? [], 1 / 3]] : []) {
        for (let i = 0; i < rows.length; i += 3) found = Math.max(found, share * Math.hypot(rows[i], rows[i + 1], rows[i + 2]));
      }
      return found;
    }
  }

  // ---- one view of one film
  class View {
    constructor(film, stage, ball) {
      this.film = film;
      this.viewer = $3Dmol.createViewer(stage, { backgroundColor: colour("stage"), antialias: true, disableFog: true });
      this.model = this.viewer.addModel();
      this.model.addAtoms(film.species.map((kind, i) => ({
        elem: film.symbols[kind], serial: i, index: i, bonds: [], bondOrder: [],
        x: film.start[3 * i], y: film.start[3 * i + 1], z: film.start[3 * i + 2],
      })));
      this.atoms = this.model.selectedAtoms({});
      this.arrows = [];
      this.box = null;
      this.quietly(() => {
        this.dress();
        this.frame(0);
        this.viewer.zoomTo();
        this.fit(ball);
        this.viewer.rotate(-90, "vx"); // c points up
        this.viewer.rotate(-28, "vy");
        this.viewer.rotate(14, "vx");
      });
    }

    // from so far away that the ball fills the picture, however it turns
    fit({ centre, radius, narrowest }) {
      const half = Math.atan(narrowest * Math.tan((Math.PI * this.viewer.fov) / 360));
      const away = (1.04 * radius) / Math.sin(half);
      this.viewer.setView([...centre.map((value) => -value), this.viewer.CAMERA_Z - away, 0, 0, 0, 1]);
    }

    // 3Dmol draws after every change of the view; where several follow each other only the last needs to be seen
    quietly(changes) {
      const { viewer } = this;
      viewer.show = () => viewer;
      try { changes(); } finally { delete viewer.show; }
    }

    // colours of the theme, sizes of the elements
    dress() {
      this.viewer.setBackgroundColor(colour("stage"));
      if (this.film.moving) this.viewer.setViewStyle({ style: "outline", color: colour("outline"), width: 0.02 });
      this.restyle();
      this.box = null;
    }

    restyle() {
      this.film.symbols.forEach((symbol, kind) => {
        const sphere = { radius: this.film.radii[kind], color: this.film.colours[kind] };
        const style = this.film.sticks ? { sphere, stick: { radius: 0.12, color: "#9aa5b1" } } : { sphere };
        this.model.setStyle({ elem: symbol }, style);
        if (this.film.fixed?.length) {
          this.model.setStyle({ elem: symbol, index: this.film.fixed }, { ...style, sphere: { ...sphere, color: pale(sphere.color) } });
        }
      });
    }

    place(positions) {
      this.atoms.forEach((atom, i) => {
        atom.x = positions[3 * i];
        atom.y = positions[3 * i + 1];
        atom.z = positions[3 * i + 2];
      });
      if (this.film.sticks) this.bond(positions);
      this.restyle();
    }

    // small structures without a cell: whatever is near enough is joined by a stick
    bond(positions) {
      const radii = this.film.bond_radii;
      this.atoms.forEach((atom) => { atom.bonds = []; atom.bondOrder = []; });
      for (let i = 0; i < this.film.count; i += 1) {
        for (let j = i + 1; j < this.film.count; j += 1) {
          const reach = 1.2 * (radii[this.film.species[i]] + radii[this.film.species[j]]);
          const far = Math.hypot(positions[3 * i] - positions[3 * j], positions[3 * i + 1] - positions[3 * j + 1],
            positions[3 * i + 2] - positions[3 * j + 2]);
          if (far < reach) {
            this.atoms[i].bonds.push(j); this.atoms[i].bondOrder.push(1);
            this.atoms[j].bonds.push(i); this.atoms[j].bondOrder.push(1);
          }
        }
      }
    }

    drawCell(cell) {
      if (cell === null || cell === this.box?.cell) return;
      if (this.box) this.viewer.removeShape(this.box.shape);
      const corner = (a, b, c) => ({
        x: a * cell[0] + b * cell[3] + c * cell[6], y: a * cell[1] + b * cell[4] + c * cell[7], z: a * cell[2] + b * cell[5] + c * cell[8],
      });
      const shape = this.viewer.addShape({ color: colour("cell") });
      const far = corner(1, 1, 1);
      const radius = Math.min(0.06, 0.0035 * Math.hypot(far.x, far.y, far.z));
      for (const [u, v] of [[0, 0], [0, 1], [1, 0], [1, 1]]) {
        for (const [start, end] of [[corner(0, u, v), corner(1, u, v)], [corner(u, 0, v), corner(u, 1, v)], [corner(u, v, 0), corner(u, v, 1)]]) {
          shape.addCylinder({ start, end, radius, fromCap: 1, toCap: 1 });
        }
      }
      this.box = { cell, shape };
    }

    drawArrows(index, options) {
      this.arrows.forEach((shape) => this.viewer.removeShape(shape));
      this.arrows = [];
      const move = this.film.move(index);
      if (move === null) return;
      if (options.proposed && move.proposed) this.drawKind(move.from, move.proposed, "proposed", 0.055, options.times);
      if (options.executed) this.drawKind(move.from, move.executed, "executed", 0.085, options.times);
    }

    drawKind(from, rows, kind, radius, times) {
      const lengths = [];
      for (let i = 0; i < rows.length; i += 3) lengths.push([times * Math.hypot(rows[i], rows[i + 1], rows[i + 2]), i]);
      const drawn = lengths.filter(([length]) => length >= SHORTEST_ARROW).sort((a, b) => b[0] - a[0]).slice(0, MOST_ARROWS);
      if (drawn.length === 0) return;
      const shape = this.viewer.addShape({ color: colour(kind) });
      for (const [length, i] of drawn) {
        // from the surface of the atom: inside nobody would see it
        const out = (0.92 * this.film.radii[this.film.species[i / 3]] * times) / length;
        const at = (share) => ({ x: from[i] + share * rows[i], y: from[i + 1] + share * rows[i + 1], z: from[i + 2] + share * rows[i + 2] });
        shape.addArrow({ start: at(out), end: at(out + times), radius, radiusRatio: 2.4, mid: Math.max(0.3, 1 - 0.4 / length) });
      }
      this.arrows.push(shape);
    }

    frame(position, options = null) {
      const index = this.film.at(position);
      this.place(this.film.positions(position));
      this.drawCell(this.film.cell(index));
      const wanted = options && `${index} ${options.executed} ${options.proposed} ${options.times}`;
      if (wanted !== this.drawn) {
        this.drawn = wanted;
        if (options) this.drawArrows(index, options);
      }
      this.viewer.render();
    }
  }

  // ---- the part
  Relaxion.parts.film = (part, page) => {
    const films = part.films.map((plain) => new Film(plain));
    const clock = page.clock;
    const root = make("div", { class: films.length > 1 ? "stack several" : "stack" });
    const row = make("div", { class: "films" });
    const frames = films.map((film) => filmFrame(film, films.length > 1));
    row.append(...frames.map((frame) => frame.figure));
    const bar = playBar(clock);
    const tools = toolBar(films);
    root.append(row, bar.element, tools.element, ...(part.notes ?? []).map((note) => make("p", { class: "small" }, note)));

    page.whenShown(() => {
      frames.forEach((frame) => caption(frame, clock.call)); // first: pictures are as high as captions let them
      const ball = ballAround(frames, part.at_end);
      const views = frames.map((frame) => openView(frame, ball));
      const shown = views.filter((view) => view !== null);
      linkViews(shown);
      connect(page, clock, films, frames, views, bar, tools);
      if (part.at_end) clock.go(clock.last);
      else if (!Relaxion.still() && clock.last > 1) clock.play();
    });
    return root;
  };

  function filmFrame(film, named) {
    const calls = make("span", { class: "calls" });
    const state = make("span", { class: "state" });
    const heading = named ? make("h3", {}, film.name) : make("span", { class: "hidden" }, film.name);
    const stage = make("div", {
      class: "stage", tabindex: 0, role: "group", "aria-roledescription": "3D view",
      "aria-label": `${film.name}: ${film.description}. Arrow keys rotate it, plus and minus zoom, space plays or pauses.`,
    });
    const figure = make("figure", { class: "film" }, make("figcaption", {}, heading, calls, state), stage);
    return { film, figure, stage, calls, state };
  }

  // the same for all films, as one is turned with the others
  function ballAround(frames, atEnd) {
    const films = frames.map((frame) => frame.film);
    const narrowest = Math.min(1, ...frames.map(({ stage }) => stage.clientWidth / stage.clientHeight));
    const points = films.flatMap((film) => film.outline(atEnd ? [film.frames.length - 1] : [0, film.frames.length - 1]));
    const centre = [0, 1, 2].map((axis) => {
      const [low, high] = points.reduce(([a, b], point) => [Math.min(a, point[axis]), Math.max(b, point[axis])], [Infinity, -Infinity]);
      return (low + high) / 2;
    });
    const reach = points.reduce((most, point) => Math.max(most, Math.hypot(...point.map((value, axis) => value - centre[axis]))), 0);
    return { centre, narrowest, radius: reach + Math.max(...films.flatMap((film) => film.radii)) };
  }

  function openView(frame, ball) {
    try {
      const view = new View(frame.film, frame.stage, ball);
      frame.stage.querySelector("canvas")?.setAttribute("aria-hidden", "true");
      return view;
    } catch (error) {
      frame.stage.append(make("p", { class: "absent" },
        "This browser offers no WebGL, so the structure cannot be drawn. Plots and tables are complete."));
      frame.stage.dataset.absent = String(error);
      return null;
    }
  }

  // turning one film turns all
  function linkViews(views) {
    let linking = false;
    for (const view of views) {
      view.viewer.setViewChangeCallback((seen) => {
        if (linking) return;
        linking = true;
        for (const other of views) if (other !== view) other.viewer.setView(seen);
        linking = false;
      });
    }
  }

  function playBar(clock) {
    const play = make("button", { type: "button", class: "main" }, "Play");
    const back = make("button", { type: "button", class: "icon", "aria-label": "One force call back" }, "◀");
    const forth = make("button", { type: "button", class: "icon", "aria-label": "One force call on" }, "▶");
    const slider = make("input", { type: "range", min: 1, max: clock.last, step: 1, value: 1, "aria-label": "Force call" });
    const shown = make("output", { "aria-live": "off" });
    play.addEventListener("click", () => (clock.playing ? clock.pause() : clock.play()));
    back.addEventListener("click", () => clock.step(-1));
    forth.addEventListener("click", () => clock.step(1));
    slider.addEventListener("input", () => { clock.pause(); clock.go(Number(slider.value)); });
    clock.follow(() => {
      play.textContent = clock.playing ? "Pause" : clock.position >= clock.last && clock.last > 1 ? "Replay" : "Play";
      slider.value = String(clock.call);
      shown.textContent = `call ${clock.call} of ${clock.last}`;
      slider.setAttribute("aria-valuetext", shown.textContent);
      back.disabled = clock.position <= 1;
      forth.disabled = clock.position >= clock.last;
    });
    const element = make("div", { class: "bar", role: "group", "aria-label": "Playing the relaxation" }, play, back, forth, slider, shown);
    return { element, slider };
  }

  function toolBar(films) {
    const turn = make("button", { type: "button", "aria-pressed": Relaxion.still() ? "false" : "true" }, "Rotate");
    const moves = films.some((film) => film.bases);
    const proposals = films.some((film) => film.proposed && film.proposed.some((rows) => rows));
    const times = make("select", { "aria-label": "How much longer arrows are drawn" },
      make("option", { value: "auto" }, "to fit"), ...FACTORS.map((factor) => make("option", { value: factor }, `×${factor}`)));
    const factor = make("span", {});
    const box = (kind, words) => {
      const input = make("input", { type: "checkbox", checked: true });
      const mark = make("span", { class: "arrow", "aria-hidden": "true" });
      mark.style.background = `var(--${kind})`;
      return { input, label: make("label", {}, input, mark, words) };
    };
    const executed = box("executed", "next move");
    const proposed = box("proposed", "as proposed");
    const kinds = [...new Map(films.flatMap((film) => film.symbols.map((symbol, kind) => [symbol, film.colours[kind]]))).entries()];
    const legend = kinds.map(([symbol, shade]) => {
      const dot = make("span", { class: "swatch", "aria-hidden": "true" });
      dot.style.background = shade;
      return make("span", { class: "key" }, dot, symbol);
    });
    const element = make("div", { class: "tools" }, turn, moves ? executed.label : null, proposals ? proposed.label : null,
      moves ? make("label", {}, "drawn", times, factor) : null, make("span", { class: "legend" }, ...legend));
    return { element, turn, executed: executed.input, proposed: proposed.input, times, factor };
  }

  function connect(page, clock, films, frames, views, bar, tools) {
    const shown = views.filter((view) => view !== null);
    const scale = () => {
      if (tools.times.value !== "auto") return Number(tools.times.value);
      const longest = Math.max(...films.map((film) => film.longest(clock.position)));
      return [...FACTORS].reverse().find((factor) => factor <= LARGEST_FIT && factor * longest <= LONGEST_ARROW) ?? 1;
    };
    const draw = () => {
      const options = { executed: tools.executed.checked, proposed: tools.proposed.checked, times: scale() };
      tools.factor.textContent = `×${options.times}`;
      views.forEach((view) => view?.frame(clock.position, options));
      frames.forEach((frame) => caption(frame, clock.call));
    };
    clock.follow(draw);
    for (const input of [tools.executed, tools.proposed, tools.times]) input.addEventListener("change", draw);
    page.whenThemed(() => { shown.forEach((view) => { view.dress(); view.drawn = undefined; }); draw(); });

    const turning = () => tools.turn.getAttribute("aria-pressed") === "true";
    const setTurning = (on) => { tools.turn.setAttribute("aria-pressed", String(on)); page.wake(); };
    tools.turn.addEventListener("click", () => setTurning(!turning()));
    page.whenever(() => turning() && shown.length > 0, (seconds) => shown[0].viewer.rotate(DEGREES_PER_SECOND * seconds, "z"));

    frames.forEach((frame, i) => listen(frame, views[i], clock, () => setTurning(false)));
  }

  function caption(frame, call) {
    const { film } = frame;
    const index = film.at(call);
    const over = film.still || call >= film.end_call;
    const words = over ? film.end : film.readings?.[index] ?? "";
    const count = Math.min(call, film.end_call);
    frame.calls.replaceChildren(...(film.still ? [] : [make("b", {}, count), count === 1 ? " force call" : " force calls"]));
    if (frame.state.textContent !== words) frame.state.textContent = words;
    frame.state.className = `state${over ? (film.converged ? " done" : " failed") : ""}`;
    frame.figure.classList.toggle("winner", over && film.winner === true);
  }

  function listen(frame, view, clock, stopTurning) {
    // the wheel belongs to the page unless the reader means the film
    frame.stage.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && document.activeElement !== frame.stage) event.stopPropagation();
    }, { capture: true });
    for (const kind of ["mousedown", "touchstart"]) {
      frame.stage.addEventListener(kind, stopTurning, { capture: true, passive: true });
    }
    frame.stage.addEventListener("keydown", (event) => {
      const turns = { ArrowLeft: [-10, "vy"], ArrowRight: [10, "vy"], ArrowUp: [-10, "vx"], ArrowDown: [10, "vx"] };
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === " ") clock.playing ? clock.pause() : clock.play();
      else if (view && turns[event.key]) { stopTurning(); view.viewer.rotate(...turns[event.key]); }
      else if (view && (event.key === "+" || event.key === "-")) view.viewer.zoom(event.key === "+" ? 1.15 : 1 / 1.15);
      else return;
      event.preventDefault();
    });
  }
})();
