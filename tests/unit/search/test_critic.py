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
from relaxion.errors import PolicyError
from relaxion.search import search
from relaxion.search.choices import Mixture
from relaxion.search.critic import Critic, CriticSettings, batch_of_atoms, batch_of_hops, load_critic, save_critic
from relaxion.search.fitting import CriticFitSettings, fit, quality, targets
from relaxion.search.hops import Hops
from relaxion.search.moves import MOVES
from relaxion.search.run import shipped_critic
from relaxion.train.search.collecting import collect
from relaxion.train.search.families import COLLAPSING, TRAINED, UNSEEN, alloy_cluster, training_cluster


@pytest.fixture(scope="module")
def critic() -> Critic:
    return Critic(CriticSettings(), torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def hops(tmp_path_factory: pytest.TempPathFactory) -> Hops:
    folder = tmp_path_factory.mktemp("hops")

    def start(random: np.random.Generator) -> Atoms:
        return alloy_cluster(("Ni", "Pd"), 10, 4, random)

    moves = {"swap": 0.5, "relocate": 0.3, "rattle": 0.2}
    paths = collect(folder, range(1), start, Mixture, moves, walks=6, calls=40)
    return Hops.load(paths)


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


def test_learning_from_hops_predicts_them_better(hops: Hops) -> None:
    before = quality(Critic(CriticSettings(), torch.Generator().manual_seed(1)), hops)
    after = quality(fit(hops, CriticFitSettings(updates=80, batch=32, seed=1)), hops)
    assert after["spearman"] > max(before["spearman"], 0.2)
    assert after["r2 swap"] > before["r2 swap"]


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
        if walk.calls > 118:
            raise Stop

    options: dict[str, Any] = {"calls": 135, "choice": str(path), "candidates": 4}
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
