"""The commands that relax and learn, in the order of the help; `showing_commands` has the others.

Docstrings are the help: below the first line they list examples and exit codes, and say "Units." where the help names
the units (`command.help_of`). What takes long to load is loaded by the functions themselves, after the first checks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from relaxion.apps.cli.command import (
    DONE,
    RELAXING,
    AgentOption,
    AllowUnseenOption,
    AssignmentsOption,
    CalculatorOption,
    CalculatorSettingOption,
    CellMaskOption,
    DatabaseArgument,
    DatabaseOption,
    DeviceOption,
    FmaxOption,
    FreeCellOption,
    JsonEverythingOption,
    JsonResultOption,
    KeepSymmetryOption,
    ManyArgument,
    ModelOption,
    PolicyOption,
    PressureOption,
    QuietOption,
    QuietWithoutHintsOption,
    RattleOption,
    RattleSeedOption,
    SettingsFileOption,
    StepsOption,
    argument,
    check_cell_options,
    check_numbers,
    check_recipe,
    check_structure_files,
    command,
    complete_optimizers,
    complete_policies,
    complete_recipes,
    flag,
    option,
    trainable,
)

AGAIN = "interrupted; run the same command again to continue"


@command(usage=RELAXING)
def relax(
    files: Annotated[
        list[Path],
        argument(
            "FILE",
            "Structure files in any format ASE reads; FILE@0:2 takes its first two. Each is relaxed into a "
            "folder of its own.",
        ),
    ],
    calc: CalculatorOption = "auto",
    calc_options: CalculatorSettingOption = None,
    model: ModelOption = None,
    policy: PolicyOption = "auto",
    device: DeviceOption = None,
    allow_unseen: AllowUnseenOption = False,
    fmax: FmaxOption = 0.05,
    steps: StepsOption = 500,
    cell: FreeCellOption = False,
    pressure: PressureOption = 0.0,
    cell_mask: CellMaskOption = "",
    keep_symmetry: KeepSymmetryOption = False,
    database: DatabaseOption = None,
    settings: SettingsFileOption = None,
    compare: Annotated[
        str,
        option(
            "NAMES",
            "Also run these ASE optimizers from the same start: BFGS,FIRE,...",
            autocompletion=complete_optimizers,
        ),
    ] = "",
    out: Annotated[Path, option("DIR", "Results go to DIR/NAME/.")] = Path("relaxed"),
    as_json: Annotated[bool, flag("--json", "One JSON object per structure on stdout, nothing else.")] = False,
    report: Annotated[
        bool, flag("--report", "Also write DIR/NAME/report.html: film, curves, comparison, facts.")
    ] = False,
    resume: Annotated[bool, flag("--resume", "Continue structures whose relaxation into DIR was interrupted.")] = False,
    force: Annotated[bool, flag("--force", "Replace earlier results.")] = False,
    leave_saddles: Annotated[
        bool,
        flag(
            "--leave-saddles",
            "Look for negative curvature at the end, with at most 4 force calls, and relax further if found.",
        ),
    ] = False,
    rattle: RattleOption = 0.0,
    seed: RattleSeedOption = 0,
    quiet: QuietWithoutHintsOption = False,
) -> int:
    """Relax structures. Writes each in its own format and as extxyz, with log and trajectory.

    relaxion relax alloy.cif
    relaxion relax POSCAR --cell --fmax 0.01
    relaxion relax *.xyz --calc eam --compare BFGS,FIRE --json
    relaxion relax slab.cif --calc my_module:make_calculator --out results
    relaxion relax slab.cif --calc my_module:make_calculator --model sevennet
    relaxion relax slab.cif --calc mace:medium-mpa-0 --calc-option dispersion=true
    relaxion relax POSCAR --settings relax.toml
    relaxion relax alloy.cif --compare BFGS,FIRE --report
    Units.
    Exit codes: 0 all converged, 1 error, 2 usage, 3 not all converged, 130 interrupted, 143 terminated by SIGTERM (in
    both cases what was reached is saved, and --resume continues).
    """
    options = locals()
    check_numbers(fmax, steps, rattle=rattle)
    check_cell_options(cell, pressure, cell_mask)
    if len(files) == 1 and not as_json:  # of several the others are relaxed all the same
        check_structure_files(files)
    from relaxion.apps.cli.relax import RelaxRequest, relax_structures

    return relax_structures(RelaxRequest(**options))


@command(usage=RELAXING, interrupted=AGAIN)
def relax_many(
    files: Annotated[
        list[Path] | None,
        argument(
            "FILE",
            "Structure files in any format ASE reads; every structure in them is relaxed, or those of FILE@0:100.",
            show_default="those of an earlier run into DIR",
        ),
    ] = None,
    calc: CalculatorOption = "auto",
    calc_options: CalculatorSettingOption = None,
    model: ModelOption = None,
    policy: PolicyOption = "auto",
    device: DeviceOption = None,
    allow_unseen: AllowUnseenOption = False,
    fmax: FmaxOption = 0.05,
    steps: StepsOption = 500,
    cell: FreeCellOption = False,
    pressure: PressureOption = 0.0,
    cell_mask: CellMaskOption = "",
    keep_symmetry: KeepSymmetryOption = False,
    database: DatabaseOption = None,
    settings: SettingsFileOption = None,
    out: Annotated[Path, option("DIR", "Results; run the same command again to continue.")] = Path("relaxed-many"),
    learn: Annotated[
        int,
        option("N", "Fine-tune the policies after every N structures, for those that follow.", min=0),
    ] = 0,
    workers: Annotated[str, option("N|KIND", "N or local:N, ray:auto, ray:ADDRESS; one processor each.")] = "local:2",
    batch_size: Annotated[
        int, option("N", "Structures evaluated together by a worker, if the calculator supports it.", min=1)
    ] = 128,
    time_limit: Annotated[
        float | None,
        option("SECONDS", "Time limit per structure; a structure that exceeds it fails.", show_default="none"),
    ] = None,
    retry_failed: Annotated[bool, flag("--retry-failed", "Try failed structures of earlier runs again.")] = False,
    as_json: JsonResultOption = False,
    quiet: QuietOption = False,
) -> int:
    """Relax thousands of structures with many workers. Run the same command again to continue an interrupted run.

    relaxion relax-many structures.xyz --out relaxed --workers 4
    relaxion relax-many *.cif --out relaxed --calc chgnet --time-limit 600
    relaxion relax-many structures.xyz --out relaxed --workers ray:auto
    relaxion relax-many slabs.xyz --out relaxed --database relaxations --learn 20
    relaxion relax-many slabs.xyz --out relaxed --calc my_module:make_calculator --model sevennet
    relaxion status relaxed && relaxion merge relaxed all.extxyz
    Units.
    Exit codes: 0 all converged, 1 some failed or the run could not continue, 2 usage, 3 not all converged, 130
    interrupted, 143 terminated. The same command continues in every case.
    """
    options = locals()
    check_numbers(fmax, steps)
    check_cell_options(cell, pressure, cell_mask)
    check_structure_files(files or ())
    from relaxion.apps.cli.relax_many import ManyRequest, relax_all

    return relax_all(ManyRequest(**options))


@command()
def status(folder: ManyArgument, as_json: JsonEverythingOption = False) -> int:
    """Show the progress of 'relax-many', also while it runs.

    relaxion status relaxed
    relaxion status relaxed --json
    Exit codes: 0 done, 1 error.
    """
    from relaxion.apps.cli.relax_many import show_status

    return show_status(folder, as_json=as_json)


@command()
def merge(
    folder: ManyArgument,
    out: Annotated[Path, argument("FILE.extxyz", "All results, one file.")],
    force: Annotated[bool, flag("--force", "Replace an earlier file.")] = False,
) -> int:
    """Merge the results of 'relax-many' into one file, in the order of the input.

    relaxion merge relaxed all.extxyz
    Exit codes: 0 written, 1 error, 2 usage, 3 not all are relaxed.
    """
    from relaxion.apps.cli.relax_many import merge_results

    return merge_results(folder, out, force=force)


@command()
def database(
    folder: DatabaseArgument,
    more: Annotated[list[Path] | None, argument("FILES", "More files for --add.")] = None,
    add: Annotated[list[Path] | None, option("FILE", "Add a file that ASE reads; may be repeated.", "--add")] = None,
    calculator: Annotated[
        str | None, option("NAME", "The calculator that made the files of --add, if they do not name one.")
    ] = None,
    export: Annotated[Path | None, option("FILE.extxyz", "Every evaluated structure with energy and forces.")] = None,
    as_json: JsonEverythingOption = False,
    force: Annotated[bool, flag("--force", "Replace an earlier export.")] = False,
) -> int:
    """Show a relaxation database, export it, or add earlier relaxations to it.

    relaxion relax slab.cif --database relaxations && relaxion database relaxations
    relaxion database relaxations --add old.traj runs/*/vasprun.xml --calculator PBE
    relaxion database relaxations --export all.extxyz
    Units.
    Exit codes: 0 done, 1 error, 2 usage.
    """
    from relaxion.apps.cli.database import show_database

    added = [*(add or ()), *(more or ())]
    return show_database(folder, added, calculator, export, as_json=as_json, force=force)


@command(usage=RELAXING)
def learn(
    folder: DatabaseArgument,
    origin: Annotated[
        str, option("NAME|FILE", "The policy to start from.", "--from", autocompletion=complete_policies)
    ] = "universal",
    out: Annotated[str, option("NAME|FILE", "The new policy; --policy and auto find a NAME.")] = "learned",
    calculator: Annotated[str | None, option("NAME", "Use only relaxations of this calculator, or all.")] = None,
    calc: Annotated[
        str | None,
        option(
            "SPEC",
            "Also relax held-out starts with both policies and count force calls.",
            show_default="no force call",
        ),
    ] = None,
    number: Annotated[int, option("N", "At most this many starts.", min=2)] = 24,
    assignments: AssignmentsOption = None,
    as_json: JsonResultOption = False,
    force: Annotated[bool, flag("--force", "Replace an earlier policy of that name.")] = False,
    quiet: QuietOption = False,
) -> int:
    """Fine-tune a policy on a relaxation database, without a force call. It is saved only if it is better.

    relaxion learn relaxations --from universal --out my-policy
    relaxion learn relaxations --from metals --out my-slabs --calc emt
    relaxion relax slab.cif --policy my-slabs
    Exit codes: 0 a better policy is saved, 1 error, 2 usage, 3 nothing better, 130 interrupted, 143 terminated
    (in both cases the same command continues).
    """
    options = locals()
    from relaxion.apps.cli.database import LearnRequest, learn_from_database

    return learn_from_database(LearnRequest(**options))


@command()
def train(
    recipe: Annotated[
        str | None,
        argument("RECIPE", "A shipped recipe, a TOML file or a run folder.", autocompletion=complete_recipes),
    ] = None,
    out: Annotated[Path | None, option("RUN", "The run's own folder.", show_default="runs/RECIPE-AGENT-SEED")] = None,
    agent: AgentOption = None,
    seed: Annotated[int | None, option("N", "Seed of all random numbers.", min=0)] = None,
    steps: Annotated[int | None, option("N", "Total environment steps.", min=1)] = None,
    assignments: AssignmentsOption = None,
    resume: Annotated[bool, flag("--resume", "Continue from the last checkpoint.")] = False,
    from_weights: Annotated[
        str | None,
        option(
            "RUN|FILE|POLICY",
            "Start a new run with the weights of an old one, or of a policy, with its network and step rule.",
            "--from",
            autocompletion=complete_policies,
        ),
    ] = None,
    calc: Annotated[str | None, option("SPEC", "Calculator, for recipes on your own structures (fine-tune).")] = None,
    structures: Annotated[str | None, option("FILE", "Your own structures, for such recipes.")] = None,
    force: Annotated[bool, flag("--force", "Replace an earlier run.")] = False,
    collectors: Annotated[
        str | None,
        option(
            "ray:N|ray:ADDRESS|ray:N@ADDRESS",
            "Relax structures in this many Ray actors, here or on a cluster, while this process learns.",
        ),
    ] = None,
    as_json: JsonResultOption = False,
    quiet: QuietOption = False,
) -> int:
    """Train an agent or a network by a recipe. An interrupted run can be resumed. Without a recipe: list all.

    relaxion train
    relaxion train pendulum --agent sac --seed 0 --out runs/pendulum
    relaxion train runs/pendulum --resume
    relaxion train pendulum --steps 20000 --set batch_size=256
    relaxion train al-fe --collectors ray:8
    relaxion train fine-tune --from universal --calc my_module:make --structures my.xyz
    Exit codes: 0 done, 1 error, 2 usage, 130 interrupted, 143 terminated by SIGTERM (in both cases --resume continues).
    """
    options = locals()
    if recipe is None:
        from relaxion.apps.cli.progress import print_table

        print_table([("recipe", True), ("what", False)], trainable().items())
        return DONE
    check_recipe(recipe)
    from relaxion.apps.cli.train import TrainRequest, train_by_recipe

    return train_by_recipe(TrainRequest(**options))


@command()
def tune(
    recipe: Annotated[str, argument("RECIPE", "As in 'train'.", autocompletion=complete_recipes)],
    out: Annotated[Path, option("DIR", "Folder of the sweep; an existing sweep is continued.", show_default=False)],
    trials: Annotated[int, option("N", "Total trials, including those of earlier commands.", min=1)],
    varied: Annotated[
        list[str] | None,
        option("KEY=VALUES", "Vary a setting: KEY=LO:HI, KEY=LO:HI:log or KEY=A|B|C; may be repeated.", "--vary"),
    ] = None,
    agent: AgentOption = None,
    seed: Annotated[int | None, option("N", "Seed of every trial and of the proposals.", min=0)] = None,
    steps: Annotated[int | None, option("N", "Environment steps of each trial.", min=1)] = None,
    assignments: AssignmentsOption = None,
    workers: Annotated[str, option("local:N|ray:N|ray:ADDRESS", "How many trials at a time, and where.")] = "local:1",
    sampler: Annotated[str, option("NAME", "Of Optuna: tpe or random.")] = "tpe",
    as_json: JsonResultOption = False,
    quiet: QuietOption = False,
) -> int:
    """Search for good settings of a recipe. Each trial is a run; run the same command again to continue.

    relaxion tune pendulum --out sweeps/pendulum --trials 20 --steps 5000 --vary policy_learning_rate=1e-4:1e-2:log
    relaxion tune emt-metals --out sweeps/emt --trials 50 --workers local:2 --vary 'updates_per_round=4|8|16'
    Exit codes: 0 done, 1 error, 2 usage, 130 interrupted, 143 terminated by SIGTERM (the same command continues).
    """
    options = locals()
    check_recipe(recipe)
    from relaxion.apps.cli.train import TuneRequest, tune_recipe

    return tune_recipe(TuneRequest(**options))
