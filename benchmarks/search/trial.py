"""Searches at equal force calls: `python benchmarks/search/trial.py SET ARM [ARM ...] [--critic NAME=FILE ...]`.

SET: `tuning` (training pairs, for choosing settings), `unseen` (pairs that no critic and no setting has seen), `large`
(unseen pairs, 30-50 atoms); `al-fe:tuning`, `al-fe:unseen`, `al-fe-cell:tuning`, `al-fe-cell:unseen` (compositions of
Al–Fe crystals in a fixed or free cell, EAM; the searches of a system share the fixed cell). ARM: see `arm_named`. Each
arm of a set is one JSON file in the folder; one that exists is left as it is, so a stopped trial goes on. Without ARM
the table of what is there is printed.
Every arm begins a search at the same start, relaxes with Relaxion's own `relax_batch` code (0.05 eV/Å) and is charged
for every force call. Found: within 1 meV per atom of the lowest energy of that system in any file of the set. A search
that finds nothing is charged the whole budget.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relaxion.files import write_json
from relaxion.potentials.emt import Emt
from relaxion.search.choices import Bandit, Draw, HopChooser, Mixture, PossibleHop, SearchSettings, Walker
from relaxion.search.critic import Critic, CriticSettings, load_critic
from relaxion.search.critic_choice import CriticChoice
from relaxion.search.moves import Distances
from relaxion.search.run import ModelChoice, TrialRelaxer, one_round, shipped_critic
from relaxion.search.walk import Walk
from relaxion.train.data.starts import first_at_hand, potential_at_hand
from relaxion.train.tasks.search import FAMILIES, MakeStart, systems

TUNED = {  # shares of the best fixed mixture that was found on training systems
    "metals": {"swap": 0.6, "relocate": 0.25, "twist": 0.15},
    "al-fe": {"swap": 0.4, "slip": 0.2, "relocate": 0.2, "rattle": 0.2},
    "al-fe-cell": {"swap": 0.4, "slip": 0.2, "relocate": 0.1, "rattle": 0.15, "strain": 0.15},
}
SAME_EV = 1e-3  # two relaxations of one minimum differ by less
Arm = tuple[Callable[[], HopChooser], dict[str, Any]]


class Restarts(Mixture):
    """Every trial is a new random start."""

    def __init__(self, make_start: MakeStart) -> None:
        self.make_start = make_start

    def choose(self, walkers: Sequence[Walker], draw: Draw) -> list[PossibleHop | None]:  # noqa: ARG002
        return [self._anew(walker) for walker in walkers]

    def _anew(self, walker: Walker) -> PossibleHop:
        fresh = self.make_start(walker.random)
        trial = walker.atoms.copy()
        trial.set_cell(fresh.cell)
        trial.positions[np.argsort(trial.numbers, kind="stable")] = fresh.positions[
            np.argsort(fresh.numbers, kind="stable")
        ]
        return PossibleHop("restart", trial, Distances.of(trial).look(trial.numbers))


class WrongEmt(Emt):
    """Every parameter is wrong by this share, up or down."""

    def __init__(self, share: float) -> None:
        self.share = share
        super().__init__()

    def _set_parameters(self, table: torch.Tensor) -> None:
        signs = 2 * torch.randint(2, table.shape, generator=torch.Generator().manual_seed(0)) - 1
        super()._set_parameters(table * (1 + self.share * signs))


class Forgetful(Mixture):
    """Trials that were relaxed before may be relaxed again, as usual in basin hopping."""

    def choose(self, walkers: Sequence[Walker], draw: Draw) -> list[PossibleHop | None]:
        return super().choose(walkers, replace(draw, tried={}))


def arm_named(name: str, critics: dict[str, Path], tuned: dict[str, float], make_start: MakeStart) -> Arm:
    """`basin@T` has another temperature (eV);
    `critic:NAME[:candidates[:softmax[:temperature[:online[:depth]]]]]`, online: on or off, depth: most moves of a hop;
    `revisit:…`: hops to known minima are relaxed again, and no walker begins anew. `basin` does so too, `basin-anew`
    does not; `basin-forgetful` also relaxes hops that were tried before."""
    if name.startswith("mix@"):  # mix@swap=0.6,relocate=0.3@0.1
        _, shares, temperature = name.split("@")
        moves = {kind: float(share) for kind, share in (part.split("=") for part in shares.split(","))}
        return Mixture, {"moves": moves, "temperature_ev": float(temperature)}
    if name.startswith(("critic:", "revisit:")):
        words = name.split(":")
        rest = [*words[2:], *["16", "0.03", "0.1", "off", "4"][len(words) - 2 :]]
        candidates, softmax, temperature, online = int(rest[0]), float(rest[1]), float(rest[2]), rest[3] == "on"
        if words[1] == "untrained":
            critic = Critic(CriticSettings(), torch.Generator().manual_seed(0))
        else:
            critic = load_critic(critics[words[1]])
        options = {"candidates": candidates, "temperature_ev": softmax, "learn": online, "depth": int(rest[4])}
        return lambda: CriticChoice(critic, **options), {"temperature_ev": temperature}
    if name.startswith("model:"):  # model:2, EMT with parameters off by 2 % judges eight candidates
        settings = SearchSettings(candidates=8)
        wrong = WrongEmt(float(name.removeprefix("model:")) / 100)
        return lambda: ModelChoice(wrong, settings), {}
    kind, _, temperature = name.partition("@")
    makers = {"restarts": partial(Restarts, make_start), "gaussian": Mixture, "basin": Mixture, "basin-anew": Mixture,
              "basin-forgetful": Forgetful, "bandit": Bandit}  # fmt: skip
    moves = {"rattle": 1.0} if kind in ("restarts", "gaussian") else {} if kind == "bandit" else tuned
    return makers[kind], {"moves": moves, "temperature_ev": float(temperature or 0.1)}


def run_arm(
    which: str,
    name: str,
    critics: dict[str, Path],
    calls: int,
    searches: int,
    seed: int,
    known: dict[str, float],
) -> dict[str, Any]:
    """`known`: energies in eV; a search that reaches that of its system ends there, which saves time, not calls."""
    family_name, _, part = which.rpartition(":")
    family_name = family_name or "metals"
    cell = family_name.endswith("-cell")
    family = FAMILIES[family_name.removesuffix("-cell")]
    walks, labels = [], []
    for number, (label, make_start) in enumerate(systems(family_name.removesuffix("-cell"), part, cell=cell).items()):
        make, options = arm_named(name, critics, TUNED[family_name], make_start)
        for search in range(searches):
            start = make_start(np.random.default_rng([seed, number, search]))
            settings = SearchSettings(calls=calls, seed=1000 * seed + search, cell=cell, **options)
            walks.append(Walk(start, settings, make()))
            walks[-1].is_plain = not name.startswith(("critic:", "model:", "bandit", "basin-anew"))
            labels.append(label)
    relax = TrialRelaxer(first_at_hand(family.potential, potential_at_hand), SearchSettings(cell=cell))
    began = time.monotonic()
    while any(not walk.stopped for walk in walks):
        one_round(walks, relax)
        for label, walk in zip(labels, walks, strict=True):
            if walk.best_ev <= known.get(label, -np.inf) + SAME_EV:
                walk.stopped = walk.stopped or "the lowest energy known was reached"
    records = [
        {"system": label, "atoms": len(walk.start), "staircase": staircase(walk)}
        for label, walk in zip(labels, walks, strict=True)
    ]
    return {"set": which, "arm": name, "calls": calls, "seed": seed, "seconds": time.monotonic() - began,
            "records": records}  # fmt: skip


def staircase(walk: Walk) -> list[list[float]]:
    """Calls and energy (eV) wherever the best energy went down."""
    steps: list[list[float]] = []
    for step in walk.history:
        if not steps or step.best_ev < steps[-1][1]:
            steps.append([step.calls, step.best_ev])
    return steps


def lowest_of(runs: list[dict[str, Any]]) -> dict[str, float]:
    """eV, of each system in any of the runs."""
    best: dict[str, float] = {}
    for run in runs:
        for record in run["records"]:
            lowest = record["staircase"][-1][1]
            best[record["system"]] = min(best.get(record["system"], np.inf), lowest)
    return best


def table(files: list[Path], control: str) -> list[dict[str, Any]]:
    runs = [json.loads(path.read_text()) for path in files]
    best = lowest_of(runs)
    arms: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        arms.setdefault(run["arm"], []).append(run)
    numbers = {arm: _numbers(runs, best) for arm, runs in arms.items()}
    return [_row(arm, own, numbers.get(control)) for arm, own in numbers.items()]


def _numbers(runs: list[dict[str, Any]], best: dict[str, float]) -> dict[str, Any]:
    calls: dict[str, list[float]] = {}
    found: dict[str, list[float]] = {}
    excess: dict[str, list[float]] = {}
    for run in runs:
        for record in run["records"]:
            goal = best[record["system"]] + 0.001 * record["atoms"]
            reached = [at for at, energy in record["staircase"] if energy <= goal]
            calls.setdefault(record["system"], []).append(reached[0] if reached else run["calls"])
            found.setdefault(record["system"], []).append(float(bool(reached)))
            last = record["staircase"][-1][1]
            excess.setdefault(record["system"], []).append(1000 * (last - best[record["system"]]) / record["atoms"])
    return {"calls": calls, "found": found, "excess": excess, "seconds": sum(run["seconds"] for run in runs),
            "runs": len(runs)}  # fmt: skip


def _row(arm: str, own: dict[str, Any], control: dict[str, Any] | None) -> dict[str, Any]:
    mean = {name: _by_system(own[name]) for name in ("calls", "found", "excess")}
    row = {"arm": arm, "runs": own["runs"], "searches": sum(map(len, own["calls"].values()))}
    row |= {"mean_calls": mean["calls"].mean(), "interval": _interval(mean["calls"])}
    row |= {"found": mean["found"].mean(), "excess_mev_per_atom": mean["excess"].mean(), "seconds": own["seconds"]}
    if control is not None:
        for name in ("calls", "excess"):
            theirs = _by_system(control[name])
            row[f"{name}_ratio"] = mean[name].mean() / theirs.mean()
            row[f"{name}_ratio_interval"] = _interval(mean[name], theirs)
    return {name: _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, np.floating) else value


def _by_system(values: dict[str, list[float]]) -> np.ndarray:
    return np.array([np.mean(values[system]) for system in sorted(values)])


def _interval(values: np.ndarray, over: np.ndarray | None = None) -> list[float]:
    """95 %, systems drawn again 4000 times."""
    random = np.random.default_rng(0)
    rows = random.integers(len(values), size=(4000, len(values)))
    means = values[rows].mean(axis=1)
    means = means if over is None else means / over[rows].mean(axis=1)
    return [float(end) for end in np.quantile(means, [0.025, 0.975])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set")
    parser.add_argument("arms", nargs="*")
    parser.add_argument("--folder", type=Path, default=Path("runs/search/trial"))
    parser.add_argument("--critic", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--searches", type=int, default=4, help="per system")
    parser.add_argument("--seed", type=int, default=9000)
    parser.add_argument(
        "--stop-at-known",
        action="store_true",
        help="end a search at the lowest energy that the files in FOLDER have: first fill it by a long run, or early "
        "arms stop above the minimum and are charged the budget",
    )
    parser.add_argument("--control", default="basin")
    parser.add_argument("--json", type=Path)
    told = parser.parse_args()
    torch.set_num_threads(1)
    told.folder.mkdir(parents=True, exist_ok=True)
    critics = {name: Path(file) for name, file in (word.split("=", 1) for word in told.critic)}
    critics = {"shipped": shipped_critic(), **critics}
    for arm in told.arms:
        path = told.folder / f"{told.set.replace(':', '-')}-{arm.replace('/', '_')}-{told.seed}.json"
        if not path.exists():
            others = [json.loads(file.read_text()) for file in told.folder.glob(f"{told.set.replace(':', '-')}-*.json")]
            known = lowest_of(others) if told.stop_at_known else {}
            write_json(path, run_arm(told.set, arm, critics, told.calls, told.searches, told.seed, known))
    rows = table(sorted(told.folder.glob(f"{told.set.replace(':', '-')}-*.json")), told.control)
    for row in sorted(rows, key=lambda row: row["mean_calls"]):
        low, high = row["interval"]
        ratio = row.get("calls_ratio", float("nan"))
        rlow, rhigh = row.get("calls_ratio_interval", (float("nan"),) * 2)
        print(
            f"{row['arm']:44s} {row['searches']:4d} searches  {row['mean_calls']:6.0f} calls ({low:.0f}-{high:.0f})  "
            f"ratio {ratio:.2f} ({rlow:.2f}-{rhigh:.2f})  found {row['found']:.2f}  "
            f"excess {row['excess_mev_per_atom']:.2f} meV/atom  {row['seconds']:.0f} s",
            flush=True,
        )
    if told.json is not None:
        write_json(told.json, {"set": told.set, "control": told.control, "rows": rows})


if __name__ == "__main__":
    main()
