"""What the commands that relax and learn can be asked; `showing_requests` has the other commands.

Every option is declared once, as a field; a docstring is a command's help. Below its first line a docstring lists
examples and exit codes, and says "Units." where the help names the units. `app` makes a command of each class, in this
order; the function of `command(COMMANDS, "module:function")` gets the finished request. Loads neither torch nor ASE.
"""

from __future__ import annotations

from pathlib import Path

from relaxion.cli import completion
from relaxion.cli.options import (
    FITTING,
    RELAXING,
    Command,
    agent_option,
    argument,
    calc_option,
    calc_options_option,
    command,
    device_option,
    flag,
    memory_option,
    optimizers_option,
    option,
    optional,
    policy_option,
    quiet_flag,
    rattle_option,
    rattle_seed_option,
    recipe_argument,
    set_option,
    settings_option,
    shared,
    unseen_flag,
)

COMMANDS: list[Command] = []  # in the order of the help
AGAIN = "interrupted; run the same command again to continue"


@shared
class RelaxingRequest:
    """How structures are relaxed: what 'relax' and 'relax-many' have in common, with the same defaults."""

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
    steps: int = option("N", "Maximum number of steps per structure; each is one force call.", default=500)
    cell: bool = flag("--cell", "Relax the cell too.")
    pressure: float = option("GPa", "External pressure, for --cell.", default=0.0)
    cell_mask: str = option(
        "AXES",
        "Strain components that may change, for --cell: some of xx,yy,zz,yz,xz,xy.",
        default="",
        show_default="all six",
    )
    keep_symmetry: bool = flag("--keep-symmetry", "Keep the space group of the start (within 0.01 Å); needs spglib.")
    memory: Path | None = memory_option()
    settings: Path | None = settings_option()


@command(COMMANDS, "relax:relax", usage=RELAXING)
class RelaxRequest(RelaxingRequest):
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
    compare: str = optimizers_option("Also run these ASE optimizers from the same start: BFGS,FIRE,...", default="")
    out: Path = option("DIR", "Results go to DIR/NAME/.", default=Path("relaxed"))
    as_json: bool = flag("--json", "One JSON object per structure on stdout, nothing else.")
    report: bool = flag("--report", "Also write DIR/NAME/report.html: film, curves, comparison, facts.")
    resume: bool = flag("--resume", "Continue structures whose relaxation into DIR was interrupted.")
    force: bool = flag("--force", "Replace earlier results.")
    rattle: float = rattle_option()
    seed: int = rattle_seed_option()
    quiet: bool = quiet_flag("No progress and no hints on stderr.")


@command(COMMANDS, "relax_many:relax_many", usage=RELAXING, interrupted=AGAIN)
class ManyRequest(RelaxingRequest):
    """Relax thousands of structures with many workers. Run the same command again to continue an interrupted run.

    relaxion relax-many structures.xyz --out relaxed --workers 4
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
    learn: int = option(
        "N", "After every N structures the policies learn from them; later structures use the result.", default=0, min=0
    )
    workers: str = option("N|KIND", "N or local:N, ray:auto, ray:ADDRESS; one processor each.", default="local:2")
    batch_size: int = option(
        "N", "Structures evaluated together by a worker, if the calculator supports it.", default=128, min=1
    )
    time_limit: float | None = optional(
        "SECONDS", "Time limit per structure; a structure that exceeds it is set aside.", show_default="none"
    )
    retry_failed: bool = flag("--retry-failed", "Try structures again that earlier runs set aside.")
    as_json: bool = flag("--json", "The result as one JSON object on stdout.")
    quiet: bool = quiet_flag()


@command(COMMANDS, "relax_many:status")
class StatusRequest:
    """Show the progress of 'relax-many', also while it runs.

    relaxion status relaxed
    relaxion status relaxed --json
    Exit codes: 0 done, 1 error.
    """

    folder: Path = argument("DIR", "The --out of 'relax-many'.")
    as_json: bool = flag("--json", "Everything as one JSON object.")


@command(COMMANDS, "relax_many:merge")
class MergeRequest:
    """Put the results of 'relax-many' into one file, in the order of the input.

    relaxion merge relaxed all.extxyz
    Exit codes: 0 written, 1 error, 2 usage, 3 not all are relaxed.
    """

    folder: Path = argument("DIR", "The --out of 'relax-many'.")
    out: Path = argument("FILE.extxyz", "All results, one file.")
    force: bool = flag("--force", "Replace an earlier file.")


@command(COMMANDS, "memory:memory")
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


@command(COMMANDS, "learn:learn", usage=RELAXING)
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


@command(COMMANDS, "train:train")
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


@command(COMMANDS, "collect:collect")
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


@command(COMMANDS, "tune:tune")
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
