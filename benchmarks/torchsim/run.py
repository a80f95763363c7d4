"""Model evaluations and throughput inside TorchSim: its FIRE and L-BFGS and Relaxion, same structures, same model.

    pip install 'relaxion[torchsim,sevenn,chgnet]'          # Python 3.12: TorchSim 0.6, which has an L-BFGS
    python benchmarks/torchsim/run.py [--number 16]         # what is not in results/ yet; may be stopped at any time

Unseen crystals of the set `crystals` (and `crystals-cell`) of `relaxion bench`, SevenNet-0, to fmax 0.05 eV/Å.
Everybody is looked at after every step (steps_between_swaps=1), so nobody pays for steps past the tolerance.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch_sim as ts
from sevenn.torchsim import SevenNetModel

from relaxion.apps.comparison import find_set
from relaxion.torchsim import relaxer

RESULTS = Path(__file__).parent / "results"
FMAX = 0.05  # eV/Å
MOST_STEPS = 500
METHODS = ("relaxion", "core", "FIRE", "L-BFGS")
SETS = ("crystals", "crystals-cell")


class Counting:
    """Structures that a model was asked about."""

    def __init__(self, model: Any) -> None:
        self.calls, self.passes = 0, 0
        model.register_forward_pre_hook(self._count)

    def _count(self, _model: Any, arguments: tuple[Any, ...]) -> None:
        self.calls += arguments[0].n_systems
        self.passes += 1


def optimizer(method: str) -> Any:
    known = {"FIRE": ts.Optimizer.fire, "L-BFGS": ts.Optimizer.lbfgs}
    return known.get(method) or relaxer("auto" if method == "relaxion" else None, FMAX)


def measured(name: str, method: str, number: int) -> dict[str, Any]:
    cell = name.endswith("-cell")
    images = find_set(name).starts(number, 9000)
    model = SevenNetModel("7net-0", device="cpu")
    counted = Counting(model)
    converged = ts.generate_force_convergence_fn(FMAX, include_cell_forces=cell)
    began = time.perf_counter()
    final = ts.optimize(
        images,
        model,
        optimizer=optimizer(method),
        convergence_fn=converged,
        max_steps=MOST_STEPS,
        steps_between_swaps=1,
        autobatcher=ts.InFlightAutoBatcher(model=model, memory_scales_with="n_atoms", max_memory_scaler=64),
        init_kwargs={"cell_filter": ts.CellFilter.frechet} if cell else {},
    )
    seconds = time.perf_counter() - began
    return {
        "set": name,
        "method": method,
        "number": number,
        "evaluations": counted.calls,
        "model_passes": counted.passes,
        "seconds": round(seconds, 1),
        "structures_per_minute": round(60 * number / seconds, 1),
        "unconverged": int((~converged(final)).sum()),
        "energies_ev_per_atom": (final.energy / torch.bincount(final.system_idx)).tolist(),
    }


def table(number: int) -> None:
    print(
        "| set | method | evaluations a structure | structures a minute | not converged | of the best of TorchSim's |"
    )
    print("|---" * 6 + "|")
    for name in SETS:
        files = {method: RESULTS / f"{name}-{method}-{number}.json" for method in METHODS}
        found = {method: json.loads(file.read_text()) for method, file in files.items() if file.exists()}
        theirs = [one["evaluations"] for method, one in found.items() if method in ("FIRE", "L-BFGS")]
        for method, one in found.items():
            calls = one["evaluations"] / number
            ratio = f"{one['evaluations'] / min(theirs):.2f}" if theirs else ""
            print(
                f"| {name} | {method} | {calls:.1f} | {one['structures_per_minute']} | {one['unconverged']} | {ratio} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=16)
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    RESULTS.mkdir(exist_ok=True)
    for name in arguments.sets if not arguments.table else ():
        for method in METHODS:
            file = RESULTS / f"{name}-{method}-{arguments.number}.json"
            if not file.exists():
                result = measured(name, method, arguments.number)
                file.write_text(json.dumps(result, indent=1) + "\n")
                print(f"{name}, {method}: {result['evaluations']} evaluations, {result['seconds']} s", flush=True)
    table(arguments.number)


if __name__ == "__main__":
    main()
