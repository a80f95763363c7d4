"""What the commands that compare, show, check, list and package can be asked; written as those in `requests`."""

from __future__ import annotations

from pathlib import Path

from relaxion.cli.options import (
    AS_IN_RELAX,
    FITTING,
    RELAXING,
    Command,
    argument,
    calc_option,
    command,
    flag,
    optimizers_option,
    option,
    optional,
    policy_option,
    quiet_flag,
    rattle_option,
    rattle_seed_option,
    unseen_flag,
)

COMMANDS: list[Command] = []  # in the order of the help
NONE_DONE = "interrupted before the first structure was done by all optimizers"


@command(COMMANDS, "bench:bench", usage=RELAXING, interrupted=NONE_DONE)
class BenchRequest:
    """Count the force calls of optimizers on the same starts, inside the calculator.

    relaxion bench emt-bulk
    relaxion bench alfe --policy my-policy.safetensors --allow-unseen
    relaxion bench lj38 --with BFGS,FIRE2 --number 20 --json lj38.json --plot lj38.png
    relaxion bench POSCAR --calc eam --perturb rattle:0.1 --cell
    Units.
    Exit codes: 0 all converged, 1 error, 2 usage, 3 not all converged, 130 interrupted, 143 terminated by SIGTERM (in
    both cases what was reached is saved).
    """

    what: str = argument(
        "SET",
        "emt-bulk, emt-large, emt-bulk-cell, emt-slabs, emt-clusters, alfe, alfe-cell, lj38, mixed, crystals, "
        "crystals-cell, new-elements, macs, perovskites, perovskites-cell, carbon-cell, molecules, mp-relax, or a "
        "structure file.",
    )
    calc: str | None = optional("SPEC", AS_IN_RELAX, show_default="the set's own; emt for files")
    optimizers: str = option(
        "NAMES",
        "ASE's optimizers to compare with: BFGS,FIRE,... or all or none. Relaxion's classical optimizer always runs.",
        "--with",
        default="",
        show_default="those of the published tables",
    )
    policy: str = policy_option("As in 'relax'.")
    allow_unseen: bool = unseen_flag()
    perturb: str | None = optional("WORDS", "Perturb every start: rattle:0.1, strain:0.03+rattle:0.1, vacancy:1.")
    cell: bool = flag("--cell", "Relax the cell too.")
    fmax: float = option("eV/Å", AS_IN_RELAX, default=0.05)
    steps: int = option("N", "Maximum force calls per relaxation; a failure counts this many.", default=500)
    number: int | None = optional("N", "Number of structures, the first ones of the set.", show_default="50 or 100")
    seed: int = option("N", "Seed of the starts; seeds below 9000 are for training.", default=9000, min=0)
    json_file: Path | None = optional("FILE", "All numbers; - for stdout.", "--json")
    plot: Path | None = optional("FILE.png", "The performance profile.")
    force: bool = flag("--force", "Replace these files.")
    quiet: bool = quiet_flag("No progress and no hints on stderr.")


@command(COMMANDS, "race:race", usage=RELAXING, interrupted="interrupted; no page was written")
class RaceRequest:
    """Relax one structure with several optimizers and show the films side by side in one page.

    relaxion race alloy.cif --with BFGS,FIRE
    relaxion race alloy.cif --policy none
    relaxion race POSCAR --cell --with BFGSLineSearch --fmax 0.01 --out race.html
    relaxion race structures.xyz --index 3 --calc eam --rattle 0.1 --json
    Units.
    Exit codes: 0 Relaxion converged, 1 error, 2 usage, 3 Relaxion did not converge, 130 interrupted, 143 terminated.
    """

    file: Path = argument("FILE", "A structure file in any format ASE reads.")
    optimizers: str = optimizers_option("ASE's optimizers to compare with, up to 5.", "--with", default="BFGS,FIRE")
    out: Path = option("FILE.html", "The page.", default=Path("race.html"))
    calc: str = calc_option(AS_IN_RELAX, **FITTING)
    policy: str = policy_option(AS_IN_RELAX)
    allow_unseen: bool = unseen_flag()
    cell: bool = flag("--cell", "Relax the cell too.")
    fmax: float = option("eV/Å", "Converged when the largest force is below this.", default=0.05)
    steps: int = option("N", "Maximum number of steps per optimizer.", default=500)
    index: int | None = optional("N", "Which structure of the file, from 0.", show_default="the first")
    rattle: float = rattle_option()
    seed: int = rattle_seed_option()
    as_json: bool = flag("--json", "One JSON object on stdout, nothing else.")
    force: bool = flag("--force", "Replace an earlier page.")
    quiet: bool = quiet_flag("No progress and no hints on stderr.")


@command(COMMANDS, "pages:report")
class ReportRequest:
    """Make a page from an earlier relaxation or a training run: films, curves, comparison, diagnostics, facts.

    relaxion relax alloy.cif --out relaxed && relaxion report relaxed/alloy
    relaxion report bfgs.traj --out bfgs.html
    relaxion report runs/alloys
    relaxion report relaxed-many --against relaxed-without-learning
    Units.
    Exit codes: 0 written, 1 error, 2 usage.
    """

    path: Path = argument(
        "FOLDER|TRAJ",
        "A result folder of 'relax', the --out of 'relax-many', a training run's folder, or a trajectory ASE reads.",
    )
    out: Path | None = optional("FILE.html", "The page.", show_default="FOLDER/report.html or NAME.html")
    against: list[Path] | None = optional(
        "DIR|JSON", "Of 'relax-many': other results, or a 'bench … --json', for the same input; may be repeated."
    )
    force: bool = flag("--force", "Replace an earlier page.")


@command(COMMANDS, "pages:watch", interrupted="")
class WatchRequest:
    """Follow training runs in the browser: curves, diagnostics, alarms, films.

    relaxion watch runs/alloys
    relaxion watch runs/alloys-td3-* --port 9000
    relaxion watch runs/alloys --save alloys.html
    relaxion watch relaxed-many bench.json
    Exit codes: 0 done, 1 error, 2 usage, 130 interrupted, 143 terminated by SIGTERM.
    """

    runs: list[Path] = argument(
        "RUN", "Folders of runs, up to 12; or one of 'relax-many', then as --against of 'report'."
    )
    port: int = option("N", "Port on 127.0.0.1; the next free one if it is taken.", default=8765)
    save: Path | None = optional("FILE.html", "Save the page as it is now to a file instead of serving it.")
    force: bool = flag("--force", "Replace an earlier file.")


@command(COMMANDS, "doctor:doctor", one_thread=False)
class DoctorRequest:
    """Check environment, versions, calculators, policies, threads and common mistakes; relax four atoms.

    relaxion doctor
    relaxion doctor --json > doctor.json
    Exit codes: 0 everything works, 1 something does not.
    """

    as_json: bool = flag("--json", "Everything as one JSON object.")


@command(COMMANDS, "listings:calculators")
class CalculatorsRequest:
    """List what --calc understands.

    relaxion calculators
    relaxion relax POSCAR --calc eam
    Units.
    """

    as_json: bool = flag("--json", "One JSON object per calculator.")


@command(COMMANDS, "package:package")
class PackageRequest:
    """Make a policy file from a run, with a model card; its results are measured again on structures held out.

    relaxion package runs/alloys alloys-1
    relaxion policies alloys-1
    Exit codes: 0 done, 1 error, 2 usage.
    """

    run: Path = argument("RUN", "The folder of a run on structures.")
    name: str = argument("NAME", "Name of the new policy.")
    out: Path | None = optional(
        "FILE",
        "The bundle; its model card goes beside it.",
        show_default="NAME.safetensors in $RELAXION_POLICIES or ~/.local/share/relaxion/policies",
    )
    force: bool = flag("--force", "Replace an earlier bundle of that name.")


@command(COMMANDS, "listings:policies")
class PoliciesRequest:
    """List all policies, shipped and your own, show the model card of one, or remove one of yours.

    relaxion policies
    relaxion policies NAME --json
    relaxion policies remove NAME
    relaxion relax alloy.cif --policy NAME
    """

    name: str | None = argument("NAME", "Show the model card of this one; or the word remove.", default=None)
    removed: str | None = argument("NAME", "After remove: one of your own.", default=None)
    as_json: bool = flag("--json", "One JSON object per policy.")


@command(COMMANDS, "pages:curve")
class CurveRequest:
    """Draw learning curves of runs, finished or not, against environment steps.

    relaxion curve runs/pendulum-sac-*
    relaxion curve runs/a runs/b --out ab.png
    """

    runs: list[Path] = argument("RUN", "Run folders; those that differ only in the seed share a curve.")
    out: Path = option("FILE.png", "The picture.", default=Path("learning_curve.png"))
    force: bool = flag("--force", "Replace an earlier picture.")
