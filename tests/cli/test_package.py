"""`relaxion package` and `policies` from outside: a run becomes a policy with a card that is true of it."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from relaxion import policies as library
from relaxion.model.atom_policies import AtomGaussianPolicy
from relaxion.model.policy_file import PolicyFile, policy_of
from relaxion.policies import find_policy
from relaxion.settings import assigned
from relaxion.train.runs.loop import train
from relaxion.train.tasks.progress import CHECKPOINTS
from relaxion.train.tasks.settings import find, read_settings, settings_from_recipe

TINY = {
    "task": "relax", "structures": "alloys:Al-Cu:2-3", "n_pooled": 20, "held_apart": "seed", "n_structures": 4,
    "max_force_calls": 12, "steps": 80, "warmup_steps": 16, "batch_size": 8, "replay_capacity": 100,
    "updates_per_round": 1, "channels": 4, "log_interval_steps": 20, "assessment_interval_steps": 40,
    "assessment_starts": 4, "checkpoint_interval_steps": 40, "seed": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished runs, one of each kind of policy, and one on vectors."""
    folder = tmp_path_factory.mktemp("runs")
    for agent in ("td3", "sac"):
        train(read_settings({**TINY, "agent": agent}), folder / agent)
    vector = {"task": "Pendulum-v1", "agent": "td3", "widths": [4], "steps": 30, "warmup_steps": 8, "batch_size": 8}
    train(read_settings({**vector, "assessment_starts": 1, "log_interval_steps": 10}), folder / "vector")
    return folder


@pytest.fixture(autouse=True)
def own_policies(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RELAXION_POLICIES", str(own_folder / "policies"))
    (own_folder / "shipped").mkdir()
    monkeypatch.setattr(library, "SHIPPED", own_folder / "shipped")
    return own_folder / "policies"


def copied(run: Path, *, without: tuple[str, ...] = ()) -> Path:
    shutil.copytree(run, "copy")
    for name in without:
        (Path("copy") / name).unlink()
    return Path("copy")


def policy_weights(file: Path, kind: str) -> dict[str, torch.Tensor]:
    """Of the policy that the run kept."""
    kept = CHECKPOINTS.read(file, kind).part("kept")
    return {name.removeprefix("policy."): tensor for name, tensor in kept.items() if name.startswith("policy.")}


@pytest.mark.parametrize("agent", ["td3", "sac"])
def test_a_run_becomes_a_policy(relaxion: Callable[..., Any], runs: Path, agent: str) -> None:
    answer = relaxion("package", runs / agent, "mine")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("mine: direct policy for Al Cu, ")
    assert answer.out.count("\n") == 1
    assert sorted(file.name for file in Path("policies").iterdir()) == ["mine.md", "mine.safetensors"]
    bundle = find_policy("mine")
    expected = policy_weights(runs / agent / "agent.safetensors", "relaxion agent")
    assert bundle.policy.weights.keys() == expected.keys()  # no critics, targets or Adam's memory
    assert all(torch.equal(tensor, expected[name]) for name, tensor in bundle.policy.weights.items())
    assert isinstance(policy_of(bundle), AtomGaussianPolicy) == (agent == "sac")


def test_the_card_says_what_the_run_was(relaxion: Callable[..., Any], runs: Path) -> None:
    """Results were measured on the bundle, and must be those of the run."""
    relaxion("package", runs / "td3", "mine")
    card, result = find_policy("mine").card, json.loads((runs / "td3" / "result.json").read_text())
    own, bfgs, fire = card.results
    assert own.mean_force_calls == result["kept_force_calls_mean"]
    assert own.success_rate == result["kept_success_rate"]
    assert card.policy_step == result["kept_step"]
    assert (bfgs.mean_force_calls, fire.mean_force_calls) == (result["force_calls_bfgs"], result["force_calls_fire"])
    for row in card.results:
        assert row.mean_interval_95 is not None
        assert row.mean_interval_95[0] <= row.mean_force_calls <= row.mean_interval_95[1] <= row.largest_force_calls
    assert (card.environment_steps, card.seed, card.agent) == (80, 3, "td3")
    assert (card.wall_time_seconds, card.run_weights_sha256) == (result["wall_time_seconds"], result["weights_sha256"])
    assert (card.elements, card.smallest_n_atoms, card.largest_n_atoms) == (("Al", "Cu"), 2, 3)
    assert (card.potential, card.cells, card.n_assessment_starts) == ("emt", "fixed", 4)
    failed = round(4 * (1 - result["kept_success_rate"]))
    assert card.fails_on[0].startswith(f"{failed} of 4 held-out starts did not" if failed else "None of the 4")
    assert Path("policies/mine.md").read_text() == find_policy("mine").card_text()


def test_the_command_of_the_card_has_the_settings_of_the_run(relaxion: Callable[..., Any], runs: Path) -> None:
    relaxion("package", runs / "sac", "mine")
    card = find_policy("mine").card
    words = shlex.split(card.training_command)
    assert words[:2] == ["relaxion", "train"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    given = assigned([value for name, value in zip(words[3::2], words[4::2], strict=True) if name == "--set"])
    given |= {name.removeprefix("--"): int(options[name]) for name in ("--seed", "--steps") if name in options}
    assert settings_from_recipe(find(words[2]), options.get("--agent"), given).flat() == card.training_settings


def test_a_card_holds_the_recipe_of_its_run(relaxion: Callable[..., Any], runs: Path) -> None:
    relaxion("package", runs / "td3", "mine")
    Path("again.toml").write_text(relaxion("policies", "mine").out.split("```toml\n")[1].split("```")[0])
    expected = read_settings({**TINY, "agent": "td3"})
    assert settings_from_recipe(Path("again.toml"), None, {}).flat() == expected.flat()


def test_results_are_of_what_was_held_apart(relaxion: Callable[..., Any], runs: Path) -> None:
    """Settings were chosen on validation structures; a card is not to shine with those."""
    settings = read_settings({**TINY, "agent": "td3", "assess_on": "validation"})
    train(settings, Path("validated"))
    assert relaxion("package", "validated", "validated").code == 0
    assert relaxion("package", runs / "td3", "plain").code == 0
    validated, plain = find_policy("validated"), find_policy("plain")
    assert validated.weights_sha256 == plain.weights_sha256
    assert validated.card.results == plain.card.results
    assert validated.card.training_settings["assess_on"] == "validation"


def test_an_unfinished_run_gives_its_checkpoint(relaxion: Callable[..., Any], runs: Path) -> None:
    run = copied(runs / "td3", without=("result.json", "agent.safetensors", "baselines.json"))
    assert relaxion("package", run, "mine").code == 0
    bundle = find_policy("mine")
    expected = policy_weights(run / "checkpoint.safetensors", "relaxion checkpoint")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in bundle.policy.weights.items())
    assert (bundle.card.environment_steps, bundle.card.run_weights_sha256) == (80, None)
    baselines = json.loads((runs / "td3" / "baselines.json").read_text())
    assert bundle.card.results[1].mean_force_calls == baselines["BFGS"]["mean_force_calls"]
    assert not (run / "baselines.json").exists()  # a run folder is the run's own


def test_nothing_is_overwritten_unasked(relaxion: Callable[..., Any], runs: Path) -> None:
    relaxion("package", runs / "td3", "mine")
    before = Path("policies/mine.safetensors").read_bytes()
    answer = relaxion("package", runs / "sac", "mine")
    assert answer.code == 1
    assert "mine.safetensors exists; choose another name, or --force" in answer.err
    assert Path("policies/mine.safetensors").read_bytes() == before
    assert relaxion("package", runs / "sac", "mine", "--force").code == 0
    assert find_policy("mine").card.agent == "sac"


def test_a_file_of_its_own(relaxion: Callable[..., Any], runs: Path) -> None:
    answer = relaxion("package", runs / "td3", "mine", "--out", "deep/down/other.safetensors")
    assert answer.code == 0, answer.err
    assert Path("deep/down/other.md").exists()
    assert not Path("policies").exists()
    assert "# mine" in relaxion("policies", "deep/down/other.safetensors").out


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("vector", "mine"), 1, "vector learned Pendulum-v1, which relaxes no atoms; package a run on structures"),
        (("nothing", "mine"), 1, "nothing is not the folder of a run; 'relaxion train' makes one"),
        (("td3", "my metals"), 2, "'my metals' is not a valid name for a policy"),
        (("td3", "../mine"), 2, "'../mine' is not a valid name for a policy"),
        (("td3", "auto"), 2, "'auto' has a special meaning"),
        (("td3", "shipped"), 2, "a policy named 'shipped' ships with relaxion"),
        (("td3", "mine", "--out", "mine.bin"), 2, "--out is a policy file, NAME.safetensors, got mine.bin"),
    ],
)
def test_mistakes(relaxion: Callable[..., Any], runs: Path, words: tuple[str, ...], code: int, sentence: str) -> None:
    Path("shipped/shipped.safetensors").write_bytes(b"")
    answer = relaxion("package", runs / words[0], *words[1:])
    assert (answer.code, answer.out) == (code, "")
    assert sentence in answer.err
    assert answer.err.count("\n") == 1
    assert not Path("policies").exists()


def test_runs_that_have_nothing_to_give(relaxion: Callable[..., Any], runs: Path) -> None:
    run = copied(runs / "td3", without=("result.json", "checkpoint.safetensors"))
    assert "is not finished and has no checkpoint yet" in relaxion("package", run, "mine").err
    shutil.copy(runs / "td3" / "result.json", run)
    (run / "agent.safetensors").write_bytes((runs / "td3" / "agent.safetensors").read_bytes()[:-9])
    answer = relaxion("package", run, "mine")
    assert answer.code == 1
    assert "agent.safetensors is damaged" in answer.err
    early = read_settings({**TINY, "agent": "td3", "warmup_steps": 100, "steps": 8})
    train(early, Path("early"))
    Path("early/result.json").unlink()
    assert "early has learned nothing yet" in relaxion("package", "early", "mine").err
    assert not Path("policies").exists()


def test_the_list(relaxion: Callable[..., Any], runs: Path) -> None:
    assert relaxion("policies").code == 0
    assert "none ships with this relaxion and none is in" in relaxion("policies").err
    relaxion("package", runs / "td3", "mine")
    Path("policies/broken.safetensors").write_bytes(b"nonsense")
    answer = relaxion("policies")
    assert answer.code == 0
    rows = {line.split()[0]: line for line in answer.out.splitlines() if line.strip()}
    assert "direct" in rows["mine"]
    assert "Al Cu" in rows["mine"]
    assert "unreadable" in rows["broken"]
    assert "broken.safetensors is damaged or not a safetensors file" in answer.err
    broken, mine = relaxion("policies", "--json").objects
    assert (broken["name"], "damaged" in broken["error"]) == ("broken", True)
    assert (mine["name"], mine["kind"], mine["elements"], mine["shipped"]) == ("mine", "direct", ["Al", "Cu"], False)
    assert mine["weights_sha256"] == PolicyFile.read(Path("policies/mine.safetensors")).weights_sha256


def test_the_card_of_one(relaxion: Callable[..., Any], runs: Path) -> None:
    relaxion("package", runs / "td3", "mine")
    assert relaxion("policies", "mine").out == Path("policies/mine.md").read_text()
    values = relaxion("policies", "mine", "--json").objects[0]
    assert values["training_settings"]["seed"] == 3
    wrong = relaxion("policies", "mime")
    assert (wrong.code, wrong.out) == (1, "")
    assert "did you mean 'mine'?" in wrong.err
