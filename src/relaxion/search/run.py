"""`relaxion.search`: from minimum to minimum on a budget of force calls, and what a search leaves in its folder.

Trials of one search, or of many at once, go to one batched relaxer. The folder has the minima as extxyz and as ASE's
database, and a summary in JSON.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import ase.db
import ase.io
import numpy as np
from ase import Atoms
from ase.calculators.calculator import BaseCalculator

from relaxion.batch import BatchRelaxer, BatchSettings
from relaxion.errors import FileError, PolicyError, SettingsError
from relaxion.files import part_of, write_json
from relaxion.optimizer.batch_relaxation import Relaxed
from relaxion.potentials.base import Potential
from relaxion.search.choices import (
    CHOICES,
    SOFTMAX_EV,
    Bandit,
    Draw,
    Hop,
    HopChooser,
    Mixture,
    PossibleHop,
    SearchSettings,
    Walker,
    softmax_pick,
)
from relaxion.search.critic import card_of, load_critic
from relaxion.search.critic_choice import CriticChoice, choose_together
from relaxion.search.moves import alike
from relaxion.search.state import NAME, restore_state, save_state
from relaxion.search.state import NAME as STATE
from relaxion.search.walk import CALLS_PER_HOP, NEW, Minimum, Step, ToRelax, Walk, check_moves, energy_of


class TrialRelaxer:
    """Keeps the policy loaded between rounds."""

    def __init__(self, potential: str | BaseCalculator | Potential, settings: SearchSettings) -> None:
        self.settings = BatchSettings(
            policy=settings.policy, fmax=settings.fmax, cell=settings.cell, pressure_gpa=settings.pressure_gpa
        )
        self._relaxer = BatchRelaxer(potential, self.settings)

    def __call__(self, trials: Sequence[ToRelax]) -> list[Relaxed]:
        """In the order given."""
        results: dict[int, Relaxed] = {}
        for number, trial in enumerate(trials):
            own = replace(self.settings, max_force_calls=max(trial.calls, 1))
            self._relaxer.add(trial.atoms, number, settings=own)
        while len(results) < len(trials):
            for relaxed in self._relaxer.advance():
                results[relaxed.tag] = relaxed
        return [results[number] for number in range(len(trials))]


class ModelChoice(Mixture):
    """Candidates are relaxed in a cheaper potential; one is taken by softmax over their energies there.

    The hop begins at the minimum of the cheaper potential: few expensive calls are left. Candidates that fall back to
    where the walker stands, or to what was tried from there, are dropped.
    """

    def __init__(self, model: str | BaseCalculator | Potential, settings: SearchSettings) -> None:
        """model: the cheaper potential. settings: of the search."""
        self.settings = settings
        self.calls = 0  # of the cheaper potential
        self._relax = TrialRelaxer(model, settings)

    def choose(self, walkers: Sequence[Walker], draw: Draw) -> list[PossibleHop | None]:
        drawn = [draw.several(walker, self.settings.candidates) for walker in walkers]
        limit = CALLS_PER_HOP
        starts = [walker.atoms for walker in walkers] + [hop.trial for candidates in drawn for hop in candidates]
        relaxed = self._relax([ToRelax(atoms, limit) for atoms in starts])
        self.calls += sum(result.force_calls for result in relaxed)
        ends = iter(relaxed[len(walkers) :])
        chosen: list[PossibleHop | None] = []
        for walker, candidates, here in zip(walkers, drawn, relaxed, strict=False):
            hops: list[tuple[PossibleHop, float]] = []
            for candidate, end in zip(candidates, ends, strict=False):
                look = draw.look(end.atoms)
                hop = PossibleHop(candidate.kind, end.atoms, look)
                back = alike(look, [draw.look(here.atoms)])
                if end.converged and not back and draw.is_new(hop, walker):
                    hops.append((hop, energy_of(end)))
            energies = np.array([energy for _, energy in hops])
            pick = softmax_pick(energies, SOFTMAX_EV, walker.random) if hops else None
            # where the cheaper potential brings nothing, the mixture goes on
            chosen.append(hops[pick][0] if pick is not None else draw.one(walker))
        return chosen


def one_round(walks: Sequence[Walk], relax: TrialRelaxer) -> list[list[Hop]]:
    """All searches that still run hop once, in one batch; the hops of each."""
    learned = [walk for walk in walks if isinstance(walk.chooser, CriticChoice) and walk.hopping]
    chosen = choose_together([(walk.chooser, walk.hopping, walk.draw) for walk in learned])  # pyright: ignore[reportArgumentType]
    by_critic = {id(walk): own for walk, own in zip(learned, chosen, strict=True)}
    asked = [walk.ask(by_critic.get(id(walk))) for walk in walks]
    results = relax([trial for trials in asked for trial in trials])
    hops: list[list[Hop]] = []
    start = 0
    for walk, trials in zip(walks, asked, strict=True):
        part = results[start : start + len(trials)]
        hops.append(walk.tell(part) if trials else [])
        start += len(trials)
    return hops


SECONDS_BETWEEN_STATES = 10.0
OF_RUN = "critic.safetensors"  # in the folder of a training
SHIPPED = "metals.safetensors"  # in `relaxion/search/critics`
OnRound = Callable[[Walk], None]


@dataclass(frozen=True, eq=False)
class SearchResult:
    """What a search found, lowest first."""

    found: list[Minimum]  # with how often and when each was found
    force_calls: int
    history: list[Step]  # one line per hop
    stopped: str  # why, in words
    choice: str  # who chose the hops
    seconds: float
    unfinished: Atoms | None = None  # the start as far as it was relaxed, where the budget ended before

    @property
    def minima(self) -> list[Atoms]:
        """Distinct minima with energy and forces, lowest first."""
        return [minimum.atoms for minimum in self.found]

    @property
    def best(self) -> Atoms | None:
        return self.minima[0] if self.found else None


def search(
    atoms: Atoms,
    potential: str | BaseCalculator | Potential | None = None,
    *,
    calls: int = 2000,
    seed: int = 0,
    folder: str | Path | None = None,
    on_round: OnRound | None = None,
    model: str | BaseCalculator | Potential | None = None,
    **options: Any,
) -> SearchResult:
    """Look for the lowest minimum of a cluster, a slab with adsorbates, a crystal, a defect or a molecule.

    Args:
        atoms: where to begin, with constraints if need be; not changed.
        potential: a name ("emt"), an ASE calculator or a potential; None: the calculator of the atoms.
        calls: force calls in all, never exceeded.
        seed: of everything that is drawn.
        folder: where the state is kept, so that a search that was stopped goes on when it is called again with the same
            arguments (more calls are allowed).
        on_round: called after each round of hops.
        model: a cheaper potential; candidates are relaxed there and chosen by its energies. Its calls are not counted.
        options: fields of `SearchSettings`, such as walkers=4, choice="bandit", moves={"swap": 1.0}, cell=True,
            seconds=600.
    """
    settings = settings_of(calls=calls, seed=seed, **options)
    potential = potential if potential is not None else atoms.calc
    if potential is None:
        raise SettingsError("no potential: give one, such as relaxion.search(atoms, 'emt'), or set atoms.calc")
    chooser, name = chooser_of(settings, atoms) if model is None else (ModelChoice(model, settings), "model")
    walk = Walk(atoms, settings, chooser)
    check_moves(walk)
    relax = TrialRelaxer(potential, settings)
    file = None if folder is None else _state_file(Path(folder))
    before = restore_state(walk, file) if file is not None and file.exists() else 0.0
    seconds = run(walk, relax, file, before, on_round)
    return SearchResult(walk.minima.by_energy(), walk.calls, walk.history, walk.stopped, name, seconds, walk.unfinished)


def run(walk: Walk, relax: TrialRelaxer, file: Path | None, before: float, on_round: OnRound | None) -> float:
    """Until a limit is reached; the state is written now and then, and at the end however it comes. Wall seconds."""
    began = time.monotonic() - before
    written = -math.inf  # the first state as soon as the start is relaxed
    try:
        while not walk.stopped:
            one_round([walk], relax)
            if on_round is not None:
                on_round(walk)
            now = time.monotonic()
            if walk.settings.seconds is not None and now - began >= walk.settings.seconds:
                walk.stopped = walk.stopped or f"{walk.settings.seconds:g} s are over"
            if file is not None and walk.walkers and now - written > SECONDS_BETWEEN_STATES:
                save_state(walk, file, now - began)
                written = now
    finally:
        # between two rounds the walk is whole; an interrupt inside `ask` or `tell` leaves the last state as it is
        if file is not None and walk.walkers and walk.is_whole:
            save_state(walk, file, time.monotonic() - began)
    return time.monotonic() - began


def settings_of(**options: Any) -> SearchSettings:
    known = SearchSettings.__dataclass_fields__
    for name in options:
        if name not in known:
            raise SettingsError(f"unknown setting '{name}' of a search; there are {', '.join(known)}")
    moves = options.get("moves")
    if moves is not None and not isinstance(moves, Mapping):
        options["moves"] = dict.fromkeys(moves, 1.0)
    return SearchSettings(**options)


def chooser_of(settings: SearchSettings, atoms: Atoms) -> tuple[HopChooser, str]:
    """Who chooses the hops, and its name in words."""
    if settings.choice == "mixture":
        return Mixture(), "fixed mixture"
    if settings.choice == "bandit":
        return Bandit(), "bandit over kinds"
    path = shipped_critic() if settings.choice in ("auto", "critic") else Path(settings.choice)
    if path is not None and path.is_dir():
        path = path / OF_RUN
    if settings.choice == "auto" and (path is None or not knows(path, atoms, settings)):
        return Bandit(), "bandit over kinds"
    if path is None:
        raise PolicyError("no critic ships with this relaxion; name the file of one, or choose bandit")
    if settings.choice not in CHOICES and not path.is_file():
        raise SettingsError(
            f"choice is one of {', '.join(CHOICES)} or the file or run of a critic, got '{settings.choice}'"
        )

    critic = load_critic(path)
    return CriticChoice(critic, candidates=settings.candidates, learn=settings.learn), f"critic {path.stem}"


def shipped_critic() -> Path | None:
    """The critic in the package, where there is one."""
    path = Path(str(files("relaxion.search"))) / "critics" / SHIPPED
    return path if path.is_file() else None


def knows(path: Path, atoms: Atoms, settings: SearchSettings) -> bool:
    """Whether a critic was trained on such structures: its elements, and clusters or crystals as its card has it."""
    card = card_of(path)
    elements = set(atoms.numbers.tolist())
    alike = bool(atoms.pbc.any()) == bool(card.get("periodic", False)) and not settings.cell
    return alike and len(elements) > 1 and elements <= set(card.get("elements", []))


def _state_file(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{folder} cannot be made ({error.strerror or error}); name another folder") from error
    with suppress(OSError):
        (folder / f".{NAME}.part").unlink(missing_ok=True)
    return folder / NAME


MINIMA = "minima.extxyz"
DATABASE = "minima.db"
SUMMARY = "search.json"
PAGE = "report.html"
UNFINISHED = "start.extxyz"
OURS = (MINIMA, DATABASE, SUMMARY, PAGE, UNFINISHED, STATE)
FORMAT = "relaxion-search"


def gains(result: SearchResult) -> dict[str, dict[str, float]]:
    """Of each kind of move: hops, force calls, new minima, and by how much it lowered the best energy (eV)."""
    found: dict[str, defaultdict[str, float]] = {}
    best = result.history[0].best_ev if result.history else 0.0
    for step in result.history[1:]:
        own = found.setdefault(step.kind, defaultdict(int))
        own["hops"] += 1
        own["force_calls"] += step.hop_calls
        own["new_minima"] += step.outcome == NEW
        own["accepted"] += step.accepted
        own[step.outcome] += 1
        own["gained_ev"] += max(best - step.best_ev, 0.0)
        best = min(best, step.best_ev)
    return {kind: dict(own) for kind, own in found.items()}


def staircase(result: SearchResult) -> list[tuple[int, float]]:
    """Force calls and best energy (eV) wherever it went down, and at the end."""
    steps: list[tuple[int, float]] = []
    for step in result.history:
        if not steps or step.best_ev < steps[-1][1]:
            steps.append((step.calls, step.best_ev))
    if steps:
        steps.append((result.force_calls, steps[-1][1]))
    return steps


def summary(result: SearchResult, **more: Any) -> dict[str, Any]:
    """Plain values; `more`: what was asked."""
    minima = [
        {"energy_ev": minimum.energy_ev, "times_found": minimum.times_found, "found_at_call": minimum.found_at_call}
        for minimum in result.found
    ]
    return {
        "format": FORMAT, **more, "force_calls": result.force_calls, "hops": max(len(result.history) - 1, 0),
        "stopped": result.stopped, "choice": result.choice, "seconds": round(result.seconds, 3),
        "moves": gains(result), "staircase": [list(step) for step in staircase(result)], "minima": minima,
    }  # fmt: skip


def labelled(result: SearchResult) -> list[Atoms]:
    """The minima with what is known of them in `info`."""
    images = []
    for rank, minimum in enumerate(result.found):
        atoms = minimum.atoms.copy()
        atoms.calc = minimum.atoms.calc
        atoms.info |= {"rank": rank, "times_found": minimum.times_found, "found_at_call": minimum.found_at_call}
        images.append(atoms)
    return images


def write_results(result: SearchResult, folder: Path, **more: Any) -> None:
    """Each file in one go; where no minimum was reached, the start as far as it was relaxed."""
    try:
        if result.found:
            images = labelled(result)
            _write_extxyz(images, folder / MINIMA)
            _write_database(images, folder / DATABASE)
        elif result.unfinished is not None:
            _write_extxyz([result.unfinished], folder / UNFINISHED)
        write_json(folder / SUMMARY, summary(result, **more))
    except OSError as error:
        raise FileError(f"results cannot be written into {folder} ({error}); is the disk full?") from error


def _write_extxyz(images: list[Atoms], path: Path) -> None:
    beside = part_of(path)
    ase.io.write(beside, images, format="extxyz")  # pyright: ignore[reportArgumentType] - ASE's hint forgets lists
    beside.replace(path)


def _write_database(images: list[Atoms], path: Path) -> None:
    beside = part_of(path)
    beside.unlink(missing_ok=True)
    database: Any = ase.db.connect(beside, type="db", use_lock_file=False)
    with database:
        for atoms in images:
            words = {name: int(atoms.info[name]) for name in ("rank", "times_found", "found_at_call")}
            database.write(atoms, **words)
    beside.replace(path)
