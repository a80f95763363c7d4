"""What a worker of relax-many does, wherever it runs: takes structures as JSON lines, gives records."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from ase import Atoms
from ase.io.jsonio import decode, encode

from relaxion.apps.relax_many.learning import LearnedPolicies
from relaxion.apps.relax_many.results import plain_info, written
from relaxion.apps.relax_many.settings import WorkerSettings
from relaxion.batch import BatchRelaxer
from relaxion.optimizer.batch_relaxation import Relaxed
from relaxion.optimizer.choice import Chooser
from relaxion.potentials.registry import make_potential
from relaxion.structures import Outcome

SECONDS_BETWEEN_SIGNS = 0.5  # of life
SET_ASIDE = (Outcome.RUNNING, Outcome.NON_FINITE)  # ends without anything that could be called a result


def task_line(key: str, atoms: Atoms) -> str:
    """One structure for a worker. StructureError or another where its constraints cannot be told."""
    bare = atoms.copy()
    bare.info = plain_info(atoms)
    return json.dumps({"key": key, "atoms": encode(bare)})


def atoms_of(line: str) -> Atoms:
    """The opposite."""
    found = decode(json.loads(line)["atoms"])
    assert isinstance(found, Atoms)
    return found


class RelaxWorker:
    """Makes its calculator once, then relaxes one chunk after the other."""

    def __init__(self, settings: WorkerSettings) -> None:
        """PotentialError where the calculator cannot be made."""
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)  # of a process of our own: more threads only get in the way of other workers
        if settings.folder != os.getcwd():  # noqa: PTH109
            os.chdir(settings.folder)
        self.settings = settings
        batch, potential = settings.batch_settings(), make_potential(settings.many.calculator, settings.device)
        self.learned = None
        if settings.many.learn_every:
            unseen, device = batch.allow_unseen, settings.device
            chooser = Chooser(batch.policy, allow_unseen=unseen, calculator=potential, device=device)
            self.learned = LearnedPolicies(chooser, allow_unseen=batch.allow_unseen)
        word = settings.many.model
        self.model = make_potential(word, settings.device) if word else None
        self.relaxer = BatchRelaxer(potential, batch, self.learned, settings.database, self.model)

    def close(self) -> None:
        self.relaxer.potential.close()
        if self.model is not None:
            self.model.close()

    def __call__(self, tasks: Sequence[str]) -> Iterator[dict[str, Any] | None]:
        """What became of each structure, as it is done; now and then None, a sign of life."""
        waiting, told = list(reversed(tasks)), time.monotonic()
        # one by one where policies learn: company changes the last digits, and from there on everything
        at_once = self.settings.batch_size if self.relaxer.together and self.learned is None else 1
        while waiting or self.relaxer.n_running or self.relaxer.has_finished:
            while waiting and self.relaxer.n_running < at_once:
                line = waiting.pop()
                plain = json.loads(line)
                if self.learned is not None:
                    self.learned.weights = plain.get("weights", {})
                self.relaxer.add(atoms_of(line), plain["key"])
            for relaxed in self.relaxer.advance():
                told = time.monotonic()
                yield self._record(relaxed)
            if time.monotonic() - told > SECONDS_BETWEEN_SIGNS:
                told = time.monotonic()
                yield None

    def _record(self, relaxed: Relaxed) -> dict[str, Any]:
        facts = {
            "key": relaxed.tag,
            "outcome": relaxed.label.replace(" ", "_"),
            "force_calls": relaxed.force_calls,
            "enthalpy_ev": relaxed.enthalpy_ev if self.settings.many.pressure_gpa else None,  # else it is the energy
            "fmax": relaxed.fmax_ev_per_angstrom,
            "policy": relaxed.policy_used,
            "fallback_used": relaxed.fallback_used,
            "seconds": round(relaxed.seconds, 4),
            "model_calls": relaxed.model_calls or None,
        }
        if relaxed.error is None and relaxed.outcome not in SET_ASIDE:
            return {**facts, "energy_ev": relaxed.energy_ev, "frame": written(relaxed.atoms, facts)}
        return {**facts, "error": _reason(relaxed), "last": _last_frame(relaxed, facts)}


def _reason(relaxed: Relaxed) -> str:
    if relaxed.error is not None:
        return relaxed.error
    return "the calculator's answer at the start is not finite"


def _last_frame(relaxed: Relaxed, facts: dict[str, Any]) -> str | None:
    try:
        return written(relaxed.atoms, facts)
    except (ValueError, TypeError, KeyError):  # of structures that are not fit to be written
        return None
