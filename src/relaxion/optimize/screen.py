"""The screen before a force call: a step must not run two atoms into each other. It costs no call."""

from __future__ import annotations

from dataclasses import replace

import torch

from relaxion.optimize.point import Proposal, longest
from relaxion.potentials.corrector import NEAREST_SHARE, first_touch

SMALLEST_SHARE = 0.1  # of the step is always taken: a call that teaches is better than standing still


def screened(proposal: Proposal) -> Proposal:
    """The same proposal, shortened where it would bring a pair too near; a pair already too near may only part."""
    geometry = proposal.base.geometry
    if geometry is None or len(geometry.bonds.first) == 0:
        return proposal
    bonds = geometry.bonds
    room = float((bonds.lengths - NEAREST_SHARE * bonds.natural_lengths).min())
    if not geometry.cell_factor and 2 * longest(proposal.step) < room:  # the usual case, at a tenth of the cost
        return proposal
    changes = torch.from_numpy(bonds.changes(proposal.step, geometry))
    limits = torch.from_numpy(NEAREST_SHARE * bonds.natural_lengths)
    share = max(float(first_touch(torch.from_numpy(bonds.vectors), changes, limits).min()), SMALLEST_SHARE)
    if share >= 1:
        return proposal
    # a quadratic model along the step, with the full step as its minimum, expects 2t - t² of the whole change
    return replace(proposal, step=share * proposal.step, expected_change=proposal.expected_change * share * (2 - share))
