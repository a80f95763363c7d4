"""Where a policy's step costs more than a force call, "auto" takes what is quicker in all."""

from __future__ import annotations

import time

import numpy as np
import pytest
from ase.build import bulk
from ase.calculators.emt import EMT

from relaxion import Relaxer
from relaxion import relaxer as relaxer_module


class Slow(EMT):
    """EMT that takes as long as a network would."""

    def calculate(self, *args, **kwargs):
        time.sleep(0.5)
        super().calculate(*args, **kwargs)


class Instant(EMT):
    """EMT that takes no time at all, as the relaxer sees it."""


def relaxed(kind: type[EMT], policy: str | None, monkeypatch: pytest.MonkeyPatch) -> Relaxer:
    monkeypatch.setattr(relaxer_module, "LARGE", 0)
    atoms = bulk("Cu", cubic=True) * (2, 2, 2)
    atoms.symbols[np.random.default_rng(0).random(len(atoms)) < 0.4] = "Au"
    atoms.rattle(0.2, seed=1)
    atoms.calc = kind()
    optimizer = Relaxer(atoms, logfile=None, policy=policy)
    if kind is Instant:  # whatever else the machine does
        monkeypatch.setattr(Relaxer, "_call_seconds", property(lambda _: 0.0, lambda *_: None), raising=False)
    assert optimizer.run(fmax=1e-3)
    return optimizer


@pytest.mark.parametrize(
    ("kind", "policy", "kept"), [(Slow, "auto", True), (Instant, "auto", False), (Instant, "metals", True)]
)
def test_a_policy_slower_than_force_calls_is_left(kind, policy, kept, monkeypatch, caplog):
    caplog.set_level("INFO")
    optimizer = relaxed(kind, policy, monkeypatch)
    assert ("classical optimizer continues" in caplog.text) is not kept
    assert optimizer.policy_used == "metals"
    assert optimizer.policy_steps <= 2 or kept
    assert optimizer.policy_steps > 2 or not kept
