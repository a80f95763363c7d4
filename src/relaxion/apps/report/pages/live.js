// The live page: takes in parts as the server sends them.
"use strict";
(() => {
  const { make, page } = Relaxion;
  const { live } = JSON.parse(document.getElementById("data").textContent);
  const shown = document.getElementById("parts");
  const root = document.documentElement;
  const state = make("p", { class: "state", role: "status" });
  const save = make("a", { href: "page.html", download: "relaxion.html" }, "Save as a file");
  document.getElementById("head").append(make("div", { class: "served" }, state, save));

  const waiting = new Map(); // parts somebody is busy in: exchanged when they have left
  const find = (id) => [...shown.children].find((element) => element.dataset.part === id);

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
      else shown.append(fresh);
    }
  }

  shown.addEventListener("focusout", () => setTimeout(() => {
    for (const [id, part] of [...waiting]) {
      if (find(id)?.contains(document.activeElement)) continue;
      waiting.delete(id);
      take(part);
    }
    settle();
  }));

  // in the server's order; what stands right is not moved, so that nobody loses his place
  function arrange(order) {
    [...shown.children].filter((element) => !order.includes(element.dataset.part)).forEach((element) => element.remove());
    let next = shown.firstElementChild;
    for (const id of order) {
      const element = find(id);
      if (!element) continue;
      if (element === next) next = next.nextElementSibling;
      else shown.insertBefore(element, next);
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
