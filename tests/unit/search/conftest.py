"""One small cluster, and a potential that fails when it is told to."""

from __future__ import annotations

import numpy as np
import pytest
from ase import Atoms

from relaxion.train.tasks.search import alloy_cluster


@pytest.fixture
def cluster() -> Atoms:
    return alloy_cluster(("Ni", "Pd"), 11, 4, np.random.default_rng(3))
