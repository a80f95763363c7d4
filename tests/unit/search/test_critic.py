"""What a critic must not see, learn and forget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms

from relaxion.batch import relax_batch
from relaxion.errors import PolicyError, RelaxionError
from relaxion.files import Stored, digest
from relaxion.search import search
from relaxion.search.choices import SearchSettings
from relaxion.search.critic import Critic, CriticSettings, Hops, batch_of_atoms, batch_of_hops, load_critic, save_critic
from relaxion.search.critic_choice import CriticChoice, quality, targets
from relaxion.search.moves import MOVES, alike
from relaxion.search.run import TrialRelaxer, one_round, shipped_critic
from relaxion.search.walk import Walk
from relaxion.train.recipes import find
from relaxion.train.runs.loop import make_trainer, train
from relaxion.train.tasks import search as learning
from relaxion.train.tasks.search import COLLAPSING, TRAINED, UNSEEN, SearchTrainer, training_cluster
from relaxion.train.tasks.settings import RunSettings, settings_from_recipe


@pytest.fixture(scope="module")
def critic() -> Critic:
    return Critic(CriticSettings(), torch.Generator().manual_seed(0))


def small(**more: Any) -> RunSettings:
    values = {"walks": 1, "assessment_starts": 1, "assessment_interval_steps": 0}
    return settings_from_recipe(find("search-metals"), None, values | more)


@pytest.fixture(scope="module")
def hops() -> Hops:
    trainer = make_trainer(small(walks=2))
    assert isinstance(trainer, SearchTrainer)
    trainer.advance()
    assert trainer.force_calls == 800
    assert trainer.hops is not None
    return trainer.hops


def test_unseen_pairs_are_never_drawn() -> None:
    left_out = {frozenset(pair) for pair in (*UNSEEN, *COLLAPSING)}
    assert len(TRAINED) == 15
    random = np.random.default_rng(0)
    for _ in range(40):
        assert frozenset(training_cluster(random).symbols) not in left_out


def test_a_hop_to_nowhere_changes_nothing_and_frames_do_not_matter(critic: Critic, cluster: Atoms) -> None:
    trial = MOVES["relocate"](cluster, np.arange(len(cluster)), np.random.default_rng(0))
    assert trial is not None
    assert np.abs(critic.changes([cluster], [cluster], [0])).max() < 1e-6
    plain = critic.changes([cluster], [trial], [0])
    order = np.random.default_rng(1).permutation(len(cluster))
    turned = []
    for atoms in (cluster, trial):
        other = atoms[order]
        other.rotate(70, (1, 1, 3))
        other.positions *= -1
        turned.append(other)
    assert np.allclose(critic.changes(turned[:1], turned[1:], [0]), plain, atol=1e-5)
    assert np.abs(plain[0] - plain[1]).max() > 1e-6  # the twins are two


def test_hops_as_arrays_give_the_same_batch_as_atoms(critic: Critic, hops: Hops) -> None:
    chosen = np.array([3, 0, len(hops) - 1])
    minima = [hops.structure(number, trial=False) for number in chosen]
    trials = [hops.structure(number, trial=True) for number in chosen]
    from_arrays = critic(batch_of_hops(hops, chosen))
    from_atoms = critic(batch_of_atoms(minima, trials, [0, 1, 2]))
    assert torch.allclose(from_arrays, from_atoms, atol=1e-5)


def test_targets_by_hand() -> None:
    def rows(values: list[Any], kind: Any) -> np.ndarray:
        return np.array(values, kind)

    three = Hops(
        numbers=np.zeros(0), before=np.zeros((0, 3)), trials=np.zeros((0, 3)), counts=rows([1, 1, 1, 1], np.int32),
        cells=np.zeros((4, 2, 3, 3)), periodic=np.zeros((4, 3), bool),
        changes=rows([0.2, -0.5, np.nan, 0.1], np.float32),
        above_best=np.zeros(4), calls=rows([3, 4, 5, 6], np.int32), walks=rows([0, 0, 0, 1], np.int32),
        accepted=rows([True, True, False, True], bool), kinds=rows(["swap"] * 4, str),
    )  # fmt: skip
    assert np.allclose(targets(three), [0.2, -0.5, 1.0, 0.1])
    # the first hop led to the second, that one to the third, which was rejected; then another walk
    assert three.states.tolist() == [1, 2, 3, 4]
    assert replace(three, accepted=np.zeros(4, bool)).states.tolist() == [1, 1, 1, 2]


def test_hops_are_kept_in_files(hops: Hops) -> None:
    again = Hops.of_tensors(hops.tensors())
    both = Hops.joined([hops, again])
    assert all((getattr(hops, name) == getattr(again, name)).all() for name in ("before", "kinds", "accepted", "cells"))
    assert len(both) == 2 * len(hops)
    assert both.states[-1] == 2 * hops.states[-1]  # walks of the two stay apart
    assert Hops.joined([both, again]).walks.max() + 1 == 3 * (hops.walks.max() + 1)
    assert both.structure(len(hops) + 3, trial=True) == hops.structure(3, trial=True)


def test_a_critic_learns_by_its_command_resumes_exactly_and_chooses_hops(
    cluster: Atoms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "COLLECTIONS", 2)  # twelve, with 400 calls in each search
    monkeypatch.setattr(learning, "WALK_CALLS", 200)
    untrained = make_trainer(small())
    assert isinstance(untrained, SearchTrainer)
    straight = train(small(steps=24), tmp_path / "straight")
    trainer = make_trainer(small(steps=24))
    half = make_trainer(small(steps=24))
    assert isinstance(trainer, SearchTrainer)
    assert isinstance(half, SearchTrainer)
    for _ in range(12):
        half.advance()
    trainer.restore(Stored(half.snapshot(), {}))
    for _ in range(12):
        trainer.advance()
    assert digest(trainer.weights()) == straight.weights_sha256
    assert trainer.hops is not None
    learned = load_critic(tmp_path / "straight" / "critic.safetensors")
    assert quality(learned, trainer.hops)["spearman"] > quality(untrained.used, trainer.hops)["spearman"]
    result = search(cluster, "emt", calls=60, choice=str(tmp_path / "straight"), learn=False)
    assert result.choice == "critic critic"
    assert result.force_calls == 60


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"structures": "metal"}, "metals, al-fe or a file"),
        ({"structures": "nowhere.xyz", "calculator": "emt"}, "no file nowhere.xyz"),
        ({"calculator": "nosuch"}, "unknown potential 'nosuch'"),
    ],
)
def test_a_wrong_training_of_critics_is_refused_before_anything_is_written(
    wrong: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(RelaxionError, match=said):
        train(small(**wrong), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_planned_hops_join_moves_and_never_lead_back(critic: Critic, cluster: Atoms) -> None:
    walk = Walk(cluster, SearchSettings(calls=200), CriticChoice(critic, learn=False))
    one_round([walk], TrialRelaxer("emt", SearchSettings()))
    walker = walk.walkers[0]
    own = walk.draw.look(walker.atoms)
    hops = [hop for hop in (walk.chooser.choose([walker], walk.draw)[0] for _ in range(12)) if hop is not None]
    assert not alike(own, [hop.look for hop in hops])
    moved = [np.abs(hop.trial.positions - walker.atoms.positions).max(axis=1) > 0.01 for hop in hops]
    assert max(int(which.sum()) for which in moved) > 2  # more than a swap
    single = CriticChoice(critic, learn=False, depth=1)
    plain = [single.choose([walker], walk.draw)[0] for _ in range(12)]
    assert all(hop is not None and hop.kind != "several" for hop in plain)


def test_files_of_critics_and_of_other_things(critic: Critic, cluster: Atoms, tmp_path: Path) -> None:
    path = tmp_path / "critic.safetensors"
    save_critic(critic, path, {"elements": [28, 46]})
    trial = cluster.copy()
    trial.rattle(0.1)
    assert (load_critic(path).changes([cluster], [trial], [0]) == critic.changes([cluster], [trial], [0])).all()
    path.write_bytes(b"nonsense")
    with pytest.raises(PolicyError, match="damaged or not"):
        load_critic(path)


def test_a_search_that_learns_is_resumed_exactly(critic: Critic, cluster: Atoms, tmp_path: Path) -> None:
    path = tmp_path / "critic.safetensors"
    save_critic(critic, path, {"elements": [28, 46]})

    class Stop(Exception):
        pass

    def stop(walk: Any) -> None:
        if walk.calls > 140:
            raise Stop

    options: dict[str, Any] = {"calls": 160, "choice": str(path), "candidates": 4}
    straight = search(cluster, "emt", **options)
    with pytest.raises(Stop):
        search(cluster, "emt", folder=tmp_path / "state", on_round=stop, **options)
    resumed = search(cluster, "emt", folder=tmp_path / "state", **options)
    assert resumed.history == straight.history
    assert len(straight.history) > 26  # it has begun to learn


def test_the_critic_that_ships_is_used_where_it_fits_and_ranks_swaps(cluster: Atoms) -> None:
    assert search(cluster, "emt", calls=40).choice == "critic metals"
    one_element = Atoms("Cu6", cluster.positions[:6])
    assert search(one_element, "emt", calls=40).choice == "bandit over kinds"
    path = shipped_critic()
    assert path is not None
    critic = load_critic(path)
    assert path.stat().st_size < 200_000
    random = np.random.default_rng(1)
    minimum = relax_batch([cluster], "emt")[0]
    swaps = [MOVES["swap"](minimum.atoms, np.arange(len(cluster)), random) for _ in range(20)]
    trials = [trial for trial in swaps if trial is not None]
    ends = [relaxed.energy_ev or 0.0 for relaxed in relax_batch(trials, "emt")]
    expected = critic.changes([minimum.atoms], trials, [0] * len(trials)).mean(axis=0)
    assert np.corrcoef(expected, ends)[0, 1] > 0.7
