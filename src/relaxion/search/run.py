"""`relaxion.search`: from minimum to minimum on a budget of force calls."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ase import Atoms
from ase.calculators.calculator import BaseCalculator

from relaxion.errors import FileError, PolicyError, SettingsError
from relaxion.potentials.base import Potential
from relaxion.search.choices import Bandit, HopChooser, Mixture
from relaxion.search.critic import card_of, load_critic
from relaxion.search.critic_choice import CriticChoice
from relaxion.search.minima import Minimum
from relaxion.search.relaxing import ModelChoice, TrialRelaxer, one_round
from relaxion.search.settings import CHOICES, SearchSettings
from relaxion.search.state import NAME, restore_state, save_state
from relaxion.search.walk import Step, Walk, check_moves

SECONDS_BETWEEN_STATES = 10.0
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
    if settings.choice == "auto" and (path is None or not knows(path, atoms, settings)):
        return Bandit(), "bandit over kinds"
    if path is None:
        raise PolicyError("no critic ships with this relaxion; name the file of one, or choose bandit")
    if settings.choice not in CHOICES and not path.is_file():
        raise SettingsError(f"choice is one of {', '.join(CHOICES)} or the file of a critic, got '{settings.choice}'")

    critic = load_critic(path)
    options = {"candidates": settings.candidates, "temperature_ev": settings.softmax_temperature_ev}
    return CriticChoice(critic, **options, learn=settings.learn), f"critic {path.stem}"


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
