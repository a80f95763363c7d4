"""Does anything beyond lessons improve the shipped `metals` under the guard? docs/results/learning.md has the answer.

    python benchmarks/atoms/residual.py --runs FOLDER            # all parts below, resumable
    python benchmarks/atoms/residual.py --runs FOLDER --only search observe
    python benchmarks/atoms/residual.py --table

The policy is frozen. A residual sees one point of a guarded relaxation and changes how the next step is made: stiffness
by at most ±20 %, softest directions, trust radius, how far secants count. Zero is the shipped policy, call for call.

    search      relaxes training starts with one change after the other, and learns from the cheapest
    observe     which observations predict the cheapest change? (cross-validated, on what `search` found)
    reinforce   TD3 on the residual: -1 for each force call, n-step, five critics; three seeds
    evolve      evolution strategies, antithetic pairs on the same starts; three seeds
    lessons     the control: lessons under the guard from the same policy, for TD3's processor time; three seeds
    assess      all of them, once, on starts never looked at before

Small results are kept as JSON in `results/residual`, states and weights in FOLDER. Two processes may share the work:
`--only reinforce-0 evolve-0` names single seeds. `observe` needs scikit-learn.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from relaxion.agents.td3 import TD3, TD3Settings
from relaxion.bench.sets import find_set
from relaxion.bench.statistics import resampled
from relaxion.experience.replay import Batch
from relaxion.files import write_json
from relaxion.networks.layers import tamed
from relaxion.networks.metric.network import MetricNetwork
from relaxion.networks.metric.policies import MetricPolicy
from relaxion.networks.roles import Critics
from relaxion.networks.surroundings import structure_mean
from relaxion.networks.vector import BoxActions, VectorPolicy
from relaxion.optimize.batch import BatchRelaxer, BatchSettings
from relaxion.optimize.choice import load, new_stepper
from relaxion.optimize.guard import Feedback, Guard, Scaled
from relaxion.optimize.learned import Asked, LearnedMetrics, Metric
from relaxion.optimize.models import LocalModel
from relaxion.optimize.point import Array, Point, Proposal, cosine, dot, longest
from relaxion.optimize.quasi_newton import QuasiNewtonSettings
from relaxion.optimize.stepper import Stepper
from relaxion.optimize.trust_rule import StepControl
from relaxion.potentials import potential
from relaxion.structures import Structures
from relaxion.training.metric import MetricRunSettings
from relaxion.training.recipe import find, settings_from_recipe
from relaxion.training.supervised.fit import Fit
from relaxion.training.supervised.live import LiveExamples
from relaxion.training.supervised.metals import MetalsSettings

KEPT = Path(__file__).parent / "results" / "residual"
FMAX, CAP, AT_ONCE = 0.05, 200, 64
KNOBS = ("stiffness", "soft", "trust", "secants")
LARGEST_LOG_STIFFNESS, LARGEST_SOFT, LARGEST_LOG_TRUST, LARGEST_LOG_LENGTH = 0.18, 0.5, 0.7, 1.1  # e^0.18: 20 %
SOFT_FLOOR = 0.5  # eV/Å²: what stiffens the softest directions
BOX = BoxActions(-torch.ones(len(KNOBS)), torch.ones(len(KNOBS)))
SETTINGS = np.array([*np.eye(4), *-np.eye(4)])  # what `search` tries: each knob to its ends
TINY = 0.02 * np.array([[1, 0, 0, 0], [-1, 0, 0, 0], [0.5, 0, 0, 0], [-0.5, 0, 0, 0]])  # stiffness by at most 0.4 %
SETS = {"emt-bulk": "near", "emt-bulk-cell": "free cell", "emt-slabs": "far", "emt-clusters": "far", "alfe": "far"}
VALIDATION_SEED, ASSESSMENT_SEED, N_VALIDATION, N_ASSESSMENT = 8210, 9600, 40, 150
BUDGET = 200_000  # force calls of each learner; those of `search` are the first of `reinforce`
SEEDS, LOOKS = (0, 1, 2), 4
N_SECANTS, N_FEEDBACKS, N_POOLED = 3, 2, 32

Choose = Callable[[Array], Array]
"""From an observation to an action, every component between -1 and 1."""


# What a residual sees


INVARIANTS = (
    *("log10_largest_force", "log10_force_over_tolerance", "energy_ratio", "log_curvature_ratio", "alignment"),
    *("log10_force_ratio", "back_off", "rejected", "log_points", "metric_error", "log_step_over_trust", "log_trust"),
    *("springs_cosine", "log_springs_ratio", "by_policy", "core_steps_left", "disappointments"),
)
"""What the guard itself knows of a point; learned trust rules of early releases saw these."""


def _names() -> dict[str, list[str]]:
    secant = ("log_curvature_ratio", "log_curvature", "cosine_with_step")
    step = ("rayleigh", "force_cosine", "soft_cosine", "soft_log_ratio", "log_peak", "log_n_atoms", "cell_share")
    told = ("energy_ratio", "log_curvature_ratio", "alignment", "log_force_ratio", "back_off")
    return {
        "invariants": list(INVARIANTS),
        "spectrum": [f"secant{n}_{name}" for n in range(N_SECANTS) for name in secant] + list(step),
        "history": [f"before{n}_{name}" for n in range(N_FEEDBACKS) for name in told] + ["steps_cosine", "n_secants"],
        "pooled": [f"feature{n}" for n in range(N_POOLED)],
    }


GROUPS = _names()
NAMES = [name for names in GROUPS.values() for name in names]


@dataclass(frozen=True, eq=False)
class SeenMetric:
    """A stiffness, and what the network thought of the whole structure."""

    metric: Metric
    features: Array  # (N_POOLED,)
    knows_curvature: bool = True

    def apply(self, step: Array) -> Array:
        return self.metric.apply(step)

    def solve(self, forces: Array, extra_floor: float = 0.0) -> Array:
        return self.metric.solve(forces, extra_floor)


@dataclass(frozen=True, eq=False)
class Blended:
    """A metric whose softest directions are stiffer by a share of what an extra floor would do, or softer (below 0)."""

    metric: Metric
    share: float
    knows_curvature: bool = True

    def apply(self, step: Array) -> Array:
        return self.metric.apply(step)

    def solve(self, forces: Array, extra_floor: float = 0.0) -> Array:
        plain = self.metric.solve(forces, extra_floor)
        return plain + self.share * (self.metric.solve(forces, extra_floor + SOFT_FLOOR) - plain)


class SeenMetrics(LearnedMetrics):
    """The policy, with the mean over the atoms of its last features."""

    def at(self, asked: Sequence[Asked], structures: Structures) -> list[Metric]:
        caught = list[Tensor]()
        hook = self.network.backbone.register_forward_hook(lambda _m, _i, out: caught.append(out.scalars[0]))
        try:
            metrics = super().at(asked, structures)
        finally:
            hook.remove()
        pooled = structure_mean(tamed(caught[0].detach()), structures).double().numpy()
        return [SeenMetric(metric, features) for metric, features in zip(metrics, pooled, strict=True)]


def _logarithm(ratio: float) -> float:
    return float(np.log(np.clip(ratio, 0.02, 50.0))) if np.isfinite(ratio) else 0.0


class ResidualGuard(Guard):
    """The guard, each step of the policy changed as `choose` says; remembers what was seen and chosen."""

    def __init__(self, source: SeenMetrics, choose: Choose | None) -> None:
        self.choose, self.calls = choose, 0
        self.decisions: list[tuple[int, Array, Array]] = []  # force calls so far, observation, action
        super().__init__(QuasiNewtonSettings(), source)

    def reset(self) -> None:
        super().reset()
        self.before = [Feedback()] * (N_FEEDBACKS + 1)

    def judged(self, point: Point) -> Point:
        base = super().judged(point)
        self.before = [*self.before, self.feedback][-N_FEEDBACKS - 1 :]
        return base

    def _by_policy(
        self, base: Point, model: LocalModel, metric: Metric, step: Array, control: StepControl, error: float
    ) -> Proposal:
        softened = metric.solve(base.forces, SOFT_FLOOR)
        seen = self._seen(base, model, step, softened, error)
        action = np.zeros(len(KNOBS)) if self.choose is None else np.clip(self.choose(seen), -1.0, 1.0)
        self.decisions.append((self.calls, seen, action))
        if not action.any():
            return super()._by_policy(base, model, metric, step, control, error)
        stiffness, soft, trust, secants = (float(value) for value in action)
        own = Blended(Scaled(metric, float(np.exp(LARGEST_LOG_STIFFNESS * stiffness))), LARGEST_SOFT * soft)
        control = replace(
            control,
            log_trust=control.log_trust + LARGEST_LOG_TRUST * trust,
            secant_length=control.secant_length * float(np.exp(LARGEST_LOG_LENGTH * secants)),
        )
        proposal = super()._by_policy(base, model, own, own.solve(base.forces), control, error)
        self._applied = metric.apply(proposal.step)  # the guard judges the policy, not the residual
        return proposal

    def _seen(self, base: Point, model: LocalModel, step: Array, softened: Array, error: float) -> Array:
        metric = model.metric
        assert isinstance(metric, SeenMetric)
        spectrum = [*self._spectrum(base, metric, step), *_step_numbers(base, step, softened)]
        values = np.concatenate(
            [self._invariants(base, model, step, error), spectrum, self._history(), metric.features]
        )
        return np.nan_to_num(values, nan=0.0, posinf=6.0, neginf=-6.0)

    def _invariants(self, base: Point, model: LocalModel, step: Array, error: float) -> list[float]:
        told, springs = self.feedback, model.springs
        assert springs is not None
        springs_step, force = springs.solve(base.forces), float(np.log10(max(base.largest_force, 1e-6)))
        ratio = _logarithm(float(np.linalg.norm(step) / max(np.linalg.norm(springs_step), 1e-12)))
        return [
            *(force, float(np.clip(force - np.log10(FMAX), -1, 4)), told.energy_ratio, told.log_curvature_ratio),
            *(told.alignment, float(np.clip(told.log_force_ratio, -3, 3)), told.back_off, float(told.rejected)),
            *(float(np.log(told.points)), min(error, 3.0)),
            float(np.clip(np.log((longest(step) + 1e-6) / self.trust), -6, 6)),
            float(np.log(self.trust / self.settings.first_trust)),
            *(cosine(step, springs_step), float(np.clip(ratio, -3, 3)), float(told.by_policy)),
            *(float(np.log1p(self.core_steps_left)), min(self.bad_steps, 4) / 2),
        ]

    def _spectrum(self, base: Point, metric: Metric, step: Array) -> list[float]:
        """Of the newest secants: curvature met over the metric's, the metric's own, cosine with the step (in B)."""
        values, along = [], max(dot(step, base.forces), 1e-12)  # step·B·step
        for secant in reversed(self.secants[-N_SECANTS:]):
            applied = metric.apply(secant.step)
            own = max(dot(secant.step, applied), 1e-12)
            stiffness = own / max(dot(secant.step, secant.step), 1e-12)
            values += [_logarithm(secant.curvature / own), _logarithm(stiffness / 5.0)]
            values.append(dot(step, applied) / float(np.sqrt(own * along)))
        return values + [0.0] * (3 * N_SECANTS - len(values))

    def _history(self) -> list[float]:
        values = list[float]()
        for told in self.before[:N_FEEDBACKS]:
            values += [told.energy_ratio, told.log_curvature_ratio, told.alignment]
            values += [float(np.clip(told.log_force_ratio, -3, 3)), told.back_off]
        last = [secant.step for secant in self.secants[-2:]]
        return [*values, cosine(*last) if len(last) == 2 else 0.0, min(len(self.secants), 5) / 5]


def _step_numbers(base: Point, step: Array, softened: Array) -> list[float]:
    n_atoms = len(step) if base.geometry is None else base.geometry.n_atoms
    size = float(np.linalg.norm(step)) + 1e-12
    return [
        _logarithm(dot(step, base.forces) / size**2 / 5.0),
        cosine(step, base.forces),
        cosine(step, softened),
        _logarithm(float(np.linalg.norm(softened)) / size),
        _logarithm(longest(step) * np.sqrt(len(step)) / size),
        float(np.log(n_atoms / 8)),
        float(np.linalg.norm(step[n_atoms:])) / size,
    ]


class CountingStepper(Stepper):
    """Tells the guard how many force calls were made, those under FIRE too."""

    def judge(self, point: Point) -> tuple[Point, bool]:
        assert isinstance(self.method, ResidualGuard)
        self.method.calls += 1
        return super().judge(point)


# Relaxations


@dataclass(frozen=True, eq=False)
class Job:
    """One start and who relaxes it."""

    atoms: Atoms
    cell: bool
    kind: str
    choose: Choose | None = None
    tag: Any = None


@dataclass(frozen=True, eq=False)
class Done:
    """How it went."""

    job: Job
    force_calls: int
    converged: bool
    decisions: list[tuple[int, Array, Array]]

    @property
    def charged(self) -> int:
        return self.force_calls if self.converged else CAP


@cache
def base_network() -> MetricNetwork:
    policy = load("metals").policy
    assert isinstance(policy, MetricPolicy)
    return policy.network


def relaxing(engine: str, jobs: Iterable[Job], network: MetricNetwork | None = None) -> Iterator[Done]:
    """Relax them, so many at once; as each is done. `network`: another than the shipped one."""
    source, steppers = SeenMetrics(network or base_network()), list[Stepper]()
    settings = BatchSettings(fmax=FMAX, max_force_calls=CAP)
    relaxer = BatchRelaxer(potential(engine), settings, lambda _: ("residual", steppers[-1]))
    waiting = iter(jobs)
    while True:
        for job in itertools.islice(waiting, max(0, AT_ONCE - relaxer.n_running)):
            guard = ResidualGuard(source, job.choose)
            steppers[:] = [CountingStepper(guard)]
            relaxer.add(job.atoms, tag=(job, guard), cell=job.cell)
        if not relaxer.n_running and not relaxer.has_finished:
            return
        for relaxed in relaxer.advance():
            job, guard = relaxed.tag
            yield Done(job, relaxed.force_calls, relaxed.converged, guard.decisions)


def recipe() -> MetalsSettings:
    settings = settings_from_recipe(find("metals"), None, {})
    assert isinstance(settings, MetricRunSettings)
    assert isinstance(settings.fit, MetalsSettings)
    return settings.fit


def training_starts(engine: str, generator: torch.Generator) -> Iterator[Job]:
    """Starts of the recipe `metals` without end, every kind by its share."""
    sources = [source for source in recipe().sources() if source.potential.name == potential(engine).name]
    while True:
        block = list[Job]()
        for source in sources:
            (name,) = source.starts.shares  # pyright: ignore[reportAttributeAccessIssue]
            found = source.starts.sample(generator, round(16 * source.share))
            far = name in ("slab", "cluster", "packing", "surface", "step", "particle")
            for atoms, cell in zip(found.to_ase(), found.cell_free.tolist(), strict=True):
                block.append(Job(atoms, cell, "far" if far else "free cell" if cell else "near"))
        yield from (block[number] for number in torch.randperm(len(block), generator=generator).tolist())


ENGINES = ("emt", "eam")


def generators(seed: int) -> dict[str, torch.Generator]:
    return {engine: torch.Generator().manual_seed(1000 * seed + place) for place, engine in enumerate(ENGINES)}


@cache
def fixed_starts(name: str, seed: int, number: int) -> tuple[Job, ...]:
    known = find_set(name)
    return tuple(Job(a, known.free_cell, name, tag=n) for n, a in enumerate(known.starts(number, seed)))


def measured(
    seed: int, number: int, choose: Choose | None = None, network: MetricNetwork | None = None
) -> dict[str, list[int]]:
    """Force calls on the sets, start by start; failures are charged the cap."""
    calls = {}
    for name in SETS:
        jobs = (replace(job, choose=choose) for job in fixed_starts(name, seed, number))
        found = {done.job.tag: done.charged for done in relaxing(find_set(name).calculator, jobs, network)}
        calls[name] = [found[place] for place in range(number)]
    return calls


def plain_calls(name: str, seed: int, number: int) -> list[int]:
    """Of the shipped policy as a user has it, to compare with a residual of zero."""
    metrics = LearnedMetrics(base_network())
    settings = BatchSettings(fmax=FMAX, max_force_calls=CAP)
    relaxer = BatchRelaxer(find_set(name).make_potential(), settings, lambda _: ("g", new_stepper(metrics=metrics)))
    for job in fixed_starts(name, seed, number):
        relaxer.add(job.atoms, tag=job.tag, cell=job.cell)
    found = dict[int, int]()
    while relaxer.n_running:
        found |= {one.tag: one.force_calls if one.converged else CAP for one in relaxer.advance()}
    return [found[place] for place in range(number)]


@cache
def base_validation(runs: Path) -> Mapping[str, list[int]]:
    """Of the policy alone; a residual of zero needs just as many force calls."""
    file = runs / "validation.json"
    if not file.exists():
        calls = measured(VALIDATION_SEED, N_VALIDATION)
        for name in SETS:
            assert calls[name] == plain_calls(name, VALIDATION_SEED, N_VALIDATION), f"zero is not the policy on {name}"
        write_json(file, calls)
    return json.loads(file.read_text())


def ratios(calls: Mapping[str, Sequence[int]], others: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Of mean force calls, set by set, and their geometric mean."""
    found = {name: float(np.mean(calls[name]) / np.mean(others[name])) for name in SETS}
    return found | {"all": float(np.exp(np.mean(np.log(list(found.values())))))}


def validated(runs: Path, choose: Choose | None, network: MetricNetwork | None) -> dict[str, float]:
    return ratios(measured(VALIDATION_SEED, N_VALIDATION, choose, network), base_validation(runs))


# The residual


class Residual(nn.Module):
    """Observation -> action; zero before it has learned."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, widths: Sequence[int], generator: torch.Generator, n_out: int = len(KNOBS)) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(len(NAMES)))
        self.register_buffer("deviation", torch.ones(len(NAMES)))
        box = BoxActions(-torch.ones(n_out), torch.ones(n_out))
        self.policy = VectorPolicy(len(NAMES), box, widths, generator)
        with torch.no_grad():
            for parameter in list(self.policy.parameters())[-2:]:
                parameter.zero_()

    def scaled_to(self, observations: Tensor) -> None:
        """What is seen has mean 0 and deviation 1 on these."""
        self.mean.copy_(observations.mean(dim=0))
        self.deviation.copy_(observations.std(dim=0).clamp_min(1e-2))

    def normalised(self, observations: Tensor) -> Tensor:
        return ((observations - self.mean) / self.deviation).clamp(-5, 5)

    def forward(self, observations: Tensor) -> Tensor:
        return self.policy(self.normalised(observations))

    def choose(self, observation: Array) -> Array:
        with torch.no_grad():
            return self(torch.from_numpy(observation).float()[None])[0].double().numpy()


class Keeper:
    """Validates now and then, keeps the best, and counts the processor time of learning alone."""

    def __init__(self, runs: Path, name: str) -> None:
        self.runs, self.name, self.curve = runs, name, list[dict[str, Any]]()
        self.began, self.apart, self.best = time.process_time(), 0.0, np.inf

    @property
    def seconds(self) -> float:
        return time.process_time() - self.began - self.apart

    def look(self, module: nn.Module, choose: Choose | None = None, **told: Any) -> None:
        at, began = self.seconds, time.process_time()
        network = module if isinstance(module, MetricNetwork) else None
        found = validated(self.runs, choose, network)
        self.curve.append({"cpu_seconds": round(at, 1), **told, "validation": found})
        print(self.name, json.dumps(self.curve[-1]), flush=True)
        if found["all"] < self.best:
            self.best = found["all"]
            save_file({key: value.contiguous() for key, value in module.state_dict().items()}, self.file)
        self.apart += time.process_time() - began

    @property
    def file(self) -> Path:
        return self.runs / f"{self.name}.safetensors"

    def end(self, **told: Any) -> None:
        best = min(self.curve, key=lambda one: one["validation"]["all"])
        write_json(KEPT / f"{self.name}.json", told | {"kept": best, "curve": self.curve})


# Search, then learn


@dataclass(frozen=True, eq=False)
class Held:
    """One setting from the n-th decision on; a new one for each relaxation."""

    setting: Array
    first: int
    made: list[int] = field(default_factory=lambda: [0])

    def __call__(self, _observation: Array) -> Array:
        self.made[0] += 1
        return self.setting if self.made[0] > self.first else np.zeros_like(self.setting)


KINDS = ("near", "free cell", "far")


def search_block(
    engine: str, starts: Sequence[Job], random: np.random.Generator, tiny: bool
) -> tuple[list[dict[str, Any]], list[Done]]:
    """Every start by the policy alone, then with each setting from one of its decisions on; and all relaxations."""
    numbered = [replace(job, tag=n) for n, job in enumerate(starts)]
    rows = {d.job.tag: d for d in relaxing(engine, numbered) if d.decisions}
    settings = np.concatenate([SETTINGS, TINY]) if tiny else SETTINGS
    jobs, firsts = list[Job](), {}
    for n, done in rows.items():
        firsts[n] = 0 if random.random() < 0.5 else int(random.integers(len(done.decisions)))
        jobs += [
            replace(done.job, choose=Held(setting, firsts[n]), tag=(n, place)) for place, setting in enumerate(settings)
        ]
    tried = {done.job.tag: done for done in relaxing(engine, jobs)}
    found = [_searched(rows[n], firsts[n], [tried[n, place] for place in range(len(settings))]) for n in rows]
    return found, [*rows.values(), *tried.values()]


def _searched(base: Done, first: int, tried: Sequence[Done]) -> dict[str, Any]:
    spent, observation, _ = base.decisions[first]
    costs = [float(done.charged - spent) for done in tried]
    cheapest = int(np.argmin(costs[: len(SETTINGS)]))
    better = costs[cheapest] < base.charged - spent
    return {
        "observation": observation,
        "base": float(base.charged - spent),
        "tried": costs[: len(SETTINGS)],
        "tiny": costs[len(SETTINGS) :] or [np.nan] * len(TINY),
        "kind": KINDS.index(base.job.kind),
        "way": [seen for _, seen, _ in (tried[cheapest] if better else base).decisions[first:]],
        "setting": SETTINGS[cheapest] if better else np.zeros(len(KNOBS)),
    }


def search(runs: Path, number: int = 800, block: int = 200) -> None:
    """Relax and keep, block by block (resumable), then learn from the cheapest."""
    seconds, calls, rows = 0.0, 0, 0
    for place in range(number // block):
        file = runs / f"search-{place}.safetensors"
        if not file.exists():
            _search_and_keep(file, place, block)
        told = json.loads(file.with_suffix(".json").read_text())
        seconds, calls, rows = seconds + told["cpu_seconds"], calls + told["force_calls"], rows + told["states"]
    if not (KEPT / "search.json").exists():
        learn_from_cheapest(runs, seconds, calls, rows)


def _search_and_keep(file: Path, place: int, block: int) -> None:
    began, random = time.process_time(), np.random.default_rng(place)
    rows, dones = list[dict[str, Any]](), list[Done]()
    for engine, generator in generators(100 + place).items():
        starts = list(itertools.islice(training_starts(engine, generator), block // 2))
        more_rows, more_dones = search_block(engine, starts, random, tiny=place % 4 == 0)
        rows, dones = rows + more_rows, dones + more_dones
    ways = [np.stack(row["way"]) for row in rows]
    settings = [np.tile(row["setting"], (len(way), 1)) for row, way in zip(rows, ways, strict=True)]
    table = {key: np.array([row[key] for row in rows]) for key in ("observation", "base", "tried", "tiny", "kind")}
    table |= {"way": np.concatenate(ways), "settings": np.concatenate(settings)} | kept_decisions(dones)
    save_file({key: torch.from_numpy(values) for key, values in table.items()}, file)
    told = {"cpu_seconds": time.process_time() - began, "force_calls": sum(done.force_calls for done in dones)}
    write_json(file.with_suffix(".json"), told | {"states": len(rows)})
    print("search", place, told, flush=True)


def kept_decisions(dones: Sequence[Done]) -> dict[str, Array]:
    """All decisions of all relaxations, one after the other, for an agent to learn from."""
    every = [(spent, done.charged, *both) for done in dones for spent, *both in done.decisions]
    spent, ends, seen, actions = (np.array(column) for column in zip(*every, strict=True))
    return {"spent": spent, "ends": ends, "seen": seen.astype(np.float32), "actions": actions.astype(np.float32)}


def searched(runs: Path) -> dict[str, Tensor]:
    files = sorted(runs.glob("search-*.safetensors"), key=lambda file: int(file.stem.split("-")[1]))
    parts = [load_file(file) for file in files]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


class Gains(nn.Module):
    """Predicts what each setting saves, and takes the one that promises most where it is more than a margin."""

    def __init__(self, generator: torch.Generator, margin: float) -> None:
        super().__init__()
        self.residual, self.margin = Residual((64,), generator, len(SETTINGS)), margin

    def choose(self, observation: Array) -> Array:
        gains = -self.residual.choose(observation)
        best = int(np.argmax(gains))
        return SETTINGS[best] if gains[best] > self.margin else np.zeros(len(KNOBS))


def fit(residual: Residual, observations: Tensor, targets: Tensor, generator: torch.Generator) -> None:
    """Least squares with weight decay, 3 000 updates of 256."""
    optimizer = torch.optim.AdamW(residual.parameters(), lr=1e-3, weight_decay=0.05)
    for _ in range(3000):
        which = torch.randint(len(observations), (256,), generator=generator)
        optimizer.zero_grad()
        (residual(observations[which]) - targets[which]).square().mean().backward()
        optimizer.step()


def learn_from_cheapest(runs: Path, seconds: float, calls: int, rows: int) -> None:
    """Imitate the cheapest, or predict what each saves; what validates best is kept."""
    data, generator, keeper = searched(runs), torch.Generator().manual_seed(0), Keeper(runs, "search")
    seen, saved = data["observation"].float(), (data["tried"] / data["base"][:, None]).log().float().clamp(-0.9, 0.9)
    imitator = Residual((64,), generator)
    imitator.scaled_to(data["way"].float())
    fit(imitator, data["way"].float(), data["settings"].float(), generator)
    gains = Gains(generator, 0.0)
    gains.residual.scaled_to(seen)
    fit(gains.residual, seen, saved, generator)
    keeper.look(imitator, imitator.choose, learner="imitation")
    for margin in (0.0, 0.05, 0.1):
        gains.margin = margin
        keeper.look(gains, gains.choose, learner="gains", margin=margin)
    spent = round(seconds + keeper.seconds, 1)
    keeper.end(cpu_seconds=spent, search_seconds=round(seconds, 1), force_calls=calls, states=rows)


# Which observations predict the better change?


def observe(runs: Path) -> None:
    """Cross-validated R² of what each setting saves, from each group of observations."""
    data = {key: values.numpy() for key, values in searched(runs).items()}
    saved = np.log(data["tried"] / data["base"][:, None])  # below 0: fewer calls than the policy alone
    kinds, seen = data["kind"], data["observation"]
    columns = {name: [NAMES.index(one) for one in names] for name, names in GROUPS.items()}
    columns |= {"all": list(range(len(NAMES)))}
    rows = {kind: kinds == place for place, kind in enumerate(KINDS)} | {"all": np.full(len(kinds), True)}
    found = {
        kind: {group: _predictability(seen[of][:, own], saved[of]) for group, own in columns.items()}
        for kind, of in rows.items()
    }
    hindsight = {kind: _hindsight(data, of) for kind, of in rows.items()}
    settings = [dict(zip(KNOBS, setting.tolist(), strict=True)) for setting in SETTINGS]
    told = {"states": len(kinds), "settings": settings, "r2": found, "hindsight": hindsight}
    write_json(KEPT / "observe.json", told)


def _predictability(seen: Array, saved: Array) -> dict[str, Any]:
    """R² by setting of ridge and forest, five folds; and the mean saving of always following the forest."""
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.linear_model import RidgeCV
    from sklearn.model_selection import KFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    models = {
        "ridge": make_pipeline(StandardScaler(), RidgeCV(np.logspace(0, 4, 9))),
        "forest": RandomForestRegressor(60, min_samples_leaf=10, max_features=0.33, random_state=0, n_jobs=1),
    }
    result = dict[str, Any]()
    for name, model in models.items():
        predicted = cross_val_predict(model, seen, saved, cv=KFold(5, shuffle=True, random_state=0))
        errors = ((saved - predicted) ** 2).sum(axis=0)
        scores = 1 - errors / np.maximum(((saved - saved.mean(axis=0)) ** 2).sum(axis=0), 1e-12)
        best = predicted.argmin(axis=1)
        followed = np.where(predicted.min(axis=1) < 0, saved[np.arange(len(saved)), best], 0.0)
        result[name] = {
            "by_setting": [round(float(score), 3) for score in scores],
            "mean": round(float(scores.mean()), 3),
            "log_ratio_if_followed": round(float(followed.mean()), 4),
        }
    return result


def _hindsight(data: Mapping[str, Array], of: Array) -> dict[str, float]:
    """Calls of the cheapest over those of the policy; beside it the cheapest of changes too small to mean anything."""
    tiny = of & np.isfinite(data["tiny"][:, 0])
    cheapest = np.minimum(data["tried"].min(axis=1), data["base"])
    four = np.minimum(data["tried"][:, [0, 1, 2, 4]].min(axis=1), data["base"])
    lucky = np.minimum(data["tiny"].min(axis=1), data["base"])
    constant = (data["tried"][of].mean(axis=0) / data["base"][of].mean()).tolist()
    return {
        "states": int(of.sum()),
        "mean_calls_left": float(data["base"][of].mean()),
        "cheapest_of_8": float(cheapest[of].mean() / data["base"][of].mean()),
        "states_with_tiny": int(tiny.sum()),
        "cheapest_of_4": float(four[tiny].mean() / data["base"][tiny].mean()),
        "cheapest_of_4_tiny": float(lucky[tiny].mean() / data["base"][tiny].mean()),
        "each_for_all": [round(value, 4) for value in constant],
    }


# Reinforcement


class NormedCritics(Critics):
    """Five critics with layer norm. All of them guide the policy: a single one's errors exceed what is to be gained."""

    def __init__(self, n_critics: int = 5, width: int = 128) -> None:
        super().__init__()
        sizes = [len(NAMES) + len(KNOBS), width, width]
        self.members = nn.ModuleList(nn.Sequential(*_normed(sizes), nn.Linear(width, 1)) for _ in range(n_critics))

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        joined = torch.cat([observations, actions], dim=1)
        return torch.cat([member(joined) for member in self.members], dim=1)

    def first(self, observations: Tensor, actions: Tensor) -> Tensor:
        return self(observations, actions).mean(dim=1)


def decisions_of_search(runs: Path) -> Iterator[Done]:
    """The relaxations of `search`, as far as an agent learns from them: a new one begins where calls do not rise."""
    data, job = {key: values.numpy() for key, values in searched(runs).items()}, Job(Atoms(), False, "")
    spent, ends = data["spent"], data["ends"]
    edges = np.flatnonzero((np.diff(spent) <= 0) | (np.diff(ends) != 0)) + 1
    for rows in np.split(np.arange(len(spent)), edges):
        own = [(int(spent[row]), data["seen"][row], data["actions"][row]) for row in rows]
        yield Done(job, int(ends[rows[0]]), True, own)


def _normed(sizes: Sequence[int]) -> Iterator[nn.Module]:
    for n_in, n_out in itertools.pairwise(sizes):
        yield from (nn.Linear(n_in, n_out), nn.LayerNorm(n_out), nn.ReLU())


@dataclass(frozen=True)
class Reinforcement:
    """How the agent learns."""

    base_transitions: int = 10_000
    critic_updates_before: int = 5_000
    transitions_per_update: int = 6
    n_steps: int = 4
    discount: float = 0.99
    noise: float = 0.2  # half ranges; as much again for a whole relaxation
    batch: int = 256
    unit: float = 10.0  # force calls per unit of value
    policy_rate: float = 3e-5
    anchor: float = 0.02  # units of value for a knob at its end: holds the residual near zero


class Memory:
    """n-step transitions of finished relaxations; the reward is -1 for each force call."""

    def __init__(self, settings: Reinforcement, capacity: int = 400_000) -> None:
        self.settings, self.number = settings, 0
        width = len(NAMES)
        self.seen, self.later = torch.zeros(capacity, width), torch.zeros(capacity, width)
        self.actions = torch.zeros(capacity, len(KNOBS))
        self.rewards, self.discounts = torch.zeros(capacity), torch.zeros(capacity)

    def add(self, done: Done) -> None:
        settings, decisions = self.settings, done.decisions
        for place, (spent, seen, action) in enumerate(decisions):
            ends = place + settings.n_steps >= len(decisions)
            until, later, _ = (done.charged, seen, action) if ends else decisions[place + settings.n_steps]
            powers = settings.discount ** np.arange(until - spent)
            row = self.number % len(self.seen)
            self.seen[row], self.later[row] = torch.from_numpy(seen), torch.from_numpy(later)
            self.actions[row] = torch.from_numpy(action)
            self.rewards[row] = -float(powers.sum()) / settings.unit
            self.discounts[row] = 0.0 if ends else settings.discount ** (until - spent)
            self.number += 1

    def sample(self, residual: Residual, generator: torch.Generator) -> Batch:
        which = torch.randint(min(self.number, len(self.seen)), (self.settings.batch,), generator=generator)
        seen, later = residual.normalised(self.seen[which]), residual.normalised(self.later[which])
        return Batch(seen, self.actions[which], self.rewards[which], self.discounts[which], later)


class Explorer:
    """The residual with noise, part of it the same throughout a relaxation; a new one for each."""

    def __init__(self, residual: Residual, noise: float, random: np.random.Generator) -> None:
        self.residual, self.noise, self.random = residual, noise, random
        self.held = noise * random.standard_normal(len(KNOBS))

    def __call__(self, observation: Array) -> Array:
        noise = self.held + self.noise * self.random.standard_normal(len(KNOBS))
        return self.residual.choose(observation) + noise


def reinforce(runs: Path, seed: int) -> None:
    """Off-policy with the batched relaxations as environment; those of `search` are the first that it sees."""
    settings, generator = Reinforcement(), torch.Generator().manual_seed(seed)
    random, name = np.random.default_rng(seed), f"reinforce-{seed}"
    torch.manual_seed(seed)  # the critics' first weights
    residual, memory, keeper = Residual((64, 64), generator), Memory(settings), Keeper(runs, name)
    before = settings.critic_updates_before
    agent = TD3(
        residual.policy,
        NormedCritics(),
        BOX,
        generator,
        TD3Settings(
            policy_learning_rate=settings.policy_rate,
            critic_learning_rate=3e-4,
            target_noise=0.1,
            target_noise_clip=0.2,
        ),
        policy_penalty=lambda _batch, actions: settings.anchor * actions.square().sum(dim=1),
        critic_updates_before=before,
    )
    streams = [relaxing(e, _explored(e, g, residual, settings, random)) for e, g in generators(200 + seed).items()]
    for done in decisions_of_search(runs):
        memory.add(done)
    before_own = json.loads((KEPT / "search.json").read_text())
    calls, due, scalars = before_own["force_calls"], 0.0, dict[str, Tensor]()
    own_calls = BUDGET - calls
    for done in itertools.chain.from_iterable(zip(*streams, strict=True)):
        memory.add(done)
        calls, due = calls + done.force_calls, due + len(done.decisions) / settings.transitions_per_update
        if memory.number < settings.base_transitions:
            due = 0.0
            continue
        if int(agent.n_updates) == 0:
            residual.scaled_to(memory.seen[: memory.number])
            due = before
        while due >= 1:
            scalars, due = dict(agent.update(memory.sample(residual, generator))), due - 1
        if calls >= before_own["force_calls"] + own_calls * (len(keeper.curve) + 1) / LOOKS:
            told = {key.split("/")[1]: round(float(value), 5) for key, value in scalars.items()}
            sizes = residual(memory.seen[max(0, memory.number - 2000) : memory.number]).abs().mean(dim=0).tolist()
            keeper.look(residual, residual.choose, force_calls=calls, **told, mean_size=[round(s, 3) for s in sizes])
        if len(keeper.curve) == LOOKS:
            break
    spent = round(keeper.seconds + before_own["search_seconds"], 1)  # the search belongs to it
    keeper.end(cpu_seconds=spent, force_calls=calls, transitions=memory.number, seed=seed)


def _explored(
    engine: str, generator: torch.Generator, residual: Residual, settings: Reinforcement, random: np.random.Generator
) -> Iterator[Job]:
    for job in training_starts(engine, generator):
        yield replace(job, choose=Explorer(residual, settings.noise, random))


# Evolution

EVOLVED = (
    "log10_force_over_tolerance",
    "log_step_over_trust",
    "secant0_log_curvature_ratio",
    "soft_cosine",
    "back_off",
)


def evolve(runs: Path, seed: int) -> None:
    """A constant and five weights for each knob; Adam on antithetic differences of the mean log force calls."""
    generator, keeper = torch.Generator().manual_seed(seed), Keeper(runs, f"evolve-{seed}")
    residual, places = Residual((), generator), [NAMES.index(name) for name in EVOLVED]
    starts = {engine: training_starts(engine, own) for engine, own in generators(300 + seed).items()}
    weights = torch.zeros(len(EVOLVED) + 1, len(KNOBS), requires_grad=True)
    optimizer, calls, rounds = torch.optim.Adam([weights], lr=0.03), 0, 0
    while len(keeper.curve) < LOOKS:
        jobs = {engine: list(itertools.islice(own, 24)) for engine, own in starts.items()}
        if rounds == 0:
            calls += _scale(residual, jobs)
        slope = torch.zeros_like(weights)
        for _ in range(PAIRS):
            noise = torch.randn(weights.shape, generator=generator)
            up, spent_up = _cost(residual, places, weights.detach() + DEVIATION * noise, jobs)
            down, spent_down = _cost(residual, places, weights.detach() - DEVIATION * noise, jobs)
            slope += noise * (up - down) / (2 * DEVIATION * PAIRS)
            calls += spent_up + spent_down
        weights.grad = slope
        optimizer.step()
        rounds += 1
        if calls >= BUDGET * (len(keeper.curve) + 1) / LOOKS:
            _put(residual, places, weights.detach())
            constants = [round(float(value), 3) for value in weights.detach()[-1]]
            keeper.look(residual, residual.choose, rounds=rounds, force_calls=calls, constants=constants)
    rows = [*EVOLVED, "constant"]
    table = dict(zip(rows, weights.detach().round(decimals=3).tolist(), strict=True))
    spent = round(keeper.seconds, 1)
    keeper.end(cpu_seconds=spent, force_calls=calls, rounds=rounds, pairs=PAIRS, weights=table, seed=seed)


PAIRS, DEVIATION = 6, 0.2


def _scale(residual: Residual, jobs: Mapping[str, Sequence[Job]]) -> int:
    """Observations are scaled by those of the policy alone."""
    every = [done for engine, own in jobs.items() for done in relaxing(engine, own)]
    residual.scaled_to(torch.tensor(np.array([seen for done in every for _, seen, _ in done.decisions])).float())
    return sum(done.force_calls for done in every)


def _put(residual: Residual, places: Sequence[int], weights: Tensor) -> None:
    matrix, bias = residual.policy.parameters()
    with torch.no_grad():
        matrix.zero_()
        matrix[0, places] = weights[:-1]
        bias[0, 0] = weights[-1]


def _cost(
    residual: Residual, places: Sequence[int], weights: Tensor, jobs: Mapping[str, Sequence[Job]]
) -> tuple[float, int]:
    """Mean logarithm of the force calls, and their sum."""
    own = copy.deepcopy(residual)
    _put(own, places, weights)
    dones = [d for e, some in jobs.items() for d in relaxing(e, (replace(job, choose=own.choose) for job in some))]
    return float(np.mean([np.log(done.charged) for done in dones])), sum(done.force_calls for done in dones)


# The control

GENTLY = 0.25


def lessons(runs: Path, seed: int) -> None:
    """Lessons as `relaxion train metals` gives them, from the shipped policy on, at a fourth of its rates."""
    budget = json.loads((KEPT / f"reinforce-{seed}.json").read_text())["cpu_seconds"]
    updates = round(budget / _seconds_per_update(seed))
    fit, examples, policy = _lessons(seed, updates)
    keeper = Keeper(runs, f"lessons-{seed}")
    while len(keeper.curve) < LOOKS:
        fit.update()
        if keeper.seconds > budget * (len(keeper.curve) + 1) / LOOKS:
            keeper.look(policy.network, updates=fit.n_updates, force_calls=examples.force_calls)
    spent = round(keeper.seconds, 1)
    keeper.end(cpu_seconds=spent, force_calls=examples.force_calls, updates=fit.n_updates, seed=seed)


def _lessons(seed: int, updates: int) -> tuple[Fit, LiveExamples, MetricPolicy]:
    generator = torch.Generator().manual_seed(400 + seed)
    policy = copy.deepcopy(load("metals").policy).requires_grad_(True)
    assert isinstance(policy, MetricPolicy)
    settings = recipe()
    changes = {"fit_updates": updates, "fit_learning_rate": GENTLY * settings.fit_learning_rate}
    settings = settings.model_copy(update=changes)
    examples = LiveExamples(policy.network, settings.sources(), settings, generator)
    return Fit(policy.network, examples, settings), examples, policy


def _seconds_per_update(seed: int, number: int = 32) -> float:
    """So that the rate has fallen when the time is over."""
    fit, _, _ = _lessons(seed, 1000)
    began = time.process_time()
    for _ in range(number):
        fit.update()
    return (time.process_time() - began) / number


# Assessment


def contestants(runs: Path) -> dict[str, tuple[Choose | None, MetricNetwork | None]]:
    """As validation left them; those that have learned."""
    generator, found = torch.Generator(), dict[str, tuple[Choose | None, MetricNetwork | None]]()
    for name in LEARNERS:
        weights = load_file(runs / f"{name}.safetensors")
        if name.startswith("lessons"):
            network = copy.deepcopy(base_network())
            network.load_state_dict(weights)
            found[name] = None, network
            continue
        kept = json.loads((KEPT / f"{name}.json").read_text())["kept"]
        gains = kept.get("learner") == "gains"
        learner = Gains(generator, kept["margin"]) if gains else Residual(LEARNERS[name], generator)
        learner.load_state_dict(weights)
        found[name] = learner.choose, None
    return {"metals": (None, None)} | found


SEEDED = {"reinforce": (64, 64), "evolve": (), "lessons": ()}  # and the widths of their networks
LEARNERS = {"search": (64,)} | {f"{name}-{seed}": widths for name, widths in SEEDED.items() for seed in SEEDS}


def assess(runs: Path) -> None:
    """Each of them once, on starts that nobody looked at."""
    file = KEPT / "assess.json"
    told = json.loads(file.read_text()) if file.exists() else {"seed": ASSESSMENT_SEED, "number": N_ASSESSMENT}
    calls = told.setdefault("force_calls", {})
    for name, (choose, network) in contestants(runs).items():
        if name not in calls:
            calls[name] = measured(ASSESSMENT_SEED, N_ASSESSMENT, choose, network)
            write_json(file, told)


def table() -> None:
    """Mean calls of the policy, then those of each learner relative to it and to the control; as in the docs.

    A learner with seeds is their mean, start by start; `all far` has each seed too.
    """
    calls = json.loads((KEPT / "assess.json").read_text())["force_calls"]
    far = [name for name in SETS if SETS[name] == "far"]
    groups = {name: [name] for name in SETS} | {"all far": far, "all": list(SETS)}
    own = {
        who: {group: np.concatenate([calls[who][name] for name in names]) for group, names in groups.items()}
        for who in calls
    }
    for name in SEEDED:
        own[name] = {group: np.mean([own[f"{name}-{seed}"][group] for seed in SEEDS], axis=0) for group in groups}
    print("| | " + " | ".join(groups) + " | worst, failures | CPU seconds | force calls |\n" + "|---" * 11 + "|")
    means = [f"{found.mean():.2f}" for found in own["metals"].values()]
    print(f"| metals, calls | {' | '.join(means)} | {_worst(own, ['metals'])} | | |")
    for who in (*SEEDED, "search", *(name for name in LEARNERS if name != "search")):
        print(f"| {who} | {_ratios(own, who, 'metals')} | {_worst(own, _seeds_of(who))} | {_cost_of(who)} |")
    for who in ("reinforce", "evolve", "search"):
        print(f"| {who} beside lessons | {_ratios(own, who, 'lessons')} | | | |")


def _ratios(own: Mapping[str, Mapping[str, Array]], who: str, other: str) -> str:
    return " | ".join(f"{resampled(found, own[other][group]):.3f}" for group, found in own[who].items())


def _seeds_of(who: str) -> list[str]:
    return [f"{who}-{seed}" for seed in SEEDS] if who in SEEDED else [who]


def _worst(own: Mapping[str, Mapping[str, Array]], names: Sequence[str]) -> str:
    every = np.concatenate([own[name]["all far"] for name in names])
    return f"{every.max():.0f}, {int((every >= CAP).sum())}"


def _cost_of(who: str) -> str:
    told = [json.loads((KEPT / f"{name}.json").read_text()) for name in _seeds_of(who)]
    return " | ".join(f"{np.mean([one[key] for one in told]):.0f}" for key in ("cpu_seconds", "force_calls"))


PARTS: dict[str, Callable[[Path], None]] = {
    "search": search,
    "observe": observe,
    **{f"reinforce-{seed}": partial(reinforce, seed=seed) for seed in SEEDS},
    **{f"evolve-{seed}": partial(evolve, seed=seed) for seed in SEEDS},
    **{f"lessons-{seed}": partial(lessons, seed=seed) for seed in SEEDS},
    "assess": assess,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.table:
        table()
        return
    given.runs.mkdir(parents=True, exist_ok=True)
    KEPT.mkdir(parents=True, exist_ok=True)
    for name in given.only:
        if name == "assess" or not (KEPT / f"{name}.json").exists():
            PARTS[name](given.runs)


if __name__ == "__main__":
    main()
