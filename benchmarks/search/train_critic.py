"""A critic from nothing: `python benchmarks/search/train_critic.py metals OUT.safetensors --seed 0`.

Collects hops (files that exist are used as they are, so a stopped run goes on) and fits. The first file is kept apart:
on it the R² of each kind is printed. Families: metals, al-fe, al-fe-cell.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relaxion.search.choices import HopChooser, Mixture
from relaxion.search.critic import CriticSettings, Hops, load_critic, save_critic
from relaxion.search.critic_choice import CriticChoice, CriticFitSettings, fit, quality
from relaxion.train.search import FAMILIES, collect

DEPTHS = (1, 2, 4, 8)  # of the walks in turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--hops", type=Path, help="folder of the hops", default=Path("runs/search/hops"))
    parser.add_argument("--files", type=int, default=4, help="of about 10 000 hops")
    parser.add_argument("--walks", type=int, default=96, help="in each file, of 400 force calls")
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--chooser", type=Path, help="a critic that chooses the hops, else a fixed mixture")
    parser.add_argument("--updates", type=int, default=5000)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=NUMBER", help="of the fit or the critic")
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    family = FAMILIES[told.family]

    given = None if told.chooser is None else load_critic(told.chooser)
    depths = cycle(DEPTHS)

    def chooser() -> HopChooser:
        if given is None:
            return Mixture()
        return CriticChoice(given, candidates=16, temperature_ev=0.08, learn=False, depth=next(depths))

    files = range(told.first, told.first + told.files)
    collect(
        told.hops, files, family.training_start, chooser, family.hops, family.potential, told.walks, cell=family.cell
    )
    if told.updates == 0 or told.out.exists():
        return
    apart, *used = sorted(told.hops.glob("hops-*.npz"))
    hops = Hops.load(used)
    values = {name: float(value) for name, value in (word.split("=") for word in told.set)}
    values = {name: int(value) if name in ("batch", "channels", "n_layers") else value
              for name, value in values.items()}  # fmt: skip
    of_critic: dict[str, Any] = {
        name: value for name, value in values.items() if name in CriticSettings.__dataclass_fields__
    }
    of_fit: dict[str, Any] = {name: value for name, value in values.items() if name not in of_critic}
    settings = CriticFitSettings(updates=told.updates, seed=told.seed, **of_fit)
    critic_settings = CriticSettings(**of_critic)
    began = time.monotonic()
    critic = fit(hops, settings, critic_settings)
    card = {
        "elements": sorted(set(hops.numbers.tolist())),
        "periodic": bool(hops.periodic.any()),
        "hops": len(hops),
        "fit": asdict(settings),
        "potential": family.potential,
        "sizes": [int(np.min(hops.counts)), int(np.max(hops.counts))],
        "seconds": round(time.monotonic() - began),
        "quality_on_hops_kept_apart": {
            name: round(value, 3) for name, value in quality(critic, Hops.load([apart])).items()
        },
    }
    save_critic(critic, told.out, card)
    print(json.dumps(card))


if __name__ == "__main__":
    main()
