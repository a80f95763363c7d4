"""From a word to a potential: "emt", "eam:FILE", "module:factory", an ASE calculator, ..."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch
from ase import Atoms
from ase.calculators.calculator import BaseCalculator
from ase.data import chemical_symbols
from torch import Tensor

from relaxion.errors import PotentialError, RelaxionError, SettingsError, UnknownPotentialError
from relaxion.potentials.base import AsePotential, Potential, PotentialCalculator
from relaxion.potentials.eam import TabulatedEam, ZhouEam
from relaxion.potentials.emt import Emt
from relaxion.potentials.engines import EXTRAS, is_installed
from relaxion.potentials.pairwise import LennardJones, Morse
from relaxion.settings import assigned, assignment, nearest
from relaxion.structures import Evaluation, Structures
from relaxion.structures.structures import DeviceLike, device_of

TRAITS = ("compute_forces", "compute_stress", "memory_scales_with", "device", "dtype", "forward")


def is_torchsim_model(thing: object) -> bool:
    """Whether it has what every model of TorchSim has; TorchSim itself need not be loaded to know."""
    return isinstance(thing, torch.nn.Module) and all(hasattr(thing, trait) for trait in TRAITS)


class TorchSimPotential(Potential):
    """Asks the model about all structures of the same periodicity at once, where it is and in its own precision."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.name = type(model).__name__
        self.has_stress = bool(model.compute_stress)
        if not model.compute_forces:
            raise PotentialError(f"the model {self.name} gives energies without forces; try compute_forces=True")

    def evaluate(self, structures: Structures, stresses: bool) -> Evaluation:
        answer = Evaluation(
            energies=structures.positions.new_empty(structures.n_structures),
            forces=torch.empty_like(structures.positions),
            stresses=torch.zeros_like(structures.cells) if stresses else None,
        )
        kinds, kind = structures.periodic.unique(dim=0, return_inverse=True)  # TorchSim has one for a whole batch
        for number in range(len(kinds)):
            self._evaluate(structures, kind == number, answer)
        return answer

    def _evaluate(self, structures: Structures, which: Tensor, answer: Evaluation) -> None:
        part = structures.select(which)
        found = self.model(state_of(part, self.model.device, self.model.dtype))
        answer.energies[which] = found["energy"].detach().to(answer.energies)
        answer.forces[which[structures.structure_index]] = found["forces"].detach().to(answer.forces)
        if answer.stresses is not None and bool(part.periodic.all()):
            answer.stresses[which] = found["stress"].detach().to(answer.stresses)


def state_of(structures: Structures, device: torch.device, dtype: torch.dtype) -> Any:
    """As TorchSim has them: cells with their vectors in columns, one periodicity for all."""
    import torch_sim  # pyright: ignore[reportMissingImports]

    periodic = structures.periodic[0].tolist()
    return torch_sim.SimState(
        positions=structures.positions.to(device, dtype),
        masses=torch.ones(structures.n_atoms, device=device, dtype=dtype),
        cell=structures.cells.mT.contiguous().to(device, dtype),
        pbc=periodic[0] if len(set(periodic)) == 1 else periodic,  # pyright: ignore[reportArgumentType]
        atomic_numbers=structures.atomic_numbers.to(device),
        system_idx=structures.structure_index.to(device),
    )


# ---- From a word to a potential: "emt", "eam:FILE", "module:factory", an ASE calculator, ...

BUILT_IN: dict[str, tuple[Callable[..., Potential], str]] = {
    "emt": (Emt, "effective medium theory, equal to ASE's EMT; batched"),
    "eam": (ZhouEam, "analytic embedded atom method for 16 metals and their alloys (Zhou 2004); batched"),
    "lj": (LennardJones, "Lennard-Jones, equal to ASE's; σ 1 Å, ε 1 eV; batched"),
    "morse": (Morse, "Morse, equal to ASE's; r0 1 Å, ε 1 eV; batched"),
}


@dataclass(frozen=True)
class PotentialEntry:
    """One line of `relaxion calculators`."""

    spec: str
    description: str
    elements: tuple[str, ...] | None  # chemical symbols; None: any, or whatever the file or package knows
    available: bool
    how_to_install: str | None  # None: nothing to install


def potential(spec: str | BaseCalculator | Potential, device: DeviceLike = None) -> Potential:
    """The potential meant by `spec`.

    "emt", "eam", "lj", "morse"; "eam:FILE" (setfl or Finnis–Sinclair table, also gzipped); "chgnet", "sevennet", "gfn2"
    and the engines of other packages ("mace", "mace:FILE", "lammps:FILE", ...: `relaxion calculators`) where installed;
    "module:factory" (which is called); an ASE calculator; a TorchSim model; or a potential, which is returned as it is.
    "lj?sigma=2.5&epsilon=0.1": with keyword arguments of what is called (`with_options`). `device`: where a network
    computes ("cuda"; None: the CPU); everything else stays on the CPU.

    A module is also looked for in the working directory. If it is found there, the directory stays at the end of
    `sys.path`, so that what the calculator imports later is found too.
    """
    if isinstance(spec, str):
        return _from_word(spec, device_of(device))
    if device is not None:
        raise SettingsError(f"a {type(spec).__name__} is where it was made; leave out device={str(device)!r}")
    found = _from_object(spec)
    if found is None:
        raise UnknownPotentialError(
            f"cannot make a potential from {type(spec).__name__}; "
            "give a name such as 'emt', an ASE calculator or a Relaxion potential"
        )
    return found


def with_options(spec: str, options: Mapping[str, Any]) -> str:
    """The name of a potential that also says keyword arguments: numbers, true, false, text, and lists of them."""
    for name, value in options.items():
        if not name.isidentifier() or assigned([assignment(name, value)]) != {name: value}:
            raise SettingsError(f"option '{name}' of a calculator is a number, true, false, text or a list of them")
    hidden = str.maketrans({"%": "%25", "&": "%26", "?": "%3F"})
    words = "&".join(assignment(name, value).translate(hidden) for name, value in options.items())
    return f"{spec}?{words}" if words else spec


def without_options(spec: str) -> tuple[str, dict[str, Any]]:
    """The opposite of `with_options`."""
    name, mark, words = spec.rpartition("?")
    if not mark or "=" not in words:
        return spec, {}
    return name, assigned([unquote(word) for word in words.split("&")], "a calculator", "lj?sigma=2.5")


def make_potential(spec: str, device: DeviceLike = None) -> Potential:
    """`potential`, with whatever its factory raises turned into a sentence.

    Some packages greet on stdout when they load; that belongs to results alone, so greetings go to stderr.
    """
    try:
        with redirect_stdout(sys.stderr):
            return potential(spec, device)
    except RelaxionError:
        raise
    except Exception as error:  # the user's own factory or another package may raise anything
        raise PotentialError(
            f"the calculator '{spec}' could not be created: {type(error).__name__}: {error}"
        ) from error


def known_potentials() -> list[PotentialEntry]:
    """Everything that `potential` makes by name."""
    entries: list[PotentialEntry] = []
    for spec, (build, description) in BUILT_IN.items():
        numbers = build().elements
        symbols = None if numbers is None else tuple(chemical_symbols[number] for number in sorted(numbers))
        entries.append(PotentialEntry(spec, description, symbols, available=True, how_to_install=None))
    entries.append(
        PotentialEntry("eam:FILE", "embedded atom method from a .eam.alloy or .eam.fs table; batched", None, True, None)
    )
    entries += [
        PotentialEntry(spec, extra.description, None, is_installed(extra.package), extra.how_to_install)
        for spec, extra in EXTRAS.items()
    ]
    any_code = "any ASE calculator: factory() of that module is called and must return one"
    return [*entries, PotentialEntry("module:factory", any_code, None, True, None)]


def _from_word(word: str, device: torch.device) -> Potential:
    spec, options = without_options(word)
    made = _with_options_given(spec, options, device)
    if options:
        made.options = options
    return made


def _with_options_given(spec: str, options: Mapping[str, Any], device: torch.device) -> Potential:
    head, colon, tail = spec.partition(":")
    if head in EXTRAS and (tail or not colon):
        return EXTRAS[head].build(spec, tail, device, options)
    if spec in BUILT_IN:
        return _called(spec, BUILT_IN[spec][0], options)
    if head == "eam" and tail and not options:
        return TabulatedEam.from_file(tail)
    if colon and head and tail and head != "eam":
        return _from_code(spec, head, tail, options)
    known = [*BUILT_IN, *EXTRAS, "eam:FILE", "module:factory"]
    raise UnknownPotentialError(f"unknown potential '{spec}': {nearest(spec, known)}")


def _called(spec: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """With a sentence where it does not take these options."""
    try:
        signature(factory).bind(**options)
    except TypeError as error:
        raise SettingsError(f"'{spec}' does not take these options: {error}") from error
    return factory(**options)


def _from_object(thing: object) -> Potential | None:
    if isinstance(thing, Potential):
        return thing
    if isinstance(thing, PotentialCalculator):
        return thing.potential
    # some calculators of other packages do not inherit from ASE's; classes and atoms have the methods too
    asks = all(callable(getattr(thing, name, None)) for name in ("get_forces", "get_potential_energy"))
    if isinstance(thing, BaseCalculator) or (asks and not isinstance(thing, type | Atoms)):
        return AsePotential(thing)  # pyright: ignore[reportArgumentType]
    return TorchSimPotential(thing) if is_torchsim_model(thing) else None


def _from_code(spec: str, module_name: str, factory_name: str, options: Mapping[str, Any]) -> Potential:
    with _working_directory_importable() as here:
        factory = getattr(_import(spec, module_name), factory_name, None)
        if not callable(factory):
            what = "has no" if factory is None else "cannot call its"
            raise UnknownPotentialError(f"potential '{spec}': module {module_name} {what} '{factory_name}'")
        made = _called(spec, factory, options) if options else factory()
    if here not in sys.path and _lies_in(here, module_name):
        # A calculator may import its neighbours as late as in its first force call. Last in line: nothing here shall
        # hide an installed package from the rest of the process.
        sys.path.append(here)
    found = _from_object(made)
    if found is None:
        raise UnknownPotentialError(
            f"potential '{spec}': {factory_name}() returned {type(made).__name__}, "
            "expected an ASE calculator or a Relaxion potential"
        )
    return found


def _import(spec: str, module_name: str):
    try:
        return import_module(module_name)
    except (ImportError, ValueError, TypeError) as error:  # the last two: names such as 'a..b' and '.a'
        known = nearest(module_name, [*BUILT_IN, *EXTRAS])
        raise UnknownPotentialError(
            f"potential '{spec}': module '{module_name}' cannot be imported ({error}); {known}"
        ) from error


@contextmanager
def _working_directory_importable() -> Iterator[str]:
    """A user's own file lies where the command is run; a console script does not look there by itself."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield here
    finally:
        sys.path.remove(here)


def _lies_in(folder: str, module_name: str) -> bool:
    """Whether the module, or the package it belongs to, was found in this folder itself."""
    module = sys.modules[module_name.partition(".")[0]]
    places = getattr(module, "__path__", None) or [getattr(module, "__file__", None) or ""]
    return any(Path(place).parent == Path(folder) for place in places)
