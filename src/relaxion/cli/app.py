"""The command line. Thin on purpose: torch and ASE are loaded by the command that needs them, not by --help."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from relaxion.cli import completion, help_texts
from relaxion.version import __version__

EXAMPLES = """
[bold]Examples[/bold]

relaxion relax alloy.cif

relaxion relax POSCAR --cell --fmax 0.01

relaxion relax *.xyz --calc eam --compare BFGS,FIRE --json

relaxion relax slab.cif --calc my_module:make_calculator --out results

relaxion relax steel.cif --calc eam --policy metals --allow-unseen

relaxion relax alloy.cif --compare BFGS,FIRE --report
"""
FIRST_STEPS = """
[bold]First steps[/bold]

relaxion doctor                        is everything here?

relaxion relax alloy.cif               relax it, 0.05 eV/Å

relaxion race alloy.cif --with BFGS    watch it beside BFGS

relaxion --install-completion          words after TAB in your shell
"""
UNITS = """
[bold]Units[/bold]: lengths Å, energies eV, forces eV/Å, stresses eV/Å³, times s.

[bold]Exit codes[/bold]: 0 all converged, 1 error, 2 usage, 3 not all converged, 130 interrupted, 143
terminated by SIGTERM (in both cases what was reached is saved).
"""

BENCH_EXAMPLES = """
[bold]Examples[/bold]

relaxion bench emt-bulk

relaxion bench alfe --policy my-policy.safetensors --allow-unseen

relaxion bench lj38 --with BFGS,FIRE2 --number 20 --json lj38.json --plot lj38.png

relaxion bench POSCAR --calc eam --perturb rattle:0.1 --cell
"""

TRAIN_CODES = """
[bold]Exit codes[/bold]: 0 done, 1 error, 2 usage, 130 interrupted, 143 terminated by SIGTERM (in both cases --resume
goes on).
"""

app = typer.Typer(
    name="relaxion",
    help="Relax atomic structures with few force calls.",
    epilog=FIRST_STEPS + EXAMPLES + UNITS,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"relaxion {__version__}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Relax atomic structures with few force calls."""


@app.command(epilog=EXAMPLES + UNITS)
def relax(
    files: Annotated[
        list[Path],
        typer.Argument(  # readable=False: our own sentence says what is wrong with a file
            metavar="FILE",
            show_default=False,
            readable=False,
            help="Structure files of any kind ASE reads. Of a file with several structures each is relaxed, "
            "frame by frame, into a folder of its own.",
        ),
    ],
    calc: Annotated[
        str,
        typer.Option(
            metavar="SPEC",
            help="emt, eam, eam:FILE, lj, morse, module:factory; see 'calculators'.",
            autocompletion=completion.calculators,
        ),
    ] = "emt",
    policy: Annotated[
        str, typer.Option(metavar="NAME|FILE", help=help_texts.POLICY, autocompletion=completion.policies)
    ] = "auto",
    allow_unseen: Annotated[bool, typer.Option("--allow-unseen", help=help_texts.ALLOW_UNSEEN)] = False,
    fmax: Annotated[
        float, typer.Option(metavar="eV/Å", help="Converged when no force (nor cell row) is longer than this.")
    ] = 0.05,
    steps: Annotated[int, typer.Option(metavar="N", help="Most steps; each is one force call.")] = 500,
    cell: Annotated[bool, typer.Option("--cell", help="Relax the cell too.")] = False,
    compare: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Also run these ASE optimizers from the same start: BFGS,FIRE,...",
            autocompletion=completion.optimizers,
        ),
    ] = "",
    out: Annotated[Path, typer.Option(metavar="DIR", readable=False, help="Results go to DIR/NAME/.")] = Path(
        "relaxed"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per structure on stdout, nothing else.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Also write DIR/NAME/report.html: film, curves, comparison, facts.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace earlier results.")] = False,
    rattle: Annotated[
        float, typer.Option(metavar="Å", help="Move the atoms at random by so much along each axis first.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of --rattle.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no hints on stderr.")] = False,
) -> None:
    """Relax structures; write each as it came and as extxyz, with log and trajectory."""
    from relaxion.cli import relax as relax_command

    request = relax_command.RelaxRequest(
        files=tuple(files),
        calculator=calc,
        policy=policy,
        fmax=fmax,
        steps=steps,
        free_cell=cell,
        compare=compare,
        out=out,
        as_json=as_json,
        force=force,
        quiet=quiet,
        rattle_angstrom=rattle,
        seed=seed,
        report=report,
        allow_unseen=allow_unseen,
    )
    raise typer.Exit(relax_command.relax(request))


@app.command("relax-many", epilog=help_texts.MANY)
def relax_many(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE",
            show_default="those of an earlier run into DIR",
            readable=False,
            help="Structure files of any kind ASE reads; every structure in them is relaxed.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", readable=False, help="Results; the same command again goes on here.")
    ] = Path("relaxed-many"),
    calc: Annotated[
        str, typer.Option(metavar="SPEC", help="As in 'relax'.", autocompletion=completion.calculators)
    ] = "emt",
    policy: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="As in 'relax'.", autocompletion=completion.policies)
    ] = "auto",
    allow_unseen: Annotated[bool, typer.Option("--allow-unseen", help=help_texts.ALLOW_UNSEEN)] = False,
    fmax: Annotated[float, typer.Option(metavar="eV/Å", help="As in 'relax'.")] = 0.05,
    steps: Annotated[int, typer.Option(metavar="N", help="Most steps of a structure; each is one force call.")] = 500,
    cell: Annotated[bool, typer.Option("--cell", help="Relax the cells too.")] = False,
    workers: Annotated[
        str, typer.Option(metavar="KIND", help="local:N, ray:auto, ray:ADDRESS; one processor each.")
    ] = "local:2",
    batch_size: Annotated[
        int, typer.Option(metavar="N", min=1, help="Structures at once in a worker, where the calculator takes many.")
    ] = 128,
    time_limit: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", show_default="none", help="Of one structure; beyond it is set aside."),
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try once more what earlier runs set aside.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result as one JSON object on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Relax thousands of structures by many workers; it can be killed at any moment and goes on when run again."""
    # before NumPy and torch are loaded: on small structures more threads only make times worse
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from relaxion.cli import many as many_command

    request = many_command.ManyRequest(
        files=tuple(files or ()),
        out=out,
        calculator=calc,
        policy=policy,
        allow_unseen=allow_unseen,
        fmax=fmax,
        steps=steps,
        free_cell=cell,
        workers=workers,
        batch_size=batch_size,
        time_limit_seconds=time_limit,
        retry_failed=retry_failed,
        as_json=as_json,
        quiet=quiet,
    )
    raise typer.Exit(many_command.relax_many(request))


@app.command(epilog=help_texts.STATUS)
def status(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", show_default=False, readable=False, help="The --out of 'relax-many'.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
) -> None:
    """Say how far 'relax-many' is; works while it runs."""
    from relaxion.cli import many as many_command

    raise typer.Exit(many_command.status(folder, as_json=as_json))


@app.command(epilog=help_texts.MERGE)
def merge(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", show_default=False, readable=False, help="The --out of 'relax-many'.")
    ],
    out: Annotated[
        Path, typer.Argument(metavar="FILE.extxyz", show_default=False, readable=False, help="All results, one file.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier file.")] = False,
) -> None:
    """Put the results of 'relax-many' into one file, in the order of the input."""
    from relaxion.cli import many as many_command

    raise typer.Exit(many_command.merge_results(folder, out, force=force))


@app.command(epilog=help_texts.TRAIN + TRAIN_CODES)
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            show_default=False,
            help="A shipped recipe, a TOML file or a run folder.",
            autocompletion=completion.recipes,
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", show_default="runs/RECIPE-AGENT-SEED", help="The run's own folder.")
    ] = None,
    agent: Annotated[
        str | None, typer.Option(metavar="NAME", help="ddpg, td3, d4pg or sac.", autocompletion=completion.agents)
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", min=0, help="Decides everything that is drawn.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Environment steps in all.")] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Another value for a setting; may be repeated."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    from_weights: Annotated[
        Path | None, typer.Option(metavar="RUN|FILE", help="A new run that begins with old weights.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier run.")] = False,
    collectors: Annotated[
        str | None,
        typer.Option(
            metavar="ray:N|ray:ADDRESS|ray:N@ADDRESS",
            help="Structures are stepped by so many Ray actors, here or on a cluster, while this process learns.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The result as one JSON object on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Train an agent by a recipe; the run can be killed at any moment and resumed."""
    from relaxion.cli import train as train_command

    request = train_command.TrainRequest(
        recipe=recipe,
        out=out,
        agent=agent,
        seed=seed,
        steps=steps,
        assignments=tuple(assignments or ()),
        resume=resume,
        from_weights=from_weights,
        force=force,
        collectors=collectors,
        as_json=as_json,
        quiet=quiet,
    )
    raise typer.Exit(train_command.run(request))


@app.command(epilog=help_texts.COLLECT)
def collect(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", show_default=False, help="A shipped recipe (universal-data) or a TOML file."),
    ],
    out: Annotated[Path, typer.Option(metavar="STORE", help="The store's own folder; an existing one is completed.")],
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Processes, one core each.")] = 1,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="seed=7; molecule.number=100: one kind; number=10: all kinds."),
    ] = None,
    limit_minutes: Annotated[
        float | None, typer.Option(metavar="M", min=0, help="Stop after so long; the same command goes on.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Relax with this metric under guard, not with the classical core.",
            autocompletion=completion.policies,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as one JSON object on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Relax training structures with dear potentials and store all that was evaluated; killed, it goes on."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy is loaded: of this process and of its workers
    from relaxion.cli import collect as collect_command

    request = collect_command.CollectRequest(
        recipe=recipe,
        out=out,
        workers=workers,
        assignments=tuple(assignments or ()),
        limit_minutes=limit_minutes,
        policy=policy,
        as_json=as_json,
        quiet=quiet,
    )
    raise typer.Exit(collect_command.run(request))


@app.command(epilog=help_texts.TUNE + TRAIN_CODES)
def tune(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            show_default=False,
            help="As in 'train'.",
            autocompletion=completion.recipes,
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", show_default=False, help="Of the sweep; there already: go on.")],
    trials: Annotated[int, typer.Option(metavar="N", min=1, help="Trials in all, those of earlier commands included.")],
    varied: Annotated[
        list[str] | None,
        typer.Option("--vary", metavar="KEY=LO:HI[:log]", help="Vary a setting, or KEY=A|B|C; may be repeated."),
    ] = None,
    space: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", readable=False, help='The same from a TOML file: key = "lo:hi:log", key = [a, b].'
        ),
    ] = None,
    agent: Annotated[
        str | None, typer.Option(metavar="NAME", help="ddpg, td3, d4pg or sac.", autocompletion=completion.agents)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Of every trial, and of what is proposed.")
    ] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Environment steps of each trial.")] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Another value for a setting; may be repeated."),
    ] = None,
    workers: Annotated[
        str, typer.Option(metavar="local:N|ray:N|ray:ADDRESS", help="Trials at a time, and where.")
    ] = "local:1",
    sampler: Annotated[str, typer.Option(metavar="NAME", help="Of Optuna: tpe or random.")] = "tpe",
    as_json: Annotated[bool, typer.Option("--json", help="The result as one JSON object on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Search for good settings of a recipe: each trial is a run of its own; the same command again goes on."""
    from relaxion.cli import tune as tune_command

    request = tune_command.TuneRequest(
        recipe=recipe,
        out=out,
        trials=trials,
        agent=agent,
        seed=seed,
        steps=steps,
        assignments=tuple(assignments or ()),
        varied=tuple(varied or ()),
        space=space,
        workers=workers,
        sampler=sampler,
        as_json=as_json,
        quiet=quiet,
    )
    raise typer.Exit(tune_command.tune(request))


@app.command(epilog=BENCH_EXAMPLES + UNITS)
def bench(
    what: Annotated[
        str,
        typer.Argument(
            metavar="SET",
            show_default=False,
            help="emt-bulk, emt-large, emt-bulk-cell, emt-slabs, emt-clusters, alfe, alfe-cell, lj38, mixed, "
            "crystals, crystals-cell, new-elements, macs, perovskites-cell, carbon-cell, molecules, or a structure "
            "file.",
        ),
    ],
    calc: Annotated[
        str | None, typer.Option(metavar="SPEC", show_default="the set's own; emt for files", help="As in 'relax'.")
    ] = None,
    optimizers: Annotated[
        str,
        typer.Option(
            "--with",
            metavar="NAMES",
            show_default="those whose best is quoted",
            help="ASE's optimizers beside ours: BFGS,FIRE,... or all or none. Our classical core always runs.",
        ),
    ] = "",
    policy: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Of ours, as in 'relax'.", autocompletion=completion.policies)
    ] = "auto",
    allow_unseen: Annotated[bool, typer.Option("--allow-unseen", help=help_texts.ALLOW_UNSEEN)] = False,
    perturb: Annotated[
        str | None, typer.Option(metavar="WORDS", help="Of every start: rattle:0.1, strain:0.03+rattle:0.1, vacancy:1.")
    ] = None,
    cell: Annotated[bool, typer.Option("--cell", help="Relax the cell too.")] = False,
    fmax: Annotated[float, typer.Option(metavar="eV/Å", help="As in 'relax'.")] = 0.05,
    steps: Annotated[
        int, typer.Option(metavar="N", help="Most force calls of a relaxation; a failure is charged so many.")
    ] = 500,
    number: Annotated[
        int | None, typer.Option(metavar="N", show_default="50 or 100", help="Structures, the first of the set.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the starts; below 9000 is for training.")] = 9000,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", readable=False, help="All numbers; - for stdout.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", readable=False, help="The performance profile.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace these files.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no hints on stderr.")] = False,
) -> None:
    """Count the force calls of optimizers on the same starts, inside the calculator."""
    # before NumPy and torch are loaded: on small structures more threads only make times worse
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from relaxion.cli import bench as bench_command

    request = bench_command.BenchRequest(
        what=what,
        calculator=calc,
        optimizers=optimizers,
        policy=policy,
        perturb=perturb,
        free_cell=cell,
        fmax=fmax,
        cap=steps,
        number=number,
        seed=seed,
        json_file=json_file,
        plot_file=plot,
        force=force,
        quiet=quiet,
        allow_unseen=allow_unseen,
    )
    raise typer.Exit(bench_command.bench(request))


@app.command(epilog=help_texts.RACE)
def race(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", show_default=False, readable=False, help="A structure file of any kind ASE reads."
        ),
    ],
    optimizers: Annotated[
        str,
        typer.Option(
            "--with",
            metavar="NAMES",
            help="ASE's optimizers beside ours, up to 5.",
            autocompletion=completion.optimizers,
        ),
    ] = "BFGS,FIRE",
    out: Annotated[Path, typer.Option(metavar="FILE.html", readable=False, help="The page.")] = Path("race.html"),
    calc: Annotated[
        str, typer.Option(metavar="SPEC", help="As in 'relax'.", autocompletion=completion.calculators)
    ] = "emt",
    policy: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="As in 'relax'.", autocompletion=completion.policies)
    ] = "auto",
    allow_unseen: Annotated[bool, typer.Option("--allow-unseen", help=help_texts.ALLOW_UNSEEN)] = False,
    cell: Annotated[bool, typer.Option("--cell", help="Relax the cell too.")] = False,
    fmax: Annotated[float, typer.Option(metavar="eV/Å", help="The finish: no force is longer than this.")] = 0.05,
    steps: Annotated[int, typer.Option(metavar="N", help="Most steps of each optimizer.")] = 500,
    index: Annotated[
        int | None, typer.Option(metavar="N", show_default="the first", help="Which structure of the file, from 0.")
    ] = None,
    rattle: Annotated[
        float, typer.Option(metavar="Å", help="Move the atoms at random by so much along each axis first.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of --rattle.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier page.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no hints on stderr.")] = False,
) -> None:
    """Relax one structure by several optimizers and show them side by side, in step, in one page."""
    from relaxion.cli import race as race_command

    relax_request = race_command.RelaxRequest(
        files=(file,),
        calculator=calc,
        policy=policy,
        fmax=fmax,
        steps=steps,
        free_cell=cell,
        compare=optimizers,
        out=out,
        as_json=as_json,
        force=force,
        quiet=quiet,
        rattle_angstrom=rattle,
        seed=seed,
        allow_unseen=allow_unseen,
    )
    raise typer.Exit(race_command.race(race_command.RaceRequest(relax_request, index)))


@app.command(epilog=help_texts.REPORT)
def report(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER|TRAJ",
            show_default=False,
            readable=False,
            help="A result folder of 'relaxion relax', the folder of a training run, or a trajectory ASE reads.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html", readable=False, show_default="FOLDER/report.html or NAME.html", help="The page."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier page.")] = False,
) -> None:
    """Make a page of an earlier relaxation, or of a training run: films, curves, comparison, diagnosis, facts."""
    from relaxion.cli import report as report_command

    raise typer.Exit(report_command.report(path, out, force=force))


@app.command(epilog=help_texts.WATCH)
def watch(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", show_default=False, readable=False, help="Folders of runs, up to 12."),
    ],
    port: Annotated[int, typer.Option(metavar="N", help="Of 127.0.0.1; the next free one if it is taken.")] = 8765,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", readable=False, help="Freeze the page as it is now to a file instead."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier file.")] = False,
) -> None:
    """Follow training runs in the browser: curves, diagnosis, alarms, films; drop a structure to race it."""
    from relaxion.cli import watch as watch_command

    raise typer.Exit(watch_command.watch(runs, port, save, force=force))


@app.command(epilog=help_texts.DOCTOR)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
) -> None:
    """Look at environment, versions, calculators, policies, threads and common mistakes; relax four atoms."""
    from relaxion.cli import doctor as doctor_command

    raise typer.Exit(doctor_command.doctor(as_json=as_json))


@app.command(epilog=help_texts.CALCULATORS)
def calculators(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per calculator.")] = False,
) -> None:
    """List what --calc understands."""
    from relaxion.cli.calculators import list_calculators

    list_calculators(as_json=as_json)


@app.command(epilog=help_texts.PACKAGE)
def package(
    run: Annotated[Path, typer.Argument(metavar="RUN", show_default=False, help="The folder of a run on structures.")],
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="What the policy will be called.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default="NAME.safetensors in $RELAXION_POLICIES or ~/.local/share/relaxion/policies",
            help="The bundle; its model card goes beside it.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier bundle of that name.")] = False,
) -> None:
    """Make a policy of a run, with a model card; held-apart structures are relaxed once more for it."""
    from relaxion.cli import package as package_command

    raise typer.Exit(package_command.package(run, name, out, force=force))


@app.command(epilog=help_texts.POLICIES)
def policies(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", show_default=False, help="Show the model card of this one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per policy.")] = False,
) -> None:
    """List the policies there are, shipped and your own, or show the model card of one."""
    from relaxion.cli import policies as command

    code = command.list_policies(as_json=as_json) if name is None else command.show_policy(name, as_json=as_json)
    raise typer.Exit(code)


@app.command(epilog=help_texts.CURVE)
def curve(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN", show_default=False, help="Run folders; those that differ in the seed only share a curve."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE.png", help="The picture.")] = Path("learning_curve.png"),
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier picture.")] = False,
) -> None:
    """Draw learning curves of runs, finished or not, against environment steps."""
    from relaxion.cli import curve as curve_command

    raise typer.Exit(curve_command.curve(runs, out, force=force))


def main() -> None:
    """The `relaxion` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an Å that a terminal cannot show is no reason to fail
    app()
