// The live page: takes in parts as the server sends them, and has a second tab where structures race.
"use strict";
(() => {
  const { make, page } = Relaxion;
  const { live } = JSON.parse(document.getElementById("data").textContent);
  const main = document.getElementById("parts");
  const root = document.documentElement;

  // ---- two tabs
  const training = make("div", { class: "panel", id: "training", role: "tabpanel", "aria-labelledby": "tab-training" }, ...main.childNodes);
  const race = make("div", { class: "panel", id: "race", role: "tabpanel", "aria-labelledby": "tab-race", hidden: true }, ...Relaxion.raceTab(live.race));
  const tab = (name, words) => make("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": name }, words);
  const tabs = [tab("training", "Training"), tab("race", "Race")];
  const choose = (chosen) => {
    tabs.forEach((button) => {
      const on = button === chosen;
      button.setAttribute("aria-selected", String(on));
      button.tabIndex = on ? 0 : -1;
      document.getElementById(button.getAttribute("aria-controls")).hidden = !on;
    });
  };
  const state = make("p", { class: "state", role: "status" });
  const save = make("a", { href: "page.html", download: "relaxion-training.html" }, "Save as a file");
  document.getElementById("head").append(make("div", { class: "tabs" }, make("div", { role: "tablist", "aria-label": "What to look at" }, ...tabs), state, save));
  main.classList.add("tabbed");
  main.replaceChildren(training, race);
  choose(tabs[0]);
  tabs.forEach((button, k) => {
    button.addEventListener("click", () => choose(button));
    button.addEventListener("keydown", (event) => {
      const other = { ArrowRight: k + 1, ArrowLeft: k - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (other === undefined) return;
      const next = tabs[(other + tabs.length) % tabs.length];
      choose(next);
      next.focus();
      event.preventDefault();
    });
  });

  // ---- news
  const waiting = new Map(); // parts somebody is busy in: exchanged when they have left
  const find = (id) => [...training.children].find((element) => element.dataset.part === id);

  function take(part) {
    const old = find(part.id);
    if (old?.update && old.dataset.kind === part.kind) {
      old.update(part);
      const title = old.querySelector("h2");
      if (title && part.title && title.textContent !== part.title) title.textContent = part.title;
    } else if (old?.contains(document.activeElement)) {
      waiting.set(part.id, part);
    } else {
      const fresh = Relaxion.section(part, page);
      if (old) old.replaceWith(fresh);
      else training.append(fresh);
    }
  }

  training.addEventListener("focusout", () => setTimeout(() => {
    for (const [id, part] of [...waiting]) {
      if (find(id)?.contains(document.activeElement)) continue;
      waiting.delete(id);
      take(part);
    }
    settle();
  }));

  // in the server's order; what stands right is not moved, so that nobody loses his place
  function arrange(order) {
    [...training.children].filter((element) => !order.includes(element.dataset.part)).forEach((element) => element.remove());
    let next = training.firstElementChild;
    for (const id of order) {
      const element = find(id);
      if (!element) continue;
      if (element === next) next = next.nextElementSibling;
      else training.insertBefore(element, next);
    }
  }

  function settle() {
    page.show();
    Relaxion.showChosenRun?.();
  }

  function say(words, kind) {
    if (state.textContent !== words) state.textContent = words;
    state.className = `state ${kind}`;
    root.dataset.live = kind;
  }

  function listen() {
    const source = new EventSource(`events?known=${live.epoch}-${live.version}`);
    source.addEventListener("open", () => say("live", "open"));
    source.addEventListener("error", () => say("the server does not answer; trying again", "lost"));
    source.addEventListener("parts", (event) => {
      const news = JSON.parse(event.data);
      if (news.heading) {
        document.title = news.heading.title;
        document.querySelector("#head h1").textContent = news.heading.title;
        document.querySelector("#head .eyebrow").textContent = news.heading.eyebrow;
        const lead = document.querySelector("#head .lead");
        if (lead) lead.textContent = news.heading.lead;
      }
      news.parts.forEach(take);
      arrange(news.order);
      settle();
      root.dataset.version = news.version;
    });
    addEventListener("pagehide", () => source.close());
  }
  say("connecting", "waiting");
  root.dataset.version = live.version;
  listen();
})();
