"""Examples, units and exit codes below the help of each command. Loads nothing."""

from __future__ import annotations

UNITS_ONLY = """
[bold]Units[/bold]: lengths Å, energies eV, forces eV/Å, stresses eV/Å³, times s.
"""
POLICY = (
    "auto takes a shipped policy that was trained on all elements, else the classical core; none insists on the core; "
    "NAME or FILE takes that policy; see 'policies'."
)
ALLOW_UNSEEN = "Let the policy speak about elements it was not trained on; the guard watches it all the same."


def examples(*lines: str) -> str:
    """One per line, under a heading."""
    return "\n".join(["", "[bold]Examples[/bold]", *(f"\n{line}" for line in lines), ""])


def exit_codes(words: str) -> str:
    return f"\n[bold]Exit codes[/bold]: {words}.\n"


RACE = (
    examples(
        "relaxion race alloy.cif --with BFGS,FIRE",
        "relaxion race alloy.cif --policy none",
        "relaxion race POSCAR --cell --with BFGSLineSearch --fmax 0.01 --out race.html",
        "relaxion race structures.xyz --index 3 --calc eam --rattle 0.1 --json",
    )
    + UNITS_ONLY
    + exit_codes("0 ours converged, 1 error, 2 usage, 3 ours did not converge, 130 interrupted, 143 terminated")
)
REPORT = (
    examples(
        "relaxion relax alloy.cif --out relaxed && relaxion report relaxed/alloy",
        "relaxion report bfgs.traj --out bfgs.html",
        "relaxion report runs/alloys",
    )
    + UNITS_ONLY
    + exit_codes("0 written, 1 error, 2 usage")
)
WATCH = examples(
    "relaxion watch runs/alloys",
    "relaxion watch runs/alloys-td3-* --port 9000",
    "relaxion watch runs/alloys --save alloys.html",
) + exit_codes("0 done, 1 error, 2 usage, 130 interrupted")
DOCTOR = examples("relaxion doctor", "relaxion doctor --json > doctor.json") + exit_codes(
    "0 everything works, 1 something does not"
)
CALCULATORS = examples("relaxion calculators", "relaxion relax POSCAR --calc eam") + UNITS_ONLY
TRAIN = examples(
    "relaxion train pendulum --agent sac --seed 0 --out runs/pendulum",
    "relaxion train runs/pendulum --resume",
    "relaxion train pendulum --steps 20000 --set batch_size=256",
    "relaxion train al-fe --collectors ray:8",
)
TUNE = examples(
    "relaxion tune pendulum --out sweeps/pendulum --trials 20 --steps 5000 --vary policy_learning_rate=1e-4:1e-2:log",
    "relaxion tune emt-metals --out sweeps/emt --trials 50 --workers local:2 --vary 'updates_per_round=4|8|16'",
)
COLLECT = examples(
    "relaxion collect universal-data --out stores/universal --workers 2",
    "relaxion collect universal-data --out stores/trial --set number=10 --limit-minutes 5",
) + exit_codes("0 complete, 1 error, 2 usage, 3 time was up, 130, 143 stopped (the same command goes on)")
PACKAGE = examples("relaxion package runs/alloys alloys-1", "relaxion policies alloys-1") + exit_codes(
    "0 done, 1 error, 2 usage"
)
POLICIES = examples("relaxion policies", "relaxion policies NAME --json", "relaxion relax alloy.cif --policy NAME")
CURVE = examples("relaxion curve runs/pendulum-sac-*", "relaxion curve runs/a runs/b --out ab.png")
MANY = (
    examples(
        "relaxion relax-many structures.xyz --out relaxed --workers local:4",
        "relaxion relax-many *.cif --out relaxed --calc chgnet --time-limit 600",
        "relaxion relax-many structures.xyz --out relaxed --workers ray:auto",
        "relaxion status relaxed && relaxion merge relaxed all.extxyz",
    )
    + UNITS_ONLY
    + exit_codes(
        "0 all converged, 1 some were set aside or the run could not go on, 2 usage, 3 not all converged, 130 "
        "interrupted, 143 terminated. In any case the same command goes on"
    )
)
STATUS = examples("relaxion status relaxed", "relaxion status relaxed --json") + exit_codes("0 told, 1 error")
MERGE = examples("relaxion merge relaxed all.extxyz") + exit_codes("0 written, 1 error, 2 usage, 3 not all are relaxed")
