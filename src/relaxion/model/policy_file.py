"""PolicyBundle: weights, what is needed to rebuild the networks, and the model card, in one safetensors file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from ase.data import atomic_numbers as numbers_of
from ase.data import chemical_symbols
from pydantic import Field
from torch import Tensor

from relaxion.errors import PolicyError, SettingsError
from relaxion.files import Format, Upgrade, digest, joined
from relaxion.model.card import ModelCard, as_markdown
from relaxion.settings import Settings

KIND = "relaxion policy"
ROLES = {"gate": "trust rule"}  # what people call a part whose name in the file is older
SUFFIX = ".safetensors"
MOST_ADSORBED = 0.25  # share of the atoms that may be adsorbates
UPGRADES: dict[int, Upgrade] = {}  # format version left behind -> how to understand it; one old file each in the tests
FORMAT = Format(version=1, error=PolicyError, upgrades=UPGRADES, advice="download it again, or package its run again")


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
            raise PolicyError(f"the {self.kind} network of the bundle has no weights")
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
class PolicyBundle:
    """A policy that can be shipped. `networks` has "policy", and where it has a trust rule of its own, "gate"."""

    name: str
    networks: Mapping[str, Network]
    card: ModelCard

    def __post_init__(self) -> None:
        if "policy" not in self.networks:
            raise PolicyError(f"the bundle {self.name} has no policy, only {', '.join(self.networks) or 'nothing'}")

    @property
    def policy(self) -> Network:
        return self.networks["policy"]

    @property
    def kind(self) -> str:
        """direct or metric, `+ trust rule` where it has its own."""
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


def uncovered(bundle: PolicyBundle, atomic_numbers: Iterable[int]) -> tuple[str, ...]:
    """Elements the policy does not cover, in the order of their numbers; empty: it covers all.

    Adsorbates are covered as long as they are a small part of the atoms, as they were in training.
    """
    counts = Counter(chemical_symbols[int(number)] for number in atomic_numbers)
    known = {symbol for symbol in counts if symbol in (*bundle.card.elements, *bundle.card.unseen)}
    adsorbed = {symbol: n for symbol, n in counts.items() if symbol in bundle.card.adsorbates and symbol not in known}
    if sum(adsorbed.values()) <= MOST_ADSORBED * counts.total():
        known |= adsorbed.keys()
    return tuple(sorted(counts.keys() - known, key=numbers_of.__getitem__))


def covers(bundle: PolicyBundle, atomic_numbers: Iterable[int]) -> bool:
    """Whether the policy was trained on every one of the elements."""
    return not uncovered(bundle, atomic_numbers)
