"""bash eval/bench.sh digits_table [ARM...]: compares the digits table with an independent NumPy simulation of it.

Every arm is its file in configs/compare, with all nodes in this process and the simulation's images, shares, initial
parameters and minibatches (digits_reference.py), seeds 0 to 2. Printed per arm: means over the seeds, the simulation's
values, and the difference, which must be within .6 points (3 for Adam) for local and merged accuracy.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from common import cores, machine, workers
from digits_reference import ROUNDS, write

from decentnode.experiment import load
from decentnode.launch.one_process.in_process import run_in_process

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "compare"
SEEDS = 3
Figures = tuple[float, ...]
REFERENCE: dict[str, tuple[float | None, float | None, float | None]] = {
    "ring_central": (97.33, None, None), "ring_central_adam": (97.56, None, None),
    "ring_dsgd": (96.63, 97.63, 0.161), "hypercube_dsgd": (97.10, 97.70, 0.095),
    "ring_el_oracle": (97.47, 97.70, 0.060),
    "ring_dsgdm": (96.50, 97.56, 0.158), "hypercube_dsgdm": (97.25, 97.56, 0.070),
    "ring_qg_momentum": (97.19, 97.26, 0.037), "hypercube_qg_momentum": (97.30, 97.26, 0.011),
    "ring_dsgt": (97.54, 97.56, 0.047), "hypercube_dsgt": (97.24, 97.33, 0.116),
    "ring_momentum_tracking": (97.42, 97.41, 0.032), "hypercube_momentum_tracking": (97.34, 97.41, 0.010),
    "ring_d2": (97.40, None, None), "ring_edm": (97.34, None, None),
    "ring_dadam": (90.61, 94.37, 0.184), "hypercube_dadam": (93.26, 94.22, None),
    "ring_accumadam": (89.95, 94.52, 0.245), "hypercube_accumadam": (92.52, 93.48, None),
}  # fmt: skip
"""Arm -> local and merged accuracy in percent and consensus rms of the simulation; None if unknown."""


def run(arm: str, seed: int, rounds: int = ROUNDS) -> Figures:
    """Makes one run. Returns (local, merged, consensus rms)."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write(folder, seed, rounds)
        batches = folder / ("central.npy" if arm == "ring_central_adam" else "batches.npy")
        experiment = load(CONFIGS / f"digits_{arm}.yaml", [
            f"seed={seed}", f"data={{name: npz, file: {folder}/data.npz, train_keys: train_keys, scale: 0.0625, "
            "partition: {name: 'digits_reference:Shares'}}",
            f"model={{name: 'digits_reference:Net', file: {folder}/model.npz}}",
            "training.name=digits_reference:GivenBatches", f"training.batches={batches}", f"node.rounds={rounds}",
        ])  # fmt: skip
        found = run_in_process(experiment)[0].figures()
    return 100 * float(found["accuracy_mean"]), 100 * float(found["accuracy_merged"]), float(found["consensus_rms"])


def line(arm: str, runs: list[Figures]) -> str:
    """Returns one row: our values, the simulation's, and the difference of both accuracies."""
    tolerance = 3.0 if "adam" in arm else 0.6
    cells, worst = [], 0.0
    for ours, theirs, digits in zip(zip(*runs, strict=True), REFERENCE[arm], (2, 2, 3), strict=True):
        mean = statistics.fmean(ours)
        cells.append(f"{mean:7.{digits}f} ({'-' if theirs is None else f'{theirs:.{digits}f}'})".rjust(16))
        if theirs is not None and digits == 2:
            worst = max(worst, mean - theirs, theirs - mean)
    spread = statistics.stdev(local for local, _, _ in runs)
    verdict = "within" if worst <= tolerance else "NOT within"
    return f"{arm:28} {' '.join(cells)}   ±{spread:.2f}   off by {worst:.2f}, {verdict} {tolerance}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arms", nargs="*", metavar="ARM", help=", ".join(REFERENCE))
    arms = parser.parse_args().arms or list(REFERENCE)
    if unknown := [arm for arm in arms if arm not in REFERENCE]:
        parser.error(f"arms must be of {', '.join(REFERENCE)}, got {', '.join(unknown)}")
    print(f"{machine()}; mean of {SEEDS} seeds (simulation's)")
    print(f"{'arm':28} {'local %':>16} {'merged %':>16} {'consensus rms':>16}   deviation of local")
    with workers(cores()) as pool:
        jobs = {arm: [pool.submit(run, arm, seed) for seed in range(SEEDS)] for arm in arms}
        for arm, futures in jobs.items():
            print(line(arm, [each.result() for each in futures]), flush=True)


if __name__ == "__main__":
    main()
