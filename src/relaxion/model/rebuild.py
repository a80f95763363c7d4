"""From networks to what a bundle keeps of them, and back, equal to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from relaxion.errors import PolicyError, SettingsError
from relaxion.model.backbone import BackboneSettings
from relaxion.model.policy_file import Network, PolicyBundle
from relaxion.model.roles import MoveActions, Policy
from relaxion.settings import shown


@dataclass(frozen=True)
class Family:
    """Policies that share their settings. Both are made from (actions, settings, generator) and keep `bounds`."""

    settings: type[BackboneSettings]
    deterministic: type[Any]
    stochastic: type[Any]


def _direct() -> Family:
    from relaxion.model.backbone import AtomNetworkSettings
    from relaxion.model.direct_policy import AtomGaussianPolicy, AtomPolicy

    return Family(AtomNetworkSettings, AtomPolicy, AtomGaussianPolicy)


def _metric() -> Family:
    from relaxion.model.stiffness_network import MetricSettings
    from relaxion.model.stiffness_policy import MetricGaussianPolicy, MetricPolicy

    return Family(MetricSettings, MetricPolicy, MetricGaussianPolicy)


FAMILIES: dict[str, Callable[[], Family]] = {"direct": _direct, "metric": _metric}  # by the bundle's word for them


def policy_of(bundle: PolicyBundle) -> Policy:
    """The policy of a bundle with its weights, ready to act (`eval`, no gradients)."""
    return rebuilt(bundle.policy, bundle.name)


def rebuilt(network: Network, name: str) -> Policy:
    """The policy that a bundle describes; `name` is for the sentence when it cannot be made."""
    if network.kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise PolicyError(f"{name} holds a network of kind '{network.kind}', this relaxion knows {known}; update it")
    _check_packages(network, name)
    try:
        module = _fresh(FAMILIES[network.kind](), network)
    except (SettingsError, KeyError, TypeError, ValueError, OverflowError, RuntimeError, MemoryError) as error:
        # torch has RuntimeError for sizes that cannot be
        words = error if isinstance(error, SettingsError) else shown(error)
        raise PolicyError(f"{name} cannot be rebuilt from its settings: {words}") from error
    _load(module, network.weights, name)
    return module.eval().requires_grad_(False)


def described(policy: Policy) -> Network:
    """What a bundle keeps of a policy."""
    for make_family in FAMILIES.values():
        family = make_family()
        if type(policy) in (family.deterministic, family.stochastic):
            return network_of(policy.settings, policy.state_dict(), stochastic=type(policy) is family.stochastic)  # pyright: ignore[reportArgumentType]
    raise PolicyError(f"a {type(policy).__name__} cannot be packaged")


def network_of(settings: BackboneSettings, weights: Mapping[str, Tensor], *, stochastic: bool) -> Network:
    """Of a policy with these settings and weights; the kind of the settings tells the kind of the policy."""
    for kind, make_family in FAMILIES.items():
        if type(settings) is make_family().settings:
            values = {"network": settings.model_dump(mode="json"), "stochastic": stochastic}
            own = {name: tensor.detach().clone() for name, tensor in weights.items()}
            return Network(kind, values, own, _packages(settings))
    raise PolicyError(f"policies with {type(settings).__name__} cannot be packaged")


def _fresh(family: Family, network: Network) -> Any:
    kind = family.stochastic if network.settings["stochastic"] else family.deterministic
    if not isinstance(network.settings, Mapping) or network.weights["bounds"].ndim != 1:
        raise ValueError("its bounds are not a row of numbers")
    bounds = MoveActions(*network.weights["bounds"].tolist())
    # a generator of its own: the draws are overwritten, and nothing global may change
    return kind(bounds, family.settings.read(network.settings["network"]), torch.Generator())


def _packages(settings: BackboneSettings) -> dict[str, str]:
    """Packages whose numbers become part of what was learned: e3nn's conventions changed between releases."""
    return {"e3nn": version("e3nn")} if settings.backbone == "tensor_field" else {}


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
                f"{name} was trained with {package} {wanted} and may mean something else with {present}, which is "
                f"installed; try: pip install '{package}=={wanted}'"
            )


def _release(word: str) -> tuple[str, ...]:
    """0.6 of 0.6.1: within these e3nn keeps its conventions."""
    return tuple(word.split(".")[:2])


def _alike(kept: Tensor, made: Tensor) -> bool:
    """Weights may have more or fewer bits than a new network's, but are of its shape and kind."""
    real = kept.dtype in (torch.float32, torch.float64) if made.is_floating_point() else kept.dtype == made.dtype
    return kept.shape == made.shape and real


def _load(module: nn.Module, weights: Mapping[str, Tensor], name: str) -> None:
    present = module.state_dict()
    wrong = [key for key in present if key not in weights or not _alike(weights[key], present[key])]
    wrong += [key for key in weights if key not in present]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise PolicyError(f"weights and settings of {name} do not belong together: {', '.join(wrong[:3])}{more}")
    # assign: weights keep the precision they were trained in
    module.load_state_dict({key: tensor.clone() for key, tensor in weights.items()}, assign=True)
