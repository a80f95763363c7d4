"""atomate2's force-field maker with relaxion: `optimizer_kwargs={"optimizer": Relaxer}`; jobflow carries the class."""

from ase.calculators.emt import EMT
from atomate2.forcefields.jobs import ForceFieldRelaxMaker
from comparison import FMAX, alloy, compare
from jobflow import run_locally
from pymatgen.io.ase import AseAtomsAdaptor

EMT_BY_NAME = {"@module": "ase.calculators.emt", "@callable": "EMT"}
structure = AseAtomsAdaptor.get_structure(alloy())


def relax(optimizer, cell):
    maker = ForceFieldRelaxMaker(
        force_field_name=EMT_BY_NAME,
        relax_cell=cell,
        relax_kwargs={"fmax": FMAX},
        optimizer_kwargs={"optimizer": optimizer},
    )
    job = maker.make(structure)
    return run_locally(job, log=False, ensure_success=True)[job.uuid][1].output.output.energy


if __name__ == "__main__":
    compare(relax, EMT, "FIRE")
