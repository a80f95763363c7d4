"""The screen before a force call: a step must not run two atoms into each other. It costs no call."""

from __future__ import annotations

from dataclasses import replace

import torch

from relaxion.optimize.point import Proposal, longest
from relaxion.optimize.springs import Bonds
from relaxion.potentials.corrector import Nearest, first_touch

NEAREST = Nearest(share_of_radii=0.55)  # shorter bonds hardly exist, and forces there say little of the rest
SMALLEST_SHARE = 0.1  # of the step is always taken: a call that teaches is better than standing still


def screened(proposal: Proposal, bonds: Bonds | None) -> Proposal:
    """The same proposal, shortened where it would bring a pair too near; a pair already too near may only part."""
    geometry = proposal.base.geometry
    if geometry is None or bonds is None or len(bonds.first) == 0:
        return proposal
    limits = NEAREST.limits(torch.from_numpy(bonds.natural_lengths))
    room = float((bonds.lengths - limits.numpy()).min())
    if not geometry.cell_factor and 2 * longest(proposal.step) < room:  # the usual case, at a tenth of the cost
        return proposal
    changes = torch.from_numpy(bonds.changes(proposal.step, geometry))
    share = max(float(first_touch(torch.from_numpy(bonds.vectors), changes, limits).min()), SMALLEST_SHARE)
    if share >= 1:
        return proposal
    # a quadratic model along the step, with the full step as its minimum, expects 2t - t² of the whole change
    return replace(proposal, step=share * proposal.step, expected_change=proposal.expected_change * share * (2 - share))
