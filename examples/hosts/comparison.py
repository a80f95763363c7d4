"""What the examples share: a structure far from its minimum, and force calls counted inside the calculator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ase import Atoms
from ase.calculators.calculator import Calculator
from ase.io import read
from ase.optimize.optimize import Optimizer

from relaxion import Relaxer

FMAX = 0.05  # eV/Å
Relax = Callable[[Any, bool], float]  # optimizer (a name, or a class), free cell or not: the energy at the end, eV


def alloy() -> Atoms:
    """32 atoms of gold and copper, stretched cell, displaced by about 0.15 Å."""
    return read(Path(__file__).resolve().parents[1] / "alloy.cif")  # pyright: ignore[reportReturnType]


@contextmanager
def counted(calculator: type[Calculator]) -> Iterator[list[int]]:
    """A list that grows by one entry whenever a calculator of this class really calculates, whoever made it."""
    calls: list[int] = []
    calculate = calculator.calculate

    def calculate_and_count(self: Calculator, *args: Any, **kwargs: Any) -> None:
        calls.append(len(calls))
        calculate(self, *args, **kwargs)

    calculator.calculate = calculate_and_count
    try:
        yield calls
    finally:
        calculator.calculate = calculate


def compare(relax: Relax, calculator: type[Calculator], default: str | type[Optimizer]) -> None:
    """Relax with the host's default and with ours, fixed cell and free cell; print force calls and energies."""
    for cell in (False, True):
        told = []
        for optimizer in (default, Relaxer):
            with counted(calculator) as calls:
                energy = relax(optimizer, cell)
            name = optimizer if isinstance(optimizer, str) else optimizer.__name__
            told.append(f"{name} {len(calls)} calls, {energy:.3f} eV")
        print(f"{'free' if cell else 'fixed'} cell: {'; '.join(told)}", flush=True)
