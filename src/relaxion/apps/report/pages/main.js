// Reads the data of the page and builds its parts; runs the one animation loop.
"use strict";
(() => {
  const { make, parts } = Relaxion;

  // Which force call is shown. Films and plots of a page follow one clock, so that all go in step.
  class Clock {
    constructor(last) {
      this.last = Math.max(1, last);
      this.position = 1; // a force call; between two of them while playing
      this.playing = false;
      this.followers = [];
      this.secondsPerCall = Math.min(0.9, Math.max(2.5, Math.min(12, 0.45 * this.last)) / Math.max(1, this.last - 1));
    }

    follow(tell) {
      this.followers.push(tell);
      tell(this);
    }

    tell() {
      for (const tell of this.followers) tell(this);
    }

    get call() {
      return Math.floor(this.position + 1e-9);
    }

    go(position) {
      this.position = Math.min(this.last, Math.max(1, position));
      this.tell();
    }

    step(by) {
      this.pause();
      this.go(by > 0 ? this.call + 1 : Math.ceil(this.position - 1e-9) - 1);
    }

    play() {
      if (this.position >= this.last) this.position = 1;
      this.playing = true;
      this.tell();
    }

    pause() {
      if (!this.playing) return;
      this.playing = false;
      this.tell();
    }

    // called by the page's one animation loop
    advance(seconds) {
      if (!this.playing) return;
      this.position = Math.min(this.last, this.position + seconds / this.secondsPerCall);
      if (this.position >= this.last) this.playing = false;
      this.tell();
    }
  }

  class Page {
    constructor(plain) {
      this.clocks = [];
      this.later = [];
      this.movers = []; // [whether, what]: done at each picture while it is true
      this.awake = false;
      this.clock = plain.last_call ? this.newClock(plain.last_call) : null;
      document.addEventListener("visibilitychange", () => this.wake());
    }

    newClock(last) {
      const clock = new Clock(last);
      this.clocks.push(clock);
      clock.follow(() => clock.playing && this.wake());
      return clock;
    }

    whenShown(action) { this.later.push(action); }

    // what waited for the parts to be in place
    show() { this.later.splice(0).forEach((action) => action()); }

    whenever(whether, what) { this.movers.push([whether, what]); this.wake(); }

    whenThemed(action) { matchMedia("(prefers-color-scheme: dark)").addEventListener("change", action); }

    get moving() {
      return !document.hidden && (this.clocks.some((clock) => clock.playing) || this.movers.some(([whether]) => whether()));
    }

    wake() {
      if (this.awake || !this.moving) return;
      this.awake = true;
      let before = performance.now();
      const picture = (now) => {
        const seconds = Math.min(0.4, Math.max(0, now - before) / 1000);
        before = now;
        this.movers.forEach(([whether, what]) => whether() && what(seconds));
        this.clocks.forEach((clock) => clock.advance(seconds));
        this.awake = this.moving;
        if (this.awake) requestAnimationFrame(picture);
      };
      requestAnimationFrame(picture);
    }
  }

  // A piece of the page with a clock of its own, which can be taken away again: films that are exchanged.
  class Scope {
    constructor(page, last) {
      this.page = page;
      this.clock = last ? page.newClock(last) : null;
      this.later = [];
      this.movers = [];
      this.gone = false;
    }

    whenShown(action) { this.later.push(action); }

    show() { this.later.splice(0).forEach((action) => action()); }

    whenever(whether, what) {
      const mover = [() => !this.gone && whether(), what];
      this.movers.push(mover);
      this.page.whenever(...mover);
    }

    whenThemed(action) { this.page.whenThemed(() => this.gone || action()); }

    wake() { this.page.wake(); }

    // browsers allow few 3D views at a time: those inside `root` are given back
    leave(root) {
      this.gone = true;
      this.clock?.pause();
      this.page.clocks = this.page.clocks.filter((clock) => clock !== this.clock);
      this.page.movers = this.page.movers.filter(([whether]) => !this.movers.some(([own]) => own === whether));
      for (const canvas of root.querySelectorAll("canvas")) {
        const context = canvas.getContext("webgl2") ?? canvas.getContext("webgl");
        context?.getExtension("WEBGL_lose_context")?.loseContext();
      }
      root.replaceChildren();
    }
  }
  Relaxion.Scope = Scope;

  function section(part, page) {
    const build = parts[part.kind];
    const bare = part.kind === "tiles";
    const title = part.title && make("h2", { id: Relaxion.identity("title"), class: bare ? "hidden" : "" }, part.title);
    const content = build ? build(part, page) : make("p", {}, `This page cannot show a part of the kind ${part.kind}.`);
    const element = make("section", {
      class: `part${bare ? " bare" : ""}`, "data-kind": part.kind, "data-part": part.id, "data-run": part.run, hidden: part.run > 0,
      "aria-labelledby": title ? title.id : null,
    }, title || null, content);
    Object.assign(element, { update: content.update, rest: content.rest, wake: content.wake }); // where a part can take in newer data, or pause
    element.style.gridColumn = `span ${part.span ?? 12}`;
    if (part.rows_tall) element.style.gridRow = `span ${part.rows_tall}`;
    return element;
  }

  const plain = JSON.parse(document.getElementById("data").textContent);
  const page = new Page(plain);
  document.getElementById("head").append(
    make("p", { class: "eyebrow" }, plain.eyebrow), make("h1", {}, plain.title), plain.lead ? make("p", { class: "lead" }, plain.lead) : "");
  document.getElementById("parts").replaceChildren(...plain.parts.map((part) => section(part, page)));
  document.getElementById("foot").append(...plain.foot.map((line) => make("p", {}, line)));
  page.show();
  Object.assign(Relaxion, { page, section });
  document.documentElement.dataset.ready = "true";
})();
