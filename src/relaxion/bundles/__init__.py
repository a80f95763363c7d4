"""Policies as files: what was learned, how to rebuild it, what it is good for. Loads no training code."""

from relaxion.bundles.bundle import Network, PolicyBundle, covers, uncovered
from relaxion.bundles.card import CardResult, ModelCard, as_markdown
from relaxion.bundles.library import KnownPolicy, find_policy, known_policies, none_found, user_folder

__all__ = [
    "CardResult", "KnownPolicy", "ModelCard", "Network", "PolicyBundle", "as_markdown", "covers", "find_policy",
    "known_policies", "none_found", "uncovered", "user_folder",
]  # fmt: skip
