"""From a run on structures to a policy file: the policy's weights and a model card.

Results on the card are not copied from the run: the held-out starts are relaxed once more by the policy as it comes
out of the policy file, so a card is true of the file it stands beside.
"""

from __future__ import annotations

import shlex
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase.symbols import Symbols

from relaxion import __version__
from relaxion.errors import RelaxionError, RelaxionWarning, RunError
from relaxion.files import Stored, json_of, text_of
from relaxion.model.card import POLICY, CardResult, ModelCard
from relaxion.model.policy_file import PolicyFile
from relaxion.settings import assignment, command_words, option_words, shown
from relaxion.structures import Outcome
from relaxion.train.judge.assessment import CORE, Assessed, Assessor
from relaxion.train.judge.statistics import resampled
from relaxion.train.runs.run_folder import AGENT, CHECKPOINT, RunFolder
from relaxion.train.tasks.progress import CHECKPOINTS, stored_settings
from relaxion.train.tasks.settings import SHIPPED, Packed, RunSettings, read_settings, settings_from_recipe

N_NAMED = 5  # structures that a sentence about failures names
OWN_OPTIONS = ("agent", "seed", "steps")  # of `relaxion train`; all else is a setting
NAMES = {CORE: "classical core"}  # on a card, where they differ


def bundle_from_run(path: Path, name: str) -> PolicyFile:
    """The policy of a finished run, or of the last checkpoint of one that is not."""
    folder = RunFolder(path)
    stored = read_weights(folder)
    settings = read_settings(stored_settings(stored))
    if (packed := settings.packed(stored)) is None:
        raise RunError(
            f"{path} learned {settings.training.task}, which relaxes no atoms; package a run on structures, whose task "
            "is relax or stiffness"
        )
    card = ModelCard(
        **packed.card,
        **_progress(folder, stored, packed.steps_are_updates),
        training_command=training_command(settings, folder),
        seed=settings.training.seed,
        relaxion_version=__version__,
        date=datetime.now(UTC).date().isoformat(),
        training_settings=settings.flat(),
    )
    bundle = PolicyFile(name, packed.networks, card)
    return replace(bundle, card=with_results(bundle, packed, folder))


def read_weights(folder: RunFolder) -> Stored:
    """A run without a result goes on, or was stopped: its checkpoint is newer than what an earlier end has left."""
    if not (folder.settings.exists() or folder.is_run):
        raise RunError(f"{folder.path} is not the folder of a run; 'relaxion train' makes one")
    if folder.result.exists() and folder.agent.exists():
        return CHECKPOINTS.read(folder.agent, AGENT)
    if not folder.checkpoint.exists():
        raise RunError(f"{folder.path} is not finished and has no checkpoint yet; wait for it, or train it again")
    stored = CHECKPOINTS.read(folder.checkpoint, CHECKPOINT)
    names = ("counters.n_updates", "counters.fit_updates")  # of the agent, and of the fit of its policy before
    counters = [int(stored.tensors[name]) for name in names if name in stored.tensors]
    if counters and sum(counters) == 0:
        raise RunError(
            f"{folder.path} has learned nothing yet, it was stopped before its first update; `resume=True` continues it"
        )
    return stored


def _progress(folder: RunFolder, stored: Stored, steps_are_updates: bool) -> dict[str, Any]:
    """How far the run has come: as its result says, or its checkpoint."""
    if "counters.step" in stored.tensors:
        seconds = stored.values.get("wall_time_seconds")
        return {"environment_steps": int(stored.tensors["counters.step"]), "wall_time_seconds": seconds}
    result = _result(folder)
    try:
        return {
            "environment_steps": int(result["training_force_calls" if steps_are_updates else "steps"]),
            "wall_time_seconds": float(result["wall_time_seconds"]),
            "run_weights_sha256": str(result["weights_sha256"]),
        }
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RunError(
            f"{folder.result} is damaged ({error!r}); train on with `resume=True` to write it again"
        ) from error


def _result(folder: RunFolder) -> dict[str, Any]:
    try:
        result = json_of(folder.result)
    except (OSError, ValueError) as error:
        result = error
    if not isinstance(result, dict):
        words = "train on with `resume=True` to write it again"
        raise RunError(f"{folder.result} is damaged ({shown(result)}); {words}")
    return result


def with_results(bundle: PolicyFile, packed: Packed, folder: RunFolder) -> ModelCard:
    """The card with the results of the policy, as it comes out of the policy file, beside the classical ones."""
    assessor = packed.assessor
    with torch.no_grad():
        assessed = assessor(packed.relax(bundle))
    own = assessed.calls
    policy = CardResult(
        optimizer=POLICY,
        mean_force_calls=own.mean,
        mean_interval_95=_interval(own.force_calls),
        success_rate=assessed.success_rate,
        largest_force_calls=float(max(own.force_calls)),
    )
    kept = _kept_baselines(folder) if packed.same_starts else {}
    classical = [_classical_result(name, kept.get(name), assessor) for name in assessor.compared]
    values = {
        "n_assessment_starts": assessor.n_starts,
        "results": (policy, *sorted(classical, key=lambda row: row.optimizer != NAMES[CORE])),
        "fails_on": (*failures_in_words(assessed), *packed.fails_on),
    }
    return bundle.card.model_copy(update=values)


def _classical_result(name: str, kept: Mapping[str, Any] | None, assessor: Assessor) -> CardResult:
    row = kept or assessor.measure(name).as_plain()
    calls = row.get("force_calls")
    return CardResult(
        optimizer=NAMES.get(name, name),
        mean_force_calls=row["mean_force_calls"],
        mean_interval_95=_interval(calls) if calls else None,
        success_rate=1 - row["failures"] / assessor.n_starts,
        largest_force_calls=float(max(calls)) if calls else None,
    )


def _interval(force_calls: Sequence[float]) -> tuple[float, float]:
    found = resampled(np.array(force_calls, dtype=np.float64))
    return found.low, found.high


def _kept_baselines(folder: RunFolder) -> dict[str, dict[str, Any]]:
    try:
        values = json_of(folder.baselines)
        numbers = {n: {key: float(v[key]) for key in ("mean_force_calls", "failures")} for n, v in values.items()}
        return {
            n: {**row, "force_calls": [float(x) for x in values[n].get("force_calls", ())]}
            for n, row in numbers.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def failures_in_words(assessed: Assessed) -> list[str]:
    """Which starts did not converge, of which kind where there are several; and which of the rest took longest."""
    failed = [one for one in assessed.relaxed if not one.converged]
    converged = [one for one in assessed.relaxed if one.converged]
    sentences = [f"None of the {len(assessed.relaxed)} held-out starts failed."]
    if failed:
        reasons = Counter(Outcome[one.outcome.upper()].label for one in failed)
        words = ", ".join(f"{label} {count}" for label, count in sorted(reasons.items()))
        named = ", ".join(_formula(one.numbers) for one in failed[:N_NAMED])
        more = " and others" if len(failed) > N_NAMED else ""
        sentences = [
            f"{len(failed)} of {len(assessed.relaxed)} held-out starts did not converge within {assessed.cap} force "
            f"calls ({words}): {named}{more}."
        ]
        kinds = Counter(one.label for one in failed if one.label)
        sentences += [
            f"{number} of {len(assessed.by_kind()[kind])} starts of kind {kind}." for kind, number in kinds.items()
        ]
    if converged:
        slowest = max(converged, key=lambda one: one.force_calls)
        sentences.append(
            f"Of those that converged the slowest took {slowest.force_calls} force calls: {_formula(slowest.numbers)}."
        )
    return sentences


def _formula(numbers: Any) -> str:
    return Symbols(numbers).get_chemical_formula()


def training_command(settings: RunSettings, folder: RunFolder) -> str:
    """The shortest `relaxion train` with a shipped recipe that has exactly these settings, and began as the run did."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RelaxionWarning)  # about settings that other recipes do not have
        commands = [command for recipe in sorted(SHIPPED.glob("*.toml")) if (command := _command(recipe, settings))]
    shortest = min(commands, key=len, default="")
    origin = text_of(folder.origin).strip() if folder.origin.exists() else None
    words = shlex.split(shortest) if shortest else command_words("train", "settings.toml")
    command = shlex.join([*words, *option_words(**{"from": origin})])
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
    if reached != wanted or "task" in changes or None in changes.values():  # TOML has no word for None
        return None
    usual_agent = settings_from_recipe(recipe, None, {}).agent_name  # where none is asked for
    return shlex.join(
        command_words(
            "train",
            recipe.stem,
            agent=None if settings.agent_name == usual_agent else settings.agent_name,
            seed=wanted["seed"],
            steps=None if start["steps"] == wanted["steps"] else wanted["steps"],
            set=[assignment(name, value) for name, value in changes.items() if name not in OWN_OPTIONS],
        )
    )
