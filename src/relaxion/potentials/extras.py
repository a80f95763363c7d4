"""Potentials of optional packages: where these lie, without importing them, and what to say where they are missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relaxion.errors import MissingExtraError, SettingsError, UnknownPotentialError

if TYPE_CHECKING:
    import torch

    from relaxion.potentials.base import Potential


@dataclass(frozen=True)
class Extra:
    """A potential that needs an optional package."""

    package: str
    factory: str  # module of this room and a callable in it, imported when it is asked for
    how_to_install: str
    description: str
    model: str = ""  # what may follow the name and a colon, in words: "MODEL", "FILE"; empty: nothing may
    needs_model: bool = False
    devices: bool = True  # whether the factory takes a device; without, it computes on the CPU

    def build(self, spec: str, model: str, device: torch.device, options: Mapping[str, Any]) -> Potential:
        if not is_installed(self.package):
            raise self._missing(spec)
        self._check(spec, model)
        if taken := {"model", "device"} & set(options):
            raise SettingsError(f"'{spec}': {taken.pop()} is not an option here; write NAME:MODEL, and `device=...`")
        module, _, name = self.factory.partition(":")
        arguments: dict[str, Any] = {"model": model} if model else {}
        arguments |= {"device": device} if self.devices else {}
        try:
            return getattr(import_module(f"relaxion.potentials.{module}"), name)(**arguments, **options)
        except ImportError as error:
            raise self._missing(spec) from error

    def _check(self, spec: str, model: str) -> None:
        name = spec.partition(":")[0]
        if model and not self.model:
            raise UnknownPotentialError(f"'{spec}': nothing may follow the name; write '{name}'")
        if self.needs_model and not model:
            raise UnknownPotentialError(f"'{name}' needs a file; write '{name}:{self.model}'")

    def _missing(self, spec: str) -> MissingExtraError:
        return MissingExtraError(
            f"'{spec}' needs the package {self.package}, which cannot be imported; try: {self.how_to_install}"
        )


def is_installed(package: str) -> bool:
    return _location(package) is not None


def package_folder(package: str) -> Path:
    """Where its files lie; ImportError where it is not installed."""
    location = _location(package)
    if location is None:
        raise ModuleNotFoundError(f"No module named '{package}'", name=package)
    return location


def _location(package: str) -> Path | None:
    try:
        found = find_spec(package)
    except (
        ModuleNotFoundError,
        ValueError,
    ):  # of a part of what is missing; somebody forbids to import it
        return None
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0])
