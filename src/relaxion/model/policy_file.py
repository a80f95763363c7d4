"""PolicyFile: weights, what is needed to rebuild the networks, and the model card, in one safetensors file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import torch
from ase.data import atomic_numbers as numbers_of
from ase.data import chemical_symbols
from pydantic import Field
from torch import Tensor, nn

from relaxion.errors import PolicyError, SettingsError
from relaxion.files import Format, Stored, Upgrade, digest, joined
from relaxion.model.actions import MoveActions
from relaxion.model.backbone import BackboneSettings
from relaxion.model.card import ModelCard, as_markdown
from relaxion.model.roles import Policy
from relaxion.settings import Settings, shown

KIND = "relaxion policy"
ROLES = {"gate": "step rule"}  # what people call a part whose name in the file is older
SUFFIX = ".safetensors"
MOST_ADSORBED = 0.25  # share of the atoms that may be adsorbates


def _from_version_1(stored: Stored) -> Stored:
    """Stiffness was called metric."""
    values = deepcopy(stored.values)
    with suppress(KeyError, TypeError, AttributeError):  # what is missing or odd is named when the values are read
        kinds = [(network, "kind") for network in values["networks"].values()]
        settings = values["card"]["training_settings"]
        for where, name in [*kinds, (settings, "task"), (settings, "policy")]:
            if where.get(name) == "metric":
                where[name] = "stiffness"
    return Stored(stored.tensors, values)


UPGRADES: dict[int, Upgrade] = {
    1: _from_version_1
}  # by the format version that is left behind; an old file each in the tests
FORMAT = Format(version=2, error=PolicyError, upgrades=UPGRADES, advice="download it again, or package its run again")


@dataclass(frozen=True, eq=False)
class Network:
    """One network: of which kind, made with which settings, and what it learned.

    Kinds are known to `relaxion.model.policy_file`, which makes networks from this and the other way round.
    """

    kind: str
    settings: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    requires: Mapping[str, str]  # package -> version whose numbers the weights depend on

    def __post_init__(self) -> None:
        if not self.weights:
            raise PolicyError(f"the {self.kind} network of the policy file has no weights")
        for name, tensor in self.weights.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor.double()).all():
                raise PolicyError(f"the weights '{name}' of the {self.kind} network are not finite; they are of no use")


class _NetworkValues(Settings):
    kind: str
    settings: dict[str, Any]
    requires: dict[str, str] = Field(default_factory=dict)


class _Values(Settings):
    name: str
    networks: dict[str, _NetworkValues]
    card: ModelCard


@dataclass(frozen=True, eq=False)
class PolicyFile:
    """A policy that can be shipped. `networks` has "policy", and "gate" for a step rule of its own."""

    name: str
    networks: Mapping[str, Network]
    card: ModelCard

    def __post_init__(self) -> None:
        if "policy" not in self.networks:
            raise PolicyError(
                f"the policy file {self.name} has no policy, only {', '.join(self.networks) or 'nothing'}"
            )

    @property
    def policy(self) -> Network:
        return self.networks["policy"]

    @property
    def kind(self) -> str:
        """direct or stiffness, `+ step rule` where it has its own."""
        others = sorted(ROLES.get(name, name) for name in self.networks if name != "policy")
        return " + ".join([self.policy.kind, *others])

    @property
    def n_numbers(self) -> int:
        """Learned numbers in all."""
        return sum(tensor.numel() for network in self.networks.values() for tensor in network.weights.values())

    @property
    def weights_sha256(self) -> str:
        """Of names, shapes and bits of all weights."""
        return digest(self._tensors())

    def write(self, path: Path) -> None:
        """In one go; replaces what is there."""
        networks = {
            role: _NetworkValues(kind=n.kind, settings=dict(n.settings), requires=dict(n.requires))
            for role, n in self.networks.items()
        }
        values = _Values(name=self.name, networks=networks, card=self.card)
        FORMAT.write(path, KIND, self._tensors(), values.model_dump(mode="json"))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Or a PolicyError in one sentence: missing, damaged, foreign, of a newer format."""
        stored = FORMAT.read(path, KIND)
        try:
            values = _Values.read(stored.values)
            networks = {
                role: Network(network.kind, network.settings, stored.part(role), network.requires)
                for role, network in values.networks.items()
            }
            return cls(values.name, networks, values.card)
        except (SettingsError, PolicyError) as error:
            raise PolicyError(f"{path} is not a complete policy: {error}") from error

    def card_text(self) -> str:
        """The model card as Markdown."""
        about = {
            "kind": self.kind,
            "learned numbers": str(self.n_numbers),
            "weights_sha256": self.weights_sha256,
        }
        needs = [f"{p} {v}" for network in self.networks.values() for p, v in network.requires.items()]
        return as_markdown(self.name, about | ({"needs": ", ".join(needs)} if needs else {}), self.card)

    def _tensors(self) -> dict[str, Tensor]:
        return joined({role: network.weights for role, network in self.networks.items()})


def uncovered(bundle: PolicyFile, atomic_numbers: Iterable[int], *, adsorbates: bool = True) -> tuple[str, ...]:
    """Elements the policy does not cover, in the order of their numbers; empty: it covers all.

    `adsorbates`: they are covered as long as they are a small part of the atoms, as they were in training.
    """
    counts = Counter(chemical_symbols[int(number)] for number in atomic_numbers)
    known = {symbol for symbol in counts if symbol in (*bundle.card.elements, *bundle.card.unseen)}
    adsorbed = {symbol: n for symbol, n in counts.items() if symbol in bundle.card.adsorbates and symbol not in known}
    if adsorbates and sum(adsorbed.values()) <= MOST_ADSORBED * counts.total():
        known |= adsorbed.keys()
    return tuple(sorted(counts.keys() - known, key=numbers_of.__getitem__))


@dataclass(frozen=True)
class Family:
    """Policies that share their settings. Both are made from (actions, settings, generator) and keep `bounds`."""

    settings: type[BackboneSettings]
    deterministic: type[Any]
    stochastic: type[Any]


def _direct() -> Family:
    from relaxion.model.atom_policies import AtomGaussianPolicy, AtomPolicy
    from relaxion.model.backbone import AtomNetworkSettings

    return Family(AtomNetworkSettings, AtomPolicy, AtomGaussianPolicy)


def _stiffness() -> Family:
    from relaxion.model.atom_policies import StiffnessGaussianPolicy, StiffnessPolicy
    from relaxion.model.stiffness_network import StiffnessSettings

    return Family(StiffnessSettings, StiffnessPolicy, StiffnessGaussianPolicy)


FAMILIES: dict[str, Callable[[], Family]] = {"direct": _direct, "stiffness": _stiffness}


def policy_of(bundle: PolicyFile) -> Policy:
    """The policy of a bundle with its weights, ready to act (`eval`, no gradients)."""
    return rebuilt(bundle.policy, bundle.name)


def rebuilt(network: Network, name: str) -> Policy:
    """The policy that a bundle describes; `name` is for the sentence when it cannot be made."""
    if network.kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise PolicyError(f"{name} holds a network of kind '{network.kind}', this relaxion reads {known}; update it")
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
