"""How a policy does on fresh starts of the kinds that `universal` is taught: for choices, never for results.

    python benchmarks/relaxation/own_kinds.py universal my-policy.safetensors [--number 8]     # a minute or two each
    python benchmarks/relaxation/own_kinds.py universal my-policy.safetensors --errors         # two minutes in all

Every policy and the classical core relax the same starts with CHGNet, or with `--engine sevennet`, to 0.05 eV/Å (seed
8400, or --seed; at most 200 force calls). Printed: mean calls, the geometric mean with its standard error and the 95th
percentile of calls over the core's. On 100 starts that mean is uncertain by 3 %.

With `--chance` the core also relaxes the same starts moved by 0.001 Å: what such ratios are by chance alone.

With `--errors` all policies are asked at the same states, those of relaxations by the first one to 0.005 eV/Å, for the
way to the end. Printed: the mean relative error of the step (`train/supervised/fit.py`) at the first, second, third
and all later states, and its difference to the first policy's with its standard error. That tells two policies apart
sooner than calls do.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from ase import Atoms

from relaxion.batch import BatchRelaxer, BatchSettings, relax_batch
from relaxion.model.atom_policies import StiffnessPolicy
from relaxion.model.stiffness_network import StiffnessNetwork
from relaxion.optimizer.choice import load, new_stepper
from relaxion.optimizer.hessian.learned import LearnedHessians, states_at
from relaxion.optimizer.safeguard import StepRule
from relaxion.potentials import potential
from relaxion.potentials.base import Potential
from relaxion.train.data.kinds import CollectSettings, file_structures
from relaxion.train.supervised.fine_tune import LARGEST_ERROR
from relaxion.train.supervised.fit import Examples, relative_errors, way_to
from relaxion.train.supervised.sources import KindStarts
from relaxion.train.tasks.settings import find, read_toml

SEED = 8400
FMAX, END, MOST_CALLS = 0.05, 0.005, 200
ENGINE = "chgnet"
HARDLY = 1e-3  # Å


def starts(engine: str, made_of: Potential, number: int, seed: int = SEED) -> list[tuple[Atoms, bool]]:
    """So many of each kind at hand, and whether their cell is free."""
    collection = CollectSettings.of(read_toml(find("universal-data")), {})
    kinds = {
        name: kind
        for name, kind in collection.kinds.items()
        if kind.share and kind.engine == engine and (kind.make != "file" or file_structures(kind, collection.side))
    }
    found: list[tuple[Atoms, bool]] = []
    for place, name in enumerate(kinds):
        generator = torch.Generator().manual_seed(seed + place)
        made = KindStarts(collection, name, made_of).sample(generator, number)
        found += zip(made.to_ase(), made.cell_free.tolist(), strict=True)
    return found


def calls(policy: str | None, begun: list[tuple[Atoms, bool]], chgnet: Potential) -> np.ndarray:
    """Force calls from every start; the most allowed where it did not converge."""
    taken = np.zeros(len(begun))
    for free in (False, True):
        places = [place for place, (_, cell) in enumerate(begun) if cell == free]
        atoms = [begun[place][0] for place in places]
        relaxed = relax_batch(atoms, chgnet, policy, FMAX, free, MOST_CALLS, allow_unseen=True)
        taken[places] = [one.force_calls if one.converged else MOST_CALLS for one in relaxed]
    return taken


def calls_with(metrics: LearnedHessians, begun: list[tuple[Atoms, bool]], engine: Potential) -> np.ndarray:
    """The same for a stiffness that is no policy's, under the guard."""
    settings = BatchSettings(fmax=FMAX, max_force_calls=MOST_CALLS)
    batch = BatchRelaxer(engine, settings, lambda _: ("stiffness", new_stepper(policy_model=metrics)))
    for number, (atoms, cell) in enumerate(begun):
        batch.add(atoms, number, cell=cell)
    taken = np.zeros(len(begun))
    while batch.n_running or batch.has_finished:
        for one in batch.advance():
            taken[one.tag] = one.force_calls if one.converged else MOST_CALLS
    return taken


def moved(begun: list[tuple[Atoms, bool]]) -> list[tuple[Atoms, bool]]:
    """The same starts, hardly elsewhere."""
    copies = [(atoms.copy(), cell) for atoms, cell in begun]
    for number, (atoms, _) in enumerate(copies):
        atoms.rattle(HARDLY, seed=number)
    return copies


def lessons(policy: str, begun: list[tuple[Atoms, bool]], chgnet: Potential) -> list[Examples]:
    """Of each relaxation that converged: the bases of its steps and their ways to the end."""
    network, rule = network_of_policy(policy)
    settings = BatchSettings(fmax=END, max_force_calls=MOST_CALLS, record=True)
    batch = BatchRelaxer(
        chgnet, settings, lambda _: (policy, new_stepper(policy_model=LearnedHessians(network), rule=rule))
    )
    for atoms, cell in begun:
        batch.add(atoms, cell=cell)
    found = list[Examples]()
    while batch.n_running or batch.has_finished:
        for one in batch.advance():
            bases = [visit.point for visit in one.visited if visit.accepted and visit.point.finite]
            if one.converged and len(bases) > 1:
                ends = states_at([bases[-1]] * (len(bases) - 1)).structures
                found.append(Examples(states_at(bases[:-1]), way_to(ends, states_at(bases[:-1]).structures)))
    return found


def errors(policy: str, taught: list[Examples]) -> np.ndarray:
    """Mean relative error of each relaxation at its first, second, third and later states; not a number: has none."""
    (network, _), rows = network_of_policy(policy), []
    for one in taught:
        with torch.no_grad():
            own = relative_errors(network, one).clamp_max(LARGEST_ERROR).numpy()
        rows.append([part.mean() if len(part) else np.nan for part in (own[:1], own[1:2], own[2:3], own[3:])])
    return np.array(rows)


def network_of_policy(policy: str) -> tuple[StiffnessNetwork, StepRule | None]:
    loaded = load(policy)
    if not isinstance(loaded.policy, StiffnessPolicy):
        raise SystemExit(f"{policy} does not predict stiffness")
    return loaded.policy.network, loaded.rule


def compare_errors(policies: list[str], taught: list[Examples]) -> None:
    print(f"| {len(taught)} relaxations | first state | second | third | later |\n|---|---|---|---|---|")
    first: np.ndarray | None = None
    for name in policies:
        own = errors(name, taught)
        first = own if first is None else first
        gaps = own - first
        spread = np.nanstd(gaps, axis=0) / np.sqrt(np.isfinite(gaps).sum(axis=0))
        rows = zip(np.nanmean(own, axis=0), np.nanmean(gaps, axis=0), spread, strict=True)
        print(f"| {name} | " + " | ".join(f"{mean:.3f} ({gap:+.3f} ± {wide:.3f})" for mean, gap, wide in rows) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("policies", nargs="+", help="names or files")
    parser.add_argument("--number", type=int, default=8, help="starts of each kind")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--engine", default=ENGINE, help="whose kinds are relaxed, with it: chgnet or sevennet")
    parser.add_argument("--errors", action="store_true", help="relative errors at the same states in place of calls")
    parser.add_argument("--chance", action="store_true", help="also the core from starts that are hardly elsewhere")
    given = parser.parse_args()
    torch.set_num_threads(1)
    made = potential(given.engine)
    begun = starts(given.engine, made, given.number, given.seed)
    if given.errors:
        compare_errors(given.policies, lessons(given.policies[0], begun, made))
        return
    core = calls(None, begun, made)
    print(
        f"| {len(begun)} starts | mean calls | of the core's | 95th percentile | not converged |\n|---|---|---|---|---|"
    )
    rows = {"core": core}
    if given.chance:
        rows[f"core, starts moved by {HARDLY:g} Å"] = calls(None, moved(begun), made)
    for name, own in (rows | {name: calls(name, begun, made) for name in given.policies}).items():
        ratios, failed = own / core, int((own == MOST_CALLS).sum())
        geometric, high = np.exp(np.log(ratios).mean()), np.quantile(ratios, 0.95)
        spread = geometric * np.log(ratios).std() / np.sqrt(len(ratios))
        print(f"| {name} | {own.mean():.1f} | {geometric:.2f} ± {spread:.2f} | {high:.2f} | {failed} |", flush=True)


if __name__ == "__main__":
    main()
