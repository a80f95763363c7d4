"""Who can be measured: ours with any policy, our classical core, and everything ASE ships."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ase import Atoms
from ase.filters import Filter, FrechetCellFilter
from ase.optimize.cellawarebfgs import CellAwareBFGS
from ase.optimize.optimize import DEFAULT_MAX_STEPS, Optimizer

from relaxion.errors import SettingsError
from relaxion.optimizer.choice import Chooser
from relaxion.optimizer.point import bare_atoms
from relaxion.relaxer import Relaxer
from relaxion.settings import nearest

OURS = "relaxion"
CORE = "core"
# Those whose best is quoted: in a survey of all on all sets, each was best or near it somewhere, or is widely used.
QUOTED = ("BFGS", "LBFGS", "BFGSLineSearch", "GoodOldQuasiNewton", "RFO", "FIRE", "FIRE2", "MDMin", "GPMin", "CG")
QUOTED_WITH_CELL = ("CellAwareBFGS",)
ALIASES = ("QuasiNewton", "SciPyFminCG")  # of BFGSLineSearch and CG
MOST_GPMIN_ROWS = 6000  # of the dense matrix it factorises at every step; at more, it gives up
ARGUMENTS: dict[str, dict[str, Any]] = {"Sella": {"order": 0}}  # which by default looks for saddles

Build = Callable[[Atoms | Filter], Optimizer]


@dataclass(frozen=True)
class Contestant:
    """One optimizer with its settings, ready to be put on atoms."""

    name: str
    build: Build
    classical: bool = True  # neither ours nor our core

    def steps(self, n_rows: int, cap: int) -> int:
        """Most steps on so many rows of coordinates."""
        return min(cap, MOST_GPMIN_ROWS // (3 * n_rows + 1)) if self.name == "GPMin" else cap


def known_optimizers() -> dict[str, type[Optimizer]]:
    """Everything in ase.optimize, ASE's preconditioned ones, SciPy's, and Sella where it is installed."""
    import ase.optimize
    from ase.optimize.precon import PreconFIRE, PreconLBFGS
    from ase.optimize.sciopt import SciPyFminBFGS, SciPyFminCG

    found = {name: thing for name, thing in vars(ase.optimize).items() if _is_optimizer(thing)}
    found |= {"CG": SciPyFminCG, "SciPyFminCG": SciPyFminCG, "SciPyFminBFGS": SciPyFminBFGS}
    found |= {"PreconLBFGS": PreconLBFGS, "PreconFIRE": PreconFIRE}
    if find_spec("sella") is not None:
        found["Sella"] = import_module("sella").Sella
    return found


def _is_optimizer(thing: object) -> bool:
    return inspect.isclass(thing) and issubclass(thing, Optimizer) and thing is not Optimizer


def chosen_optimizers(text: str, option: str = "") -> dict[str, type[Optimizer]]:
    """From `BFGS,FIRE`; upper and lower case are the same. `option` is where the text came from, if that has a name."""
    known = known_optimizers()
    spelling = {name.lower(): name for name in known}
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word.lower() not in spelling:
            where = f"{option}: " if option else ""
            raise SettingsError(f"{where}ASE has no optimizer '{word}'; {nearest(word, known)}")
    return {spelling[word.lower()]: known[spelling[word.lower()]] for word in words}


def classical_contestants(text: str, *, without_gpmin: bool, free_cell: bool) -> list[Contestant]:
    """From `BFGS,FIRE`, `all`, `none`, or nothing for those of the published tables."""
    if text.strip().lower() == "none":
        return []
    everybody = text.strip().lower() == "all"
    names = _all_but_aliases() if everybody else [*QUOTED, *QUOTED_WITH_CELL]
    chosen_by_us = everybody or not text.strip()
    asked = chosen_optimizers(",".join(names) if chosen_by_us else text)
    sit_out = {"GPMin"} if without_gpmin else set()
    sit_out |= set() if free_cell else set(QUOTED_WITH_CELL)
    return [
        Contestant(name, _build(name, kind)) for name, kind in asked.items() if not (chosen_by_us and name in sit_out)
    ]


def _build(name: str, kind: type[Optimizer]) -> Build:
    if kind is CellAwareBFGS:
        return _cell_aware
    return partial(kind, logfile=None, **ARGUMENTS.get(name, {}))


class _CellAware(CellAwareBFGS):
    """It has a tolerance of its own for stresses: here the one that corresponds to fmax."""

    def run(self, fmax: float = 0.05, steps: int = DEFAULT_MAX_STEPS) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        filtered: Any = self.atoms
        atoms = filtered.atoms
        return super().run(fmax=fmax, smax=fmax * len(atoms) / atoms.get_volume(), steps=steps)


def _cell_aware(target: Atoms | Filter) -> Optimizer:
    """It insists on a filter that does not scale the cell."""
    if isinstance(target, Atoms):
        raise SettingsError("CellAwareBFGS is for free cells; let the cell relax too, or take another optimizer")
    own: Any = FrechetCellFilter(target.atoms, exp_cell_factor=1.0)  # pyright: ignore[reportArgumentType]
    return _CellAware(own, logfile=None)  # pyright: ignore[reportArgumentType]


def _all_but_aliases() -> Iterable[str]:
    return [name for name in known_optimizers() if name not in ALIASES]


def our_contestants(policy: str | None, *, allow_unseen: bool = False) -> list[Contestant]:
    """Ours as asked, and the core beside it; one of them where they are the same thing."""
    core = Contestant(CORE, partial(Relaxer, logfile=None, policy=None), classical=False)
    if policy is None:
        return [core]
    check_policy(policy)
    return [Contestant(OURS, partial(_ours, policy, allow_unseen), classical=False), core]


def _ours(policy: str, allow_unseen: bool, target: Atoms | Filter) -> Optimizer:
    """Decided here, and not by the relaxer, so that a set of fifty starts does not log the same line fifty times."""
    choice = PolicyChoice.of(policy, bare_atoms(target), allow_unseen=allow_unseen)
    return Relaxer(target, logfile=None, policy=choice.policy, allow_unseen=allow_unseen)


@dataclass(frozen=True)
class PolicyChoice:
    """Who relaxes one structure: with "auto" it may be a policy for one and the core for the next."""

    policy: str | None  # the relaxer's `policy=`; None where its elements leave only the core
    allow_unseen: bool
    note: str  # why the core, where somebody may have expected a policy
    device: str | None = None  # where its network computes

    @classmethod
    def of(
        cls,
        policy: str,
        atoms: Atoms,
        *,
        allow_unseen: bool = False,
        calculator: object = None,
        device: str | None = None,
    ) -> PolicyChoice:
        asked = policy_argument(policy)
        chooser = Chooser(asked, allow_unseen=allow_unseen, calculator=calculator or atoms.calc)
        decision = chooser.decide_for(atoms)
        return cls(None if decision.loaded is None else asked, allow_unseen, decision.note, device)


def policy_argument(text: str) -> str | None:
    """What the command line says, as the relaxer's `policy=`: `none` is the classical core, all else is passed on."""
    return None if text.strip().lower() == "none" else text


def check_policy(policy: str | None) -> None:
    """Refuse a policy that is not known or cannot be read, before anything is relaxed."""
    Chooser(policy)
