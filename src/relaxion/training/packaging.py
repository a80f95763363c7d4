"""From a run on structures to a bundle: the policy's weights and a model card.

Results on the card are not copied from the run: the held-apart starts are relaxed once more by the policy as it comes
out of the bundle, so a card is true of the file it stands beside.
"""

from __future__ import annotations

import json
import shlex
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from ase.data import chemical_symbols

from relaxion.bench.baselines import ase_calls
from relaxion.bundles import CardResult, ModelCard, PolicyBundle
from relaxion.bundles.card import POLICY
from relaxion.bundles.networks import network_of, policy_of
from relaxion.errors import RelaxionError, RelaxionWarning, RunError
from relaxion.files import Stored, json_of, text_of
from relaxion.networks.roles import Policy
from relaxion.settings import shown
from relaxion.structures import Outcome
from relaxion.training import checkpoint
from relaxion.training.atom_assessment import COMPARED, AtomAssessed, AtomAssessor
from relaxion.training.atom_task import AtomTask, atom_task
from relaxion.training.checkpoint import stored_settings
from relaxion.training.metals_packaging import bundle_of_metals
from relaxion.training.recipe import SHIPPED, overrides, settings_from_recipe
from relaxion.training.run_folder import AGENT, CHECKPOINT, RunFolder
from relaxion.training.run_settings import (
    AtomRunSettings,
    MetalsRunSettings,
    MetricRunSettings,
    RunSettings,
    UniversalRunSettings,
)
from relaxion.training.universal_packaging import bundle_of_universal
from relaxion.version import __version__

N_NAMED = 5  # structures that a sentence about failures names
OWN_OPTIONS = ("agent", "seed", "steps")  # of `relaxion train`; all else is --set


def bundle_from_run(path: Path, name: str) -> PolicyBundle:
    """The policy of a finished run, or of the last checkpoint of one that is not."""
    folder = RunFolder(path)
    stored = read_weights(folder)
    settings = RunSettings.read(stored_settings(stored))
    if isinstance(settings, MetalsRunSettings):
        progress = _progress(folder, stored)
        if folder.result.exists():  # its steps are updates of the metric
            progress["environment_steps"] = _force_calls(folder)
        return bundle_of_metals(name, stored, settings, training_command(settings, folder), progress)
    if isinstance(settings, UniversalRunSettings):
        command = training_command(settings, folder)
        return bundle_of_universal(name, stored, settings, command, _progress(folder, stored))
    if not isinstance(settings, AtomRunSettings):
        raise RunError(
            f"{path} learned {settings.training.task}, which relaxes no atoms; package a run on structures, "
            "whose task is relax"
        )
    weights = {key.removeprefix("policy."): t for key, t in stored.part("agent").items() if key.startswith("policy.")}
    network = network_of(settings.policy, weights, stochastic=settings.agent_name == "sac")
    task = _task(settings)
    card = _card(folder, stored, settings, task)
    bundle = PolicyBundle(name, {"policy": network}, card)
    return replace(bundle, card=_with_results(card, folder, task, policy_of(bundle)))


def read_weights(folder: RunFolder) -> Stored:
    """A run without a result goes on, or was stopped: its checkpoint is newer than what an earlier end has left."""
    if not (folder.settings.exists() or folder.is_run):
        raise RunError(f"{folder.path} is no folder of a run; 'relaxion train RECIPE --out RUN' makes one")
    if folder.result.exists() and folder.agent.exists():
        return checkpoint.read(folder.agent, AGENT)
    if not folder.checkpoint.exists():
        raise RunError(f"{folder.path} is not finished and has no checkpoint yet; wait for it, or train it again")
    stored = checkpoint.read(folder.checkpoint, CHECKPOINT)
    if _learned_nothing(stored):
        raise RunError(f"{folder.path} has learned nothing yet, it was stopped before its first update; --resume it")
    return stored


def _learned_nothing(stored: Stored) -> bool:
    """Neither an update of the agent nor, where it has a teacher, a lesson."""
    counters = [stored.tensors[name] for name in ("counters.n_updates", "counters.lessons") if name in stored.tensors]
    return bool(counters) and sum(int(counter) for counter in counters) == 0


def _task(settings: AtomRunSettings) -> AtomTask:
    """With results on what was held apart for them, also where the run itself looked at other structures."""
    atoms = settings.atoms.model_copy(update={"assess_on": "held_apart"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RelaxionWarning)  # advice for training comes too late
        return atom_task(replace(settings, atoms=atoms))


def _card(folder: RunFolder, stored: Stored, settings: AtomRunSettings, task: AtomTask) -> ModelCard:
    """Everything but the results."""
    trained, atoms = task.pools["training"], settings.atoms
    return ModelCard(
        elements=tuple(chemical_symbols[number] for number in trained.atomic_numbers.unique().tolist()),
        smallest_n_atoms=int(trained.counts.min()),
        largest_n_atoms=int(trained.counts.max()),
        potential=atoms.potential,
        starts=(atoms.structures, f"perturbed by {atoms.perturbation}", f"held apart by {atoms.held_apart}"),
        cells="free" if atoms.cell_free else "fixed",
        force_tolerance_ev_per_angstrom=settings.environment.force_tolerance_ev_per_angstrom,
        agent=_teachers(settings),
        training_command=training_command(settings, folder),
        seed=settings.training.seed,
        relaxion_version=__version__,
        date=datetime.now(UTC).date().isoformat(),
        training_settings=settings.flat(),
        **_progress(folder, stored),
    )


def _teachers(settings: AtomRunSettings) -> str:
    """Who trained it, in words."""
    if isinstance(settings, MetricRunSettings) and settings.lessons.lesson_updates > 0:
        reinforced = settings.training.steps > settings.lessons.lesson_updates
        return f"imitation, then {settings.agent_name}" if reinforced else "imitation"
    return settings.agent_name


def _progress(folder: RunFolder, stored: Stored) -> dict[str, Any]:
    """How far the run has come: as its result says, or its checkpoint."""
    if "counters.step" in stored.tensors:
        seconds = stored.values.get("wall_time_seconds")
        return {"environment_steps": int(stored.tensors["counters.step"]), "wall_time_seconds": seconds}
    try:
        result = _result(folder)
        return {
            "environment_steps": int(result["steps"]),
            "wall_time_seconds": float(result["wall_time_seconds"]),
            "run_weights_sha256": str(result["weights_sha256"]),
        }
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RunError(f"{folder.result} is damaged ({error!r}); train on with --resume to write it again") from error


def _force_calls(folder: RunFolder) -> int:
    calls = _result(folder).get("training_force_calls")
    if not isinstance(calls, int) or calls < 0:
        raise RunError(f"{folder.result} is damaged: training_force_calls is {shown(calls)}; train on with --resume")
    return calls


def _result(folder: RunFolder) -> dict[str, Any]:
    try:
        result = json_of(folder.result)
    except (OSError, ValueError) as error:
        result = error
    if not isinstance(result, dict):
        words = "train on with --resume to write it again"
        raise RunError(f"{folder.result} is damaged ({shown(result)}); {words}")
    return result


def _with_results(card: ModelCard, folder: RunFolder, task: AtomTask, policy: Policy) -> ModelCard:
    assessor = AtomAssessor(task, task.settings.training.assessment_starts)
    with torch.no_grad():
        assessed = assessor(policy)
    formulas = [atoms.get_chemical_formula() for atoms in assessor.starts.structures.to_ase()]
    values = {
        "n_assessment_starts": assessor.n_starts,
        "results": (policy_result(assessed), *_classical_results(folder, assessor)),
        "fails_on": tuple(failures_in_words(formulas, assessed, assessor.environment.settings.max_force_calls)),
    }
    return card.model_copy(update=values)


def policy_result(assessed: AtomAssessed) -> CardResult:
    """The policy's own row."""
    calls = assessed.force_calls.double()
    return CardResult(
        optimizer=POLICY,
        mean_force_calls=float(calls.mean()),
        success_rate=assessed.success_rate,
        largest_force_calls=float(calls.max()),
    )


def _classical_results(folder: RunFolder, assessor: AtomAssessor) -> list[CardResult]:
    """As the run measured them, if on the same starts; otherwise now."""
    kept = _kept_baselines(folder) if _assessed_held_apart(folder) else {}
    return [_classical_result(name, kept.get(name), assessor) for name in COMPARED]


def _classical_result(name: str, kept: Mapping[str, float] | None, assessor: AtomAssessor) -> CardResult:
    if kept is None:
        world = assessor.environment.settings
        fmax, cap = world.force_tolerance_ev_per_angstrom, world.max_force_calls
        found = ase_calls(name, assessor.starts.structures, assessor.task.potential, fmax, cap)
        kept = {"mean_force_calls": found.mean, "failures": found.failures}
    success_rate = 1 - kept["failures"] / assessor.n_starts
    return CardResult(optimizer=name, mean_force_calls=kept["mean_force_calls"], success_rate=success_rate)


def _kept_baselines(folder: RunFolder) -> dict[str, dict[str, float]]:
    try:
        values = json_of(folder.baselines)
        return {name: {key: float(v[key]) for key in ("mean_force_calls", "failures")} for name, v in values.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _assessed_held_apart(folder: RunFolder) -> bool:
    try:
        return 'assess_on = "held_apart"' in text_of(folder.settings)
    except (OSError, ValueError):
        return False


def failures_in_words(formulas: Sequence[str], assessed: AtomAssessed, cap: int) -> list[str]:
    """Which starts did not converge within `cap` force calls, and which of the rest took longest."""
    converged = assessed.outcomes == Outcome.CONVERGED
    failed: list[int] = (~converged).nonzero().flatten().tolist()
    sentences = [f"None of the {len(formulas)} held-apart starts failed."]
    if failed:
        reasons = Counter(Outcome(int(assessed.outcomes[number])).label for number in failed)
        words = ", ".join(f"{label} {count}" for label, count in sorted(reasons.items()))
        named = ", ".join(formulas[number] for number in failed[:N_NAMED])
        more = " and others" if len(failed) > N_NAMED else ""
        sentences = [
            f"{len(failed)} of {len(formulas)} held-apart starts did not converge within {cap} force calls "
            f"({words}): {named}{more}."
        ]
    if converged.any():
        slowest = int(torch.where(converged, assessed.force_calls, -1).argmax())
        calls = int(assessed.force_calls[slowest])
        sentences.append(f"Of those that converged the slowest took {calls} force calls: {formulas[slowest]}.")
    return sentences


def training_command(settings: RunSettings, folder: RunFolder) -> str:
    """The shortest `relaxion train` with a shipped recipe that has exactly these settings, and began as the run did."""
    commands = [command for recipe in sorted(SHIPPED.glob("*.toml")) if (command := _command(recipe, settings))]
    shortest = min(commands, key=len, default="")
    origin = ["--from-weights", text_of(folder.origin).strip()] if folder.origin.exists() else []
    words = shlex.split(shortest) if shortest else ["relaxion", "train", "settings.toml"]
    command = shlex.join([*words, *origin])
    return command if shortest else f"{command}  # with the settings below in that file"


def _command(recipe: Path, settings: RunSettings) -> str | None:
    """None where the recipe cannot be brought there."""
    wanted = settings.flat()
    try:
        kind = {"policy": wanted["policy"]} if "policy" in wanted else {}  # its settings have defaults of their own
        start = settings_from_recipe(recipe, settings.agent_name, kind).flat()
        changes = {name: value for name, value in wanted.items() if start.get(name) != value}
        changes = kind | changes
        reached = settings_from_recipe(recipe, settings.agent_name, changes).flat()
    except RelaxionError:
        return None
    if reached != wanted or "task" in changes or None in changes.values():  # --set has no word for None
        return None
    words = ["relaxion", "train", recipe.stem, "--agent", settings.agent_name]
    words += ["--seed", str(wanted["seed"]), "--steps", str(wanted["steps"])]
    for name, value in changes.items():
        if name not in OWN_OPTIONS:
            words += ["--set", _assignment(name, value)]
    return shlex.join(words)


def _assignment(name: str, value: Any) -> str:
    """As `--set` reads it back; words need no quotes unless they look like something else."""
    plain = f"{name}={value}"
    return plain if overrides([plain])[name] == value else f"{name}={json.dumps(value)}"
