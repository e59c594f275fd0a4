"""Plots of which coefficients sharing rules chose to send, from the dumps of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file

from decentnode.errors import EnvironmentFault, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_GROUPS = 20
"""Number of groups of coefficients, ordered by how often they were sent, in the histogram."""
MAX_DEVIATIONS = 2.0
"""Ratios are left out if they are farther from the median than this many median absolute deviations."""


@dataclass(frozen=True)
class Dumps:
    """The dumps of a run, with the coefficients of all fragments concatenated."""

    counts: dict[int, np.ndarray]
    """By uid: in how many rounds each coefficient was sent, [C]."""
    round: int | None
    """The round of `change` and `value`: that of the last file with scores of the lowest uid that has any; None without
    scores."""
    change: np.ndarray
    """[C] the changes from which the scores of that round were computed; complex numbers by their magnitude."""
    value: np.ndarray
    """[C] the coefficients themselves."""


def load(run: Path) -> Dumps:
    """Reads the dumps of a run. If a node was killed, its counts are computed from the files that it wrote. Raises
    UsageError if there are no dumps."""
    counts: dict[int, np.ndarray] = {}
    scored: list[tuple[int, int, Path]] = []
    for folder in sorted(run.glob("nodes/*/dumps")):
        uid = int(folder.parent.name)
        files = sorted(folder.glob("[0-9]*.safetensors"))
        try:
            node_counts = _counts(folder, files)
            with_scores = [path for path in files if path.stem.endswith("-0") and "change" in load_file(path)][-1:]
        except Exception as error:  # safetensors raises exceptions of its own
            raise UsageError(f"{folder} cannot be read: {error}") from error
        if node_counts is not None:
            counts[uid] = node_counts
        scored += [(uid, int(path.stem.partition("-")[0]), path) for path in with_scores]
    if not counts and not scored:
        raise UsageError(f"{run} has no dumps; sharing.dump writes them, for rules that send part of the model")
    if not scored:
        return Dumps(counts, None, np.empty(0), np.empty(0))
    _, round, path = min(scored)
    parts = [load_file(each) for each in sorted(path.parent.glob(f"{round:08d}-*.safetensors"), key=_fragment)]
    change, value = (np.concatenate([_magnitudes(part[name]) for part in parts]) for name in ("change", "value"))
    return Dumps(counts, round, change, value)


def _fragment(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _magnitudes(values: np.ndarray) -> np.ndarray:
    return np.hypot(values[:, 0], values[:, 1]) if values.ndim == 2 else values


def _counts(folder: Path, files: list[Path]) -> np.ndarray | None:
    counts_file = folder / "counts.safetensors"
    if counts_file.exists():
        by_fragment = load_file(counts_file)
        return np.concatenate([by_fragment[name] for name in sorted(by_fragment, key=int)])
    sent = [load_file(path)["sent"] for path in files if path.stem.endswith("-0") and "sent" in load_file(path)]
    return np.bincount(np.concatenate(sent)) if sent else None


def plot(run: Path, path: Path) -> None:
    """Plots how often coefficients were sent: in their order and sorted, as percentiles, and the shares of groups of 5
    % of them; with scores also the change, the value and their ratio in one round. Raises UsageError,
    EnvironmentFault."""
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise UsageError(f"the picture's name must end in .png, .pdf or .svg, got {path.name}")
    dumps = load(run)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = bool(dumps.counts) + (dumps.round is not None)
    figure, panels = plt.subplots(rows, 3, figsize=(12, 0.9 + 2.9 * rows), squeeze=False, layout="constrained")
    try:
        if dumps.counts:
            _draw_counts(panels[0], dumps.counts)
        if dumps.round is not None:
            _draw_scores(panels[-1], dumps)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise EnvironmentFault(f"cannot write {path}: {error.strerror}") from error
    finally:
        plt.close(figure)


def shares(counts: np.ndarray) -> np.ndarray:
    """Returns [NUM_GROUPS]: the fraction of all sent coefficients that belongs to each group, from the least to the
    most often sent ones."""
    sums = np.array([each.sum() for each in np.array_split(np.sort(counts), NUM_GROUPS)], dtype=float)
    return sums / max(1.0, float(sums.sum()))


def ratios(change: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Returns change / value without outliers; 0 where the value is 0."""
    all_ratios = np.divide(change, value, out=np.zeros_like(change), where=value != 0)
    deviations = np.abs(all_ratios - np.median(all_ratios))
    median_deviation = np.median(deviations)
    kept: np.ndarray = all_ratios[deviations <= MAX_DEVIATIONS * median_deviation] if median_deviation else all_ratios
    return kept


def _draw_counts(panels: Any, counts: dict[int, np.ndarray]) -> None:
    longest = max(len(each) for each in counts.values())
    mean = np.mean([np.pad(each, (0, longest - len(each))) for each in counts.values()], axis=0)
    _draw_sorted_and_unsorted(panels[0], mean, f"rounds in which it was sent (mean of {len(counts)} nodes)")
    panels[1].plot(np.arange(0, 101), np.percentile(mean, np.arange(0, 101)))
    panels[1].set(xlabel="percentile of the coefficients", ylabel="rounds in which it was sent")
    panels[2].bar(np.arange(NUM_GROUPS) * 100 / NUM_GROUPS, 100 * shares(mean), width=100 / NUM_GROUPS, align="edge")
    panels[2].set(xlabel="coefficients, from the least sent (%)", ylabel="share of all that was sent (%)")


def _draw_scores(panels: Any, dumps: Dumps) -> None:
    where = f"round {dumps.round}"
    _draw_sorted_and_unsorted(panels[0], dumps.change, f"change, {where}")
    _draw_sorted_and_unsorted(panels[1], dumps.value, f"value, {where}")
    _draw_sorted_and_unsorted(panels[2], ratios(dumps.change, dumps.value), f"change / value, {where}")


def _draw_sorted_and_unsorted(panel: Axes, values: np.ndarray, label: str) -> None:
    panel.plot(values, ".", markersize=2, label="in their order")
    panel.plot(np.sort(values), label="sorted")
    panel.set(xlabel="coefficient", ylabel=label)
    panel.legend()
