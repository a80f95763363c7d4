"""The doors through which foreign files come in: each takes a path, reads, and gives back what it understood.

A door raises a RelaxionError where relaxion refuses. Commands are called as the command line would call them, in this
process: what they print is looked at, their exit code counts, and any other exception is a traceback.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from hostile_corpus import (
    CANARY,
    STRANGE_VALUES,
    Case,
    any_file,
    crafted,
    crafted_structures,
    json_file,
    replaced,
    spoilt_words,
    write_structures,
)

from relaxion import Relaxer
from relaxion.apps.relax_many.results import ResultFolder
from relaxion.apps.relax_many.run import places
from relaxion.apps.relax_many.settings import ManySettings, calculator_details, policy_weights
from relaxion.database import RelaxationDatabase, Trajectory
from relaxion.errors import RelaxionError
from relaxion.model import policy_file as bundles
from relaxion.optimizer.choice import load
from relaxion.potentials.registry import potential
from relaxion.train import TD3
from relaxion.train.runs.loop import make_trainer, read_weights, train
from relaxion.train.runs.run_folder import AGENT, CHECKPOINT
from relaxion.train.tasks.progress import CHECKPOINTS
from relaxion.train.tasks.settings import find, read_settings, settings_from_recipe

FAULTS = Path(__file__).parent
ATOM_RUN = {
    "task": "relax", "agent": "td3", "structures": "alloys:Al-Cu:2-4", "n_pooled": 20, "steps": 32,
    "n_structures": 4, "max_force_calls": 20, "channels": 4, "n_layers": 1, "cutoff_angstrom": 3.5, "batch_size": 4,
    "warmup_steps": 8, "replay_capacity": 64, "updates_per_round": 1, "log_interval_steps": 8,
    "assessment_interval_steps": 16, "assessment_starts": 3, "checkpoint_interval_steps": 16,
}  # fmt: skip
VECTOR_RUN = {
    "task": "Pendulum-v1", "agent": "td3", "seed": 4, "steps": 40, "widths": [4], "batch_size": 4, "warmup_steps": 10,
    "replay_capacity": 64, "assessment_starts": 2, "assessment_interval_steps": 20, "log_interval_steps": 10,
    "checkpoint_interval_steps": 20,
}  # fmt: skip


class Refused(RelaxionError):
    """A command ended with a sentence."""


class Traceback(Exception):
    """A command ended with a traceback, or without a word."""


def command(*words: str | Path) -> str:
    """What it printed; Refused with its sentence, Traceback when it was none."""
    from relaxion.apps.cli.app import app

    out, error = io.StringIO(), io.StringIO()
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            app([str(word) for word in words])
        except SystemExit as end:
            code = end.code or 0
    said = error.getvalue()
    if "Traceback" in said or "Traceback" in out.getvalue():
        raise Traceback(said[-2000:])
    if code in (0, 3):
        return out.getvalue()
    if code not in (1, 2) or not (said.strip() or out.getvalue().strip()):
        raise Traceback(f"exit code {code} without a word")
    if "please report" in said or _unnamed(said):
        raise Traceback(said[-2000:])
    raise Refused(said.strip()[-300:])


INTERNAL = ("AttributeError:", "NameError:", "AssertionError:", "UnboundLocalError:", "RecursionError:")


def _unnamed(said: str) -> bool:
    """Whether a sentence is only the name of an accident inside of relaxion. ASE's readers may have any."""
    return "cannot be read" not in said and any(word in said for word in INTERNAL)


# --------------------------------------------------------------------------------------------------- the seeds


@dataclass(frozen=True)
class World:
    """A folder of valid files."""

    root: Path

    def seed(self, name: str) -> Path:
        return self.root / name

    def make(self) -> None:
        """Everything that is read here, made by relaxion and ASE."""
        torch.set_num_threads(1)
        self.root.mkdir(parents=True, exist_ok=True)
        _make_bundles(self.root)
        train(read_settings(VECTOR_RUN), self.root / "vector-run")
        train(read_settings(ATOM_RUN), self.root / "atom-run")
        (self.root / "recipe.toml").write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in VECTOR_RUN.items()))
        text = "".join(f"{k} = {json.dumps(v)}\n" for k, v in ATOM_RUN.items() if k != "agent")
        (self.root / "atom-recipe.toml").write_text(f"{text}[agent.td3]\npolicy_learning_rate = 1e-3\n")
        _make_restarts(self.root)
        _make_store(self.root / "store")
        _make_many(self.root / "many")
        write_structures(self.root / "structures")
        for name, content in crafted_structures().items():
            file = self.root / "crafted" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        _make_table(self.root / "table.eam.alloy")
        command(
            "relax",
            self.root / "structures" / "a.extxyz",
            "--out",
            self.root / "relaxed",
            "--quiet",
            "--policy",
            "none",
        )


def copper(moved: float = 0.1) -> Atoms:
    atoms = bulk("Cu", a=3.7, cubic=True)
    atoms.positions[0] += moved
    atoms.calc = EMT()
    return atoms


def _make_bundles(root: Path) -> None:
    from relaxion.model.actions import MoveActions
    from relaxion.model.atom_policies import AtomPolicy, StiffnessPolicy
    from relaxion.model.backbone import AtomNetworkSettings
    from relaxion.model.card import ModelCard
    from relaxion.model.policy_file import PolicyFile, described
    from relaxion.model.stiffness_network import StiffnessSettings

    card = ModelCard(
        elements=("Cu", "Au"), smallest_n_atoms=2, largest_n_atoms=16, potential="emt", agent="none", seed=0,
        force_tolerance_ev_per_angstrom=0.05, training_command="none", environment_steps=0, relaxion_version="0",
        date="2026-11-16", training_settings={"trust_radius_angstrom": 0.3},
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    small = StiffnessSettings(channels=4, n_hidden=4, n_radial=4, n_coordinates=2)
    policies = {
        "stiffness": StiffnessPolicy(MoveActions(), small, generator),
        "direct": AtomPolicy(MoveActions(), AtomNetworkSettings(channels=4, n_layers=1), generator),
    }
    for name, policy in policies.items():
        PolicyFile(name, {"policy": described(policy)}, card).write(root / f"{name}.safetensors")


def _make_restarts(root: Path) -> None:
    from ase.filters import FrechetCellFilter

    atoms = copper()
    Relaxer(atoms, restart=root / "core.restart.json", logfile=None, policy=None).run(fmax=1e-3, steps=3)
    target = FrechetCellFilter(copper())
    Relaxer(target, restart=root / "cell.restart.json", logfile=None, policy=None).run(fmax=1e-3, steps=3)
    atoms = copper()
    bundle = root / "stiffness.safetensors"
    Relaxer(atoms, restart=root / "policy.restart.json", logfile=None, policy=bundle).run(fmax=1e-3, steps=3)


def _make_store(path: Path) -> None:
    store = RelaxationDatabase.create(path, {"recipe": "none"})
    generator = torch.Generator().manual_seed(0)
    for number in range(2):
        steps, atoms = 2 + number, 3
        store.append(
            [
                Trajectory(
                    key=f"key{number}", kind="packing", engine="emt", outcome=1, cell_free=False,
                    numbers=torch.full((atoms,), 29), pbc=torch.ones(3, dtype=torch.bool),
                    movable=torch.ones(atoms, dtype=torch.bool), cells=10 * torch.eye(3).expand(steps, 3, 3).clone(),
                    positions=torch.rand((steps, atoms, 3), generator=generator),
                    energies=torch.zeros(steps), forces=torch.zeros((steps, atoms, 3)),
                    stresses=torch.zeros((steps, 3, 3)),
                )
            ]
        )  # fmt: skip
    store.close()
    (file,) = store.files()
    file.rename(path / "relaxations-host.sqlite")


def _many_settings() -> ManySettings:
    return ManySettings(
        calculator="emt",
        calculator_details=calculator_details("emt"),
        policy="none",
        policy_weights=policy_weights("none"),
    )


def _make_many(path: Path) -> None:
    sys.path.insert(0, str(FAULTS.parents[1] / "tests" / "unit" / "scaling"))
    from inline_workers import InlineWorkers

    from relaxion.apps.relax_many.results import make_summary
    from relaxion.apps.relax_many.run import ManyRun, RelaxWorker

    images = [copper(0.05 * number) for number in range(3)]
    images += [Atoms("Xe", positions=[[0, 0, 0]])]  # EMT has no parameters: set aside
    for atoms in images:
        atoms.calc = None
    file = path.with_name("many.extxyz")
    ase.io.write(file, images)
    settings = _many_settings()
    with ResultFolder(path, settings, [file]) as folder:
        ManyRun(
            folder=folder, workers=InlineWorkers(partial(RelaxWorker, settings)), settings=settings, files=[file],
            chunk_size=4, time_limit_seconds=None, stop=lambda: False, report=lambda _: None,
        ).run()  # fmt: skip
        make_summary(path)


def _make_table(path: Path) -> None:
    """A small setfl table: numbers that mean nothing, in the right places."""
    n = 50
    values = np.linspace(1.0, 0.0, n)
    block = "\n".join(" ".join(f"{v:.6f}" for v in values[i : i + 5]) for i in range(0, n, 5))
    head = f"a\nb\nc\n1 Cu\n{n} 0.01 {n} 0.1 4.9\n29 63.5 3.6 fcc\n"
    path.write_text(f"{head}{block}\n{block}\n{block}\n")


# --------------------------------------------------------------------------------------------------- the doors


def read_bundle(path: Path) -> Any:
    atoms = copper()
    # the file's own name is the same for every case, so nothing may be remembered of the one before
    load.cache_clear() if hasattr(load, "cache_clear") else None
    relaxer = Relaxer(atoms, policy=path, logfile=None)
    relaxer.run(fmax=0.05, steps=3)
    return relaxer.policy_used, atoms.positions.tobytes()


def list_policies(path: Path) -> Any:
    """As one of the user's own: `relaxion policies`, which must not stumble over it."""
    folder = path.parent / "own"
    folder.mkdir(exist_ok=True)
    path.rename(folder / "mine.safetensors")
    before = os.environ.get("RELAXION_POLICIES")
    os.environ["RELAXION_POLICIES"] = str(folder)
    try:
        listed = command("policies")
        if "metals" not in listed:
            raise Traceback("the shipped policy is not listed")
        return command("policies", "mine")
    finally:
        os.environ.pop("RELAXION_POLICIES") if before is None else os.environ.__setitem__("RELAXION_POLICIES", before)


def resume(kind: dict[str, Any]) -> Callable[[Path], Any]:
    def door(path: Path) -> Any:
        settings = read_settings({**kind, "steps": int(kind["steps"]) + 4})
        return train(settings, path, resume=True).steps

    return door


def resume_by_command(path: Path) -> Any:
    return command("train", f"{path}/", "--resume", "--quiet", "--steps", "44")


def start_from(path: Path) -> Any:
    trainer = make_trainer(read_settings(VECTOR_RUN))
    trainer.start_from(read_weights(path))
    return None


def load_agent(path: Path) -> Any:
    agent = TD3.load(path)
    return agent


def read_recipe(path: Path) -> Any:
    settings = settings_from_recipe(find(str(path)), None, {})
    make_trainer(settings).close()
    return settings


def report_run(path: Path) -> Any:
    command("report", path, "--out", path.parent / "report.html")
    return None


def watch_run(path: Path) -> Any:
    command("watch", path, "--save", path.parent / "watch.html", "--force")
    return None


def package_run(path: Path) -> Any:
    return command("package", path, "fuzzed", "--out", path.parent / "fuzzed.safetensors")


def report_relaxation(path: Path) -> Any:
    return command("report", path / "a", "--out", path.parent / "report.html")


def relax_again(path: Path) -> Any:
    """Into a folder of results that is there: --force removes what its manifest lists, and nothing else."""
    outside = path.parent / "outside.txt"
    outside.write_text("mine")
    file = path.parent / "a.extxyz"
    ase.io.write(file, copper().copy())
    command("relax", file, "--out", path.parent / "relaxed", "--force", "--quiet", "--policy", "none")
    if outside.read_text() != "mine":
        raise Traceback("a file outside was changed")
    return None


def go_on(name: str) -> Callable[[Path], Any]:
    def door(path: Path) -> Any:
        from ase.filters import FrechetCellFilter

        atoms = copper()
        target = FrechetCellFilter(atoms) if name == "cell" else atoms
        policy = path.parent.parent / "seeds" / "stiffness.safetensors" if name == "policy" else None
        relaxer = Relaxer(target, restart=path, logfile=None, policy=policy)
        relaxer.run(fmax=1e-3, steps=5)
        if not np.isfinite(atoms.positions).all():
            raise Traceback("the atoms are no longer finite")
        return None

    return door


def read_store(path: Path) -> Any:
    store = RelaxationDatabase.open(path)
    found = len(store), sorted(store.keys()), store.description
    for trajectory in store:
        trajectory.structures, trajectory.evaluation  # noqa: B018
    return found


def many_status(path: Path) -> Any:
    command("status", path, "--json")
    return command("status", path)


def many_merge(path: Path) -> Any:
    merged = path.parent / "all.extxyz"
    command("merge", path, merged, "--force")
    return len(list(ase.io.iread(str(merged), index=":"))) if merged.stat().st_size else 0


def many_go_on(path: Path) -> Any:
    from relaxion.apps.relax_many.results import make_summary

    file = path.parent.parent / "seeds" / "many.extxyz"
    outside = path.parent / "outside.txt"
    outside.write_text("mine\n")
    try:
        with ResultFolder(path, _many_settings(), [file]) as folder:
            folder.append([{"key": "s" + "ab" * 16, "frame": "not looked at\n"}])
            folder.forget_failures()
            make_summary(path)
            return len(folder.done)
    finally:
        if outside.read_text() != "mine\n":
            raise Traceback("a file outside was changed")


def relax_file(path: Path) -> Any:
    out = path.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    return command("relax", "--out", out, "--quiet", "--policy", "none", "--steps", "20", "--", path)


def many_file(path: Path) -> Any:
    found = list(places(path))
    errors = [place.error for place in found if place.error is not None]
    settings = ManySettings()
    for place in found:
        if place.atoms is not None:
            settings.key(place.atoms)
    if errors:
        raise Refused(errors[0])
    return len(found)


def read_table(path: Path) -> Any:
    made = potential(f"eam:{path}")
    atoms = copper()
    atoms.calc = made.as_calculator()
    return atoms.get_potential_energy()


DOORS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    # name: (what people call it, how it is read)
    "Relaxer(policy=FILE)": ("policy bundle", read_bundle),
    "relaxion policies": ("policy bundle", list_policies),
    "train --resume, vectors": ("checkpoint, run folder", resume(VECTOR_RUN)),
    "train --resume, atoms": ("checkpoint, run folder", resume(ATOM_RUN)),
    "relaxion train RUN --resume": ("checkpoint, run folder", resume_by_command),
    "train --from": ("checkpoint, run folder", start_from),
    "TD3.load": ("checkpoint, run folder", load_agent),
    "relaxion report RUN": ("checkpoint, run folder", report_run),
    "relaxion watch --save": ("checkpoint, run folder", watch_run),
    "relaxion package": ("checkpoint, run folder", package_run),
    "relaxion train RECIPE": ("recipe", read_recipe),
    "restart=, core": ("restart file", go_on("core")),
    "restart=, cell": ("restart file", go_on("cell")),
    "restart=, policy": ("restart file", go_on("policy")),
    "RelaxationDatabase": ("store", read_store),
    "relaxion status": ("folder of relax-many", many_status),
    "relaxion merge": ("folder of relax-many", many_merge),
    "relax-many goes on": ("folder of relax-many", many_go_on),
    "relaxion relax FILE": ("structure file", relax_file),
    "relax-many FILE": ("structure file", many_file),
    "relax --force": ("folder of results", relax_again),
    "relaxion report RESULT": ("folder of results", report_relaxation),
    "eam:FILE": ("potential table", read_table),
}


# --------------------------------------------------------------------------------------------------- the cases


def cases(world: World) -> list[Case]:
    """All of them, always the same."""
    spoilt = [*_bundle_cases(world), *_run_cases(world), *_recipe_cases(world), *_restart_cases(world),
            *_store_cases(world), *_many_cases(world), *_structure_cases(world), *_other_cases(world)]  # fmt: skip
    whole = dict.fromkeys((case.door, case.seed) for case in spoilt if not case.seed.startswith("crafted"))
    return [*(Case(door, seed, "nothing", _leave, must_be_read=True) for door, seed in whole), *spoilt]


def _leave(path: Path) -> None:
    """Nothing is wrong."""
    del path


def _bundle_cases(world: World) -> Iterator[Case]:
    door = "Relaxer(policy=FILE)"
    for name in ("stiffness.safetensors", "direct.safetensors"):
        file = world.seed(name)
        yield from any_file(door, name, file, "", flips=24, cuts=12, guarded=True)
        yield from crafted(door, name, file, "", bundles.FORMAT, bundles.KIND, n_values=60, n_tensors=50)
    yield from crafted(
        "relaxion policies", "stiffness.safetensors", world.seed("stiffness.safetensors"), "",
        bundles.FORMAT, bundles.KIND,
        n_values=30, n_tensors=8,
    )  # fmt: skip


def _run_cases(world: World) -> Iterator[Case]:
    form = CHECKPOINTS
    for door, seed, kind in (
        ("train --resume, vectors", "vector-run", CHECKPOINT),
        ("train --resume, atoms", "atom-run", CHECKPOINT),
    ):
        file = world.seed(seed) / "checkpoint.safetensors"
        yield from any_file(door, seed, file, file.name, flips=16, cuts=8)
        yield from crafted(door, seed, file, file.name, form, kind, n_values=30, n_tensors=60)
        for name in ("metrics.jsonl", "settings.toml", ".lock", "result.json", "assessment.json"):
            yield from any_file(door, seed, world.seed(seed) / name, name, flips=2, cuts=1)
    agent = world.seed("vector-run") / "agent.safetensors"
    (world.root / "agent.safetensors").write_bytes(agent.read_bytes())
    for door in ("train --from", "TD3.load"):
        yield from crafted(door, "agent.safetensors", agent, "", form, AGENT, n_values=24, n_tensors=24)
    for door in ("relaxion report RUN", "relaxion watch --save"):
        for name in ("result.json", "assessment.json", "baselines.json"):
            file = world.seed("atom-run") / name
            yield from json_file(door, "atom-run", file, name, number=24)
        for name in ("metrics.jsonl", "settings.toml"):
            yield from any_file(door, "atom-run", world.seed("atom-run") / name, name, flips=4, cuts=2)
        yield from _line_cases(door, world)
    for door in ("relaxion package", "relaxion train RUN --resume"):
        seed = "vector-run" if door.endswith("--resume") else "atom-run"
        for name in ("metrics.jsonl", "settings.toml", "result.json"):
            yield from any_file(door, seed, world.seed(seed) / name, name, flips=2, cuts=1)
        yield from json_file(door, seed, world.seed(seed) / "result.json", "result.json", number=10)


def _line_cases(door: str, world: World) -> Iterator[Case]:
    """One line of the metrics with wrong values in it."""
    lines = (world.seed("atom-run") / "metrics.jsonl").read_text().splitlines()
    chance = random.Random(door)
    keys = sorted(json.loads(lines[-1]))
    for word, value in STRANGE_VALUES.items():
        key = chance.choice(keys)
        for name in (key, "time/total_timesteps"):
            changed = json.dumps({**json.loads(lines[-1]), name: value})
            content = "\n".join([*lines[:-1], changed, ""]).encode()
            yield Case(door, "atom-run", f"metrics.jsonl: {name} is {word}", _at("metrics.jsonl", content))


def _at(name: str, content: bytes) -> Callable[[Path], None]:
    spoil = replaced(content)
    return lambda root: spoil(root / name)


def _recipe_cases(world: World) -> Iterator[Case]:
    door = "relaxion train RECIPE"
    for seed, values in (("recipe.toml", VECTOR_RUN), ("atom-recipe.toml", ATOM_RUN)):
        file = world.seed(seed)
        yield from any_file(door, seed, file, "", flips=20, cuts=8)
        chance = random.Random(seed)
        every = [(key, word) for key in values for word in STRANGE_VALUES]
        for key, word in chance.sample(every, 90):
            content = "".join(f"{k} = {_toml(STRANGE_VALUES[word] if k == key else v)}\n" for k, v in values.items())
            yield Case(door, seed, f"{key} is {word}", replaced(content.encode("utf-8", "surrogatepass")))
        text = file.read_text()
        for words, more in (
            ("nested too deeply", "x = " + "[" * 100_000),
            ("tables nested too deeply", "x = " + "{a=" * 20_000 + "1" + "}" * 20_000),
            ("a key of many parts", "a." * 50_000 + "b = 1"),
            ("every key twice", text),
            ("a number of 10 000 digits", "x = " + "9" * 10_000),
            ("a day that is none", "x = 2026-13-45"),
            ("more memory than there is", "replay_capacity = 999_999_999_999_999"),
            ("a wide network", "widths = [999_999_999, 999_999_999]"),
            ("many structures", "n_pooled = 999_999_999_999"),
            ("structures from a path", 'structures = "file:../../../../etc/passwd"'),
            ("structures from a folder", 'structures = "file:/etc"'),
            ("structures of nothing", 'structures = "alloys:../..:2-4"'),
            ("a task that is a module", 'task = "os:system"'),
            ("a task from a file", 'task = "canary.py:Environment"'),
            ("a potential that is a module", 'potential = "os:getcwd"'),
        ):
            key = more.split(" ")[0]
            kept = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(f"{key} ="))
            if words == "every key twice":
                kept = text
            yield Case(door, seed, words, replaced(f"{more}\n{kept}".encode()))


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, float):
        return repr(value)
    return '""' if value is None else json.dumps(value, ensure_ascii=False)


def _restart_cases(world: World) -> Iterator[Case]:
    for name, number in (("core", 110), ("cell", 40), ("policy", 60)):
        door, seed = f"restart=, {name}", f"{name}.restart.json"
        yield from json_file(door, seed, world.seed(seed), "", number)
        if name == "core":
            yield from any_file(door, seed, world.seed(seed), "", flips=30, cuts=10)


def _store_cases(world: World) -> Iterator[Case]:
    door, file = "RelaxationDatabase", world.seed("store") / "relaxations-host.sqlite"
    yield from any_file(door, "store", file, file.name, flips=60, cuts=20)
    yield from _crafted_rows(door, "store", file)


def _many_cases(world: World) -> Iterator[Case]:
    many = world.seed("many")
    database = many / "results.sqlite"
    for door in ("relaxion status", "relaxion merge", "relax-many goes on"):
        yield from any_file(door, "many", database, database.name, flips=16, cuts=8)
        yield from json_file(door, "many", many / "relaxion-many.json", "relaxion-many.json", 20)
        for name in ("progress.json", "lock", "relaxion-many.json"):
            yield from any_file(door, "many", many / name, name, flips=2, cuts=1)
        yield from _crafted_rows(door, "many", database)
        yield from _strange_folders(door)


STRANGE_CELLS: dict[str, Any] = {
    "null": None,
    "a number": 7,
    "a negative number": -(2**62),
    "a huge number": 1e308,
    "text": "../../etc/passwd",
    "text of a megabyte": "ab" * 500_000,
    "nested too deeply": "[" * 200_000,
    "bytes": b"\x00\xff" * 20,
    "nothing": b"",
}


def _crafted_rows(door: str, seed: str, file: Path) -> Iterator[Case]:
    """A whole database with the wrong values, tables and triggers in it."""

    def changed(*statements: tuple[str, tuple[Any, ...]]) -> Callable[[Path], None]:
        def spoil(root: Path) -> None:
            with contextlib.closing(sqlite3.connect(root / file.name)) as connection:
                for statement, values in statements:
                    with contextlib.suppress(sqlite3.Error):  # a constraint of the table
                        connection.execute(statement, values)
                connection.commit()

        return spoil

    with contextlib.closing(sqlite3.connect(file)) as connection:
        rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        tables = {table: [row[1] for row in connection.execute(f"PRAGMA table_info({table})")] for (table,) in rows}
    for table, columns in tables.items():
        yield Case(door, seed, f"no table {table}", changed((f"DROP TABLE {table}", ())))
        yield Case(door, seed, f"{table} is empty", changed((f"DELETE FROM {table}", ())))
        yield Case(door, seed, f"a view named {table}", changed(
            (f"DROP TABLE {table}", ()), (f"CREATE VIEW {table} AS SELECT 1 AS key, randomblob(1000) AS value", ()),
        ))  # fmt: skip
        for column in columns:
            for words, value in STRANGE_CELLS.items():
                statement = f"UPDATE OR IGNORE {table} SET {column} = ?"
                yield Case(door, seed, f"{table}.{column} is {words}", changed((statement, (value,))))


def _strange_folders(door: str) -> Iterator[Case]:
    """Names and links that are not ours, in a folder of results."""

    def linked(name: str) -> Callable[[Path], None]:
        def spoil(root: Path) -> None:
            target = root / name
            target.parent.mkdir(exist_ok=True)
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            target.unlink(missing_ok=True)
            target.symlink_to(root.parent / "outside.txt")
            (root.parent / "outside.txt").write_text("mine\n")

        return spoil

    def named(name: str) -> Callable[[Path], None]:
        def spoil(root: Path) -> None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text("1\nnothing\nCu 0 0 0\n")

        return spoil

    names = (
        "results.sqlite", "results.sqlite-wal", "lock", "relaxion-many.json", ".relaxion-many.json.part",
        "progress.json", ".progress.json.part", "summary.csv", ".summary.csv.part",
    )  # fmt: skip
    for name in names:
        yield Case(door, "many", f"{name} is a link to a file outside", linked(name))
    for name in ("results.sqlite-wal", "results.sqlite-journal", "results.sqlite-shm", "shards/00001.extxyz"):
        yield Case(door, "many", f"there is a {name}", named(name))


def _structure_cases(world: World) -> Iterator[Case]:
    folder = world.seed("structures")
    for number, file in enumerate(sorted(folder.iterdir())):
        door = ("relaxion relax FILE", "relax-many FILE")[number % 2]
        seed = f"structures/{file.name}"
        binary = file.suffix in (".traj", ".db", ".gz")
        yield from any_file(door, seed, file, "", flips=18 if binary else 8, cuts=6 if binary else 3)
        if not binary:
            for words, content in spoilt_words(file.read_bytes(), random.Random(seed), 16):
                yield Case(door, seed, words, replaced(content))
    for door in ("relaxion relax FILE", "relax-many FILE"):
        for file in sorted(path for path in world.seed("crafted").rglob("*") if path.is_file()):
            yield Case(door, str(file.relative_to(world.root)), "by hand", _leave)


def _other_cases(world: World) -> Iterator[Case]:
    result = next(path for path in (world.seed("relaxed")).rglob("relaxion.json"))
    inside = str(result.relative_to(world.seed("relaxed")))
    for door in ("relax --force", "relaxion report RESULT"):
        yield from json_file(door, "relaxed", result, inside, 30)
        plain = json.loads(result.read_text())
        for name in ("../outside.txt", "/etc/passwd", "..", ".", "", "a/../../outside.txt", "../../outside.txt"):
            content = json.dumps({**plain, "files": [name, *plain["files"]]}).encode()
            yield Case(door, "relaxed", f"the manifest lists '{name}'", _at(inside, content))
    table = world.seed("table.eam.alloy")
    yield from any_file("eam:FILE", table.name, table, "", flips=16, cuts=8)
    for words, content in spoilt_words(table.read_bytes(), random.Random("table"), 30):
        yield Case("eam:FILE", table.name, words, replaced(content))


def canary_sings(folder: Path) -> bool:
    """Whether something was executed."""
    return (folder / CANARY).exists()
