"""`relaxion.Relaxer`: a drop-in ASE optimizer that counts force calls and spends few of them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

import numpy as np
from ase import Atoms
from ase.calculators.calculator import BaseCalculator
from ase.filters import Filter, UnitCellFilter
from ase.optimize.optimize import DEFAULT_MAX_STEPS, Optimizer
from ase.units import GPa
from ase.utils.abc import Optimizable

from relaxion.database import RelaxationDatabase
from relaxion.errors import RestartError, SettingsError
from relaxion.optimizer.choice import CORE, chosen
from relaxion.optimizer.classical import ClassicalSettings
from relaxion.optimizer.point import (
    SHORTEST_MOTION,
    STEPS_WITHOUT_MOTION,
    Array,
    Coordinates,
    Film,
    Point,
    Proposal,
    bare_atoms,
    check_door,
    frame_of,
    has_geometry,
    images_in,
    longest,
    missing_point,
    place,
    points_at,
    proposal_in_space,
    read_coordinates,
    read_energy,
    read_point,
    unwrapped,
    without_foreign,
)
from relaxion.optimizer.records import Remembered, Saved, database_at, read_restart, write_restart
from relaxion.optimizer.saddles import (
    CURVATURE,
    Check,
    EndCheck,
    SaddleSearch,
    back_afterwards,
    failed,
    kinds_of,
    undone,
)
from relaxion.optimizer.step import Stepper, propose
from relaxion.optimizer.trust_region import TrustRegionSettings
from relaxion.settings import shown
from relaxion.structures.state import Outcome
from relaxion.structures.structures import DeviceLike

if TYPE_CHECKING:
    from relaxion.optimizer.two_levels import TwoLevels
    from relaxion.potentials.base import Potential

logger = logging.getLogger(__name__)

LARGE = 200  # atoms; only above it may a policy's step cost more than a force call
TIMED_STEPS = 2  # in a row that took longer than their force calls: the policy is too slow to pay
MOST_LOOKS = 8  # near an end, one after the other; fewer are allowed
MOVED_BY_HAND = 1e-3  # Å; atoms found farther than this from where we left them were moved by somebody else


@dataclass(frozen=True)
class HistoryEntry:
    """One force call."""

    call: int
    energy_ev: float  # of the calculator; the one that belongs to the forces, where it has several
    enthalpy_ev: float  # energy + pressure × volume: what is minimised; equal to the energy without pressure
    fmax_ev_per_angstrom: float
    method: str  # that led here: "start", "policy", "model", "internal", "springs", "plain", "fire", "saddle" (left);
    # "curvature": a look at a place near the end
    step_length_angstrom: float  # longest executed displacement, from the base of the step
    trust_angstrom: float  # that the step had to keep to; at the start that of the classical optimizer
    accepted: bool = True
    reason: str = ""  # the safeguard's reason for that method, or for FIRE
    control: Mapping[str, float] = field(default_factory=dict)  # scale, trust factor, … of a policy's step


class Relaxer(Optimizer):
    """Relax atoms (or a cell filter around them) with few force calls.

    Every step of `run` is one force call; rejected points count too. Use it as any ASE optimizer:

    >>> Relaxer(atoms).run(fmax=0.05)
    >>> Relaxer(FrechetCellFilter(atoms)).run(fmax=0.05)

    After the run: `outcome`, `force_calls`, `history`, `fallback_used`. `relaxion.report(opt)` shows it in a notebook.
    """

    defaults: ClassVar[dict[str, Any]] = {**Optimizer.defaults, "maxstep": 0.6}

    def __init__(
        self,
        atoms: Atoms | Filter | Optimizable,
        restart: str | Path | None = None,
        logfile: IO | str | Path | None = "-",
        trajectory: str | Path | None = None,
        append_trajectory: bool = False,
        policy: str | Path | None = "auto",
        maxstep: float | None = None,
        allow_unseen: bool = False,
        database: str | Path | RelaxationDatabase | None = None,
        device: DeviceLike = None,
        model: str | BaseCalculator | Potential | None = None,
        leave_saddles: bool = False,
        **kwargs: Any,
    ) -> None:
        """All else as in ASE; options that only other optimizers have (alpha, dt, memory, …) are named in a warning.

        Args:
            atoms: atoms with a calculator, or a cell filter around them.
            restart: a file to continue from, written at every step.
            policy: "auto", a shipped policy that covers the elements; a name or path; None, the classical optimizer.
            maxstep: longest displacement of an atom in one step, Å.
            allow_unseen: use the policy also for elements it was not trained on.
            database: a folder that keeps every evaluated structure (`relaxion learn`).
            device: where the network of the policy computes, such as "cuda".
            model: a cheaper calculator, or its name, that plans for the calculator of the atoms; its calls are counted
                as `model_calls`.
            leave_saddles: look for negative curvature at the end, with at most 4 force calls, and relax further if
                there is some (`end_check`).
        """
        check_door(atoms)
        atoms = unwrapped(atoms)
        self.maxstep = _checked_maxstep(self.defaults["maxstep"] if maxstep is None else maxstep)
        self.policy = policy
        policy = policy if has_geometry(atoms) else _not_asked(policy, atoms)
        if database is not None and isinstance(atoms, Coordinates):
            raise SettingsError(
                f"a database stores structures; {type(atoms.__ase_optimizable__()).__name__} is not one"
            )
        kept_in = database_at(database)
        choice = chosen(
            policy,
            bare_atoms(atoms) if isinstance(atoms, Atoms | Filter) else None,
            ClassicalSettings(TrustRegionSettings(largest=self.maxstep)),
            allow_unseen=allow_unseen,
            device=device,
        )
        self.policy_used = choice.name
        self._alone = choice.stepper
        self._weights_sha256 = choice.weights_sha256
        self._levels = _levels_of(model, atoms, self.maxstep, self._alone)
        self._remembered = None if kept_in is None else Remembered(kept_in, atoms, choice.name)  # pyright: ignore[reportArgumentType]
        self.history: list[HistoryEntry] = []
        self.film = Film()
        self._base_call: int | None = None  # the force call at whose point the next step begins
        self._calls_before = 0  # in the run that wrote the restart file
        self._seen_at: Array | None = None  # where the last step began
        self._left_at: Array | None = None  # where it led
        self._counted: bytes | None = None  # the geometry of the last entry of the history
        self._read: tuple[bytes, Array] | None = None  # a geometry, and its coordinates as the filter has them
        self._motionless = 0
        self._warned = False
        self._call_began: float | None = None  # when the last step had been made, s
        self._call_seconds = math.inf  # of the last force call
        self._slow_steps = 0  # of the policy, in a row
        self._stopped: Outcome | None = None
        self.reason = ""  # why it stopped before its time, in words
        self._saddles = SaddleSearch(kinds_of(bare_atoms(atoms))) if leave_saddles else None
        self._look: Proposal | None = None  # at a place near the end, while it is evaluated
        if restart is not None and Path(restart).exists() and not Path(restart).is_file():
            raise RestartError(f"{restart} is not a file; name another restart file")
        super().__init__(
            atoms,  # pyright: ignore[reportArgumentType]  # ASE's hint forgets filters
            restart=restart,
            logfile=logfile,
            trajectory=trajectory,
            append_trajectory=append_trajectory,
            **without_foreign(kwargs),
        )

    @property
    def force_calls(self) -> int:
        """Structures evaluated, rejected ones and those before a restart included."""
        return self._calls_before + len(self.history)

    @property
    def model_calls(self) -> int:
        """Calls of the cheaper potential, those before a restart included; 0 without one."""
        return 0 if self._levels is None else self._levels.model.calls

    @property
    def model_used(self) -> str:
        """The cheaper potential, and why it was left where it was; empty without one."""
        return "" if self._levels is None else self._levels.model.used

    @property
    def _stepper(self) -> Stepper:
        """Who makes the next step."""
        return self._alone if self._levels is None else self._levels.stepper

    @property
    def end_check(self) -> EndCheck:
        """Whether the end is a minimum, as far as that was looked for."""
        return EndCheck() if self._saddles is None else self._saddles.found

    @property
    def calls_before(self) -> int:
        """Those in the runs before the restart file was written."""
        return self._calls_before

    @property
    def pressure_gpa(self) -> float:
        """The external pressure that the cell filter works against; 0 without such a filter."""
        return float(getattr(self.atoms, "scalar_pressure", 0.0)) / GPa

    @property
    def fallback_used(self) -> int:
        """Steps made by another method than the one asked for: by the classical optimizer or FIRE instead of the
        policy, by FIRE instead of the classical optimizer."""
        return self._alone.fallback_used if self._levels is None else self._levels.fallback_used

    @property
    def policy_steps(self) -> int:
        """Steps made by the policy itself."""
        return self._alone.policy_steps

    @property
    def model_steps(self) -> int:
        """Steps planned by the cheaper potential."""
        return 0 if self._levels is None else self._levels.model_steps

    @property
    def outcome(self) -> Outcome:
        """How the relaxation stands."""
        if self._stopped is not None:
            return self._stopped
        ways = [entry for entry in self.history[-MOST_LOOKS:] if entry.method != CURVATURE]
        if self.fmax is not None and ways and ways[-1].fmax_ev_per_angstrom < self.fmax:
            return Outcome.CONVERGED
        if self.history and self.nsteps >= self.max_steps:
            return Outcome.STEP_LIMIT
        return Outcome.RUNNING

    def initialize(self) -> None:
        """Nothing learned yet."""
        self._stepper.reset()

    def read(self) -> None:
        """Go on from the restart file."""
        path = Path(str(self.restart))
        saved = read_restart(path, self.atoms)
        if saved.policy != self.policy_used:
            asked = None if saved.policy == CORE else saved.policy
            raise RestartError(
                f"{path} was written with the policy {saved.policy[:80]}, now it is {self.policy_used}; "
                f"give policy={shown(asked)}, or delete the file to start afresh"
            )
        if saved.weights_sha256 != self._weights_sha256:
            raise RestartError(
                f"{path} was written with other weights of the policy {saved.policy} "
                f"(sha256 {saved.weights_sha256[:12]}, now {self._weights_sha256[:12]}); "
                "use the file of that time, or delete the restart file to start afresh"
            )
        self._calls_before = saved.force_calls
        self._seen_at = saved.seen_at
        self._left_at = saved.left_at
        try:
            self._restore_model(path, saved.core.get("model"))
            if self._saddles is not None and "saddles" in saved.core:
                self._saddles.restore(saved.core["saddles"], len(saved.seen_at))
            self._stepper.restore(saved.core)
            self._stepper.check_rows(len(saved.seen_at))
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise RestartError(f"{path} is damaged ({shown(error)}); delete it to start afresh") from error

    def replay_trajectory(self, traj: str | Path | Iterable[Atoms]) -> None:
        """Learn from the images of an earlier run, at no force call, and go on at its last image.

        From anywhere else a relaxation starts afresh. TypeError where images do not give the coordinates of the filter.
        """
        target = self.atoms
        if not isinstance(target, Atoms | UnitCellFilter) and type(target) is not Filter:
            raise TypeError(f"{type(target).__name__} has coordinates that images lack; start without a replay")
        points = [point for point in points_at(target, images_in(traj)) if point.finite]
        moved = [p for p, q in pairwise(points) if longest(p.coordinates - q.coordinates) > SHORTEST_MOTION]
        self._stepper.reset()
        for point in moved:
            propose([self._stepper], [point])
        if moved:
            self._seen_at = moved[-1].coordinates
            self._left_at = points[-1].coordinates
        self._calls_before = len(moved)

    def go_on(self) -> None:
        """After a restart: put the atoms where the run before would have looked next, so that no force call is lost."""
        if self._left_at is not None:
            place(self.atoms, self._left_at)

    def save(self, path: str | Path) -> None:
        """Write a restart file, as every step does where `restart` is given; before the first step there is none."""
        if self._seen_at is None or self._left_at is None:
            return
        who = self.policy_used, self._weights_sha256
        core = self._stepper.snapshot()
        if self._levels is not None:
            core["model"] = self._levels.plain()
        if self._saddles is not None:
            core["saddles"] = self._saddles.plain()
        saved = Saved(self.force_calls, self._seen_at, self._left_at, core, *who)
        write_restart(Path(path), self.atoms, saved)

    def _keep_restart(self) -> None:
        if self.restart is not None and self.comm.rank == 0:
            self.save(self.restart)

    def todict(self) -> dict[str, Any]:
        """For the header of the trajectory."""
        return {**super().todict(), "policy": self.policy_used}

    def run(self, fmax: float = 0.05, steps: int = DEFAULT_MAX_STEPS) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Relax until the largest force is below `fmax` (eV/Å) or `steps` steps are done. Whether it converged."""
        self._begin(fmax)
        converged = bool(super().run(fmax, steps))
        while converged and self._leaves_saddle():
            converged = bool(super().run(fmax, self.max_steps - self.nsteps))
        if self.outcome is Outcome.STEP_LIMIT:
            self._settle()
        elif self.outcome is Outcome.NON_FINITE and self._stepper.last is not None:
            place(self.atoms, self._stepper.last.base.coordinates)  # the last point with finite forces
        if self._remembered is not None:
            self._remembered.end(self.outcome)
        return converged

    def irun(self, fmax: float = 0.05, steps: int = DEFAULT_MAX_STEPS) -> Generator[bool]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The same as a generator; the atoms stay at the last point tried, even if it was a bad one."""
        self._begin(fmax)
        return super().irun(fmax, steps) if self._saddles is None else self._irun_on(super().irun(fmax, steps), fmax)

    def _irun_on(self, relaxing: Generator[bool], fmax: float) -> Generator[bool]:
        """The same, but a saddle point is no end."""
        while True:
            converged = False
            for converged in relaxing:
                if not converged:
                    yield False
            if not converged:
                return
            if not self._leaves_saddle():
                yield True
                return
            relaxing = super().irun(fmax, self.max_steps - self.nsteps)

    def _leaves_saddle(self) -> bool:
        """At the end: whether that was a saddle point, beside which the atoms now stand."""
        if self._saddles is None:
            return False
        if self._levels is not None:
            self._levels.plan_no_more()
        point = read_point(self.atoms, self._coordinates())
        self._seen_at = self._left_at = point.coordinates
        self._base_call = self.force_calls
        with back_afterwards(self.atoms):
            proposal = self._looked_around(self._saddles.check(point, self._stepper, self.max_steps - self.nsteps))
        self._write(f"{self._saddles.found.in_words()}, {self._saddles.calls} calls")
        self._counted = self._geometry()
        if proposal is None:
            return False
        place(self.atoms, point.coordinates + proposal.step)
        self._left_at = self._coordinates()
        self.nsteps += 1
        self._keep_restart()
        self.log(self.optimizable.get_gradient())
        self.call_observers()
        return True

    def _looked_around(self, check: Check) -> Proposal | None:
        """The step from a saddle point, where the check finds one."""
        found: Point | str | None = None
        while True:
            try:
                look = next(check) if found is None else check.send(found)
            except StopIteration as end:
                return end.value
            try:
                found = self._look_at(look)
            except Exception as error:  # noqa: BLE001 - calculators may raise anything; the end stands all the same
                found = failed(error)

    def _look_at(self, look: Proposal) -> Point | str:
        """One force call at a place near the end. Observers, such as trajectories, see the ways only."""
        self._keep_restart()
        place(self.atoms, look.base.coordinates + look.step)
        if reason := undone(look, self._coordinates()):
            return reason
        self._look = look
        try:
            point = read_point(self.atoms, self._coordinates())
            self._enter_history(float(self.optimizable.gradient_norm(self.optimizable.get_gradient())))
            self.history[-1] = replace(self.history[-1], accepted=False)
        finally:
            self._look = None
        self.nsteps += 1
        return point

    def _write(self, sentence: str) -> None:
        if self.logfile is not None:
            self.logfile.write(f"{type(self).__name__}:  {sentence}\n")

    def _begin(self, fmax: float) -> None:
        _check_fmax(fmax)
        self._stopped = None
        self._motionless = 0
        self.reason = ""
        if self._remembered is not None:
            self._remembered.fmax = fmax
        if self._levels is not None:
            self._plan(self._levels, fmax)
        if self.nsteps > 0 and self._counted != self._geometry():
            self.log(self.optimizable.get_gradient())  # ASE logs, and we count, the first point of the first run only

    def _settle(self) -> None:
        """Judge the last point of an unfinished run; where it is bad, leave the atoms at the better one before it."""
        point = read_point(self.atoms, self._coordinates())
        self._propose(point)
        base = self._stepper.last.base if self._stepper.last is not None else point
        if base is not point:
            place(self.atoms, base.coordinates)
        self._seen_at = base.coordinates
        self._left_at = None

    def log(self, gradient: Any = None) -> None:
        """ASE calls this once per evaluated point: the place where calls are counted."""
        if self._call_began is not None:
            self._call_seconds = time.perf_counter() - self._call_began
            self._call_began = None
            if self._levels is not None:
                self._levels.model.call_seconds = self._call_seconds
        largest_force = float(self.optimizable.gradient_norm(gradient))
        if self.pressure_gpa:
            enthalpy = read_energy(self.atoms)
            self._log_under_pressure(read_energy(bare_atoms(self.atoms)), enthalpy, largest_force)
        else:
            super().log(gradient)
        self._enter_history(largest_force)

    def _enter_history(self, largest_force: float, *, failed: bool = False) -> None:
        """A new place is a force call, also where the calculator failed."""
        geometry = self._geometry()
        if self._counted == geometry:
            return
        self._counted = geometry
        enthalpy = math.nan if failed else read_energy(self.atoms)
        energy = read_energy(bare_atoms(self.atoms)) if self.pressure_gpa and not failed else enthalpy
        last = self._look or self._stepper.last
        travelled = 0.0 if last is None else last.base.reach(self._coordinates() - last.base.coordinates)
        self.history.append(
            HistoryEntry(
                call=self.force_calls + 1,
                energy_ev=energy,
                enthalpy_ev=enthalpy,
                fmax_ev_per_angstrom=largest_force,
                method="start" if last is None else last.method,
                step_length_angstrom=travelled,
                trust_angstrom=self._stepper.region.radius if last is None else last.trust,
                reason="" if last is None else last.reason,
                control={} if last is None else last.control,
            )
        )
        proposed = None if last is None else proposal_in_space(self.atoms, last)
        base_call = None if last is None else self._base_call
        self.film.add(frame_of(bare_atoms(self.atoms), self.force_calls, base_call, proposed))
        if self._remembered is not None and not failed:
            self._remembered.point(self.force_calls, base_call)

    def _log_under_pressure(self, energy: float, enthalpy: float, largest_force: float) -> None:
        """ASE's line with one more column: ASE itself would write the enthalpy under the heading "Energy"."""
        if self.logfile is None:
            return
        name = type(self).__name__
        if self.nsteps == 0:
            headings = f"{'Step':>4} {'Time':>8} {'Energy':>15} {'Enthalpy':>15}  {'fmax':>12}"
            self.logfile.write(f"{' ' * len(name)}  {headings}\n")
        now = time.strftime("%H:%M:%S")
        numbers = f"{energy:15.6f} {enthalpy:15.6f} {largest_force:15.6f}"
        self.logfile.write(f"{name}:  {self.nsteps:3d} {now} {numbers}\n")

    def step(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Judge the present point, move on to the next. (Older ASE passes forces; they are read afresh.)"""
        point: Point | None = read_point(self.atoms, self._coordinates())
        while point is not None and self._go_on_from(point):
            point = self._failed_answer()
            self.nsteps += point is not None

    def _go_on_from(self, point: Point) -> bool:
        """Move to the next point; whether there is one."""
        began = time.perf_counter()
        proposal = self._propose(point)
        self._watch_time(time.perf_counter() - began)
        if proposal is None:
            self._stop(Outcome.NON_FINITE, f"not finite: {point.not_finite} at call {self.force_calls}, the start")
            return False
        if self._stepper.hopeless:
            self._stop(Outcome.NON_FINITE, f"not finite: {self._stepper.hopeless}")
            return False
        self._warn_of_energies()
        place(self.atoms, proposal.base.coordinates + proposal.step)
        self._seen_at, self._left_at = point.coordinates, self._coordinates()
        self._watch_motion(longest(self._left_at - point.coordinates))
        self._keep_restart()
        self._call_began = time.perf_counter()
        return self._stopped is None

    def _failed_answer(self) -> Point | None:
        """With a model: a point without numbers where the calculator fails at the place just planned, else None."""
        if self._levels is None:
            return None
        try:
            self.optimizable.get_gradient()  # which the calculator keeps
        except Exception as error:
            if not self._levels.goes_back(error):
                raise
        else:
            return None
        self._enter_history(math.nan, failed=True)
        return missing_point(self.atoms, self._coordinates())

    def _plan(self, levels: TwoLevels, fmax: float) -> None:
        """Before the first call: relax in the cheaper potential."""
        levels.model.fmax = fmax
        if self.force_calls > 0 or self._seen_at is not None:
            return
        words = levels.begin(fmax)
        if levels.model.note:
            logger.warning("%s; the relaxation continues without it", levels.model.note)
        self._write(words)
        self._call_began = time.perf_counter()
        point = self._failed_answer()
        while point is not None and self._go_on_from(point):
            point = self._failed_answer()

    def _restore_model(self, path: Path, saved: dict[str, Any] | None) -> None:
        if (saved is None) != (self._levels is None):
            had = "without a model" if saved is None else f"with the model {shown(saved['name'])}"
            raise RestartError(f"{path} was written {had}; give the same model, or delete the file to start afresh")
        if saved is None or self._levels is None:
            return
        name = self._levels.model.name
        if saved["name"] != name:
            raise RestartError(f"{path} was written with the model {shown(saved['name'])}, now it is {name}")
        self._levels.restore(saved)

    def _watch_time(self, seconds: float) -> None:
        """Where forces are cheap and the structure is large, "auto" leaves the policy for what is quicker in all."""
        safeguard = self._stepper.safeguard
        large = self.policy == "auto" and len(bare_atoms(self.atoms)) > LARGE
        if not large or not safeguard.has_policy:
            return
        self._slow_steps = self._slow_steps + 1 if seconds > self._call_seconds else 0
        if self._slow_steps == TIMED_STEPS:
            safeguard.leave_policy()
            logger.info(
                "a step of the policy takes %.2g s, a force call %.2g s: the classical optimizer continues, "
                "because it is faster in total; policy='%s' keeps the policy",
                seconds,
                self._call_seconds,
                self.policy_used,
            )

    def _warn_of_energies(self) -> None:
        """Once, where the calculator's energies contradict its forces."""
        said = self._stepper.region.contradiction
        if said and not self._warned:
            logger.warning("%s; do cutoffs, k-points or spins change with the cell?", said)
            self._warned = True

    def _propose(self, point: Point) -> Proposal | None:
        """The next step; None where there is no finite point to begin at.

        Atoms found where the last step began have not been moved yet (a kill before the force call, or an unfinished
        run that was settled): the same step is taken again. Atoms found elsewhere were moved by somebody else.
        """
        from_left = _distance(point.coordinates, self._left_at)
        from_seen = _distance(point.coordinates, self._seen_at)
        if from_seen < min(from_left, MOVED_BY_HAND) and self._stepper.last is not None:
            return self._stepper.last
        if from_left > MOVED_BY_HAND:
            self._stepper.reset()
        if self._stepper.last is None and not point.finite and (self._levels is None or not self._levels.has_other):
            return None
        proposal = propose([self._stepper], [point])[0] if self._levels is None else self._levels.propose(point)
        if proposal.base is not point and self.history:
            self.history[-1] = replace(self.history[-1], accepted=False)
        elif proposal.base is point:
            self._base_call = self.force_calls
        return proposal

    def _geometry(self) -> bytes:
        atoms = bare_atoms(self.atoms)
        return atoms.positions.tobytes() + np.asarray(atoms.cell).tobytes()

    def _coordinates(self) -> Array:
        """As the filter has them, read once per geometry: FrechetCellFilter takes a logarithm of a matrix for it."""
        geometry = self._geometry()
        if self._read is None or self._read[0] != geometry:
            self._read = geometry, read_coordinates(self.atoms)
        return self._read[1]

    def _watch_motion(self, length: float) -> None:
        """Constraints may undo every move; then going on would only burn calls."""
        self._motionless = self._motionless + 1 if length < SHORTEST_MOTION else 0
        if self._motionless >= STEPS_WITHOUT_MOTION:
            self._stop(Outcome.STALLED, f"{self._motionless} moves in a row had no effect: constraints undo them")

    def _stop(self, outcome: Outcome, reason: str) -> None:
        """End ASE's loop after this step."""
        logger.warning("relaxation stopped (%s): %s", outcome.label, reason)
        self._stopped = outcome
        self.reason = reason
        self.max_steps = self.nsteps


def _distance(coordinates: Array, place: Array | None) -> float:
    return math.inf if place is None else longest(coordinates - place)


def _not_asked(policy: str | Path | None, target: Any) -> None:
    """No policy, with a word about it where one was named."""
    if policy not in (None, "none", "auto"):
        name = type(target).__name__
        logger.warning("the policy %s does not support %s, so plain L-BFGS makes every step", policy, name)


def _levels_of(
    model: str | BaseCalculator | Potential | None, target: Any, maxstep: float, alone: Stepper
) -> TwoLevels | None:
    if model is None:
        return None
    if not isinstance(target, Atoms | Filter) or not has_geometry(target):
        logger.warning("a model plans for atoms and their cell, not for %s; it is not used", type(target).__name__)
        return None
    # loaded now, because most relaxations need no potentials of ours
    from relaxion.optimizer.two_levels import CheapModel, TwoLevels
    from relaxion.potentials.registry import potential

    calculator = bare_atoms(target).calc
    expensive = None if calculator is None else potential(calculator)
    return TwoLevels(CheapModel(target, model, maxstep, expensive), alone)


def _check_fmax(fmax: float) -> None:
    """0 is allowed, as in ASE: all steps are then made."""
    if not (math.isfinite(fmax) and fmax >= 0):
        raise SettingsError(f"fmax is a force in eV/Å above 0, got {fmax}; try fmax=0.05")


def _checked_maxstep(maxstep: float) -> float:
    if not (math.isfinite(maxstep) and maxstep > 0):
        raise SettingsError(f"maxstep is a length in Å above 0, got {maxstep}")
    return float(maxstep)
