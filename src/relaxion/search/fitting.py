"""Critics learn from hops, whoever chose them: off-policy.

With a discount factor of 0 the target is what a hop changed. Above 0 it is discrete soft actor-critic: the discounted
changes of the next n hops of the walk, then the soft value of the minimum where it stood, from the more cautious of two
target critics, -τ log mean exp(-Q/τ) over the hops that the walk tried there. Rejected hops lead nowhere.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from relaxion.search.critic import Critic, CriticSettings, batch_of_hops
from relaxion.search.hops import Hops

logger = logging.getLogger(__name__)
LOWEST_EV = -2.0
SEGMENT = 8  # hops of a batch that follow each other in a walk, and share minima
LEARNING_RATE = 2e-3
FINAL_SHARE = 0.01  # of the learning rate, at the end
TEMPERATURE_EV = 0.05  # τ of the policy whose values are learned
TARGET_UPDATE_RATE = 0.005


@dataclass(frozen=True, kw_only=True)
class CriticFitSettings:
    """How critics are trained."""

    updates: int = 8000
    batch: int = 64  # hops
    discount_factor: float = 0.0
    n_steps: int = 1
    hop_cost_ev: float = 0.0  # added for every force call of a hop
    seed: int = 0


def targets(hops: Hops, highest_ev: float, cost_ev: float = 0.0) -> np.ndarray:
    """(n_hops,) eV, of a discount factor of 0; hops that ended in no minimum count as the worst."""
    changes = np.where(np.isnan(hops.changes), highest_ev, hops.changes).astype(np.float64)
    return np.clip(changes + cost_ev * hops.calls, LOWEST_EV, highest_ev)


def soft_targets(hops: Hops, segments: np.ndarray, expected: np.ndarray, settings: CriticFitSettings) -> np.ndarray:
    """(n_segments · length,) eV; NaN where nothing follows the hop.

    segments: (n_segments, length), numbers of hops that follow each other. expected: Q of these hops by the target
    critics.
    """
    changes = np.where(hops.accepted, np.nan_to_num(hops.changes), 0.0)
    rewards = (changes + settings.hop_cost_ev * hops.calls)[segments]
    walks = hops.walks[segments]
    values = _soft_values(hops.states[segments.ravel()], expected)
    values = values.reshape(segments.shape)
    found = np.full(segments.shape, np.nan)
    length = segments.shape[1]
    for first in range(length):
        total = np.zeros(len(segments))
        for last in range(first + 1, min(first + settings.n_steps + 1, length)):
            factor = settings.discount_factor ** (last - first - 1)
            total = total + factor * rewards[:, last - 1]
            bootstrapped = total + factor * settings.discount_factor * values[:, last]
            found[:, first] = np.where(walks[:, last] == walks[:, first], bootstrapped, found[:, first])
    return np.clip(found.ravel(), 2 * LOWEST_EV, None)


def _soft_values(states: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """-τ log mean exp(-Q/τ) over the hops of each state, for every hop."""
    _, places = np.unique(states, return_inverse=True)
    lowest = np.full(places.max() + 1, np.inf)
    np.minimum.at(lowest, places, expected)
    means = np.bincount(places, np.exp((lowest[places] - expected) / TEMPERATURE_EV)) / np.bincount(places)
    return (lowest - TEMPERATURE_EV * np.log(means))[places]


def loss_of(predicted: Tensor, wanted: np.ndarray) -> Tensor:
    """Huber's, both twins on the same hops; hops whose target is NaN are left out."""
    known = ~np.isnan(wanted)
    aims = torch.from_numpy(wanted[known]).to(predicted.dtype)
    predicted = predicted[:, torch.from_numpy(known)]
    return torch.nn.functional.huber_loss(predicted, aims.expand_as(predicted), delta=0.2)


def fit(
    hops: Hops,
    settings: CriticFitSettings,
    critic_settings: CriticSettings | None = None,
    critic: Critic | None = None,
    report: Callable[[int, float], None] | None = None,
) -> Critic:
    """Train a new critic, or go on with one. The learning rate falls as a cosine.

    The critic returned is the mean of the parameters over the last part of the training, which is steadier than the
    last ones.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    random = np.random.default_rng([settings.seed, 7])
    critic = critic or Critic(critic_settings or CriticSettings(values=settings.discount_factor > 0), generator)
    decay = max(0.0, min(0.998, 1 - 10 / settings.updates))
    averaged = AveragedModel(critic, multi_avg_fn=get_ema_multi_avg_fn(decay))
    parameters = torch.optim.Adam(critic.parameters(), lr=LEARNING_RATE)
    wanted = targets(hops, critic.settings.highest_ev, settings.hop_cost_ev)
    slow = copy.deepcopy(critic) if settings.discount_factor > 0 else None
    recent, began = 0.0, time.monotonic()
    for update in range(settings.updates):
        share = 0.5 * (1 + math.cos(math.pi * update / settings.updates))
        for group in parameters.param_groups:
            group["lr"] = LEARNING_RATE * (FINAL_SHARE + (1 - FINAL_SHARE) * share)
        segments = _segments(len(hops), settings, random)
        batch = batch_of_hops(hops, segments.ravel())
        if slow is None:
            loss = loss_of(critic(batch), wanted[segments.ravel()])
        else:
            with torch.no_grad():  # of the twins the one that expects less of a hop
                expected = slow.returns(batch).amax(dim=0).double().numpy()
            loss = loss_of(critic.returns(batch), soft_targets(hops, segments, expected, settings))
            with torch.no_grad():
                for old, new in zip(slow.parameters(), critic.parameters(), strict=True):
                    old.lerp_(new, TARGET_UPDATE_RATE)
        parameters.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
        parameters.step()
        averaged.update_parameters(critic)
        recent += loss.detach().item()
        if (update + 1) % 500 == 0:
            logger.info("update %d: loss %.5f, %.0f s", update + 1, recent / 500, time.monotonic() - began)
            if report is not None:
                report(update + 1, recent / 500)
            recent = 0.0
    critic.load_state_dict(averaged.module.state_dict())
    return critic


def _segments(n_hops: int, settings: CriticFitSettings, random: np.random.Generator) -> np.ndarray:
    """(n_segments, length) numbers of the hops of a batch: pieces anywhere."""
    length = min(SEGMENT, n_hops)
    starts = random.integers(n_hops - length + 1, size=max(1, settings.batch // length))
    return starts[:, None] + np.arange(length)


@torch.no_grad()
def quality(critic: Critic, hops: Hops, batch: int = 128) -> dict[str, float]:
    """On hops that were not trained on: R² of the change of each kind, the rank correlation over all, and the gain.

    Gain: of minima with four tried hops or more, how far the hop that the critic puts first went down, as a share of
    how far the best one went.
    """
    from scipy.stats import spearmanr

    wanted = targets(hops, critic.settings.highest_ev)
    parts = [np.arange(first, min(first + batch, len(hops))) for first in range(0, len(hops), batch)]
    predicted = np.concatenate([critic(batch_of_hops(hops, part)).mean(dim=0).numpy() for part in parts])
    found = {"spearman": float(np.asarray(spearmanr(predicted, wanted))[0])}
    drops = np.maximum(-np.nan_to_num(hops.changes), 0)
    first, best = 0.0, 0.0
    for own in np.split(np.arange(len(hops)), np.flatnonzero(np.diff(hops.states)) + 1):
        if len(own) >= 4:
            first += drops[own[np.argmin(predicted[own])]]
            best += drops[own].max()
    found["gain"] = float(first / max(best, 1e-12))
    for kind in sorted(set(hops.kinds.tolist())):
        own = hops.kinds == kind
        spread = float(((wanted[own] - wanted[own].mean()) ** 2).mean())
        found[f"r2 {kind}"] = 1 - float(((wanted[own] - predicted[own]) ** 2).mean()) / max(spread, 1e-12)
    return found
