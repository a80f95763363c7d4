"""Everything an agent learned as one flat dictionary of tensors, and back, exact to the bit. No pickle anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Generator, Tensor, nn

from relaxion.agents.adam import Adam
from relaxion.errors import RestartError

Part: TypeAlias = nn.Module | Adam | Tensor | Generator


def take_snapshot(parts: Mapping[str, Part]) -> dict[str, Tensor]:
    """Copies of all tensors in the parts, named `part.tensor`."""
    return {name: tensor.detach().clone() for name, tensor in _named_tensors(parts).items()}


@torch.no_grad()
def restore_snapshot(parts: Mapping[str, Part], tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors back into the parts. Nothing is written unless everything fits."""
    present = _named_tensors(parts)
    _check(present, tensors)
    for name, tensor in present.items():
        tensor.copy_(tensors[name])
    for name, part in parts.items():
        if isinstance(part, Generator):  # its tensor is only a copy
            part.set_state(present[name])


def _named_tensors(parts: Mapping[str, Part]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for name, part in parts.items():
        match part:
            case nn.Module():
                named |= {f"{name}.{key}": tensor for key, tensor in part.state_dict().items()}
            case Adam():
                named |= {f"{name}.{key}": tensor for key, tensor in part.named_tensors().items()}
            case Generator():
                named[name] = part.get_state()
            case Tensor():
                named[name] = part
    return named


def _check(present: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    complaints = [f"'{name}' is missing" for name in present if name not in tensors]
    complaints += [f"'{name}' belongs to no part of this agent" for name in tensors if name not in present]
    for name, expected in present.items():
        got = tensors.get(name, expected)
        if expected.shape != got.shape or expected.dtype != got.dtype:
            complaints.append(
                f"'{name}' is {tuple(got.shape)} {got.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
            )
    if complaints:
        more = f" and {len(complaints) - 5} more" if len(complaints) > 5 else ""
        raise RestartError(
            f"the snapshot does not fit the agent: {'; '.join(complaints[:5])}{more}. "
            "Was it made by another algorithm or with other network sizes?"
        )
