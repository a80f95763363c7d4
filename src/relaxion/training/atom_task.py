"""A relaxation task: potential, structures to train on, structures held apart, and what is rewarded."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from ase import Atoms

from relaxion.errors import MissingElementError, RelaxionWarning, SettingsError
from relaxion.experience.environment import Environment
from relaxion.experience.structure_replay import capacity_advice
from relaxion.generators.perturbations import perturbation
from relaxion.generators.sources import HeldApart, structure_source
from relaxion.generators.starts import PerturbedStarts
from relaxion.potentials.potential import Potential
from relaxion.potentials.registry import potential
from relaxion.potentials.reward import Reward, RewardSettings
from relaxion.structures import Structures
from relaxion.training.atom_settings import AtomTaskSettings, reward_weights
from relaxion.training.run_settings import AtomRunSettings
from relaxion.training.seeds import named_generator

SIDES = ("training", "validation", "held_apart")
STATES_PER_TRANSITION = 1.5  # a running relaxation has one of each; short ones have an end more
SIDE_SEEDS = (0, 20, 9000)  # of random structures and of assessed starts, whatever the run's seed


@dataclass(frozen=True)
class AtomTask:
    """Everything a run needs of the world outside."""

    settings: AtomRunSettings
    potential: Potential
    pools: dict[str, Structures]  # by side

    def environment(self, side: str = "training", engine: Potential | None = None) -> Environment:
        """Relaxations of the structures of one side; `engine`: another counter of force calls."""
        atoms = self.settings.atoms
        reward = RewardSettings(
            weights=reward_weights(atoms.reward),
            back_off_penalty=atoms.back_off_penalty,
            lowest_force_ev_per_angstrom=atoms.reward_force_floor_ev_per_angstrom,
        )
        starts = PerturbedStarts(self.pools[side], [perturbation(atoms.perturbation)])
        return Environment(engine or self.potential, starts, self.settings.environment, Reward(reward))

    @property
    def mean_atoms(self) -> float:
        return self.pools["training"].n_atoms / self.pools["training"].n_structures

    @property
    def atom_capacity(self) -> int:
        """Rows for the states of `replay_capacity` transitions, and for the largest step that may come on top."""
        atoms, capacity = self.settings.atoms, self.settings.training.replay_capacity
        if atoms.replay_atom_capacity is not None:
            return atoms.replay_atom_capacity
        largest = int(self.pools["training"].counts.max())
        # relaxations of a few steps have a state more each; a step writes two states of every structure at worst
        return (
            round(STATES_PER_TRANSITION * capacity * self.mean_atoms)
            + 4 * self.settings.environment.n_structures * largest
        )


def atom_task(settings: AtomRunSettings) -> AtomTask:
    """The task of these settings, refused in one sentence when it cannot be learned here."""
    engine = potential(settings.atoms.potential)
    task = AtomTask(settings, engine, _pools(settings.atoms, engine))
    _check_room_for_warmup(task)
    if (advice := capacity_advice(settings.training.replay_capacity, task.mean_atoms)) is not None:
        warnings.warn(advice, RelaxionWarning, stacklevel=2)
    return task


def _check_room_for_warmup(task: AtomTask) -> None:
    """A replay that forgets before the warm-up is over would keep it warming up for ever."""
    given, warmup = task.settings.atoms.replay_atom_capacity, task.settings.training.warmup_steps
    needed = round(STATES_PER_TRANSITION * warmup * task.mean_atoms)
    if given is not None and given < needed:
        raise SettingsError(
            f"replay_atom_capacity {given} cannot hold warmup_steps = {warmup} transitions of structures with "
            f"{task.mean_atoms:.1f} atoms in the mean, so the warm-up would never end; give at least {needed}, or "
            "lower warmup_steps"
        )


def _pools(atoms: AtomTaskSettings, engine: Potential) -> dict[str, Structures]:
    perturbation(atoms.perturbation)  # wrong words are refused before anything is built
    source = structure_source(atoms.structures)
    made = [source.images(atoms.n_pooled, named_generator(seed, "structures"), engine) for seed in SIDE_SEEDS]
    pools = HeldApart(atoms.held_apart).sides([_of_right_size(images, atoms) for images in made])
    found: dict[str, Structures] = {}
    for side, images in zip(SIDES, pools, strict=True):
        if not images:
            n_made = len(made[SIDES.index(side)])
            raise SettingsError(
                f"no structure is left for {side.replace('_', ' ')}: {atoms.structures} has {n_made}, none with "
                f"{atoms.fewest_atoms} to {atoms.most_atoms} atoms on that side of held_apart = '{atoms.held_apart}'; "
                "widen one of them"
            )
        found[side] = Structures.from_ase(images, cell_free=atoms.cell_free)
        _check_elements(engine, found[side], atoms.structures)
    return found


def _of_right_size(images: list[Atoms], atoms: AtomTaskSettings) -> list[Atoms]:
    return [image for image in images if atoms.fewest_atoms <= len(image) <= atoms.most_atoms]


def _check_elements(engine: Potential, structures: Structures, source: str) -> None:
    try:
        engine.check_elements(structures)
    except MissingElementError as error:
        raise MissingElementError(f"structures = '{source}': {error}; choose other structures or potential") from error
