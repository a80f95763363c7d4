"""Everything an agent learned as one flat dictionary of tensors, and back, exact to the bit. No pickle anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Generator, Tensor, nn
from torch.optim import Adam

from relaxion.errors import RestartError

Part: TypeAlias = nn.Module | Adam | Tensor | Generator
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def take_snapshot(parts: Mapping[str, Part]) -> dict[str, Tensor]:
    """Copies of all tensors in the parts, named `part.tensor`."""
    return {name: tensor.detach().clone() for name, tensor in _tensors(parts).items()}


def restore_snapshot(parts: Mapping[str, Part], tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors back into the parts. Nothing is written unless everything fits."""
    present = _tensors(parts)
    _check(present, tensors)
    with torch.no_grad():
        for name, part in parts.items():
            _write(part, lambda key, name=name: tensors[f"{name}.{key}" if key else name])


def _tensors(parts: Mapping[str, Part]) -> dict[str, Tensor]:
    flat: dict[str, Tensor] = {}
    for name, part in parts.items():
        for key, tensor in _named_tensors(part).items():
            flat[f"{name}.{key}" if key else name] = tensor
    return flat


def _named_tensors(part: Part) -> dict[str, Tensor]:
    match part:
        case nn.Module():
            return part.state_dict()
        case Adam():
            return {f"{number}.{key}": tensor for number, key, tensor in _moments(part)}
        case Generator():
            return {"": part.get_state()}
        case Tensor():
            return {"": part}


def _moments(optimizer: Adam) -> list[tuple[int, str, Tensor]]:
    """Adam's memory for each parameter; zeros, which mean the same, where it has none yet."""
    found = []
    for number, parameter in enumerate(_parameters(optimizer)):
        memory = optimizer.state.get(parameter) or _fresh_memory(parameter)
        found += [(number, key, memory[key]) for key in MOMENTS]
    return found


def _fresh_memory(parameter: Tensor) -> dict[str, Tensor]:
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
    }


def _parameters(optimizer: Adam) -> list[nn.Parameter]:
    return optimizer.param_groups[0]["params"]


def _write(part: Part, read: Callable[[str], Tensor]) -> None:
    match part:
        case nn.Module():
            for key, tensor in part.state_dict().items():
                tensor.copy_(read(key))
        case Adam():
            for number, parameter in enumerate(_parameters(part)):
                memory = _fresh_memory(parameter)
                for key, tensor in memory.items():
                    tensor.copy_(read(f"{number}.{key}"))
                part.state[parameter] = memory
        case Generator():
            part.set_state(read("").cpu().clone())
        case Tensor():
            part.copy_(read(""))


def _check(present: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    complaints = [f"'{name}' is missing" for name in present if name not in tensors]
    complaints += [f"'{name}' belongs to no part of this agent" for name in tensors if name not in present]
    for name in present.keys() & tensors.keys():
        expected, got = present[name], tensors[name]
        if expected.shape != got.shape or expected.dtype != got.dtype:
            complaints.append(
                f"'{name}' is {tuple(got.shape)} {got.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
            )
    if complaints:
        more = f" and {len(complaints) - 5} more" if len(complaints) > 5 else ""
        raise RestartError(
            f"the snapshot does not fit the agent: {'; '.join(sorted(complaints)[:5])}{more}. "
            "Was it made by another algorithm or with other network sizes?"
        )
