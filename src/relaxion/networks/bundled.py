"""From networks to what a bundle keeps of them, and back, equal to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from relaxion.bundle import Network, PolicyBundle
from relaxion.errors import PolicyError, SettingsError
from relaxion.networks.atom_policies import AtomGaussianPolicy, AtomPolicy
from relaxion.networks.move_actions import MoveActions
from relaxion.networks.observer import AtomNetworkSettings

DIRECT = "direct"


def policy_of(bundle: PolicyBundle) -> nn.Module:
    """The policy of a bundle with its weights, ready to act (`eval`, no gradients)."""
    return rebuilt(bundle.policy, bundle.name)


def rebuilt(network: Network, name: str) -> nn.Module:
    """The module that a bundle describes; `name` is for the sentence when it cannot be made."""
    make = MAKERS.get(network.kind)
    if make is None:
        known = ", ".join(MAKERS)
        raise PolicyError(f"{name} holds a network of kind '{network.kind}', this relaxion knows {known}; update it")
    _check_packages(network, name)
    try:
        module = make(network.settings, network.weights)
    except (SettingsError, KeyError, TypeError, ValueError) as error:
        raise PolicyError(f"{name} cannot be rebuilt from its settings: {error}") from error
    _load(module, network.weights, name)
    return module.eval().requires_grad_(False)


def described(policy: nn.Module) -> Network:
    """What a bundle keeps of a policy."""
    if not isinstance(policy, AtomPolicy):
        raise PolicyError(f"a {type(policy).__name__} cannot be packaged")
    return direct_network(policy.settings, policy.state_dict(), stochastic=isinstance(policy, AtomGaussianPolicy))


def direct_network(settings: AtomNetworkSettings, weights: Mapping[str, Tensor], *, stochastic: bool) -> Network:
    """Of an AtomPolicy, or with `stochastic` an AtomGaussianPolicy, of these settings and weights."""
    own = {name: tensor.detach().clone() for name, tensor in weights.items()}
    values = {"network": settings.model_dump(mode="json"), "stochastic": stochastic}
    return Network(DIRECT, values, own, _packages(settings.backbone))


def _direct(settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
    kind = AtomGaussianPolicy if settings["stochastic"] else AtomPolicy
    bounds = MoveActions(*weights["bounds"].tolist())
    # a generator of its own: the draws are overwritten, and nothing global may change
    return kind(bounds, AtomNetworkSettings.read(settings["network"]), torch.Generator())


MAKERS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Tensor]], nn.Module]] = {DIRECT: _direct}
"""Kind of network -> fresh module from settings and weights (only their shapes matter)."""


def _packages(backbone: str) -> dict[str, str]:
    """Packages whose numbers become part of what was learned: e3nn's conventions changed between releases."""
    return {"e3nn": version("e3nn")} if backbone == "tensor_field" else {}


def _check_packages(network: Network, name: str) -> None:
    for package, wanted in network.requires.items():
        try:
            present = version(package)
        except PackageNotFoundError:
            raise PolicyError(
                f"{name} needs {package} {wanted}, which is not installed; try: pip install '{package}=={wanted}'"
            ) from None
        if _release(present) != _release(wanted):
            raise PolicyError(
                f"{name} was trained with {package} {wanted} and means something else with {present}, which is "
                f"installed; try: pip install '{package}=={wanted}'"
            )


def _release(word: str) -> tuple[str, ...]:
    """0.6 of 0.6.1: within these e3nn keeps its conventions."""
    return tuple(word.split(".")[:2])


def _load(module: nn.Module, weights: Mapping[str, Tensor], name: str) -> None:
    present = module.state_dict()
    wrong = [key for key in present if key not in weights or weights[key].shape != present[key].shape]
    wrong += [key for key in weights if key not in present]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise PolicyError(f"weights and settings of {name} do not belong together: {', '.join(wrong[:3])}{more}")
    # assign: weights keep the precision they were trained in
    module.load_state_dict({key: tensor.clone() for key, tensor in weights.items()}, assign=True)
