"""The gate's task: what a relaxer would do, seen as a control task."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from relaxion import potential
from relaxion.errors import StructureError
from relaxion.experience.gate_environment import GateEnvironment, GateTaskSettings
from relaxion.generators.metals import MetalStarts
from relaxion.optimize.gate import N_KNOBS
from relaxion.optimize.guard import OBSERVATION, Guard
from relaxion.optimize.quasi_newton import QuasiNewtonSettings
from relaxion.optimize.springs import SpringMetric, SpringSettings
from relaxion.optimize.stepper import Stepper
from relaxion.training.metals_assessment import force_calls

NEUTRAL = np.zeros(N_KNOBS, dtype=np.float32)  # the hand-made rule
CRAWL = np.array([-1, -1, 0, 1, 0], dtype=np.float32)


class Springs(SpringMetric):
    """A metric that needs no training."""

    def solve(self, forces, extra_floor=0.0):
        del extra_floor
        return super().solve(forces)


def springs(point, _past):
    return Springs(point.geometry, SpringSettings(stiffness=2.0))


def environment(settings: GateTaskSettings | None = None, free_share: float = 0.5) -> GateEnvironment:
    starts = MetalStarts(sizes=(2, 6), free_share=free_share)
    return GateEnvironment([(potential("emt"), starts, 1.0)], springs, settings)


def played(world: GateEnvironment, seed: int, action=NEUTRAL) -> list[tuple]:
    world.reset(seed=seed)
    steps = []
    while not steps or not (steps[-1][2] or steps[-1][3]):
        steps.append(world.step(action))
    return steps


@pytest.mark.filterwarnings("ignore:.*we recommend using a symmetric and normalized space.*")
def test_gymnasium_finds_nothing_wrong():
    check_env(environment(), skip_render_check=True)


def test_it_repeats_itself_from_seed_and_actions():
    world = environment()
    first, again = played(world, 3), played(world, 3)
    assert len(first) == len(again) > 1
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        assert one[1:4] == other[1:4]


def test_every_step_is_one_force_call_and_the_end_is_below_the_tolerance():
    world = environment()
    emt = world.worlds[0][0].potential
    world.reset(seed=1)
    before, steps = emt.calls, 0
    while True:
        *_, converged, cut, info = world.step(NEUTRAL)
        steps += 1
        if converged or cut:
            break
    assert emt.calls - before == steps == info["force_calls"] - 1
    assert converged
    assert world.point.largest_force < world.tolerance <= 0.05
    assert world.observation.shape == (len(OBSERVATION),)
    assert world.action_space.shape == (N_KNOBS,)


def test_rewards_add_up_to_calls_and_decades():
    """With γ = 1 shaping telescopes: what is left is minus the calls and the decades at the start."""
    world = environment(GateTaskSettings(discount_factor=1.0, shaping=2.0))
    world.reset(seed=5)
    start = np.log10(world.base.largest_force / world.tolerance)
    steps = played(world, 5)
    assert sum(step[1] for step in steps) == pytest.approx(-len(steps) + 2.0 * start)


def test_a_relaxation_is_cut_without_being_called_converged():
    world = environment(GateTaskSettings(gate_max_force_calls=2))
    world.reset(seed=2)
    *_, converged, cut, _ = world.step(CRAWL)  # crawling
    assert (converged, cut) == (False, True)


def test_knobs_matter():
    """Crawling needs more calls."""
    settings = GateTaskSettings(lowest_tolerance_ev_per_angstrom=0.05)
    quick = len(played(environment(settings), 11))
    slow = len(played(environment(settings), 11, CRAWL))
    assert slow > quick


def test_the_neutral_action_is_the_guard_with_its_hand_made_rule():
    """The same calls as the chain that a relaxer would use, so what an agent begins with is what ships."""
    world = environment(GateTaskSettings(lowest_tolerance_ev_per_angstrom=0.05), free_share=0.0)
    for seed in range(3):
        world.reset(seed=seed)
        atoms, settings = world.target.copy(), QuasiNewtonSettings()
        atoms.calc = world.target.calc
        chain = Stepper(settings, quasi_newton=Guard(settings, springs))
        assert force_calls(atoms, chain, world.tolerance) == len(played(world, seed)) + 1


def test_worlds_are_drawn_as_often_as_their_shares_say():
    emt, starts = potential("emt"), MetalStarts(sizes=(2, 4))
    other = MetalStarts(elements=("Fe",), sizes=(2, 4))
    world = GateEnvironment([(emt, starts, 3.0), (potential("eam"), other, 1.0)], springs)
    iron = [bool((world.reset(seed=seed), (world.base.geometry.numbers == 26).all())[1]) for seed in range(40)]
    assert 4 <= sum(iron) <= 16


def test_mistrust_of_one_relaxation_does_not_reach_the_next():
    world = environment()
    world.guard.disappointments = 3
    world.reset(seed=4)
    assert world.guard.disappointments == 0


def test_starts_out_of_reach_are_refused_in_a_sentence():
    world = GateEnvironment([(potential("emt"), MetalStarts(sizes=(2, 4)), 1.0)], lambda *_: None)
    with pytest.raises(StructureError, match="no start out of 50"):
        world.reset(seed=0)
