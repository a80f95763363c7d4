"""Critics learn from hops, whoever chose them: off-policy, the target is what a hop changed."""

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
LOWEST_EV = -2.0
HIGHEST_EV = 1.0  # targets above are cut: how bad a bad hop is does not matter
SEGMENT = 8  # hops of a batch that follow each other in a walk, and share minima
LEARNING_RATE = 2e-3
FINAL_SHARE = 0.01  # of the learning rate, at the end


@dataclass(frozen=True, kw_only=True)
class CriticFitSettings:
    """How critics are trained."""

    updates: int = 8000
    batch: int = 64  # hops
    seed: int = 0


def targets(hops: Hops) -> np.ndarray:
    """(n_hops,) eV; hops that ended in no minimum count as the worst."""
    changes = np.where(np.isnan(hops.changes), HIGHEST_EV, hops.changes).astype(np.float64)
    return np.clip(changes, LOWEST_EV, HIGHEST_EV)


def loss_of(predicted: Tensor, wanted: np.ndarray) -> Tensor:
    """Huber's, both twins on the same hops."""
    aims = torch.from_numpy(wanted).to(predicted.dtype)
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
    critic = critic or Critic(critic_settings or CriticSettings(), generator)
    decay = max(0.0, min(0.998, 1 - 10 / settings.updates))
    averaged = AveragedModel(critic, multi_avg_fn=get_ema_multi_avg_fn(decay))
    parameters = torch.optim.Adam(critic.parameters(), lr=LEARNING_RATE)
    wanted = targets(hops)
    recent, began = 0.0, time.monotonic()
    for update in range(settings.updates):
        share = 0.5 * (1 + math.cos(math.pi * update / settings.updates))
        for group in parameters.param_groups:
            group["lr"] = LEARNING_RATE * (FINAL_SHARE + (1 - FINAL_SHARE) * share)
        chosen = _segments(len(hops), settings, random)
        loss = loss_of(critic(batch_of_hops(hops, chosen)), wanted[chosen])
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
    """Numbers of the hops of a batch: pieces anywhere."""
    length = min(SEGMENT, n_hops)
    starts = random.integers(n_hops - length + 1, size=max(1, settings.batch // length))
    return (starts[:, None] + np.arange(length)).ravel()


@torch.no_grad()
def quality(critic: Critic, hops: Hops, batch: int = 128) -> dict[str, float]:
    """On hops that were not trained on: R² of the change of each kind, the rank correlation over all, and the gain.

    Gain: of minima with four tried hops or more, how far the hop that the critic puts first went down, as a share of
    how far the best one went.
    """
    from scipy.stats import spearmanr

    wanted = targets(hops)
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
