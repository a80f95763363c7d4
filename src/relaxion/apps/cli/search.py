"""`relaxion search`: from minimum to minimum, into a folder."""

from __future__ import annotations

import json
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from relaxion.apps.cli.command import (
    DONE,
    INCOMPLETE,
    RELAXING,
    CalculatorAsInRelaxOption,
    CalculatorSettingOption,
    FreeCellOption,
    JsonResultOption,
    PolicyAsInRelaxOption,
    PressureOption,
    QuietWithoutHintsOption,
    argument,
    check_cell_options,
    check_numbers,
    check_structure_files,
    command,
    flag,
    interrupts,
    option,
)
from relaxion.errors import FileError, SettingsError

if TYPE_CHECKING:
    from ase import Atoms

    from relaxion.potentials.base import Potential
    from relaxion.search.run import SearchResult
    from relaxion.search.walk import Walk


@command(usage=RELAXING, interrupted="interrupted; the same command with --resume continues")
def search(
    file: Annotated[
        Path, argument("FILE", "A structure file in any format ASE reads; the first structure, or FILE@3.")
    ],
    calc: CalculatorAsInRelaxOption = "auto",
    calc_options: CalculatorSettingOption = None,
    calls: Annotated[int, option("N", "Force calls in all; never exceeded.", min=1)] = 2000,
    out: Annotated[Path, option("DIR", "The result folder.")] = Path("search"),
    choice: Annotated[
        str, option("NAME|FILE", "Who chooses the hops: auto, mixture, bandit, critic, or the file of a critic.")
    ] = "auto",
    moves: Annotated[
        str,
        option(
            "KINDS",
            "swap, permute, relocate, twist, slip, rattle, strain, torsion or module:function, with shares: "
            "swap=0.6,relocate=0.4.",
            show_default="those that fit the structure",
        ),
    ] = "",
    walkers: Annotated[int, option("N", "Chains of hops side by side, relaxed in one batch.", min=1)] = 1,
    temperature: Annotated[float, option("eV", "Of the Metropolis rule between minima.")] = 0.1,
    patience: Annotated[
        int | None, option("N", "Stop when the best energy has not fallen for N force calls.", show_default="never")
    ] = None,
    seconds: Annotated[float | None, option("s", "Stop after this wall time.", show_default="never")] = None,
    fmax: Annotated[float, option("eV/Å", "Largest force at a minimum.")] = 0.05,
    cell: FreeCellOption = False,
    pressure: PressureOption = 0.0,
    policy: PolicyAsInRelaxOption = "auto",
    model: Annotated[
        str | None,
        option("NAME", "A cheaper calculator in which candidates are relaxed and compared first.", show_default="none"),
    ] = None,
    seed: Annotated[int, option("N", "Seed of everything that is drawn.", min=0)] = 0,
    compare: Annotated[
        bool, flag("--compare", "Also run plain basin hopping with as many force calls, for the page.")
    ] = False,
    as_json: JsonResultOption = False,
    resume: Annotated[bool, flag("--resume", "Continue the search in DIR; more --calls are allowed.")] = False,
    force: Annotated[bool, flag("--force", "Replace earlier results.")] = False,
    quiet: QuietWithoutHintsOption = False,
) -> int:
    """Search for the lowest minimum. Writes the distinct minima as extxyz and ASE's db, a summary and a page.

    relaxion search cluster.xyz --calc emt --calls 2000 --out found
    relaxion search POSCAR --cell --moves swap=0.5,slip=0.5 --seed 1
    relaxion search slab.xyz --calc chgnet --calls 500 --patience 200
    relaxion search cluster.xyz --calc my_module:make_calculator --model emt --calls 300
    relaxion search cluster.xyz --calls 4000 --out found --resume
    Units.
    Exit codes: 0 done, 1 error, 2 usage, 3 no minimum within the budget, 130 interrupted, 143 terminated (--resume
    continues).
    """
    options: dict[str, Any] = locals()
    check_numbers(fmax, calls)
    check_cell_options(cell, pressure, "")
    check_structure_files([file])
    return _run(options)


def _run(options: dict[str, Any]) -> int:
    from relaxion.apps.cli.inputs import AUTO, calculator_for, calculator_word, planner, read_jobs
    from relaxion.apps.cli.progress import say
    from relaxion.potentials.registry import make_potential
    from relaxion.train.judge.runs import check_policy, policy_argument

    policy = policy_argument(options["policy"])
    check_policy(policy)
    job = read_jobs([options["file"]])[0]
    if job.atoms is None or job.error is not None:
        raise FileError(job.error or f"{options['file']} holds no structure")
    _check_folder(options["out"], resume=options["resume"], force=options["force"])
    calc = options["calc"]
    if calc == AUTO:
        found = calculator_for([job.atoms])
        calc = found.name
        if (words := found.in_words()) and not options["quiet"]:
            say(f"relaxion: {words}")
    calc = calculator_word(calc, options["calc_options"])
    found = planner(options["model"], calc, [job.atoms])
    with closing(make_potential(calc)) as potential, closing(found[1]) if found else nullcontext() as model:
        return _search(options, job.atoms, job.label, potential, calc, policy, model)


def _search(
    options: dict[str, Any],
    atoms: Atoms,
    label: str,
    potential: Potential,
    calc: str,
    policy: Any,
    model: Potential | None,
) -> int:
    from relaxion.apps.cli.inputs import check_structure, command_line
    from relaxion.apps.cli.progress import ProgressLine, counted, say, speaks_ascii_only, tell
    from relaxion.apps.report.search import SearchReport, search_page
    from relaxion.apps.result_folder import PAGE
    from relaxion.search import search as run_search
    from relaxion.search.results import MINIMA, summary, write_results

    check_structure(atoms, potential, free_cell=options["cell"])
    out: Path = options["out"]
    settings = {
        "moves": _shares(options["moves"]), "walkers": options["walkers"], "choice": options["choice"],
        "temperature_ev": options["temperature"], "patience_calls": options["patience"], "seconds": options["seconds"],
        "fmax": options["fmax"], "cell": options["cell"], "pressure_gpa": options["pressure"], "policy": policy,
    }  # fmt: skip
    progress = ProgressLine(quiet=options["quiet"])
    report = progress.reporter(label, "search")

    def on_round(walk: Walk) -> None:
        if walk.walkers:
            report(walk.calls, walk.best_ev, options["fmax"])

    with progress.line():
        result = run_search(
            atoms, potential, calls=options["calls"], seed=options["seed"], folder=out, on_round=on_round, model=model,
            **settings,
        )  # fmt: skip
        beside = _beside(options, atoms, potential, settings, result) if options["compare"] else None
    asked = {"file": str(options["file"]), "calculator": calc, "seed": options["seed"], "command": command_line()}
    with interrupts.held():
        write_results(result, out, **asked)
        page = search_page(SearchReport(label, atoms, result, calc, command_line(), beside)).save(out / PAGE)
    if options["as_json"]:
        plain = {**summary(result, **asked), "written_to": str(out)}
        tell(json.dumps(plain, ensure_ascii=speaks_ascii_only(sys.stdout), allow_nan=False))
    elif result.found:
        lowest = result.found[0]
        tell(
            f"{label}: lowest minimum {lowest.energy_ev:.5f} eV after {counted(lowest.found_at_call, 'force call')}, "
            f"{len(result.found)} distinct {'minimum' if len(result.found) == 1 else 'minima'} in "
            f"{counted(result.force_calls, 'call')}; {result.stopped}; "
            f"{out / MINIMA}, {page}"
        )
    if not result.found:
        say(f"{label}: {result.stopped}")
    return DONE if result.found else INCOMPLETE


def _beside(
    options: dict[str, Any], atoms: Atoms, potential: Potential, settings: dict[str, Any], result: SearchResult
) -> SearchResult:
    """Basin hopping with Gaussian steps only, same relaxer, same budget."""
    from relaxion.search import search as run_search

    plain = {**settings, "moves": {"rattle": 1.0}, "choice": "mixture"}
    return run_search(atoms, potential, calls=max(result.force_calls, 1), seed=options["seed"], **plain)


def _shares(words: str) -> dict[str, float]:
    """`swap=0.6,relocate=0.4`, or names alone for equal shares."""
    shares = {}
    for word in filter(None, (part.strip() for part in words.split(","))):
        kind, _, share = word.partition("=")
        try:
            shares[kind] = float(share) if share else 1.0
        except ValueError as error:
            raise SettingsError(f"--moves {word}: a share is a number, such as {kind}=0.5") from error
    return shares


def _check_folder(out: Path, *, resume: bool, force: bool) -> None:
    """Nothing is overwritten unless asked; --force removes only files that a search writes."""
    from relaxion.apps.result_folder import check_out
    from relaxion.search.results import OURS
    from relaxion.search.state import NAME

    if resume and force:
        raise SettingsError("--resume continues and --force begins anew; give one of them")
    check_out(out)
    if resume and not (out / NAME).is_file():
        if any((out / name).exists() for name in OURS):
            raise FileError(f"the search in {out} ended before its start was relaxed; begin anew with --force")
        raise FileError(f"{out} holds no search that could be resumed; leave out --resume, or name its folder")
    if out.is_dir() and any(out.iterdir()) and not (resume or force):
        raise FileError(
            f"{out} holds earlier results; try --resume to continue, --force to replace them, or another --out"
        )
    if force:
        for name in OURS:
            (out / name).unlink(missing_ok=True)
