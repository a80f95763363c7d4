"""Train a critic: `python benchmarks/search/fit_critic.py OUT.safetensors SEED UPDATES HOPS.npz...`.

The last file of hops is kept apart: on it the R² of each kind is printed. A critic that exists is left as it is.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path

import numpy as np
import torch

from relaxion.search.critic import save_critic
from relaxion.search.fitting import CriticFitSettings, fit, quality
from relaxion.search.hops import Hops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("updates", type=int)
    parser.add_argument("hops", type=Path, nargs="+")
    parser.add_argument("--gamma", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    told = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    if told.out.exists():
        return
    *used, apart = sorted(told.hops)
    hops = Hops.load(used)
    settings = CriticFitSettings(
        updates=told.updates, batch=told.batch, seed=told.seed, discount_factor=told.gamma, n_steps=told.steps
    )
    began = time.monotonic()
    critic = fit(hops, settings)
    seen = quality(critic, Hops.load([apart]))
    card = {
        "elements": sorted(set(hops.numbers.tolist())),
        "periodic": bool(hops.periodic.any()),
        "hops": len(hops),
        "updates": told.updates,
        "batch": told.batch,
        "seed": told.seed,
        "discount_factor": told.gamma,
        "potential": "emt",
        "sizes": [int(np.min(hops.counts)), int(np.max(hops.counts))],
        "seconds": round(time.monotonic() - began),
        "quality_on_hops_kept_apart": {name: round(value, 3) for name, value in seen.items()},
    }
    save_critic(critic, told.out, card)
    print(json.dumps(card))


if __name__ == "__main__":
    main()
