"""Budgets are kept to the call, seeds and resumed searches repeat exactly, bad input gets a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ase import Atoms
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms

import relaxion
from relaxion.errors import FileError, PotentialError, RestartError, SettingsError, StructureError
from relaxion.search import SearchResult, search
from relaxion.search.choices import Draw, Hop, Mixture, PossibleHop, SearchSettings, Walker
from relaxion.search.moves import Distances, swap
from relaxion.search.run import TrialRelaxer, one_round
from relaxion.search.state import NAME
from relaxion.search.walk import EVAPORATED, FAILED, RESTART, RESTART_HOPS, UNFINISHED, Walk, bond_graph


class Counting(EMT):
    """ASE's EMT; counts, and fails at some calls."""

    def __init__(self, failing: range = range(0)) -> None:
        super().__init__()
        self.made = 0
        self.failing = failing

    def calculate(self, *values: Any, **options: Any) -> None:
        self.made += 1
        if self.made in self.failing:
            raise RuntimeError("the machine is on fire")
        super().calculate(*values, **options)


def told(result: SearchResult) -> list[Any]:
    return [result.force_calls, [m.energy_ev for m in result.found], result.history]


def test_the_room_can_be_called_and_finds_lower_minima_within_its_budget(cluster: Atoms) -> None:
    result = relaxion.search(cluster, "emt", calls=120, seed=1)
    assert result.force_calls == 120
    assert "120 force calls are spent" in result.stopped
    energies = [atoms.get_potential_energy() for atoms in result.minima]
    assert energies == sorted(energies)
    assert energies[0] < result.history[0].best_ev
    assert all(np.abs(atoms.get_forces()).max() < 0.05 for atoms in result.minima)
    assert sum(step.hop_calls for step in result.history) == 120
    assert sum(minimum.times_found for minimum in result.found) == sum(s.energy_ev is not None for s in result.history)


def test_every_force_call_is_counted_failures_too(cluster: Atoms) -> None:
    calculator = Counting(failing=range(60, 64))
    result = search(cluster, calculator, calls=100, walkers=3, choice="mixture")
    assert result.force_calls == calculator.made == 100
    assert sum(step.outcome == FAILED for step in result.history) == 4
    assert result.found


def test_a_calculator_that_fails_for_good_ends_the_search_and_keeps_what_was_found(cluster: Atoms) -> None:
    calculator = Counting(failing=range(50, 10_000))
    result = search(cluster, calculator, calls=400, choice="bandit")
    assert "failed 20 times in a row" in result.stopped
    assert "on fire" in result.stopped
    assert result.found
    with pytest.raises(PotentialError, match=r"the start could not be relaxed: .*on fire"):
        search(cluster, Counting(failing=range(1, 10_000)), calls=50)


def test_the_same_seed_twice_and_another_seed(cluster: Atoms) -> None:
    first, second, other = (search(cluster, "emt", calls=60, seed=seed, choice="bandit") for seed in (4, 4, 5))
    assert told(first) == told(second)
    assert told(first) != told(other)


@pytest.mark.parametrize("choice", ["mixture", "bandit"])
def test_stopped_and_resumed_is_the_same_as_straight(choice: str, cluster: Atoms, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(walk: Any) -> None:
        if walk.calls > 45:
            raise Stop

    straight = search(cluster, "emt", calls=80, walkers=2, seed=2, choice=choice)
    with pytest.raises(Stop):
        search(cluster, "emt", calls=80, walkers=2, seed=2, choice=choice, folder=tmp_path, on_round=stop)
    resumed = search(cluster, "emt", calls=80, walkers=2, seed=2, choice=choice, folder=tmp_path)
    assert told(straight) == told(resumed)
    more = search(cluster, "emt", calls=90, walkers=2, seed=2, choice=choice, folder=tmp_path)
    assert more.force_calls == 90
    with pytest.raises(FileError, match="belongs to another search"):
        search(cluster, "emt", calls=80, walkers=2, seed=3, choice=choice, folder=tmp_path)
    (tmp_path / NAME).write_bytes((tmp_path / NAME).read_bytes()[:-9])
    with pytest.raises(RestartError, match="damaged"):
        search(cluster, "emt", calls=90, walkers=2, seed=2, choice=choice, folder=tmp_path)


def test_no_trial_is_relaxed_twice_from_one_minimum_while_there_are_others(cluster: Atoms) -> None:
    random = np.random.default_rng(0)
    walker = Walker(cluster, 0.0, 0, 0.0, random)
    free = np.arange(len(cluster))
    tried: dict[int, list[np.ndarray]] = {0: []}
    draw = Draw({"swap": swap}, {"swap": 1.0}, free, Distances.of(cluster).scale, tried)
    for _ in range(12):
        hop = draw.one(walker)
        assert hop is not None
        assert draw.is_new(hop, walker)
        tried[0].append(hop.look)
        turned = hop.trial[random.permutation(len(cluster))]
        turned.rotate(40, (1, 2, 3))
        assert not draw.is_new(PossibleHop("swap", turned, Distances.of(turned).look(turned.numbers)), walker)
    assert draw.is_new(hop, Walker(cluster, 0.0, 1, 0.0, random))
    dimer = Atoms("CuAu", [(0, 0, 0), (0, 0, 2.5)])
    only = Draw({"swap": swap}, {"swap": 1.0}, np.arange(2), 1.0, {0: [Distances.of(dimer).look(dimer.numbers)]})
    assert only.one(Walker(dimer, 0.0, 0, 0.0, random)) is not None  # better than none


def test_stops_without_progress_and_by_time(cluster: Atoms) -> None:
    result = search(cluster, "emt", calls=5000, patience_calls=40, choice="mixture")
    assert "no lower minimum" in result.stopped
    assert result.force_calls < 5000
    assert search(cluster, "emt", calls=5000, seconds=0.05, choice="mixture").stopped == "0.05 s are over"


def test_constraints_are_kept_and_the_start_is_not_changed(cluster: Atoms) -> None:
    cluster.set_constraint(FixAtoms([0, 5]))
    before = cluster.positions.copy()
    result = search(cluster, "emt", calls=60, choice="mixture")
    assert (cluster.positions == before).all()
    assert len(result.minima) > 1
    for atoms in result.minima:
        assert (atoms.positions[[0, 5]] == before[[0, 5]]).all()
        assert len(atoms.constraints) == 1


def test_a_budget_below_one_relaxation_is_said_and_nothing_is_lost(cluster: Atoms) -> None:
    result = search(cluster, "emt", calls=2)
    assert result.force_calls == 2
    assert result.minima == []
    assert "2 force calls did not relax the start" in result.stopped
    assert result.unfinished is not None


def evaporate(atoms: Atoms, free: np.ndarray, random: np.random.Generator) -> Atoms:
    """A move that takes an atom away."""
    trial = atoms.copy()
    trial.positions[int(random.choice(free))] += 25.0
    return trial


def test_fragments_that_evaporate_are_no_minima(cluster: Atoms) -> None:
    result = search(cluster, "emt", calls=60, moves={f"{__name__}:evaporate": 1.0})
    assert {step.outcome for step in result.history[1:]} <= {EVAPORATED, UNFINISHED}
    assert len(result.minima) == 1


@pytest.mark.parametrize(
    ("atoms", "options", "words"),
    [
        (Atoms("Cu"), {}, "one atom has one minimum"),
        (Atoms(), {}, "no atoms"),
        (Atoms("Cu2", [[0, 0, 0], [0, 0, 2.5]], constraint=FixAtoms([0, 1])), {}, "constraints hold all 2 atoms"),
        (Atoms("Cu2", [[0, 0, 0], [0, 0, 2.5]]), {"moves": ["swap"]}, "all free atoms are Cu"),
        (Atoms("Cu2", [[0, 0, 0], [0, 0, 2.5]]), {"calls": 0}, "calls is 1 or more"),
        (Atoms("Cu2", [[0, 0, 0], [0, 0, 2.5]]), {"hops": 3}, "unknown setting 'hops'"),
        (Atoms("Cu2", [[0, 0, 0], [0, 0, 2.5]]), {"choice": "oracle"}, "choice is one of auto"),
        (Atoms("Cu2", [[0, 0, 0], [0, 0, 2.5]]), {"temperature_ev": 0.0}, "temperature_ev is above 0"),
    ],
)
def test_bad_input_gets_a_sentence(atoms: Atoms, options: dict[str, Any], words: str) -> None:
    with pytest.raises((StructureError, SettingsError), match=words):
        search(atoms, "emt", **options)


def test_without_a_potential_it_says_so(cluster: Atoms) -> None:
    with pytest.raises(SettingsError, match="no potential"):
        search(cluster)


def test_with_a_cheaper_potential_hops_begin_at_its_minima(cluster: Atoms) -> None:
    cheap = Counting()
    result = search(cluster, "emt", calls=30, candidates=4, model=cheap)
    assert result.force_calls == 30  # those of the model are not among them
    assert cheap.made > 100
    assert result.choice == "model"
    hops = result.history[1:]
    # a perfect model leaves one call for each hop, and the best candidate is lower than the start at once
    assert np.mean([step.hop_calls for step in hops]) < 1.5
    assert hops[1].best_ev < result.history[0].best_ev - 0.1
    again = search(cluster, "emt", calls=30, candidates=4, model=EMT())
    assert told(again) == told(result)


def test_a_hop_to_a_known_minimum_costs_no_call(cluster: Atoms) -> None:
    walk = Walk(cluster, SearchSettings(calls=200, moves={"swap": 1.0}, temperature_ev=10.0), Mixture())
    relax = TrialRelaxer("emt", SearchSettings())
    while len(walk.history) < 8:
        one_round([walk], relax)
    walker, calls = walk.walkers[0], walk.calls
    other = next(n for n in range(len(walk.minima)) if n != walker.minimum)
    known = walk.minima.found[other]
    hop = PossibleHop("swap", known.atoms.copy(), Distances.of(known.atoms).look(known.atoms.numbers))
    asked = walk.ask([hop])
    assert walk.calls == calls
    assert len(asked) == 1  # another hop, chosen where the walker went
    assert walk.minima.with_graph(bond_graph(asked[0].atoms)) is None
    assert walker.minimum == other or walker.energy_ev == known.energy_ev  # at 100 000 K every hop is accepted


def test_environments_and_collections_relax_known_minima_again(cluster: Atoms) -> None:
    walk = Walk(cluster, SearchSettings(calls=200, moves={"swap": 1.0}), Mixture())
    walk.is_plain = True
    one_round([walk], TrialRelaxer("emt", SearchSettings()))
    again = walk.minima.found[0].atoms
    hop = PossibleHop("swap", again, Distances.of(again).look(again.numbers))
    assert [trial.atoms for trial in walk.ask([hop])] == [again]


@pytest.mark.parametrize("plain", [False, True])
def test_a_walker_that_finds_nothing_lower_begins_anew(cluster: Atoms, plain: bool) -> None:
    learned: list[str] = []

    class Noting(Mixture):
        def learn(self, hop: Hop) -> None:
            learned.append(hop.kind)

    walk = Walk(cluster, SearchSettings(calls=400, temperature_ev=1e-9), Noting())
    walk.is_plain = plain
    relax = TrialRelaxer("emt", SearchSettings())
    one_round([walk], relax)
    walker = walk.walkers[0]
    walker.idle_hops = RESTART_HOPS
    walker.best_ev = -100.0
    one_round([walk], relax)
    step = walk.history[-1]
    if plain:
        assert step.kind != RESTART
        assert walker.idle_hops == RESTART_HOPS + 1
        return
    assert step.kind == RESTART
    assert step.accepted  # however high it is
    assert (walker.idle_hops, walker.best_ev) == (0, step.energy_ev)
    assert learned == []  # so long a way is no hop to learn from
    assert walk.best_ev <= walk.history[0].best_ev
