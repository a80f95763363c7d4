"""The commands that compare, show, check, list and package; written as those in `relaxing_commands`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from relaxion.apps.cli.command import (
    AS_IN_RELAX,
    RELAXING,
    AllowUnseenOption,
    CalculatorAsInRelaxOption,
    FreeCellOption,
    JsonEverythingOption,
    PolicyAsInRelaxOption,
    QuietWithoutHintsOption,
    RattleOption,
    RattleSeedOption,
    argument,
    check_numbers,
    check_structure_files,
    command,
    complete_optimizers,
    flag,
    option,
)
from relaxion.paths import check_file

NONE_DONE = "interrupted before the first structure was done by all optimizers"


@command(usage=RELAXING, interrupted=NONE_DONE)
def bench(
    what: Annotated[
        str,
        argument(
            "SET",
            "emt-bulk, emt-large, emt-bulk-cell, emt-slabs, emt-clusters, alfe, alfe-cell, lj38, mixed, crystals, "
            "crystals-cell, new-elements, macs, perovskites, perovskites-cell, carbon-cell, molecules, mp-relax, or a "
            "structure file.",
        ),
    ],
    calc: Annotated[str | None, option("SPEC", AS_IN_RELAX, show_default="the set's own; emt for files")] = None,
    optimizers: Annotated[
        str,
        option(
            "NAMES",
            "ASE's optimizers to compare with: BFGS,FIRE,... or all or none. Relaxion's classical optimizer always "
            "runs.",
            "--with",
            show_default="those of the published tables",
        ),
    ] = "",
    policy: PolicyAsInRelaxOption = "auto",
    allow_unseen: AllowUnseenOption = False,
    perturb: Annotated[
        str | None, option("WORDS", "Perturb every start: rattle:0.1, strain:0.03+rattle:0.1, vacancy:1.")
    ] = None,
    cell: FreeCellOption = False,
    fmax: Annotated[float, option("eV/Å", AS_IN_RELAX)] = 0.05,
    steps: Annotated[int, option("N", "Maximum force calls per relaxation; a failure counts this many.")] = 500,
    number: Annotated[
        int | None, option("N", "Number of structures, the first ones of the set.", show_default="50 or 100")
    ] = None,
    seed: Annotated[int, option("N", "Seed of the starts; seeds below 9000 are for training.", min=0)] = 9000,
    json_file: Annotated[Path | None, option("FILE", "All numbers; - for stdout.", "--json")] = None,
    force: Annotated[bool, flag("--force", "Replace this file.")] = False,
    quiet: QuietWithoutHintsOption = False,
) -> int:
    """Count the force calls of optimizers on the same starts, inside the calculator.

    relaxion bench emt-bulk
    relaxion bench alfe --policy my-policy.safetensors --allow-unseen
    relaxion bench lj38 --with BFGS,FIRE2 --number 20 --json lj38.json
    relaxion bench POSCAR --calc eam --perturb rattle:0.1 --cell
    Units.
    Exit codes: 0 all converged, 1 error, 2 usage, 3 not all converged, 130 interrupted, 143 terminated by SIGTERM (in
    both cases what was reached is saved).
    """
    options = locals()
    from relaxion.apps.cli.bench import BenchRequest, run_bench

    return run_bench(BenchRequest(**options))


@command(usage=RELAXING, interrupted="interrupted; no page was written")
def race(
    file: Annotated[Path, argument("FILE", "A structure file that ASE reads; the first structure, or FILE@3.")],
    optimizers: Annotated[
        str,
        option("NAMES", "ASE's optimizers to compare with, up to 5.", "--with", autocompletion=complete_optimizers),
    ] = "BFGS,FIRE",
    out: Annotated[Path, option("FILE.html", "The page.")] = Path("race.html"),
    calc: CalculatorAsInRelaxOption = "auto",
    policy: PolicyAsInRelaxOption = "auto",
    allow_unseen: AllowUnseenOption = False,
    cell: FreeCellOption = False,
    fmax: Annotated[float, option("eV/Å", "Converged when the largest force is below this.")] = 0.05,
    steps: Annotated[int, option("N", "Maximum number of steps per optimizer.")] = 500,
    rattle: RattleOption = 0.0,
    seed: RattleSeedOption = 0,
    as_json: Annotated[bool, flag("--json", "One JSON object on stdout, nothing else.")] = False,
    force: Annotated[bool, flag("--force", "Replace an earlier page.")] = False,
    quiet: QuietWithoutHintsOption = False,
) -> int:
    """Relax one structure with several optimizers and show the films side by side in one page.

    relaxion race alloy.cif --with BFGS,FIRE
    relaxion race alloy.cif --policy none
    relaxion race POSCAR --cell --with BFGSLineSearch --fmax 0.01 --out race.html
    relaxion race structures.xyz@3 --calc eam --rattle 0.1 --json
    Units.
    Exit codes: 0 Relaxion converged, 1 error, 2 usage, 3 Relaxion did not converge, 130 interrupted, 143 terminated.
    """
    options = locals()
    check_numbers(fmax, steps, rattle=rattle)
    check_structure_files([file])
    from relaxion.apps.cli.pages import RaceRequest, run_race

    return run_race(RaceRequest(**options))


@command()
def report(
    path: Annotated[
        Path,
        argument(
            "FOLDER|TRAJ",
            "A result folder of 'relax', the --out of 'relax-many', a training run's folder, or a trajectory ASE "
            "reads.",
        ),
    ],
    out: Annotated[
        Path | None, option("FILE.html", "The page.", show_default="FOLDER/report.html or NAME.html")
    ] = None,
    against: Annotated[
        list[Path] | None,
        option(
            "DIR|JSON", "Of 'relax-many': other results, or a 'bench … --json', for the same input; may be repeated."
        ),
    ] = None,
    force: Annotated[bool, flag("--force", "Replace an earlier page.")] = False,
) -> int:
    """Make a page from an earlier relaxation or a training run: films, curves, comparison, diagnostics, facts.

    relaxion relax alloy.cif --out relaxed && relaxion report relaxed/alloy
    relaxion report bfgs.traj --out bfgs.html
    relaxion report runs/alloys
    relaxion report relaxed-many --against relaxed-without-learning
    Units.
    Exit codes: 0 written, 1 error, 2 usage.
    """
    check_file(path)
    from relaxion.apps.cli.pages import write_report

    return write_report(path, out, against or (), force=force)


@command(interrupted="")
def watch(
    runs: Annotated[
        list[Path],
        argument("RUN", "Folders of runs, up to 12; or one of 'relax-many', then as --against of 'report'."),
    ],
    port: Annotated[int, option("N", "Port on 127.0.0.1; the next free one if it is taken.")] = 8765,
    save: Annotated[
        Path | None, option("FILE.html", "Save the page as it is now to a file instead of serving it.")
    ] = None,
    force: Annotated[bool, flag("--force", "Replace an earlier file.")] = False,
) -> int:
    """Follow training runs in the browser: curves, diagnostics, alarms, films.

    relaxion watch runs/alloys
    relaxion watch runs/alloys-td3-* --port 9000
    relaxion watch runs/alloys --save alloys.html
    relaxion watch relaxed-many bench.json
    Exit codes: 0 done, 1 error, 2 usage, 130 interrupted, 143 terminated by SIGTERM.
    """
    from relaxion.apps.cli.pages import watch_runs

    return watch_runs(runs, port, save, force=force)


@command(one_thread=False)
def doctor(as_json: JsonEverythingOption = False) -> int:
    """Check versions, packages and calculators; relax four atoms.

    relaxion doctor
    relaxion doctor --json > doctor.json
    Exit codes: 0 everything works, 1 something does not.
    """
    from relaxion.apps.cli.installed import examine

    return examine(as_json=as_json)


@command()
def calculators(as_json: Annotated[bool, flag("--json", "One JSON object per calculator.")] = False) -> int:
    """List the calculators that --calc takes.

    relaxion calculators
    relaxion relax POSCAR --calc eam
    Units.
    """
    from relaxion.apps.cli.installed import list_calculators

    return list_calculators(as_json=as_json)


@command()
def package(
    run: Annotated[Path, argument("RUN", "The folder of a run on structures.")],
    name: Annotated[str, argument("NAME", "Name of the new policy.")],
    out: Annotated[
        Path | None,
        option(
            "FILE",
            "The policy file; its model card goes beside it.",
            show_default="NAME.safetensors in $RELAXION_POLICIES or ~/.local/share/relaxion/policies",
        ),
    ] = None,
    force: Annotated[bool, flag("--force", "Replace an earlier policy of that name.")] = False,
) -> int:
    """Make a policy file from a run, with a model card measured on held-out structures.

    relaxion package runs/alloys alloys-1
    relaxion policies alloys-1
    Exit codes: 0 done, 1 error, 2 usage.
    """
    from relaxion.apps.cli.installed import package_run

    return package_run(run, name, out, force=force)


@command()
def policies(
    name: Annotated[str | None, argument("NAME", "Show its model card; or the word remove.")] = None,
    removed: Annotated[str | None, argument("NAME", "After remove: one of your own.")] = None,
    as_json: Annotated[bool, flag("--json", "One JSON object per policy.")] = False,
) -> int:
    """List all policies, shipped and your own, show the model card of one, or remove one of yours.

    relaxion policies
    relaxion policies NAME --json
    relaxion policies remove NAME
    relaxion relax alloy.cif --policy NAME
    """
    from relaxion.apps.cli.installed import list_policies

    return list_policies(name, removed, as_json=as_json)
