"""The gate's task: what a relaxer would do, seen as a control task."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from relaxion import potential
from relaxion.classical.guard import OBSERVATION
from relaxion.classical.knobs import N_KNOBS
from relaxion.classical.springs import SpringMetric, SpringSettings
from relaxion.errors import StructureError
from relaxion.experience.gate_environment import GateEnvironment, GateTaskSettings
from relaxion.training.metric_starts import MetalStarts

NEUTRAL = np.array([0, 0, -1, -1], dtype=np.float32)  # the metric as it is


class Springs(SpringMetric):
    """A metric that needs no training."""

    def solve(self, forces, extra_floor=0.0):
        del extra_floor
        return super().solve(forces)


def springs(point, _past):
    return Springs(point.geometry, SpringSettings(stiffness=2.0))


def environment(settings: GateTaskSettings | None = None, free_share: float = 0.5) -> GateEnvironment:
    starts = MetalStarts(sizes=(2, 6), free_share=free_share)
    return GateEnvironment([(potential("emt"), starts)], springs, settings)


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
    start = np.log10(world.base.largest_force) + 2
    steps = played(world, 5)
    assert sum(step[1] for step in steps) == pytest.approx(-len(steps) + 2.0 * start)


def test_a_relaxation_is_cut_without_being_called_converged():
    world = environment(GateTaskSettings(gate_max_force_calls=2))
    world.reset(seed=2)
    *_, converged, cut, _ = world.step(np.array([-1, -1, -1, 1], dtype=np.float32))  # crawling
    assert (converged, cut) == (False, True)


def test_knobs_matter():
    """Crawling needs more calls."""
    settings = GateTaskSettings(lowest_tolerance_ev_per_angstrom=0.05)
    quick = len(played(environment(settings), 11))
    slow = len(played(environment(settings), 11, np.array([-1, -1, -1, 1], dtype=np.float32)))
    assert slow > quick


def test_starts_out_of_reach_are_refused_in_a_sentence():
    world = GateEnvironment([(potential("emt"), MetalStarts(sizes=(2, 4)))], lambda *_: None)
    with pytest.raises(StructureError, match="no start out of 50"):
        world.reset(seed=0)
