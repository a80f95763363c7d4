// What a training run shows besides curves: gauges with their healthy range, alarms, the hardest structures, settings.
"use strict";
(() => {
  const { make, svg, parts } = Relaxion;

  // ---- gauges: a number, a verdict, how it came there, what is healthy, what to do. The first few are seen, the rest is folded away
  parts.gauges = (part) => {
    const first = make("div", { class: "gauges" }), rest = make("div", { class: "gauges" });
    const summary = make("summary");
    const more = make("details", { class: "more" }, summary, rest);
    const cards = new Map();
    let order = "";
    const fill = (shown) => {
      for (const gauge of shown.gauges) {
        if (!cards.has(gauge.name)) cards.set(gauge.name, card(gauge, `${shown.id}-${gauge.name}`));
        cards.get(gauge.name).say(gauge);
      }
      const names = shown.gauges.map((gauge) => gauge.name);
      if (names.join() === order) return;
      order = names.join();
      const elements = names.map((name) => cards.get(name).element);
      first.replaceChildren(...elements.slice(0, shown.first));
      rest.replaceChildren(...elements.slice(shown.first));
      summary.textContent = `${names.length - shown.first} more`;
      more.hidden = names.length <= shown.first;
    };
    fill(part);
    const root = make("div", {}, first, more, part.note ? make("p", { class: "small" }, part.note) : null);
    root.update = fill;
    return root;
  };

  function card(gauge, id) {
    const { words } = Relaxion;
    const value = make("p", { class: "value" });
    const verdict = make("span", { class: "verdict" });
    const line = svg("svg", { viewBox: "0 0 100 26", preserveAspectRatio: "none", "aria-hidden": "true", class: "spark" });
    const alarm = make("p", { class: "alarm" });
    const more = gauge.more?.length ? make("details", {}, make("summary", {}, ...words(gauge.summary)), ...gauge.more.map((one) => make("p", {}, ...words(one)))) : null;
    const element = make("article", { id, "data-name": gauge.name, tabindex: -1 }, make("header", {}, make("h3", {}, gauge.label), verdict), value, line, alarm, more);
    const say = (newer) => {
      const unit = newer.unit ? make("span", { class: "unit" }, newer.unit) : "";
      value.replaceChildren(newer.value, unit);
      element.className = `gauge ${newer.tone ?? ""}`;
      verdict.textContent = newer.verdict ?? "";
      verdict.hidden = !newer.verdict;
      alarm.replaceChildren(...words(newer.alarm ?? ""));
      alarm.hidden = !newer.alarm;
      line.replaceChildren(...spark(newer.spark ?? []));
      line.toggleAttribute("hidden", (newer.spark ?? []).length < 2);
    };
    return { element, say };
  }

  function spark(values) {
    if (values.length < 2) return [];
    const low = Math.min(...values), high = Math.max(...values);
    const y = (value) => (high === low ? 13 : 23 - (20 * (value - low)) / (high - low));
    const path = values.map((value, k) => `${k === 0 ? "M" : "L"}${((100 * k) / (values.length - 1)).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    return [svg("path", { d: path, "vector-effect": "non-scaling-stroke" })];
  }

  // ---- alarms, the newest first; a screen reader hears those that come
  parts.alarms = (part) => {
    const list = make("ul", { class: "alarms", role: "log", "aria-live": "polite", "aria-label": "Alarms" });
    const none = make("p", { class: "small" }, part.none);
    let told = "";
    const fill = (shown) => {
      const now = JSON.stringify(shown.alarms);
      if (now === told) return;
      told = now;
      none.textContent = shown.none;
      none.hidden = shown.alarms.length > 0;
      list.replaceChildren(...shown.alarms.map((alarm) => make("li", { class: alarm.tone },
        make("span", { class: "when" }, alarm.when), make("span", { class: "badge" }, alarm.badge),
        make("span", {}, ...Relaxion.words(alarm.sentence), " ", alarm.target ? make("a", { href: `#${alarm.target}` }, "Show the number") : null))));
    };
    fill(part);
    const root = make("div", {}, none, list);
    root.update = fill;
    return root;
  };

  // a link to a number opens what hides it
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href^='#']");
    const target = link && document.getElementById(decodeURIComponent(link.hash.slice(1)));
    if (!target) return;
    Relaxion.showRun?.(target.closest("[data-run]")?.dataset.run);
    const folded = target.closest("details");
    if (folded) folded.open = true;
  });

  // ---- the hardest structures: one film at a time, browsers have few 3D views to give
  parts.gallery = (part, page) => {
    const list = make("ol", { class: "choices" });
    const stage = make("div", { class: "chosen" });
    const root = make("div", { class: "gallery" }, list, stage);
    let shown = part, chosen = 0, scope = null;

    const choose = (index) => {
      if (stage.clientWidth === 0) return; // not in place yet, or hidden: 3D views need a size
      scope?.leave(stage);
      chosen = Math.min(index, shown.films.length - 1);
      [...list.querySelectorAll("button")].forEach((button, k) => button.setAttribute("aria-pressed", String(k === chosen)));
      const film = shown.films[chosen];
      if (!film) return;
      scope = new Relaxion.Scope(page, Math.max(film.end_call, ...film.calls));
      stage.append(parts.film({ films: [film], notes: shown.notes }, scope));
      scope.show();
    };
    const fill = () => {
      list.replaceChildren(...shown.films.map((film, k) => {
        const button = make("button", { type: "button", "aria-pressed": "false" }, make("b", {}, film.name), make("span", {}, film.summary));
        button.addEventListener("click", () => choose(k));
        return make("li", {}, button);
      }));
      choose(chosen);
    };
    root.update = (newer) => {
      if (JSON.stringify(newer.films) === JSON.stringify(shown.films)) return;
      shown = newer;
      fill();
    };
    root.rest = () => { scope?.leave(stage); scope = null; }; // while hidden: a 3D view without a size complains
    root.wake = () => { if (scope === null) choose(chosen); };
    fill();
    new ResizeObserver(root.wake).observe(stage);
    return root;
  };

  // ---- long text to look up, folded away
  parts.folded = (part) => make("details", { class: "folded" }, make("summary", {}, part.summary), make("pre", { tabindex: 0, "aria-label": part.title }, make("code", {}, part.text)));

  // ---- which run the parts below are about
  parts.chooser = (part) => {
    const select = make("select", { id: Relaxion.identity("run") }, ...part.choices.map((words, k) => make("option", { value: k }, words)));
    const show = () => {
      for (const element of document.querySelectorAll("[data-run]")) {
        const hide = element.dataset.run !== select.value;
        if (hide === element.hidden) continue;
        if (hide) element.rest?.();
        element.hidden = hide;
        if (!hide) element.wake?.(); // hidden and shown again between two frames: no observer hears of it
      }
    };
    select.addEventListener("change", show);
    Relaxion.showChosenRun = show;
    Relaxion.showRun = (run) => { if (run !== undefined) { select.value = run; show(); } };
    return make("p", { class: "chooser" }, make("label", { for: select.id }, part.label), " ", select);
  };
})();
