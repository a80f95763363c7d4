"""Checkpoints and files of agents: how they are written, what may be put back, and the generators they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor

from relaxion.errors import CheckpointError
from relaxion.files import Format, Stored
from relaxion.train.agents.shared import Agent

FORMAT = Format(version=2, error=CheckpointError)  # 1 left the plain values out of the digest
MEANING = ("normalise_observations", "lowest_value", "highest_value", "n_bins")  # settings that weights depend on
BOUNDS = ("centre", "half_range", "bounds")  # buffers of networks that depend on the bounds of actions
NOT_WEIGHTS = ("n_updates", "generator")  # parts of an agent's snapshot that belong to its run; so does Adam's memory
DIVERGED = "the agent has diverged: lower its learning rates or the scale of the rewards and begin a new run"

read = FORMAT.read
write = FORMAT.write


class NonFiniteError(Exception):
    """A step brought NaN or infinity; the transition as plain numbers, for the run folder."""

    def __init__(self, what: str, transition: dict[str, Any]) -> None:
        super().__init__(what)
        self.what = what
        self.transition = transition

    def __reduce__(self) -> tuple[Any, ...]:
        """So that it can come from another process."""
        return type(self), (self.what, self.transition)


class DivergedError(NonFiniteError):
    """The agent's own numbers are no longer finite: nothing outside is to blame, and going on helps nothing."""


def named_generator(seed: int, name: str) -> Generator:
    """A generator of its own for every purpose: drawing more for one never changes another."""
    mixed = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return Generator().manual_seed(int.from_bytes(mixed[:8], "little") & (2**63 - 1))


def stored_settings(stored: Stored) -> dict[str, Any]:
    """The flat settings that lie with the weights; none in very old files."""
    settings = stored.values.get("settings", {})
    if not isinstance(settings, dict):
        raise CheckpointError("the settings beside the old weights are not a table; choose another file")
    return settings


def checked_finite(agent: Mapping[str, Tensor], step: int) -> None:
    """A DivergedError when the agent is not worth keeping."""
    if broken := [name for name, t in agent.items() if t.is_floating_point() and not torch.isfinite(t).all()]:
        raise DivergedError(f"the agent's {broken[0]}", {"step": step, "not_finite": broken})


@contextmanager
def taken_back() -> Iterator[None]:
    """Whatever does not fit while a checkpoint is put back is the checkpoint's fault."""
    try:
        yield
    except (KeyError, ValueError, TypeError, IndexError, OverflowError, RuntimeError, StopIteration) as error:
        # torch has RuntimeError for shapes, kinds and states of generators that do not fit
        words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(f"the checkpoint does not fit this run ({words})") from error


def start_agent_from(agent: Agent, stored: Stored, settings: Mapping[str, Any]) -> None:
    """Old networks for a new run; Adam's memory, counter and generator stay those of the new agent."""
    old = {name: tensor for name, tensor in stored.part("agent").items() if _is_weight(name)}
    present = agent.snapshot()
    refuse_other_meaning(stored_settings(stored), settings, old, present)
    agent.restore({name: tensor for name, tensor in present.items() if not _is_weight(name)} | old)


def refuse_other_meaning(
    old: Mapping[str, Any], new: Mapping[str, Any], weights: Mapping[str, Tensor], present: Mapping[str, Tensor]
) -> None:
    """Weights of fitting shapes may still mean something else: bins of other values, actions in other units."""
    names = [name for name in MEANING if name in old and name in new and old[name] != new[name]]
    changes = [f"{name} (was {old[name]!r}, now {new[name]!r})" for name in names]
    for name in BOUNDS:
        pairs = [(weights[key], t) for key, t in present.items() if key.split(".")[-1] == name and key in weights]
        changes += [f"{name} of actions (was {w.tolist()}, now {t.tolist()})" for w, t in pairs if not w.equal(t)][:1]
    if changes:
        raise CheckpointError(f"the old weights mean something else, because these differ: {', '.join(changes)}")


def _is_weight(name: str) -> bool:
    part = name.split(".")[0]
    return not part.endswith("_optimizer") and part not in NOT_WEIGHTS
