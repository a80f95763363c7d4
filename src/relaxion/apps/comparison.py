"""What is compared: named sets of starts, and ours beside ASE's own optimizers on one start, in words.

A start depends on set, seed and place only, so fewer structures are the first of the many. Seeds from 9000 on belong to
measuring: nothing is trained or tuned on them. What comes from the whole periodic table is held out by the rule of
`train/data/dataset.py`. All optimizers are counted by the same calculator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.filters import FrechetCellFilter
from ase.io import Trajectory
from ase.optimize.optimize import Optimizer

from relaxion.errors import SettingsError
from relaxion.optimizer.choice import CORE
from relaxion.optimizer.point import quiet_filters
from relaxion.potentials import potential
from relaxion.potentials.base import Potential, PotentialCalculator
from relaxion.potentials.counting import error_in_words
from relaxion.potentials.pairwise import LennardJones
from relaxion.relaxer import Relaxer
from relaxion.settings import nearest
from relaxion.train.data.alloys import (
    EMT_METALS,
    LATTICE_CONSTANTS,
    by_lattice_constant,
    optbench_cluster,
    packed,
    random_alloy,
    strewn,
)
from relaxion.train.data.dataset import Reason
from relaxion.train.data.perturbations import NEAREST_ANGSTROM, displaced, random_strain, strained
from relaxion.train.data.prototypes import carbon_allotrope, random_crystal, random_perovskite
from relaxion.train.data.slabs import random_molecule, slab_with_adsorbate
from relaxion.train.judge.runs import OnCall, PolicyChoice, Reading, RelaxationTask, Run, Stage, finite
from relaxion.train.judge.statistics import SAME_MINIMUM_EV_PER_ATOM

RATTLE_ANGSTROM = 0.12
LARGEST_STRAIN = 0.03
EQUILIBRATION_STEPS = 40
OXIDES = {"Sr8Ti8O24": 11.9, "Y16O24": 14.9, "Ca9Ti6O21": 11.7, "Sr12Ti6O24": 13.6}
"""36 to 42 atoms of the four that MACS was published with; Å³ per atom of the known crystals."""
LENNARD_JONES = "lj, ε = 1 eV, σ = 1 Å, cutoff 15 Å"

PLACES = (  # part of the seeds: new sets go to the end; benchmarks/relaxation/molecular_sets.py has those not below
    "emt-bulk", "emt-large", "emt-bulk-cell", "emt-slabs", "emt-clusters", "alfe", "alfe-cell", "lj38", "mixed",
    "crystals", "crystals-cell", "new-elements", "macs", "perovskites-cell", "carbon-cell", "molecules", "flexible",
    "dimers", "adsorbates", "molecular-crystals", "mp-relax", "perovskites",
)  # fmt: skip

Random = np.random.Generator
Sizes = tuple[int, int]  # fewest and most atoms
Widths = tuple[float, float]  # Å, narrowest and widest
Make = Callable[[Random, int], Atoms]  # the number is the place in the set


@lru_cache(maxsize=8)
def engine(name: str) -> Potential:
    """One model per process. Of Lennard-Jones, a cutoff (OptBench's 15 σ) beyond every distance in a cluster."""
    return LennardJones(cutoff=15.0) if name == LENNARD_JONES else potential(name)


@dataclass(frozen=True)
class StartSet:
    """Starts of one kind, and how they are to be relaxed."""

    name: str
    title: str
    make: Make
    calculator: str = "emt"
    number: int = 50  # of structures, unless another is asked for: a minute or two
    free_cell: bool = False
    without_gpmin: bool = False  # whose time grows with (calls × atoms)³: minutes per structure, far from a minimum

    def make_potential(self) -> Potential:
        return engine(self.calculator)

    def starts(self, number: int, seed: int) -> list[Atoms]:
        """The first `number` starts of this seed."""
        place = PLACES.index(self.name)
        return [self.make(np.random.default_rng([seed, place, index]), index) for index in range(number)]


def find_set(name: str) -> StartSet:
    """The set of this name."""
    if name not in SETS:
        raise SettingsError(f"unknown set '{name}': {nearest(name, SETS)} Or name a structure file.")
    return SETS[name]


def strained_at_random(atoms: Atoms, random: Random) -> Atoms:
    return strained(atoms, random_strain(random, LARGEST_STRAIN))


def _strained(make: Make) -> Make:
    return lambda random, index: strained_at_random(make(random, index), random)


# Metals


def _alloy(random: Random, _index: int = 0, *, sizes: Sizes = (4, 32), rattle: Widths = (0.05, 0.3)) -> Atoms:
    """A random fcc alloy of 1–4 elements, every atom displaced by a Gaussian of random width (Å)."""
    edge = LATTICE_CONSTANTS["Cu"]
    atoms = random_alloy(random, EMT_METALS, sizes, edge_angstrom=edge, scale=by_lattice_constant)
    return displaced(atoms, random, random.uniform(*rattle))


def _cluster(random: Random, _index: int) -> Atoms:
    """6–20 atoms of two metals thrown into a cube of 14 Å³ per atom, no two nearer than 2 Å."""
    size = int(random.integers(6, 21))
    places = strewn(random, size, (14.0 * size) ** (1 / 3))
    return Atoms(random.choice(random.choice(EMT_METALS, 2, replace=False), size), places)


def _near_or_far(random: Random, index: int) -> Atoms:
    """Bulk displaced by 0.1–0.5 Å and loose clusters, in turn."""
    return _cluster(random, index) if index % 2 else _alloy(random, rattle=(0.1, 0.5))


def _packing(random: Random, _index: int) -> Atoms:
    """A random Al–Fe cell of 2–16 atoms, 12 Å³ per atom ±5 %, no two atoms nearer than 1 Å, self-images included."""
    formula = f"Al{random.integers(1, 9)}Fe{random.integers(1, 9)}"
    return packed(random, formula, volume_per_atom_angstrom3=12.0, minimum_distance_angstrom=NEAREST_ANGSTROM)


# The whole periodic table


def equilibrium(atoms: Atoms, name: str = "chgnet") -> Atoms:
    """About as known crystals are: relaxed with the cell by the classical core, at most `EQUILIBRATION_STEPS` steps.

    (So these starts change where the core changes; they are the same for all who are compared.)
    """
    key = (name, atoms.numbers.tobytes(), atoms.positions.tobytes(), atoms.cell.array.tobytes())
    if key not in _EQUILIBRIA:
        found = atoms.copy()
        found.calc = PotentialCalculator(engine(name))
        Relaxer(FrechetCellFilter(found), policy=None, logfile=None).run(fmax=0.05, steps=EQUILIBRATION_STEPS)
        found.calc = None
        _EQUILIBRIA[key] = found
    return _EQUILIBRIA[key].copy()


_EQUILIBRIA: dict[tuple[str, bytes, bytes, bytes], Atoms] = {}  # the same starts are asked for again and again


def _crystal(random: Random, why: Reason) -> Atoms:
    """An unseen crystal of 2–16 atoms at its equilibrium, displaced."""
    atoms = equilibrium(random_crystal(random, side="assessment", why=why, sizes=(2, 16)))
    return displaced(atoms, random, RATTLE_ANGSTROM)


def _known_crystal(random: Random, index: int) -> Atoms:
    """Unseen compositions and unseen prototypes of elements that were seen, in turn."""
    return _crystal(random, "prototype" if index % 2 else "composition")


def _prototype(random: Random, index: int) -> Atoms:
    """As generated: elements on the sites of a prototype, the volume guessed, nothing relaxed or displaced."""
    why: Reason = "prototype" if index % 2 else "composition"
    return random_crystal(random, side="assessment", why=why, sizes=(2, 16))


def _random_oxide(random: Random, index: int) -> Atoms:
    """The published recipe of MACS: about 40 atoms thrown into a random cell, none nearer than 1 Å, volume ±5 %."""
    formula, volume = list(OXIDES.items())[index % len(OXIDES)]
    return packed(random, formula, volume_per_atom_angstrom3=volume, minimum_distance_angstrom=NEAREST_ANGSTROM)


def _perovskite(random: Random, _index: int) -> Atoms:
    """Cubic ABX₃ of an unseen composition, displaced; mostly unstable, so far from any minimum."""
    return displaced(random_perovskite(random, side="assessment"), random, 0.1)


def _molecule(random: Random, _index: int) -> Atoms:
    """One that was held out, or is joined from such, displaced."""
    return displaced(random_molecule(random, side="assessment", sizes=(3, 24)), random, 0.05, nearest=0.6)


def _carbon(random: Random, index: int) -> Atoms:
    return displaced(carbon_allotrope(index), random, 0.1)


_far = partial(StartSet, without_gpmin=True)
_cell = partial(StartSet, free_cell=True)
_CRYSTALS_CELL = "unseen crystals with free cell, 2–16 atoms, CHGNet, rattle 0.12 Å, strain ±3 %"
_NEW_ELEMENTS = "crystals with an element never trained on, 2–16 atoms, CHGNet, rattle 0.12 Å"
_PEROVSKITES = "unseen cubic perovskites, 5 atoms, CHGNet, rattle 0.1 Å"
_PEROVSKITES_CELL = "unseen cubic perovskites with free cell, 5 atoms, CHGNet, rattle 0.1 Å, strain ±3 %"
_CARBON = "carbon allotropes with free cell, 4–8 atoms, CHGNet, rattle 0.1 Å, strain ±3 %"
_PROTOTYPES = "unrelaxed prototypes with free cell, 2–16 atoms, CHGNet (the protocol of Matbench Discovery)"
_ALLOYS_CELL = "EMT alloys with free cell, 4–32 atoms, rattle 0.05–0.15 Å, strain ±3 %"
_PACKINGS_CELL = "random Al–Fe packings with free cell, 2–16 atoms"
_KNOWN = (
    StartSet("emt-bulk", "random EMT alloys, 4–32 atoms, rattle 0.05–0.3 Å", _alloy, number=100),
    _far("emt-large", "random EMT alloys, 24–64 atoms, rattle 0.05–0.3 Å", partial(_alloy, sizes=(24, 64))),
    _cell("emt-bulk-cell", _ALLOYS_CELL, _strained(partial(_alloy, rattle=(0.05, 0.15)))),
    StartSet("emt-slabs", "EMT slabs with an adsorbate", lambda random, _: slab_with_adsorbate(random, EMT_METALS)),
    _far("emt-clusters", "random EMT clusters, 6–20 atoms", _cluster),
    _far("alfe", "random Al–Fe packings, 2–16 atoms", _packing, "eam"),
    _far("alfe-cell", _PACKINGS_CELL, _packing, "eam", free_cell=True),
    _far("lj38", "random LJ38 clusters (OptBench)", lambda random, _: optbench_cluster(random, 38), LENNARD_JONES),
    _far("mixed", "EMT: bulk displaced by 0.1–0.5 Å and loose clusters, in turn", _near_or_far),
    StartSet("crystals", "unseen crystals, 2–16 atoms, CHGNet, rattle 0.12 Å", _known_crystal, "chgnet", 40),
    _cell("crystals-cell", _CRYSTALS_CELL, _strained(_known_crystal), "chgnet", 40),
    StartSet("new-elements", _NEW_ELEMENTS, lambda random, _: _crystal(random, "element"), "chgnet", 40),
    _far("macs", "random oxides of about 40 atoms (the recipe of MACS), CHGNet", _random_oxide, "chgnet", 20),
    _cell("perovskites-cell", _PEROVSKITES_CELL, _strained(_perovskite), "chgnet", 30),
    _cell("carbon-cell", _CARBON, _strained(_carbon), "chgnet", 25),
    StartSet("molecules", "unseen organic molecules, 3–24 atoms, GFN2-xTB, rattle 0.05 Å", _molecule, "gfn2", 40),
    _cell("mp-relax", _PROTOTYPES, _prototype, "chgnet", 40),
    StartSet("perovskites", _PEROVSKITES, _perovskite, "chgnet", 30),
)
SETS: dict[str, StartSet] = {known.name: known for known in _KNOWN}


logger = logging.getLogger(__name__)


def run_ase_optimizer(kind: type[Optimizer], task: RelaxationTask, on_call: OnCall) -> Run:
    """Run it as a user of ASE would, with its defaults."""
    stage = Stage(task, on_call)
    try:
        stepping = kind(stage.target, logfile=None)  # pyright: ignore[reportArgumentType] - filters work too
        with stepping as optimizer, quiet_filters():
            stage.watch(optimizer)
            converged = optimizer.run(fmax=task.fmax, steps=task.steps)
    except Exception as error:  # noqa: BLE001 - ASE's optimizers report failure by exceptions of many kinds
        return stage.finish("error", error=f"{type(error).__name__}: {error}")
    return stage.finish("converged" if converged else "step_limit")


def restart_name(name: str) -> str:
    """Of the file with the state of the optimizer, left behind where a relaxation was cut short."""
    return f"{name}.restart.json"


def run_relaxer(
    task: RelaxationTask,
    choice: PolicyChoice,
    log: Path | None,
    trajectory: Path | None,
    on_call: OnCall,
    database: Path | None = None,
    restart: Path | None = None,
    model: Potential | None = None,
) -> Run:
    """Our optimizer, held to the same count as the others.

    restart: go on from this file of an earlier run. model: a cheaper potential that plans.
    """
    stage = Stage(task, on_call)
    optimizer = Relaxer(
        stage.target,
        restart=restart,
        logfile=log,
        trajectory=trajectory if restart is None else None,
        policy=choice.policy,
        allow_unseen=choice.allow_unseen,
        database=database,
        device=choice.device,
        model=model,
        leave_saddles=task.leave_saddles,
    )
    if restart is not None and trajectory is not None:
        # ASE, where it appends, leaves out the first point as known; here it is new
        optimizer.attach(optimizer.closelater(Trajectory(trajectory, "a", stage.atoms)))
    optimizer.go_on()
    stage.watch(optimizer)
    outcome, error = _ended(optimizer, task)
    _keep_restart(optimizer, restart, trajectory, cut_short=outcome in ("error", "interrupted"))
    stands = outcome == "converged" or _last_stands(optimizer, stage)
    run = stage.finish(outcome, error=error, last_stands=stands)
    run = replace(run, force_calls=run.force_calls + optimizer.calls_before)
    if outcome not in ("interrupted", "error"):
        check_count(optimizer.force_calls, run.force_calls)
    return replace(
        run,
        policy_used=optimizer.policy_used,
        policy_steps=optimizer.policy_steps,
        fallback_used=optimizer.fallback_used,
        model_used=optimizer.model_used,
        model_calls=optimizer.model_calls,
        model_steps=optimizer.model_steps,
        reason=optimizer.reason,
        readings=readings_of(optimizer),
        frames=tuple(optimizer.film.frames),
        end_check=optimizer.end_check,
    )


def _keep_restart(optimizer: Relaxer, restart: Path | None, trajectory: Path | None, *, cut_short: bool) -> None:
    """Where there is something to go on with. A full disk may be what ended the run: the rest must not be lost."""
    with suppress(OSError):
        if cut_short and trajectory is not None:
            optimizer.save(trajectory.with_name(restart_name(trajectory.stem)))
        elif restart is not None:
            restart.unlink()


def readings_of(optimizer: Relaxer) -> tuple[Reading, ...]:
    """Every force call of its history."""
    return tuple(
        Reading(
            entry.call,
            finite(entry.energy_ev),
            finite(entry.fmax_ev_per_angstrom),
            entry.accepted,
            entry.method,
            entry.reason,
            finite(entry.enthalpy_ev - entry.energy_ev) or 0.0,
        )
        for entry in optimizer.history
    )


def _ended(optimizer: Relaxer, task: RelaxationTask) -> tuple[str, str | None]:
    """Run it; the outcome, and the error if there was one."""
    try:
        with optimizer:  # closed before anything is moved: older ASE keeps log and trajectory open, and unflushed
            optimizer.run(fmax=task.fmax, steps=task.steps)
    except KeyboardInterrupt:
        return "interrupted", None
    except Exception as error:  # noqa: BLE001 - the calculator's failure, a full disk, a defect: what is done is kept
        return "error", error_in_words(error)
    return optimizer.outcome.label.replace(" ", "_"), None


def _last_stands(optimizer: Relaxer, stage: Stage) -> bool:
    """Whether the last point is what was reached, and not one that was tried and rejected, or never judged."""
    judged = bool(optimizer.history) and optimizer.force_calls - optimizer.calls_before == stage.counter.answers
    finite = stage.counter.last is not None and stage.counter.last.finite
    return judged and finite and optimizer.history[-1].accepted


def check_count(claimed: int, counted: int) -> None:
    """The number shown is always the calculator's; if the optimizer thinks otherwise, the user should know."""
    if claimed != counted:
        logger.warning(
            "relaxion: the optimizer counted %d force calls, the calculator %d; the calculator's number is shown; "
            "please report this", claimed, counted,
        )  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """One optimizer beside ours."""

    name: str
    run: Run
    above_ours_ev_per_atom: float | None  # in enthalpy; None: one of the two has none

    @property
    def other_minimum(self) -> bool:
        """Both converged, but not to the same place."""
        gap = self.above_ours_ev_per_atom
        return self.run.converged and gap is not None and abs(gap) > SAME_MINIMUM_EV_PER_ATOM


def compared(name: str, run: Run, ours: Run, n_atoms: int) -> Compared:
    if run.enthalpy_ev is None or ours.enthalpy_ev is None:
        return Compared(name, run, None)
    return Compared(name, run, (run.enthalpy_ev - ours.enthalpy_ev) / n_atoms)


def in_words(ours: Run, others: Sequence[Compared]) -> str:
    """`BFGS 21, FIRE 44: 3.0 × fewer than BFGS`."""
    counts = ", ".join(_count(other) for other in others)
    finished = [other for other in others if other.run.converged]
    if not ours.converged or not finished:
        return counts
    best = min(finished, key=lambda other: other.run.force_calls)
    return f"{counts}: {_ratio(best.run.force_calls / ours.force_calls)} {best.name}"


def _count(other: Compared) -> str:
    calls = other.run.force_calls
    if other.run.converged:
        return f"{other.name} {calls}"
    return f"{other.name} {'failed' if other.run.error else 'not converged'} after {calls}"


def _ratio(fewer: float) -> str:
    if 1 / 1.05 < fewer < 1.05:
        return "about as many as"
    return f"{fewer:.1f} × fewer than" if fewer > 1 else f"{1 / fewer:.1f} × more than"


def minima_in_words(ours: Run, others: Sequence[Compared]) -> str:
    """Who ended somewhere else; empty when nobody did, or when we have no minimum to compare with."""
    if not ours.converged:
        return ""
    strangers = [
        f"{other.name} found another minimum, {abs(other.above_ours_ev_per_atom) * 1000:.1f} meV/atom "
        f"{'higher' if other.above_ours_ev_per_atom > 0 else 'lower'}"
        for other in others
        if other.other_minimum and other.above_ours_ev_per_atom is not None
    ]
    return "; ".join(strangers)


def who_relaxed(run: Run) -> str:
    """`policy metals`, and how often somebody else had to step in; the cheaper potential, where there is one."""
    asked = f"{run.model_calls} call{'' if run.model_calls == 1 else 's'} of it"
    planned = f", model {run.model_used} ({asked})" if run.model_used else ""
    return _who_stepped(run) + planned


def _who_stepped(run: Run) -> str:
    if run.model_steps:
        every = run.model_steps + run.policy_steps + run.fallback_used
        return f"{run.model_steps} of {every} steps planned by the model"
    if run.policy_used in (None, CORE):
        steps = f"{run.fallback_used} step{'' if run.fallback_used == 1 else 's'}"
        return "classical optimizer" + (f" ({steps} by FIRE)" if run.fallback_used else "")
    every = run.policy_steps + run.fallback_used
    by_others = f" ({run.policy_steps} of {every} steps, the others by the classical optimizer)"
    return f"policy {run.policy_used}" + (by_others if run.fallback_used else "")
