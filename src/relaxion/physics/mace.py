"""MACE, by the ASE calculator of the package `mace`; its foundation models are downloaded by it at first use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from relaxion.physics.ase import AsePotential
from relaxion.structures import Evaluation, Structures


class Mace(AsePotential):
    """MACE-MP of the user's installation in float64, as `mace.calculators.mace_mp` makes it by default."""

    def __init__(self) -> None:
        from mace.calculators import mace_mp  # pyright: ignore[reportMissingImports]

        with _default_dtype_kept():
            super().__init__(mace_mp(default_dtype="float64", device="cpu"))
        self.name = "MACE"

    @property
    def elements(self) -> frozenset[int] | None:
        table = getattr(self.calculator, "z_table", None)
        return None if table is None else frozenset(int(number) for number in table.zs)

    def evaluate(self, structures: Structures, stresses: bool) -> Evaluation:
        with _default_dtype_kept():
            torch.set_default_dtype(torch.float64)  # what MACE sets when it is made, and builds its graphs with
            return super().evaluate(structures, stresses)


@contextmanager
def _default_dtype_kept() -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)
