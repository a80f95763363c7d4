// What a training run shows besides curves: gauges with their healthy range, alarms, the hardest structures, settings.
"use strict";
(() => {
  const { make, svg, parts } = Relaxion;

  // ---- gauges: a number, how it came there, what is healthy, what is wrong
  parts.gauges = (part) => {
    const grid = make("div", { class: "gauges" });
    const cards = new Map();
    const fill = (shown) => {
      const names = shown.gauges.map((gauge) => gauge.name);
      if (names.join() !== [...cards.keys()].join()) {
        cards.clear();
        for (const gauge of shown.gauges) cards.set(gauge.name, card(gauge));
        grid.replaceChildren(...[...cards.values()].map((one) => one.element));
      }
      for (const gauge of shown.gauges) cards.get(gauge.name).say(gauge);
    };
    fill(part);
    const root = make("div", {}, grid, part.note ? make("p", { class: "small" }, part.note) : null);
    root.update = fill;
    return root;
  };

  function card(gauge) {
    const value = make("p", { class: "value" });
    const line = svg("svg", { viewBox: "0 0 100 26", preserveAspectRatio: "none", "aria-hidden": "true", class: "spark" });
    const alarm = make("p", { class: "alarm" });
    const more = [gauge.meaning, gauge.alarm_when ? `Alarm: ${gauge.alarm_when}.` : null].filter(Boolean);
    const healthy = gauge.healthy ? `healthy: ${gauge.healthy}` : "what it is";
    const element = make("article", { class: "gauge", "data-name": gauge.name }, make("h3", {}, gauge.label), value, line, alarm,
      more.length === 0 ? null : make("details", {}, make("summary", {}, healthy), ...more.map((words) => make("p", {}, words))));
    const say = (newer) => {
      const unit = newer.unit ? make("span", { class: "unit" }, newer.unit) : "";
      value.replaceChildren(newer.value, unit);
      element.className = `gauge ${newer.tone ?? ""}`;
      alarm.textContent = newer.alarm ?? "";
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
        make("span", { class: "when" }, alarm.when), make("span", { class: "badge" }, alarm.badge), make("span", {}, alarm.sentence))));
    };
    fill(part);
    const root = make("div", {}, none, list);
    root.update = fill;
    return root;
  };

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
    return make("p", { class: "chooser" }, make("label", { for: select.id }, part.label), " ", select);
  };
})();
