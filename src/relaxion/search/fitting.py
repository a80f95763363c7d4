"""Critics learn from hops, whoever chose them: off-policy, the target is what a hop really changed.

With a discount factor of 0 that is the whole return. With one above 0 the lowest minimum of the next hops of the same
walk, each one discounted, takes its place (n-step).
"""

from __future__ import annotations

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
HIGHEST_EV = 1.0  # targets above are cut: how bad a bad hop is does not matter
LOWEST_EV = -2.0


@dataclass(frozen=True, kw_only=True)
class CriticFitSettings:
    """How critics are trained."""

    updates: int = 8000
    batch: int = 64  # hops
    learning_rate: float = 2e-3
    final_rate: float = 2e-5
    discount_factor: float = 0.0
    n_steps: int = 1
    hop_cost_ev: float = 0.0  # added for every force call of a hop
    seed: int = 0


def targets(hops: Hops, settings: CriticFitSettings) -> np.ndarray:
    """(n_hops,) eV; NaN where a hop ended in no minimum and nothing can be said."""
    changes = hops.changes.astype(np.float64)
    reached = np.where(np.isnan(changes), HIGHEST_EV, changes)
    total = reached + settings.hop_cost_ev * hops.calls
    if settings.discount_factor > 0:
        total = total + _later(hops, settings)
    return np.clip(total, LOWEST_EV, HIGHEST_EV)


def _later(hops: Hops, settings: CriticFitSettings) -> np.ndarray:
    """Discounted changes of the next n-1 hops of the walk where a hop was accepted; rejected hops lead nowhere."""
    steps = np.where(hops.accepted, np.nan_to_num(hops.changes.astype(np.float64)), 0.0)
    later = np.zeros(len(hops))
    for ahead in range(1, settings.n_steps):
        same = np.zeros(len(hops), bool)
        same[:-ahead] = hops.walks[:-ahead] == hops.walks[ahead:]
        gained = np.zeros(len(hops))
        gained[:-ahead] = steps[ahead:]
        later += settings.discount_factor**ahead * np.where(same & hops.accepted, gained, 0.0)
    return later


def loss_of(critic: Critic, hops: Hops, chosen: np.ndarray, wanted: np.ndarray) -> Tensor:
    """Huber's, both twins on the same hops."""
    predicted = critic(batch_of_hops(hops, chosen))
    aims = torch.from_numpy(wanted[chosen]).to(predicted.dtype).expand_as(predicted)
    return torch.nn.functional.huber_loss(predicted, aims, delta=0.2)


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
    critic = critic or Critic(critic_settings or CriticSettings(), generator)
    decay = max(0.0, min(0.998, 1 - 10 / settings.updates))
    averaged = AveragedModel(critic, multi_avg_fn=get_ema_multi_avg_fn(decay))
    parameters = torch.optim.Adam(critic.parameters(), lr=settings.learning_rate)
    wanted = targets(hops, settings)
    recent, began = 0.0, time.monotonic()
    for update in range(settings.updates):
        share = 0.5 * (1 + math.cos(math.pi * update / settings.updates))
        for group in parameters.param_groups:
            group["lr"] = settings.final_rate + (settings.learning_rate - settings.final_rate) * share
        loss = loss_of(critic, hops, random.integers(len(hops), size=settings.batch), wanted)
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


@torch.no_grad()
def quality(critic: Critic, hops: Hops, batch: int = 128) -> dict[str, float]:
    """R² of the change of each kind, and the rank correlation over all; on hops that were not trained on."""
    from scipy.stats import spearmanr

    wanted = targets(hops, CriticFitSettings())
    parts = [np.arange(first, min(first + batch, len(hops))) for first in range(0, len(hops), batch)]
    predicted = np.concatenate([critic(batch_of_hops(hops, part)).mean(dim=0).numpy() for part in parts])
    found = {"spearman": float(np.asarray(spearmanr(predicted, wanted))[0])}
    for kind in sorted(set(hops.kinds.tolist())):
        own = hops.kinds == kind
        spread = float(((wanted[own] - wanted[own].mean()) ** 2).mean())
        found[f"r2 {kind}"] = 1 - float(((wanted[own] - predicted[own]) ** 2).mean()) / max(spread, 1e-12)
    return found
