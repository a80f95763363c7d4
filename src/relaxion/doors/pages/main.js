// Reads the data of the page and builds its parts; runs the one animation loop.
"use strict";
(() => {
  const { make, parts } = Relaxion;

  class Page {
    constructor(plain) {
      this.clock = plain.last_call ? new Relaxion.Clock(plain.last_call) : null;
      this.later = [];
      this.movers = []; // [whether, what]: done at each picture while it is true
      this.awake = false;
      this.clock?.follow(() => this.clock.playing && this.wake());
      document.addEventListener("visibilitychange", () => this.wake());
    }

    whenShown(action) { this.later.push(action); }

    whenever(whether, what) { this.movers.push([whether, what]); this.wake(); }

    whenThemed(action) { matchMedia("(prefers-color-scheme: dark)").addEventListener("change", action); }

    get moving() { return !document.hidden && (this.clock?.playing || this.movers.some(([whether]) => whether())); }

    wake() {
      if (this.awake || !this.moving) return;
      this.awake = true;
      let before = performance.now();
      const picture = (now) => {
        const seconds = Math.min(0.4, Math.max(0, now - before) / 1000);
        before = now;
        this.movers.forEach(([whether, what]) => whether() && what(seconds));
        this.clock?.advance(seconds);
        this.awake = this.moving;
        if (this.awake) requestAnimationFrame(picture);
      };
      requestAnimationFrame(picture);
    }
  }

  function section(part, page) {
    const build = parts[part.kind];
    const bare = part.kind === "tiles";
    const title = part.title && make("h2", { id: Relaxion.identity("title"), class: bare ? "hidden" : "" }, part.title);
    const element = make("section", { class: `part${bare ? " bare" : ""}`, "data-kind": part.kind, "aria-labelledby": title ? title.id : null }, title || null,
      build ? build(part, page) : make("p", {}, `This page cannot show a part of the kind ${part.kind}.`));
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
  page.later.forEach((action) => action());
  document.documentElement.dataset.ready = "true";
})();
