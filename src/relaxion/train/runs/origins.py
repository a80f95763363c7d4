"""Policies as the beginning of a run."""

from __future__ import annotations

from pathlib import Path

from relaxion.policies import find_policy
from relaxion.errors import CheckpointError, PolicyError
from relaxion.files import Stored, joined


def weights_of_policy(name_or_path: Path) -> Stored:
    """Of a bundle, as a run that makes such would have left them. CheckpointError where there is no such metric."""
    try:
        bundle = find_policy(str(name_or_path))
    except PolicyError as error:
        raise CheckpointError(
            f"{name_or_path} is neither a run, nor a file of weights, nor a policy: {error}"
        ) from error
    if bundle.policy.kind != "metric":
        raise CheckpointError(f"the policy {bundle.name} does not predict stiffness; start from the run that made it")
    return Stored(joined({"metric": dict(bundle.policy.weights)}), {"settings": {}})
