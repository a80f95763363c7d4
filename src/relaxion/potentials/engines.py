"""Engines by name: a table of other packages and, for each, the one call that makes its own ASE calculator.

Weights are the packages' business: Relaxion fetches none, though a package may do so when a model is named that it does
not have. Files of weights are read by the packages too; most of them unpickle, so take files from people you trust.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from ase import Atoms
from ase.calculators.calculator import BaseCalculator, CalculationFailed, Calculator, all_changes
from ase.data import atomic_numbers

from relaxion.errors import (
    FileError,
    MissingExtraError,
    PotentialError,
    SettingsError,
    StructureError,
    UnknownPotentialError,
)
from relaxion.files import json_of, text_of, toml_of
from relaxion.potentials.base import AsePotential, Potential
from relaxion.structures import Evaluation, Structures


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


EXTRAS = {name: Extra(**row) for name, row in toml_of(Path(__file__).with_suffix(".toml")).items()}

GPAW_DEFAULTS = {
    "mode": {"name": "pw", "ecut": 400},
    "xc": "PBE",
    "kpts": {"density": 3.5, "gamma": True},
    "txt": "gpaw.txt",
}


class Engine(AsePotential):
    """The ASE calculator of another package, under its name and with the elements it knows."""

    def __init__(self, name: str, calculator: BaseCalculator, elements: Iterable[int] | None = None) -> None:
        super().__init__(calculator)
        self.name = name
        self._elements = None if elements is None else frozenset(int(number) for number in elements)

    @property
    def elements(self) -> frozenset[int] | None:
        return self._elements


def mace(device: torch.device, model: str = "", **options: Any) -> Engine:
    from mace.calculators import MACECalculator, mace_mp  # pyright: ignore[reportMissingImports]

    asked = {"default_dtype": "float64", **options}

    def make() -> Any:
        if file := existing(model, (".model", ".pt", ".pth")):
            return MACECalculator(model_paths=file, device=str(device), **asked)
        return mace_mp(model=model or None, device=str(device), **asked)

    made = OwnDefaultDtype(make)
    table = getattr(made.inner, "z_table", None)
    return Engine("MACE", made, None if table is None else table.zs)


def sevennet(device: torch.device, model: str = "7net-0", **options: Any) -> Engine:
    def make() -> Any:
        torch.set_default_dtype(torch.float32)
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")  # torch.jit of e3nn is deprecated; an accelerator for GPUs is missing
            from sevenn.calculator import SevenNetCalculator

            return SevenNetCalculator(existing(model, (".pth", ".pt")) or model, device=str(device), **options)

    made = OwnDefaultDtype(make)
    return Engine("SevenNet", made, made.inner.type_map)


def orb(device: torch.device, model: str = "orb-v3-conservative-inf-omat", **options: Any) -> Engine:
    from orb_models.forcefield.pretrained import ORB_PRETRAINED_MODELS  # pyright: ignore[reportMissingImports]

    try:  # 0.6 and later
        from orb_models.forcefield.inference.calculator import ORBCalculator  # pyright: ignore[reportMissingImports]
    except ImportError:
        from orb_models.forcefield.calculator import ORBCalculator  # pyright: ignore[reportMissingImports]

    def make() -> Any:
        loaded = ORB_PRETRAINED_MODELS[model](device=device, precision="float32-highest", compile=False)
        parts = loaded if isinstance(loaded, tuple) else (loaded,)  # since 0.6 a model and its adapter
        return ORBCalculator(*parts, device=device, **options)

    return Engine("Orb", OwnDefaultDtype(make))


def mattersim(device: torch.device, model: str = "mattersim-v1.0.0-1m", **options: Any) -> Engine:
    from mattersim.forcefield import MatterSimCalculator  # pyright: ignore[reportMissingImports]

    path = existing(model, (".pth",)) or model

    def make() -> Any:
        return MatterSimCalculator(load_path=path, device=str(device), **options)

    return Engine("MatterSim", OwnDefaultDtype(make))


def fairchem(device: torch.device, model: str = "uma-s-1p1", **options: Any) -> Engine:
    from fairchem.core import FAIRChemCalculator  # pyright: ignore[reportMissingImports]

    name, _, task = model.partition("@")
    path = existing(name, (".pt",)) or name

    def make() -> Any:
        asked = {"task_name": task or "omat", "device": device.type, **options}
        return FAIRChemCalculator.from_model_checkpoint(path, **asked)

    return Engine("FAIRChem", OwnDefaultDtype(make))


def nequip(device: torch.device, model: str, **options: Any) -> Engine:
    try:  # 0.17 and later
        from nequip.integrations.ase import NequIPCalculator  # pyright: ignore[reportMissingImports]
    except ImportError:
        from nequip.ase import NequIPCalculator  # pyright: ignore[reportMissingImports]

    file = existing(model, ("",))
    made = OwnDefaultDtype(lambda: NequIPCalculator.from_compiled_model(file, device=device, **options))
    names = [name for part in made.inner.transforms for name in getattr(part, "model_type_names", [])]
    known = [atomic_numbers[name] for name in names if name in atomic_numbers]
    return Engine("NequIP", made, known if names and len(known) == len(names) else None)


def matgl(device: torch.device, model: str = "TensorNet-PES-MatPES-r2SCAN-2025.2", **options: Any) -> Engine:
    from matgl import load_model  # pyright: ignore[reportMissingImports]
    from matgl.ext.ase import PESCalculator  # pyright: ignore[reportMissingImports]

    def make() -> Any:
        network = load_model(model).to(device)
        return PESCalculator(network, **{"stress_unit": "eV/A3", "use_voigt": True, **options})

    made = OwnDefaultDtype(make)
    symbols = getattr(getattr(made.inner.potential, "model", None), "element_types", None)
    return Engine("MatGL", made, None if symbols is None else [atomic_numbers[symbol] for symbol in symbols])


def lammps(model: str) -> Engine:
    """Its commands from a file. What it calls elements stands behind `pair_coeff * *`, or after `# elements:`."""
    from ase.calculators.lammpslib import LAMMPSlib

    file = Path(existing(model, ("",)))
    lines = [line.strip() for line in text_of(file).splitlines()]
    symbols = elements_of_commands(lines, file)
    made = LAMMPSlib(
        lmpcmds=[beside(file, line) for line in lines if line and not line.startswith(("#", "units", "atom_style"))],
        lammps_header=[*_header(lines), "atom_modify map array sort 0 0"],
        atom_types={symbol: number for number, symbol in enumerate(symbols, start=1)},
        keep_alive=True,
    )
    return Engine("LAMMPS", made, [atomic_numbers[symbol] for symbol in symbols])


def _header(lines: list[str]) -> list[str]:
    """Units and atom style must stand before the box; those of the file, else LAMMPS' usual ones for ASE."""
    defaults = {"units": "units metal", "atom_style": "atom_style atomic"}
    return [next((line for line in lines if line.split()[:1] == [word]), usual) for word, usual in defaults.items()]


def elements_of_commands(lines: list[str], file: Path) -> list[str]:
    """The chemical symbols of LAMMPS' atom types 1, 2, …"""
    for line in lines:
        if line.lower().startswith("# elements:"):
            symbols = line.partition(":")[2].split()
        elif line.split()[:3] == ["pair_coeff", "*", "*"]:
            symbols = [word for word in line.split()[3:] if word in atomic_numbers]
        else:
            continue
        if symbols and all(symbol in atomic_numbers for symbol in symbols):
            return symbols
    raise PotentialError(
        f"{file} does not name the element of each atom type; add a line such as '# elements: Al Cu' for types 1 and 2"
    )


def beside(file: Path, line: str) -> str:
    """The command with the files it names found beside the file it stands in; LAMMPS looks in the working directory."""
    found = [str((file.parent / word).absolute()) if (file.parent / word).is_file() else word for word in line.split()]
    return " ".join(found)


def gpaw(model: str = "", **options: Any) -> Engine:
    from gpaw import GPAW  # pyright: ignore[reportMissingImports]

    keywords = GPAW_DEFAULTS
    if model:
        keywords = json_of(Path(existing(model, ("",))))
        if not isinstance(keywords, dict):
            raise FileError(f"{model} holds a {type(keywords).__name__}; write GPAW's keywords as one JSON object")
    return Engine("GPAW", GPAW(**{**keywords, **options}))


def existing(model: str, suffixes: tuple[str, ...]) -> str:
    """The path where `model` is a file, nothing where it is a name; an error where it can only be a missing file."""
    if model and Path(model).is_file():
        return model
    if model and ("/" in model or model.endswith(suffixes)):
        raise FileError(f"no file {model}; check the name after the colon")
    return ""


class OwnDefaultDtype(Calculator):
    """Some packages set torch's default dtype when a calculator is made, and build their graphs with it.

    They get theirs back whenever they are asked, and nobody else notices.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self._theirs = torch.get_default_dtype()
        with self._default_dtype():
            self.inner = make()
        self.implemented_properties = list(self.inner.implemented_properties)

    def calculate(self, atoms: Any = None, properties=("energy",), system_changes=all_changes) -> None:
        super().calculate(atoms, properties, system_changes)
        with self._default_dtype(), torch.enable_grad():  # forces are gradients, whoever asks
            self.inner.calculate(self.atoms, list(properties), system_changes)
        self.results = dict(self.inner.results)

    @contextmanager
    def _default_dtype(self) -> Iterator[None]:
        ours = torch.get_default_dtype()
        torch.set_default_dtype(self._theirs)
        try:
            yield
        finally:
            self._theirs = torch.get_default_dtype()
            torch.set_default_dtype(ours)


# ---- GFN2-xTB, tight binding for molecules, by the package `tblite`; one structure after the other.

LAST_ELEMENT = 86  # Rn
# tblite's 1.0 leaves 4e-4 eV/Å of noise in forces, as each answer starts from the electrons of the last one; 0.1: 2e-5
ACCURACY = 0.1


class Gfn2(AsePotential):
    """C. Bannwarth, S. Ehlert, S. Grimme, J. Chem. Theory Comput. 15, 1652 (2019). Neutral, and without unpaired
    electrons where their number is even, unless the options say otherwise (`charge`, `multiplicity`).

    Structures are periodic along all three axes or along none.
    """

    def __init__(self, **options: Any) -> None:
        """`options`: of `tblite.ase.TBLite`, such as charge, multiplicity, accuracy, electronic_temperature."""
        from tblite.ase import TBLite

        asked = {"method": "GFN2-xTB", "verbosity": 0, "accuracy": ACCURACY, **options}
        super().__init__(TBLite(**asked))
        self.name = "GFN2-xTB"
        self._given = frozenset(options)

    @property
    def elements(self) -> frozenset[int]:
        return frozenset(range(1, LAST_ELEMENT + 1))

    def check_elements(self, structures: Structures) -> None:
        """And that each structure is periodic along all axes or none: tblite takes one axis for all three."""
        super().check_elements(structures)
        partly = structures.periodic.any(dim=1) & ~structures.periodic.all(dim=1)
        if partly.any():
            first = int(partly.nonzero()[0])
            number = int(structures.periodic[first].sum())
            raise StructureError(
                f"structure {first} is periodic along {number} of 3 axes, but {self.name} along all or none; "
                "give it a cell with vacuum and pbc=True"
            )

    def assumption(self, atoms: Atoms) -> str | None:
        """The spin of an odd number of electrons, unless charge, multiplicity or magnetic moments were given."""
        if {"charge", "multiplicity"} & self._given or round(atoms.get_initial_magnetic_moments().sum()):
            return None
        charge = float(atoms.get_initial_charges().sum())
        if (int(atoms.numbers.sum()) - round(charge)) % 2 == 0:
            return None
        return (
            f"an odd number of electrons: {self.name} takes it as a radical of charge {charge:g} with one unpaired "
            "electron (multiplicity 2); if it is an ion, give the calculator its charge"
        )

    def evaluate(self, structures: Structures, stresses: bool) -> Evaluation:
        # a box around a molecule means nothing here, and tblite gives no stress for it
        cells = torch.where(structures.periodic.all(dim=1)[:, None, None], structures.cells, 0.0)
        try:
            return super().evaluate(replace(structures, cells=cells), stresses)
        except CalculationFailed as error:
            raise PotentialError(f"{self.name} failed: {error}; are atoms too close to each other?") from error
