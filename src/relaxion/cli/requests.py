"""What each command can be asked. Every option is declared here, once, as a field; a docstring is a command's help.

Below its first line a docstring lists examples and exit codes, and says "Units." where the help names the units. `app`
makes a command of each class, in this order; the function of `command("module:function")` gets the finished request.
Loads neither torch nor ASE.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from typer import Argument, BadParameter, Context, Option

from relaxion.cli import completion
from relaxion.errors import PolicyError, SettingsError, UnknownPotentialError
from relaxion.settings import assignment, nearest

TYPER = "typer"  # in a field's metadata: its argument or option
AS_IN_RELAX = "As in 'relax'."
RELAXING = (SettingsError, UnknownPotentialError, PolicyError)  # wrong --calc and --policy are wrong usage


@dataclass(frozen=True)
class Command:
    """One command: its request, the function that answers it, and what is the same whatever was asked."""

    request: type[Any]  # its fields are the options, its docstring is the help
    module: str  # of this package; loaded when the command runs
    function: str  # in it: (request, interrupts) -> exit code
    interrupted: str = "interrupted"  # said where Ctrl-C or SIGTERM found nothing to save
    usage: tuple[type[Exception], ...] = (SettingsError,)  # errors that end with exit code 2
    one_thread: bool = True  # unless OMP_NUM_THREADS says otherwise; doctor shows what scripts would get

    @property
    def name(self) -> str:
        return self.function.replace("_", "-")


COMMANDS: list[Command] = []
Request = TypeVar("Request", bound=type[Any])
Asked = TypeVar("Asked")


def changed(request: Asked, **values: Any) -> Asked:
    """The same request with other values; pyright does not see that `command` makes dataclasses."""
    made: Any = request
    return replace(made, **values)


def command(where: str, **more: Any) -> Callable[[Request], Request]:
    """Make a frozen dataclass of it and enter it into the table; `where` is `module:function`."""

    def enter(request: Request) -> Request:
        made, (module, function) = dataclass(frozen=True)(request), where.split(":")
        COMMANDS.append(Command(made, module, function, **more))
        return made

    return enter


def argument(metavar: str, words: str, *, default: Any = MISSING, **more: Any) -> Any:
    """A field that is an argument; readable=False: our own sentence says what is wrong with a file."""
    made = Argument(metavar=metavar, help=words, readable=False, **{"show_default": False, **more})
    return field(default=default, metadata={TYPER: made})


def option(metavar: str, words: str, *names: str, default: Any = MISSING, **more: Any) -> Any:
    """A field that is an option with a value, called as the field is unless named."""
    made = Option(*names, metavar=metavar, help=words, readable=False, **more)
    return field(default=default, metadata={TYPER: made})


def flag(name: str, words: str, *short: str) -> Any:
    return field(default=False, metadata={TYPER: Option(name, *short, help=words, metavar="")})


def from_file(context: Context, file: Path | None) -> Path | None:
    """Settings of a TOML file become the defaults of a command, so that its options, where given, still win."""
    if file is None:
        return None
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadParameter(f"{file} cannot be read: {error}") from error
    known = {name: param for param in context.command.params for name in _names(param)}
    for name in table:
        if name not in known:
            raise BadParameter(f"{file}: unknown setting '{name}': {nearest(name, known)}")
    options = table.get("calc_options")
    if isinstance(options, dict):
        if nested := [name for name, value in options.items() if isinstance(value, dict)]:
            plain = "a number, true, false, text or a list of them"
            raise BadParameter(f"{file}: option '{nested[0]}' of a calculator is {plain}")
        table["calc_options"] = [assignment(name, value) for name, value in options.items()]
    context.default_map = {known[name].name or name: value for name, value in table.items()}
    return file


def _names(param: Any) -> list[str]:
    """As on the command line, with - or _, and as the field is called: calc_options, cell_mask, cell-mask."""
    if param.name in ("settings", "help"):
        return []
    long = [word.removeprefix("--") for word in param.opts if word.startswith("--")]
    return [param.name, *long, *(word.replace("-", "_") for word in long)]


# what several commands have; those with words left out say them of their own
optional = partial(option, default=None)
UNSEEN = "Use the policy also for elements it was not trained on; every step is still checked."
unseen_flag = partial(flag, "--allow-unseen", UNSEEN)
calc_option = partial(option, "SPEC", default="emt", autocompletion=completion.calculators)
calc_options_option = partial(
    option, "KEY=VALUE", "An option of the calculator, such as dispersion=true; may be repeated.", "--calc-option",
    default=None,
)  # fmt: skip
settings_option = partial(
    option, "FILE.toml", "Read options from a file (fmax = 0.01, cell = true); those on the command line win.",
    default=None, is_eager=True, callback=from_file,
)  # fmt: skip
FITTING: dict[str, Any] = {
    "default": "auto",
    "show_default": "emt for its metals, else the first installed of chgnet, sevennet, mace; for molecules gfn2",
}
policy_option = partial(option, "NAME|FILE", default="auto", autocompletion=completion.policies)
DEVICE = "Device of the networks of policies and named calculators: cuda, cuda:1."
device_option = partial(option, "NAME", DEVICE, default=None, show_default="cpu")
optimizers_option = partial(option, "NAMES", autocompletion=completion.optimizers)
rattle_option = partial(
    option, "Å", "First displace the atoms at random with this standard deviation along each axis.", default=0.0
)
rattle_seed_option = partial(option, "N", "Seed of --rattle.", default=0, min=0)
recipe_argument = partial(argument, "RECIPE", autocompletion=completion.recipes)
agent_option = partial(option, "NAME", "ddpg, td3, d4pg or sac.", default=None, autocompletion=completion.agents)

memory_option = partial(option, "DIR", "Keep every evaluated geometry there, to learn from; see 'learn'.", default=None)


def quiet_flag(words: str = "No progress on stderr.") -> Any:
    return flag("--quiet", words, "-q")


def set_option(words: str = "Change a setting; may be repeated.") -> Any:
    return option("KEY=VALUE", words, "--set", default=None)


@command("relax:relax", usage=RELAXING)
class RelaxRequest:
    """Relax structures. Writes each in its own format and as extxyz, with log and trajectory.

    relaxion relax alloy.cif
    relaxion relax POSCAR --cell --fmax 0.01
    relaxion relax *.xyz --calc eam --compare BFGS,FIRE --json
    relaxion relax slab.cif --calc my_module:make_calculator --out results
    relaxion relax slab.cif --calc mace:medium-mpa-0 --calc-option dispersion=true
    relaxion relax POSCAR --settings relax.toml
    relaxion relax alloy.cif --compare BFGS,FIRE --report
    Units.
    Exit codes: 0 all converged, 1 error, 2 usage, 3 not all converged, 130 interrupted, 143 terminated by SIGTERM (in
    both cases what was reached is saved, and --resume continues).
    """

    files: list[Path] = argument(
        "FILE",
        "Structure files in any format ASE reads; FILE@0:2 means some of its structures. Each is relaxed into a "
        "folder of its own.",
    )
    calc: str = calc_option(
        "emt, eam, eam:FILE, lj, morse, chgnet, sevennet, gfn2, mace, module:factory; see 'calculators'.", **FITTING
    )
    calc_options: list[str] | None = calc_options_option()
    policy: str = policy_option(
        "auto: a shipped policy that covers all elements, else the classical optimizer; none: the classical "
        "optimizer; NAME or FILE: that policy. See 'policies'."
    )
    device: str | None = device_option()
    allow_unseen: bool = unseen_flag()
    fmax: float = option(
        "eV/Å", "Converged when the largest force (with a free cell also the stress term) is below this.", default=0.05
    )
    steps: int = option("N", "Maximum number of steps; each is one force call.", default=500)
    cell: bool = flag("--cell", "Relax the cell too.")
    pressure: float = option("GPa", "External pressure, for --cell.", default=0.0)
    cell_mask: str = option(
        "AXES",
        "Strain components that may change, for --cell: some of xx,yy,zz,yz,xz,xy.",
        default="",
        show_default="all six",
    )
    keep_symmetry: bool = flag("--keep-symmetry", "Keep the space group of the start (within 0.01 Å); needs spglib.")
    compare: str = optimizers_option("Also run these ASE optimizers from the same start: BFGS,FIRE,...", default="")
    memory: Path | None = memory_option()
    out: Path = option("DIR", "Results go to DIR/NAME/.", default=Path("relaxed"))
    as_json: bool = flag("--json", "One JSON object per structure on stdout, nothing else.")
    report: bool = flag("--report", "Also write DIR/NAME/report.html: film, curves, comparison, facts.")
    resume: bool = flag("--resume", "Continue structures whose relaxation into DIR was interrupted.")
    force: bool = flag("--force", "Replace earlier results.")
    rattle: float = rattle_option()
    seed: int = rattle_seed_option()
    settings: Path | None = settings_option()
    quiet: bool = quiet_flag("No progress and no hints on stderr.")


AGAIN = "interrupted; run the same command again to continue"


@command("relax_many:relax_many", usage=RELAXING, interrupted=AGAIN)
class ManyRequest:
    """Relax thousands of structures with many workers. Run the same command again to continue an interrupted run.

    relaxion relax-many structures.xyz --out relaxed --workers local:4
    relaxion relax-many *.cif --out relaxed --calc chgnet --time-limit 600
    relaxion relax-many structures.xyz --out relaxed --workers ray:auto
    relaxion relax-many slabs.xyz --out relaxed --memory relaxations --learn 20
    relaxion status relaxed && relaxion merge relaxed all.extxyz
    Units.
    Exit codes: 0 all converged, 1 some were set aside or the run could not continue, 2 usage, 3 not all converged, 130
    interrupted, 143 terminated. The same command continues in every case.
    """

    files: list[Path] | None = argument(
        "FILE",
        "Structure files in any format ASE reads; every structure in them is relaxed, or those of FILE@0:100.",
        default=None,
        show_default="those of an earlier run into DIR",
    )
    out: Path = option("DIR", "Results; run the same command again to continue.", default=Path("relaxed-many"))
    calc: str = calc_option(AS_IN_RELAX)
    calc_options: list[str] | None = calc_options_option()
    policy: str = policy_option(AS_IN_RELAX)
    device: str | None = device_option()
    allow_unseen: bool = unseen_flag()
    fmax: float = option("eV/Å", AS_IN_RELAX, default=0.05)
    steps: int = option("N", "Maximum number of steps per structure; each is one force call.", default=500)
    cell: bool = flag("--cell", "Relax the cells too.")
    memory: Path | None = memory_option()
    learn: int = option(
        "N", "After every N structures the policies learn from them; later structures use the result.", default=0, min=0
    )
    workers: str = option("KIND", "local:N, ray:auto, ray:ADDRESS; one processor each.", default="local:2")
    batch_size: int = option(
        "N", "Structures evaluated together by a worker, if the calculator supports it.", default=128, min=1
    )
    time_limit: float | None = optional(
        "SECONDS", "Time limit per structure; a structure that exceeds it is set aside.", show_default="none"
    )
    retry_failed: bool = flag("--retry-failed", "Try structures again that earlier runs set aside.")
    settings: Path | None = settings_option()
    as_json: bool = flag("--json", "The result as one JSON object on stdout.")
    quiet: bool = quiet_flag()


@command("relax_many:status")
class StatusRequest:
    """Show the progress of 'relax-many', also while it runs.

    relaxion status relaxed
    relaxion status relaxed --json
    Exit codes: 0 done, 1 error.
    """

    folder: Path = argument("DIR", "The --out of 'relax-many'.")
    as_json: bool = flag("--json", "Everything as one JSON object.")


@command("relax_many:merge")
class MergeRequest:
    """Put the results of 'relax-many' into one file, in the order of the input.

    relaxion merge relaxed all.extxyz
    Exit codes: 0 written, 1 error, 2 usage, 3 not all are relaxed.
    """

    folder: Path = argument("DIR", "The --out of 'relax-many'.")
    out: Path = argument("FILE.extxyz", "All results, one file.")
    force: bool = flag("--force", "Replace an earlier file.")


@command("memory:memory")
class MemoryRequest:
    """Show what a memory of relaxations holds; export it; take in relaxations that you have already.

    relaxion relax slab.cif --memory relaxations && relaxion memory relaxations
    relaxion memory relaxations --add old.traj runs/*/vasprun.xml --calculator PBE
    relaxion memory relaxations --export all.extxyz
    Units.
    Exit codes: 0 done, 1 error, 2 usage.
    """

    folder: Path = argument("DIR", "The --memory of 'relax' or 'relax-many', or a store of 'collect'.")
    add: list[Path] | None = option("FILE", "Add a file that ASE reads; may be repeated.", "--add", default=None)
    more: list[Path] | None = argument("FILES", "More files for --add.", default=None)
    calculator: str | None = option(
        "NAME", "The calculator that made the files of --add, if they do not name one.", default=None
    )
    export: Path | None = option("FILE.extxyz", "Every evaluated structure with energy and forces.", default=None)
    as_json: bool = flag("--json", "Everything as one JSON object.")
    force: bool = flag("--force", "Replace an earlier export.")

    @property
    def files(self) -> list[Path]:
        """All that is to be taken in."""
        return [*(self.add or ()), *(self.more or ())]


@command("learn:learn", usage=RELAXING)
class LearnRequest:
    """Let a policy learn from a memory of relaxations, without a force call; kept only if it proved better.

    relaxion learn relaxations --from universal --out my-policy
    relaxion learn relaxations --from metals --out my-slabs --calc emt
    relaxion relax slab.cif --policy my-slabs
    Exit codes: 0 a better policy is kept, 1 error, 2 usage, 3 nothing better was found, 130 interrupted, 143 terminated
    (in both cases the same command continues).
    """

    folder: Path = argument("DIR", "The --memory of 'relax' or 'relax-many', or a store of 'collect'.")
    origin: str = option(
        "NAME|FILE", "The policy to start from.", "--from", default="universal", autocompletion=completion.policies
    )
    out: str = option("NAME|FILE", "The new policy; a NAME is found by --policy, and by auto.", default="learned")
    calculator: str | None = option("NAME", "Learn from this calculator's relaxations only, or all.", default=None)
    calc: str | None = option(
        "SPEC",
        "Also relax held-out starts with both policies, to count force calls.",
        default=None,
        show_default="no force call",
    )
    number: int = option("N", "At most this many starts.", default=24, min=2)
    assignments: list[str] | None = set_option()
    as_json: bool = flag("--json", "The result as one JSON object on stdout.")
    force: bool = flag("--force", "Replace an earlier policy of that name.")
    quiet: bool = quiet_flag("No progress on stderr.")


@command("train:train")
class TrainRequest:
    """Train an agent or a network by a recipe. An interrupted run can be resumed. Without a recipe: list all.

    relaxion train
    relaxion train pendulum --agent sac --seed 0 --out runs/pendulum
    relaxion train runs/pendulum --resume
    relaxion train pendulum --steps 20000 --set batch_size=256
    relaxion train al-fe --collectors ray:8
    relaxion train fine-tune --from universal --calc my_module:make --structures my.xyz
    Exit codes: 0 done, 1 error, 2 usage, 130 interrupted, 143 terminated by SIGTERM (in both cases --resume continues).
    """

    recipe: str | None = recipe_argument("A shipped recipe, a TOML file or a run folder.", default=None)
    out: Path | None = optional("RUN", "The run's own folder.", show_default="runs/RECIPE-AGENT-SEED")
    agent: str | None = agent_option()
    seed: int | None = optional("N", "Seed of all random numbers.", min=0)
    steps: int | None = optional("N", "Total environment steps.", min=1)
    assignments: list[str] | None = set_option()
    resume: bool = flag("--resume", "Continue from the last checkpoint.")
    from_weights: Path | None = optional("RUN|FILE|POLICY", "Start a new run with the weights of an old one.")
    origin: str | None = optional(
        "POLICY|RUN|FILE", "The same; from a policy, its network and trust rule too.", "--from",
        autocompletion=completion.policies,
    )  # fmt: skip
    calc: str | None = optional("SPEC", "Calculator, for recipes on your own structures (fine-tune).")
    structures: str | None = optional("FILE", "Your own structures, for such recipes.")
    force: bool = flag("--force", "Replace an earlier run.")
    collectors: str | None = optional(
        "ray:N|ray:ADDRESS|ray:N@ADDRESS",
        "Relax structures in this many Ray actors, here or on a cluster, while this process learns.",
    )
    as_json: bool = flag("--json", "The result as one JSON object on stdout.")
    quiet: bool = quiet_flag()


@command("collect:collect")
class CollectRequest:
    """Relax training structures with expensive potentials and store every evaluation. Run again to continue.

    relaxion collect universal-data --out stores/universal --workers 2
    relaxion collect universal-data --out stores/trial --set number=10 --limit-minutes 5
    Exit codes: 0 complete, 1 error, 2 usage, 3 time limit reached, 130, 143 stopped (the same command continues).
    """

    recipe: str = argument("RECIPE", "A shipped recipe (universal-data) or a TOML file.")
    out: Path = option("STORE", "Folder of the store; an existing one is completed.")
    workers: int = option("N", "Processes, one core each.", default=1, min=1)
    assignments: list[str] | None = set_option("seed=7; molecule.number=100: one kind; number=10: all kinds.")
    limit_minutes: float | None = optional("M", "Stop after this time; run the same command again to continue.", min=0)
    policy: str | None = policy_option("Relax with this policy instead of the classical optimizer.", default=None)
    as_json: bool = flag("--json", "The summary as one JSON object on stdout.")
    quiet: bool = quiet_flag()


@command("tune:tune")
class TuneRequest:
    """Search for good settings of a recipe. Each trial is a run; run the same command again to continue.

    relaxion tune pendulum --out sweeps/pendulum --trials 20 --steps 5000 --vary policy_learning_rate=1e-4:1e-2:log
    relaxion tune emt-metals --out sweeps/emt --trials 50 --workers local:2 --vary 'updates_per_round=4|8|16'
    Exit codes: 0 done, 1 error, 2 usage, 130 interrupted, 143 terminated by SIGTERM (the same command continues).
    """

    recipe: str = recipe_argument("As in 'train'.")
    out: Path = option("DIR", "Folder of the sweep; an existing sweep is continued.", show_default=False)
    trials: int = option("N", "Total trials, including those of earlier commands.", min=1)
    varied: list[str] | None = optional(
        "KEY=VALUES", "Vary a setting: KEY=LO:HI, KEY=LO:HI:log or KEY=A|B|C; may be repeated.", "--vary"
    )
    space: Path | None = optional("FILE", 'The same from a TOML file: key = "lo:hi:log", or key = a list of values.')
    agent: str | None = agent_option()
    seed: int | None = optional("N", "Seed of every trial and of the proposals.", min=0)
    steps: int | None = optional("N", "Environment steps of each trial.", min=1)
    assignments: list[str] | None = set_option()
    workers: str = option("local:N|ray:N|ray:ADDRESS", "How many trials at a time, and where.", default="local:1")
    sampler: str = option("NAME", "Of Optuna: tpe or random.", default="tpe")
    as_json: bool = flag("--json", "The result as one JSON object on stdout.")
    quiet: bool = quiet_flag()


NONE_DONE = "interrupted before the first structure was done by all optimizers"


@command("bench:bench", usage=RELAXING, interrupted=NONE_DONE)
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


@command("race:race", usage=RELAXING, interrupted="interrupted; no page was written")
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


@command("pages:report")
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


@command("pages:watch", interrupted="")
class WatchRequest:
    """Follow training runs in the browser: curves, diagnostics, alarms, films; drop a structure to race it.

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


@command("doctor:doctor", one_thread=False)
class DoctorRequest:
    """Check environment, versions, calculators, policies, threads and common mistakes; relax four atoms.

    relaxion doctor
    relaxion doctor --json > doctor.json
    Exit codes: 0 everything works, 1 something does not.
    """

    as_json: bool = flag("--json", "Everything as one JSON object.")


@command("listings:calculators")
class CalculatorsRequest:
    """List what --calc understands.

    relaxion calculators
    relaxion relax POSCAR --calc eam
    Units.
    """

    as_json: bool = flag("--json", "One JSON object per calculator.")


@command("package:package")
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


@command("listings:policies")
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


@command("pages:curve")
class CurveRequest:
    """Draw learning curves of runs, finished or not, against environment steps.

    relaxion curve runs/pendulum-sac-*
    relaxion curve runs/a runs/b --out ab.png
    """

    runs: list[Path] = argument("RUN", "Run folders; those that differ only in the seed share a curve.")
    out: Path = option("FILE.png", "The picture.", default=Path("learning_curve.png"))
    force: bool = flag("--force", "Replace an earlier picture.")
