"""`relax-many` that learns: policies are fine-tuned after every N structures, and later structures use the result.

Structures belong to rounds of N, in the order of the input. When all of a round have ended, each policy that relaxed
some of them is fitted to them; round r + 2 relaxes with what was learned up to round r, so that nobody waits for a fit.
A result depends on the rounds before it alone, not on who was faster: killed and resumed, on other workers, a run gives
the same results as one that was never stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from ase import Atoms

from relaxion.database import RelaxationDatabase
from relaxion.errors import CheckpointError, FileError
from relaxion.files import Format, Stored
from relaxion.model.atom_policies import StiffnessPolicy
from relaxion.model.stiffness_network import StiffnessNetwork
from relaxion.optimizer.choice import Chooser, Loaded, load, new_stepper, stepper_of
from relaxion.optimizer.classical import ClassicalSettings
from relaxion.optimizer.hessian.learned import LearnedHessians
from relaxion.optimizer.step import Stepper
from relaxion.structures import Outcome
from relaxion.train.supervised.fine_tune import FineTune
from relaxion.train.supervised.fit import secants_of

logger = logging.getLogger(__name__)

FOLDER = "learned"
FORMAT = Format(version=1, error=CheckpointError, advice="remove it, and the run fits again")
KIND = "fit of a round"
MOST_LOADED = 8  # networks that a worker keeps
LAG = 2  # rounds: the fits of a round are for the second one after it


class Learner:
    """Beside the driver: told which structures ended, asked which weights a round gets; `advance` works a little."""

    def __init__(
        self,
        folder: Path,
        database: Path,
        every: int,
        policies: Mapping[str, str],
        tune: Callable[[StiffnessNetwork], FineTune] = FineTune,
    ) -> None:
        """`policies`: what to load for each policy that may relax, by its name; `tune`: how they are fine-tuned."""
        self.tune = tune
        self.folder = folder / FOLDER
        self.every = every
        self.policies = dict(policies)
        self._database = RelaxationDatabase.at(database)
        self._tunings: dict[str, FineTune] = {}
        self._keys: list[list[str]] = []  # of each round, in the order of the input
        self._left: list[int] = []  # of each round, structures that have not ended
        self._under_way: list[str] | None = None  # policies that are fitted to the present round
        self.round = 0  # that is fitted to next
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"{self.folder} cannot be made ({error.strerror})") from error

    def enter(self, key: str, *, ended: bool) -> int:
        """A structure of the input, in its order; the round it belongs to."""
        if not self._keys or len(self._keys[-1]) == self.every:
            self._keys.append([])
            self._left.append(0)
        self._keys[-1].append(key)
        self._left[-1] += not ended
        return len(self._keys) - 1

    def ended(self, number: int) -> None:
        """One structure of this round has a result, or was set aside."""
        self._left[number] -= 1

    def is_open(self, number: int) -> bool:
        """Whether the structures of a round may be handed out."""
        return self.round > number - LAG

    def weights(self, number: int) -> dict[str, str]:
        """Files by policy, for the structures of a round."""
        found = {name: self._newest(number - LAG, name) for name in self.policies}
        return {name: str(file) for name, file in found.items() if file is not None}

    def _newest(self, last: int, name: str) -> Path | None:
        """Of the fits of a policy up to this round; there are none for rounds in which it relaxed nothing."""
        files = (self._file(number, name) for number in range(last, -1, -1))
        return next((file for file in files if file.exists()), None)

    @property
    def busy(self) -> bool:
        """Whether there is something to fit to now."""
        full = self.round < len(self._keys) and len(self._keys[self.round]) == self.every
        return full and self._left[self.round] == 0

    def advance(self) -> None:
        """One update, or the beginning or the end of a fit."""
        if not self.busy:
            return
        if self._under_way is None:
            self._under_way = self._begun()
        elif self._under_way:
            self._go_on(self._under_way[0])
        else:
            self.round = self.round + 1
            self._under_way = None

    def _begun(self) -> list[str]:
        """Policies that have something new to fit to; those that did so before a kill have not."""
        names = set[str]()
        for key in self._keys[self.round]:
            trajectory = self._database.find(key)
            if trajectory is None or trajectory.outcome == Outcome.RUNNING:  # set aside
                continue
            tuning = self._tuning(trajectory.policy)
            if tuning is not None:
                found = secants_of(trajectory)
                if found is not None:
                    tuning.add(found)
                names.add(trajectory.policy)
        return [name for name in sorted(names) if not self._restored(name)]

    def _go_on(self, name: str) -> None:
        tuning = self._tunings[name]
        learns = bool(tuning.training.relaxations)
        if learns and not tuning.done:
            tuning.update()
            return
        acceptance = tuning.test() if learns else None
        values: dict[str, Any] = {
            "policy": name,
            "round": self.round,
            "n_adopted": tuning.n_adopted,
            "n_relaxations": tuning.n_relaxations,
            "acceptance": None if acceptance is None else asdict(acceptance),
        }
        FORMAT.write(self._file(self.round, name), KIND, tuning.snapshot(), values)
        assert self._under_way is not None
        self._under_way.remove(name)

    def _restored(self, name: str) -> bool:
        file = self._file(self.round, name)
        if not file.exists():
            return False
        try:
            self._tunings[name].restore(FORMAT.read(file, KIND))
        except (CheckpointError, KeyError, RuntimeError, ValueError) as error:
            logger.warning("%s cannot be used (%s): that round is fitted again", file, error)
            return False
        return True

    def _tuning(self, name: str) -> FineTune | None:
        if name not in self._tunings and name in self.policies:
            policy = load(self.policies[name]).policy
            if isinstance(policy, StiffnessPolicy):
                self._tunings[name] = self.tune(policy.network)
        return self._tunings.get(name)

    def _file(self, number: int, name: str) -> Path:
        return self.folder / f"{number:05}-{name}.safetensors"


def read_fit(file: Path) -> Stored:
    """What a fit left: weights by `network.`, and in its values what it proved."""
    return FORMAT.read(file, KIND)


class LearnedPolicies:
    """What a worker relaxes with: the policy it would choose, with the weights that came with the task.

    Set `weights` before each structure; then it makes the stepper.
    """

    def __init__(self, chooser: Chooser, *, allow_unseen: bool) -> None:
        self._chooser = chooser
        self._allow_unseen = allow_unseen
        self.weights: Mapping[str, str] = {}  # files by policy
        self._network = lru_cache(MOST_LOADED)(_network)

    def __call__(self, atoms: Atoms) -> tuple[str, Stepper]:
        decision = self._chooser.decide_for(atoms)
        loaded = decision.loaded
        file = self.weights.get(decision.name)
        if loaded is None or file is None:
            chosen = stepper_of(decision, ClassicalSettings(), allow_unseen=self._allow_unseen)
            return chosen.name, chosen.stepper
        source = LearnedHessians(self._network(loaded, file), None if self._allow_unseen else loaded.elements)
        return decision.name, new_stepper(ClassicalSettings(), policy_model=source, rule=loaded.rule)


def _network(loaded: Loaded, file: str) -> StiffnessNetwork:
    assert isinstance(loaded.policy, StiffnessPolicy)  # others do not learn
    network = deepcopy(loaded.policy.network)
    network.load_state_dict(read_fit(Path(file)).part("network"))
    return network.requires_grad_(False)
