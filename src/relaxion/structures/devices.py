"""Where networks and batched potentials compute: the CPU, or a device that torch sees."""

from __future__ import annotations

from typing import TypeAlias

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


def _seen() -> str:
    number = torch.cuda.device_count()
    return "no CUDA device" if number == 0 else f"{number} CUDA device{'s' if number > 1 else ''}"
