"""MACE, by the ASE calculator of the package `mace`; its foundation models are downloaded by it at first use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from ase.calculators.calculator import Calculator, all_changes

from relaxion.potentials.ase import AsePotential


class Mace(AsePotential):
    """MACE-MP of the user's installation in float64, as `mace.calculators.mace_mp` makes it by default."""

    def __init__(self) -> None:
        from mace.calculators import mace_mp  # pyright: ignore[reportMissingImports]

        with _default_dtype(torch.float64):
            made = mace_mp(default_dtype="float64", device="cpu")
        super().__init__(KeepsDefaultDtype(made))
        self.name = "MACE"
        table = getattr(made, "z_table", None)
        self._elements = None if table is None else frozenset(int(number) for number in table.zs)

    @property
    def elements(self) -> frozenset[int] | None:
        return self._elements


class KeepsDefaultDtype(Calculator):
    """MACE sets torch's default dtype when it is made and builds its graphs with it; others shall not notice."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.implemented_properties = list(inner.implemented_properties)

    def calculate(self, atoms: Any = None, properties=("energy",), system_changes=all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        with _default_dtype(torch.float64):
            self.inner.calculate(self.atoms, properties, system_changes)
        self.results = dict(self.inner.results)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
