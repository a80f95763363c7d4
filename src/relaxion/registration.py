"""`gymnasium.make("relaxion:Relax-v0")` in whatever order packages are imported.

Gymnasium imports the module named before the colon and then looks into its registry. Where relaxion was imported first,
that import does nothing more, so the environments are registered when Gymnasium itself comes. Until then nothing of it
is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

GYMNASIUM, ENVIRONMENTS = "gymnasium", "relaxion.experience.gym"


def register_with_gymnasium() -> None:
    """Now where it is loaded, else as soon as it is."""
    if GYMNASIUM in sys.modules:
        import_module(ENVIRONMENTS)
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


class _Waiting(MetaPathFinder):
    """Finds Gymnasium where everybody else would, and sees to it that our environments are registered after it."""

    _looking = False

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        del path, target
        if fullname != GYMNASIUM or self._looking:
            return None
        self._looking = True
        try:
            spec = find_spec(fullname)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec, spec.loader, self)
        return spec


class _ThenRegister(Loader):
    """Loads as the loader it stands for, which then takes its place again."""

    def __init__(self, spec: ModuleSpec, loader: Loader, finder: _Waiting) -> None:
        self._spec, self._loader, self._finder = spec, loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        with suppress(ValueError):
            sys.meta_path.remove(self._finder)
        import_module(ENVIRONMENTS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # for those who only look at the spec
