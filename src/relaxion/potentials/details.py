"""What a calculator is, in plain values: name, class, parameters, version. Two memories agree where these agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from relaxion.potentials.ase import AsePotential, PotentialCalculator
from relaxion.potentials.base import Potential
from relaxion.potentials.counting import CountingCalculator
from relaxion.potentials.eam import TabulatedEam

LONGEST_VALUE = 400  # characters of one parameter


def details_of(thing: object) -> dict[str, Any]:
    """Of a potential or of any ASE calculator, seen through the wrappers of this package."""
    if isinstance(thing, CountingCalculator):
        return details_of(thing.potential)
    if isinstance(thing, PotentialCalculator):
        return details_of(thing.potential)
    if isinstance(thing, AsePotential):
        return details_of(thing.calculator) | _options(thing)
    if isinstance(thing, Potential):
        return {"name": thing.name, **_table(thing), **_options(thing)}
    if thing is None:
        return {"name": "unknown"}
    module = type(thing).__module__
    plain = {"name": type(thing).__name__, "class": f"{module}.{type(thing).__qualname__}"}
    return plain | _package_version(module.partition(".")[0]) | _parameters(thing)


def fingerprint(details: Mapping[str, Any]) -> str:
    """Of name and settings; the version of a package may change."""
    known = {name: value for name, value in details.items() if name != "version"}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def _options(potential: Potential) -> dict[str, Any]:
    return {"options": dict(potential.options)} if potential.options else {}


def _table(potential: Potential) -> dict[str, str]:
    if not isinstance(potential, TabulatedEam):
        return {}
    return {"sha256": potential.tables_sha256}


def _parameters(calculator: object) -> dict[str, Any]:
    given = getattr(calculator, "parameters", None)
    plain = {str(name): value for name, value in given.items()} if isinstance(given, dict) else {}
    text = json.dumps({name: _plain(value) for name, value in plain.items()}, sort_keys=True, default=str)
    known = json.loads(text)
    return {"parameters": known} if known else {}


def _plain(value: Any) -> Any:
    """Numbers, words and lists of them as they are; of everything else its words, which must not name an address."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value][:LONGEST_VALUE]
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    words = str(value)
    return type(value).__name__ if " at 0x" in words else words[:LONGEST_VALUE]


@lru_cache(maxsize=64)
def _package_version(package: str) -> dict[str, str]:
    try:
        return {"version": version(package)}
    except PackageNotFoundError:
        return {}
