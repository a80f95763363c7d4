"""What decides a result of `relax-many`, and the key by which a structure's result is known."""

from __future__ import annotations

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.io.jsonio import encode
from pydantic import Field

from relaxion.batch import MAX_FORCE_CALLS, BatchSettings
from relaxion.errors import SettingsError
from relaxion.optimizer.choice import learned_for, load
from relaxion.policies import shipped_names
from relaxion.potentials.base import AsePotential, Potential
from relaxion.potentials.counting import details_of
from relaxion.potentials.registry import potential
from relaxion.settings import Settings

KEY_BYTES = 16  # 128 bits: no two of 10¹² structures meet
RELEVANT_INFO = ("charge", "spin", "multiplicity")  # that calculators read from `atoms.info`


class ManySettings(Settings):
    """Everything that decides a result. A folder of results holds to one of these."""

    younger = ("learn_every", "pressure_gpa", "cell_mask", "keep_symmetry", "model", "model_details")

    calculator: str = "emt"
    """By the name that `potential` takes."""

    calculator_details: dict[str, Any] = Field(default_factory=dict)
    """What the word stands for here: class, parameters, digest of its file, version of its package."""

    model: str = ""
    """A cheaper calculator that plans, by name; empty: none."""

    model_details: dict[str, Any] = Field(default_factory=dict)
    """What that word stands for here."""

    policy: str = "auto"
    """"auto", "none", a name or a file."""

    policy_weights: dict[str, str] = Field(default_factory=dict)
    """SHA-256 of the weights of every policy that may be used, by name."""

    allow_unseen: bool = False
    """Use the policy also for elements it was not trained on."""

    fmax_ev_per_angstrom: float = Field(default=0.05, gt=0)
    """Converged when no force (nor cell row) is longer."""

    free_cell: bool = False
    """Relax the cells too."""

    pressure_gpa: float = 0.0
    """External pressure on free cells."""

    cell_mask: str = ""
    """Components of free cells that may change, some of xx,yy,zz,yz,xz,xy; empty: all."""

    keep_symmetry: bool = False
    """Hold each structure to the space group of its start."""

    max_force_calls: int = Field(default=MAX_FORCE_CALLS, ge=1)
    """A structure that needs more ends at its step limit."""

    learn_every: int = Field(default=0, ge=0)
    """Policies are fine-tuned after so many structures; 0: never."""

    @property
    def context(self) -> bytes:
        """Digest of all this, part of every key."""
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).digest()

    def key(self, atoms: Atoms) -> str:
        """The name of the result of this structure under these settings."""
        return structure_key(atoms, self.context)

    def batch_settings(self, time_limit_seconds: float | None, device: str | None) -> BatchSettings:
        """The same for a batch. The time limit, in seconds, and the device decide no result."""
        return BatchSettings(
            policy=None if self.policy == "none" else self.policy,
            fmax=self.fmax_ev_per_angstrom,
            cell=self.free_cell,
            max_force_calls=self.max_force_calls,
            allow_unseen=self.allow_unseen,
            pressure_gpa=self.pressure_gpa,
            cell_mask=self.cell_mask,
            keep_symmetry=self.keep_symmetry,
            time_limit_seconds=time_limit_seconds,
            device=device,
        )


def structure_key(atoms: Atoms, context: bytes) -> str:
    """SHA-256 of all about a structure that can change its result, shortened; the "s" keeps it from being a number."""
    hasher = hashlib.sha256(context)
    hasher.update(np.ascontiguousarray(atoms.numbers, dtype=np.int64).tobytes())
    # + 0.0: a zero is a zero, whatever its sign
    for numbers in (atoms.positions, atoms.cell.array, atoms.pbc):
        hasher.update((np.ascontiguousarray(numbers, dtype=np.float64) + 0.0).tobytes())
    for name in ("initial_magmoms", "initial_charges"):
        if (values := atoms.arrays.get(name)) is not None and np.any(values):
            hasher.update(name.encode() + np.ascontiguousarray(values, dtype=np.float64).tobytes())
    extra = {name: str(atoms.info[name]) for name in RELEVANT_INFO if name in atoms.info}
    constraints = [constraint.todict() for constraint in atoms.constraints]
    hasher.update(encode([extra, constraints]).encode())
    return "s" + hasher.digest()[:KEY_BYTES].hex()


def policy_weights(policy: str, calculator: object = None) -> dict[str, str]:
    """Digests of all policies that the word may lead to; PolicyError where it leads to none."""
    names = shipped_names() if policy == "auto" else ([] if policy == "none" else [policy])
    found = [load(name) for name in names] + (learned_for(calculator) if policy == "auto" else [])
    return {loaded.bundle.name: loaded.weights_sha256 for loaded in found}


def calculator_details(spec: str, made: Potential | None = None) -> dict[str, Any]:
    """What a calculator's word stands for here and now, as far as it can be known; of the user's own its source too."""
    made = made or potential(spec)
    details = details_of(made)
    module, _, name = spec.partition(":")
    if isinstance(made, AsePotential) and name and (file := _source_of(module)) is not None:
        details["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return details


def _source_of(module: str) -> Path | None:
    try:
        found = find_spec(module)
    except (ImportError, ValueError):
        return None
    file = Path(found.origin) if found is not None and found.origin else None
    return file if file is not None and file.is_file() else None


def check_same(kept: ManySettings, now: ManySettings, folder: Path) -> None:
    """Refuse to mix results of different settings in one folder, naming the first that differs."""
    for name in ManySettings.model_fields:
        before = getattr(kept, name)
        after = getattr(now, name)
        if before != after:
            raise SettingsError(
                f"{folder} was begun with {name} = {_short(before)}, now it is {_short(after)}; "
                "use the same again, or another folder"
            )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) < 120 else text[:119] + "…"
