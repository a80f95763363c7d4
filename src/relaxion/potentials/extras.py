"""Where optional packages lie, without importing them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


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
    except ValueError:  # None stands in its place in sys.modules: somebody forbids to import it
        return None
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0])
