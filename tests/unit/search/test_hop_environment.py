"""The hop environment keeps Gymnasium's rules; its rewards add up to what the search gained."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from ase import Atoms
from gymnasium.utils.env_checker import check_env

from relaxion.errors import SettingsError
from relaxion.search.choices import SearchSettings
from relaxion.train.tasks.search import HopEnvironment, alloy_cluster


def start(random: np.random.Generator) -> Atoms:
    return alloy_cluster(("Ni", "Pd"), 8, 3, random)


def test_rules_rewards_and_the_end_of_an_episode() -> None:
    environment = HopEnvironment(start, n_atoms=8, candidates=4, settings=SearchSettings(calls=60))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # positions have no bounds, which Gymnasium regrets
        check_env(environment, skip_render_check=True)
    _, _ = environment.reset(seed=3)
    assert environment.walk is not None
    first = environment.walk.best_ev
    begun = environment.walk.calls
    total, done, told = 0.0, False, {}
    while not done:
        _, reward, done, truncated, told = environment.step(1)
        assert not truncated
        total += reward
    assert told["force_calls"] == 60
    assert total == pytest.approx(first - told["best_ev"] - 0.001 * (60 - begun))
    with pytest.raises(SettingsError, match="call reset first"):
        environment.step(0)
