// The race tab: a structure is dropped, three optimizers relax it on the server, their films run side by side.
"use strict";
(() => {
  const { make } = Relaxion;
  const LOOK_AGAIN = 400; // ms
  const EXAMPLE = `Cu3Au shaken <example>
1.0
3.85 0 0
0 3.80 0
0 0 3.78
Au Cu
1 3
Direct
0.03 0.01 0.02
0.47 0.53 0.02
0.52 -0.03 0.46
0.02 0.55 0.53
`;

  Relaxion.raceTab = (offered) => {
    const file = make("input", { type: "file", id: Relaxion.identity("file"), accept: ".cif,.xyz,.extxyz,.vasp,.poscar,text/plain,*" });
    const given = make("output", { class: "given" }, "no file yet");
    const drop = make("div", { class: "drop" },
      make("label", { for: file.id }, "Drop a POSCAR, CIF or XYZ here, or choose one"), file, given);
    const select = (options) => make("select", {}, ...options.map(([value, words]) => make("option", { value }, words)));
    const calculator = select(offered.calculators.map((one) => [one.name, `${one.name}: ${one.description}`]));
    const policy = select(offered.policies.map((name) => [name, { auto: "auto: a policy that knows the elements", none: "none: the classical optimizer" }[name] ?? name]));
    const fmax = make("input", { type: "number", min: 0.001, max: 1, step: "any", value: 0.05 });
    const cell = make("input", { type: "checkbox" });
    const start = make("button", { type: "submit", class: "main", disabled: true }, "Race");
    const example = make("button", { type: "button" }, "Take an example");
    const words = make("p", { class: "said", role: "status" });
    const counters = make("ul", { class: "counters", "aria-hidden": "true" });
    const form = make("form", { class: "race" }, drop,
      make("div", { class: "fields" },
        make("label", {}, "Calculator", calculator), make("label", {}, "Policy", policy),
        make("label", {}, "Until fmax (eV/Å)", fmax), make("label", { class: "tick" }, cell, "relax the cell too")),
      make("div", { class: "tools" }, start, example), words, counters);
    const results = make("div", { class: "panel results" });
    let structure = null, scope = null, running = false;

    const say = (text, kind = "") => { words.textContent = text; words.className = `said ${kind}`; };
    const ready = () => { start.disabled = running || structure === null; };

    async function take(chosen) {
      structure = null;
      ready(); // until the new one is read: a click now would be lost
      if (!chosen) return;
      if (chosen.size > 0.9 * offered.most_bytes) {
        say(`${chosen.name} is larger than ${Math.round(offered.most_bytes / 1000)} kB; race a smaller structure, or use 'relaxion race'.`, "bad");
      } else {
        structure = { name: chosen.name, text: await chosen.text() };
        say("");
      }
      given.textContent = structure ? structure.name : "no file yet";
      ready();
    }

    file.addEventListener("change", () => take(file.files[0]));
    for (const kind of ["dragenter", "dragover"]) {
      drop.addEventListener(kind, (event) => { event.preventDefault(); drop.classList.add("over"); });
    }
    for (const kind of ["dragleave", "drop"]) drop.addEventListener(kind, () => drop.classList.remove("over"));
    drop.addEventListener("drop", (event) => { event.preventDefault(); take(event.dataTransfer.files[0]); });
    // beside the field a dropped file would be opened in place of the page
    for (const kind of ["dragover", "drop"]) document.addEventListener(kind, (event) => event.preventDefault());
    example.addEventListener("click", () => { structure = { name: "Cu3Au.poscar", text: EXAMPLE }; given.textContent = structure.name; say(""); ready(); });

    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      if (running || structure === null) return;
      running = true;
      ready();
      clear();
      say(`Racing ${structure.name} …`);
      try {
        show(await result());
      } catch (error) {
        say(error.message, "bad");
      } finally {
        running = false;
        counters.replaceChildren();
        ready();
      }
    });

    async function result() {
      const asked = { ...structure, calculator: calculator.value, policy: policy.value, free_cell: cell.checked, fmax: Number(fmax.value) };
      const { number } = await answer(fetch("race", {
        method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(asked),
      }));
      for (;;) {
        await new Promise((done) => setTimeout(done, LOOK_AGAIN));
        const race = await answer(fetch(`race/${number}`));
        if (race.state === "failed") throw new Error(race.error);
        if (race.state === "done") return race.page;
        count(race);
      }
    }

    async function answer(asked) {
      let response;
      try {
        response = await asked;
      } catch {
        throw new Error("the server does not answer; is 'relaxion watch' still running?");
      }
      const said = await response.json().catch(() => ({ error: `the server answers ${response.status}` }));
      if (!response.ok) throw new Error(said.error);
      return said;
    }

    function count(race) {
      counters.replaceChildren(...offered.racers.map((name) => make("li", {}, make("b", {}, race.calls[name] ?? "–"), ` ${name}`)));
      say(`Racing ${structure.name}: ${Math.round(race.seconds)} s of at most ${offered.seconds} s`);
    }

    function clear() {
      scope?.leave(results);
      results.replaceChildren();
    }

    function show(plain) {
      say(`${plain.title}.`, "good");
      scope = new Relaxion.Scope(Relaxion.page, plain.last_call);
      const head = make("div", { class: "verdict" }, make("p", { class: "eyebrow" }, plain.eyebrow), make("h2", {}, plain.title), make("p", { class: "lead" }, plain.lead));
      results.append(head, ...plain.parts.map((part) => Relaxion.section(part, scope)));
      scope.show();
      head.scrollIntoView({ block: "start" });
    }

    const about = make("p", { class: "small" },
      `Up to ${offered.most_atoms} atoms and ${Math.round(offered.most_bytes / 1000)} kB. The structure is relaxed on this machine by ${offered.racers.join(", ")} and kept nowhere.`);
    const section = make("section", { class: "part", "data-kind": "race", "aria-labelledby": "race-title" }, make("h2", { id: "race-title" }, "Race a structure of yours"), form, about);
    section.style.gridColumn = "span 12";
    return [section, results];
  };
})();
