"""Kinds of moves: each takes a minimum to a trial structure, which is then relaxed.

A kind is a function `move(atoms, free, random)`. `atoms`: a minimum, not to be changed. `free`: numbers of the atoms
that may move. `random`: NumPy's generator, the only source of chance. It returns a new structure with the same atoms in
the same order, or None where it finds nothing to do. A kind of your own is named by `module:function`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import numpy as np
from ase import Atoms

from relaxion.errors import SettingsError
from relaxion.search.moves.permute import permute
from relaxion.search.moves.rattle import rattle
from relaxion.search.moves.relocate import relocate
from relaxion.search.moves.slip import slip
from relaxion.search.moves.strain import strain
from relaxion.search.moves.swap import swap
from relaxion.search.moves.torsion import has_torsions, torsion
from relaxion.search.moves.twist import twist
from relaxion.settings import by_name, nearest

Move: TypeAlias = Callable[[Atoms, np.ndarray, np.random.Generator], Atoms | None]

MOVES: dict[str, Move] = {
    "swap": swap,
    "permute": permute,
    "relocate": relocate,
    "twist": twist,
    "slip": slip,
    "rattle": rattle,
    "strain": strain,
    "torsion": torsion,
}


def move_named(name: str) -> Move:
    """One of ours, or `module:function`."""
    if name in MOVES:
        return MOVES[name]
    if ":" not in name:
        raise SettingsError(f"unknown kind of move '{name}': {nearest(name, MOVES)}, or module:function for your own")
    found = by_name(name, "move")
    if not callable(found):
        raise SettingsError(f"the move '{name}' is a {type(found).__name__}; give a function (atoms, free, random)")
    return cast(Move, found)


def usual_moves(atoms: Atoms, free: Sequence[int] | np.ndarray, *, cell: bool) -> dict[str, float]:
    """Kinds that fit this structure, with the share of each in the fixed mixture (docs/search.md)."""
    several = len(set(atoms.numbers[free].tolist())) > 1
    whole = len(free) == len(atoms)
    if has_torsions(atoms):
        return {"torsion": 0.8, "rattle": 0.2}
    if atoms.pbc.all():
        shares = {"slip": 0.25 if whole else 0.0, "relocate": 0.15, "rattle": 0.2, "strain": 0.15 if cell else 0.0}
        shares["swap"] = 0.4 if several else 0.0
    elif atoms.pbc.any() or not whole:
        shares = {"relocate": 0.6, "rattle": 0.1, "swap": 0.3 if several else 0.0}
    else:
        shares = {"relocate": 0.35, "twist": 0.15, "rattle": 0.0 if several else 0.1, "swap": 0.5 if several else 0.0}
    total = sum(shares.values())
    return {kind: share / total for kind, share in shares.items() if share}
