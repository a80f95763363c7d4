"""Where networks and batched potentials compute: the CPU, or a device that torch sees."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch

from relaxion.errors import SettingsError

DeviceLike: TypeAlias = str | torch.device | None
"""A word ("cpu", "cuda", "cuda:1", "mps"), a `torch.device`, or None for the CPU."""


def device_of(word: DeviceLike) -> torch.device:
    """The device meant by `word`; a sentence where torch does not know it, or does not see it on this machine."""
    try:
        device = torch.device(word or "cpu")
    except (RuntimeError, TypeError) as error:
        raise SettingsError(f"unknown device '{word}'; try 'cpu', 'cuda' or 'cuda:1'") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError(f"the device '{device}' is not there: torch sees {_seen()}; try 'cpu'")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise SettingsError("the device 'mps' is not there; try 'cpu'")
    return device


Thing = TypeVar("Thing")


def moved_to(device: torch.device, thing: Thing) -> Thing:
    """A tensor, or a dataclass with all tensors in it, on that device; itself where it is there already."""
    if isinstance(thing, torch.Tensor):
        return thing.to(device)  # pyright: ignore[reportReturnType] - it is a Tensor too
    if not is_dataclass(thing) or isinstance(thing, type):
        return thing
    parts: dict[str, Any] = {part.name: getattr(thing, part.name) for part in fields(thing)}
    moved = {name: moved_to(device, value) for name, value in parts.items()}
    changed = {name: value for name, value in moved.items() if value is not parts[name]}
    return replace(thing, **changed) if changed else thing  # pyright: ignore[reportReturnType]


def _seen() -> str:
    number = torch.cuda.device_count()
    return "no CUDA device" if number == 0 else f"{number} CUDA device{'s' if number > 1 else ''}"
