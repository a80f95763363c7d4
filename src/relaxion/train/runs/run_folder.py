"""The folder of a run, and the policy file made of it: one owner at a time, nothing overwritten unasked.

Results on the card of a policy file are not copied from the run: the held-out starts are relaxed once more by the
policy as it comes out of the file, so a card is true of the file it stands beside.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase.symbols import Symbols

from relaxion import __version__
from relaxion.errors import CheckpointError, FileError, RelaxionError, RelaxionWarning, RunError
from relaxion.files import Stored, exclusive, json_of, kind_of, part_of, text_of, write_text
from relaxion.model.card import POLICY, CardResult, ModelCard
from relaxion.model.policy_file import PolicyFile
from relaxion.settings import assignment, command_words, option_words, shown
from relaxion.structures import Outcome
from relaxion.train.judge.assessment import CORE, Assessed, Assessor
from relaxion.train.judge.statistics import resampled
from relaxion.train.tasks.progress import CHECKPOINTS, stored_settings
from relaxion.train.tasks.settings import SHIPPED, Packed, RunSettings, read_settings, settings_from_recipe

LOCK = ".lock"
BASELINES = "baselines.json"
OWNER = "relaxion {}"  # what a lock says: the process
CHECKPOINT = "relaxion checkpoint"  # kinds of files
AGENT = "relaxion agent"


class RunFolder:
    """Names of what is inside."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = path / "settings.toml"
        self.metrics = path / "metrics.jsonl"
        self.checkpoint = path / "checkpoint.safetensors"
        self.agent = path / "agent.safetensors"
        self.result = path / "result.json"
        self.offender = path / "offending_transition.json"
        self.alarms = path / "alarms.jsonl"
        self.baselines = path / BASELINES
        self.assessment = path / "assessment.json"
        self.origin = path / "origin.txt"  # whose weights a run began with, where it began with any
        self.tensorboard = path / "tensorboard"

        # The checkpoint goes first when a run is removed: half cleared, a folder is never taken for one to be resumed.
        self.files = (
            self.checkpoint, self.result, self.agent, self.offender, self.alarms, self.baselines,
            self.assessment, self.origin,
            self.metrics,
            self.settings,
        )  # fmt: skip

    @property
    def is_run(self) -> bool:
        """A run has been here, or is: its checkpoint or its lock says so."""
        return kind_of(self.checkpoint) == CHECKPOINT or _owner(self.path / LOCK) is not None

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Nobody else trains here meanwhile. The system drops the lock with the process, so none is ever stale."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = exclusive(self.path / LOCK)
        except BlockingIOError:
            owner = _owner(self.path / LOCK) or "unknown"
            raise RunError(f"{self.path} is in use by process {owner}; wait for it or choose another folder") from None
        except OSError as error:
            raise FileError(f"{self.path} cannot be a run folder: {error}; choose another folder") from error
        with lock:
            lock.truncate(0)
            lock.write(OWNER.format(os.getpid()) + "\n")
            lock.flush()
            for file in self.files:
                with suppress(OSError):  # a folder of that name is somebody else's
                    part_of(file).unlink(missing_ok=True)  # what a kill has left
            yield

    def check_empty(self) -> None:
        """Refuse a folder that holds anything, save what a run leaves that was killed before its first checkpoint."""
        if self.path.is_dir() and not all(self._counts_for_nothing(file) for file in self.path.iterdir()):
            if self.is_run:
                advice = "`resume=True` continues" if self.checkpoint.exists() else "choose another folder"
                advice += ", or `force=True` replaces what a run left there"
            else:
                advice = "choose another folder: no run made it, so that `force=True` removes nothing there"
            raise FileError(f"{self.path} is not empty; {advice}")

    def _counts_for_nothing(self, file: Path) -> bool:
        unfinished = file in [part_of(own) for own in self.files]
        own_lock = file.name == LOCK and (_owner(file) is not None or file.stat().st_size == 0)
        return own_lock or unfinished or (file == self.metrics and file.stat().st_size == 0)

    def clear(self) -> None:
        """Remove what a run leaves, and nothing else; only for a folder that `is_run`."""
        for file in self.files:
            file.unlink(missing_ok=True)
        for file in self.tensorboard.glob("events.out.tfevents.*"):
            file.unlink()
        with suppress(OSError):
            self.tensorboard.rmdir()  # unless something else is in it


def _owner(lock: Path) -> str | None:
    """The process that wrote this lock; None when it is not one of ours."""
    try:
        found = re.fullmatch(OWNER.format(r"(\d{1,20})\n?"), text_of(lock))
    except (OSError, ValueError):
        return None
    return found[1] if found else None


# ---- What a run writes down: lines of metrics.jsonl and alarms.jsonl, TensorBoard on request, assessment.json.

# names in metrics.jsonl that curves are drawn of
STEPS = "time/total_timesteps"
FORCE_CALLS = "eval/force_calls_mean"
SUCCESS = "eval/success_rate"
REFERENCES = {"BFGS": "eval/force_calls_bfgs", "FIRE": "eval/force_calls_fire"}
ASSESSED_RETURN = "eval/mean_reward"
EXPLORED_RETURN = "rollout/ep_rew_mean"
FINAL = {  # what result.json calls them
    FORCE_CALLS: "final_force_calls_mean",
    SUCCESS: "final_success_rate",
    REFERENCES["BFGS"]: "force_calls_bfgs",
    REFERENCES["FIRE"]: "force_calls_fire",
    ASSESSED_RETURN: "final_return_mean",
}

ASSESSMENT_FORMAT = "relaxion-assessment"  # of assessment.json
ASSESSMENT_VERSION = 1


class Records:
    """Appends to metrics.jsonl; a resume cuts the file back to where its checkpoint was written."""

    def __init__(
        self, path: Path, *, position: int = 0, tensorboard: Path | None = None, resumed_at: int | None = None
    ) -> None:
        self._make_board = None if tensorboard is None else _board_maker(tensorboard, resumed_at)
        self._board: Any = None  # made with the first record, when the run has a checkpoint
        _cut(path, position)
        self._file = path.open("ab")

    def write(self, scalars: Mapping[str, float]) -> None:
        """One line. The x axis of everything is the true total of environment steps (R9.5)."""
        line = {name: value if math.isfinite(value) else None for name, value in scalars.items()}  # JSON has no NaN
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()
        if self._make_board is not None:
            self._board = self._board or self._make_board()
            step = int(scalars["time/total_timesteps"])
            for name, value in scalars.items():
                self._board.add_scalar(name, value, step)

    def position(self) -> int:
        """Bytes written and forced to disk: what a checkpoint remembers."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._board is not None:
            self._board.flush()
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


class AlarmFile:
    """alarms.jsonl, made with the first alarm; a resume cuts it back likewise."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path = path
        _cut(path, position)

    def write(self, events: Iterable[Any]) -> None:
        """Append (`diagnostics.Event`), and force to disk: alarms are few."""
        lines = "".join(json.dumps(event.as_record(), ensure_ascii=False) + "\n" for event in events)
        if lines:
            with self.path.open("ab") as file:
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())

    def position(self) -> int:
        """Bytes written: what a checkpoint remembers."""
        return self.path.stat().st_size if self.path.exists() else 0


class Clock:
    """Seconds a run has taken, those before a resume included."""

    def __init__(self, seconds_before: float = 0.0, step: int = 0) -> None:
        self._before = seconds_before
        self._began = time.perf_counter()
        self._last = (seconds_before, step)

    def seconds(self) -> float:
        return self._before + time.perf_counter() - self._began

    def scalars(self, step: int) -> dict[str, float]:
        """Seconds so far, and steps per second since the last call."""
        now = self.seconds()
        (then, step_then) = self._last
        self._last = (now, step)
        return {"time/time_elapsed": now, "time/fps": (step - step_then) / max(now - then, 1e-9)}


def _cut(path: Path, position: int) -> None:
    """Whatever was written after the checkpoint goes."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a file; remove it")
    length = path.stat().st_size if path.exists() else 0
    if length < position:
        raise CheckpointError(f"{path} has {length} bytes, its checkpoint was written after {position}: it was cut")
    if length > position:
        os.truncate(path, position)


def _board_maker(folder: Path, resumed_at: int | None) -> Callable[[], Any]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RunError("tensorboard = true needs the package tensorboard: pip install 'relaxion[train]'") from error
    # The record of the step that was saved stands; later ones are written again.
    return lambda: SummaryWriter(str(folder), purge_step=None if resumed_at is None else resumed_at + 1)


def leave_record(path: Path, assessed: Any, step: int) -> None:
    """Start by start, in place of what the assessment before has left; whatever is wrong with it, the run is good."""
    program, *rest = sys.argv or [""]
    command = shlex.join([Path(program).name, *rest])  # as it was typed; of a script or a test, its name
    plain = {"format": ASSESSMENT_FORMAT, "version": ASSESSMENT_VERSION, "step": step, "command": command}
    plain |= assessed.record.as_plain()
    try:
        write_text(path, json.dumps(plain, allow_nan=False, separators=(",", ":")) + "\n")
    except FileError as error:
        warnings.warn(f"the assessment was not stored: {error}", RelaxionWarning, stacklevel=2)


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
    if _learned_nothing(stored):
        raise RunError(
            f"{folder.path} has learned nothing yet, it was stopped before its first update; `resume=True` continues it"
        )
    return stored


def _learned_nothing(stored: Stored) -> bool:
    """Neither an update of the agent nor, where its policy is fitted before, one of the fit."""
    names = ("counters.n_updates", "counters.fit_updates")
    counters = [stored.tensors[name] for name in names if name in stored.tensors]
    return bool(counters) and sum(int(counter) for counter in counters) == 0


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
    return shlex.join(
        command_words(
            "train",
            recipe.stem,
            agent=None if settings.agent_name == _usual_agent(recipe) else settings.agent_name,
            seed=wanted["seed"],
            steps=None if start["steps"] == wanted["steps"] else wanted["steps"],
            set=[assignment(name, value) for name, value in changes.items() if name not in OWN_OPTIONS],
        )
    )


def _usual_agent(recipe: Path) -> str | None:
    """That which trains where none is asked for."""
    return settings_from_recipe(recipe, None, {}).agent_name
