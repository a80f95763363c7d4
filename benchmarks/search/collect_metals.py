"""Hops of clusters of the training pairs: `python benchmarks/search/collect_metals.py FOLDER FIRST LAST [CRITIC]`.

Without a critic the fixed mixture chooses. Files that exist are left as they are, so a stopped run goes on.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch

from relaxion.search.choices import HopChooser, Mixture
from relaxion.train.search.collecting import collect
from relaxion.train.search.metals import training_cluster


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    folder, first, last, *critic = sys.argv[1:]

    def chooser() -> HopChooser:
        if not critic:
            return Mixture()
        from relaxion.search.critic import load_critic
        from relaxion.search.critic_choice import CriticChoice

        return CriticChoice(load_critic(Path(critic[0])), candidates=16, temperature_ev=0.08, learn=False)

    collect(Path(folder), range(int(first), int(last)), training_cluster, chooser)


if __name__ == "__main__":
    main()
