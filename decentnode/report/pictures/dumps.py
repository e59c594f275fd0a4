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

GROUPS = 20
"""Number of groups of coefficients, ordered by how often they were sent, in the histogram."""
OUTLIERS = 2.0
"""Ratios are left out if they are farther from the median than this many median absolute deviations."""


@dataclass(frozen=True)
class Dumped:
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


def load(run: Path) -> Dumped:
    """Reads the dumps of a run. If a node was killed, its counts are computed from the files that it wrote. Raises
    UsageError if there are no dumps."""
    counts: dict[int, np.ndarray] = {}
    scored: list[tuple[int, int, Path]] = []
    for folder in sorted(run.glob("nodes/*/dumps")):
        uid = int(folder.parent.name)
        files = sorted(folder.glob("[0-9]*.safetensors"))
        try:
            found = _counts(folder, files)
            with_scores = [path for path in files if path.stem.endswith("-0") and "change" in load_file(path)][-1:]
        except Exception as error:  # safetensors raises exceptions of its own
            raise UsageError(f"{folder} cannot be read: {error}") from error
        if found is not None:
            counts[uid] = found
        scored += [(uid, int(path.stem.partition("-")[0]), path) for path in with_scores]
    if not counts and not scored:
        raise UsageError(f"{run} has no dumps; sharing.dump writes them, for rules that send part of the model")
    if not scored:
        return Dumped(counts, None, np.empty(0), np.empty(0))
    _, round, path = min(scored)
    parts = [load_file(each) for each in sorted(path.parent.glob(f"{round:08d}-*.safetensors"), key=_fragment)]
    change, value = (np.concatenate([_real(part[name]) for part in parts]) for name in ("change", "value"))
    return Dumped(counts, round, change, value)


def _fragment(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _real(values: np.ndarray) -> np.ndarray:
    return np.hypot(values[:, 0], values[:, 1]) if values.ndim == 2 else values


def _counts(folder: Path, files: list[Path]) -> np.ndarray | None:
    whole = folder / "counts.safetensors"
    if whole.exists():
        found = load_file(whole)
        return np.concatenate([found[name] for name in sorted(found, key=int)])
    sent = [load_file(path)["sent"] for path in files if path.stem.endswith("-0") and "sent" in load_file(path)]
    return np.bincount(np.concatenate(sent)) if sent else None


def plot(run: Path, path: Path) -> None:
    """Plots how often coefficients were sent: in their order and sorted, as percentiles, and the shares of groups of 5
    % of them; with scores also the change, the value and their ratio in one round. Raises UsageError,
    EnvironmentFault."""
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise UsageError(f"the picture's name must end in .png, .pdf or .svg, got {path.name}")
    found = load(run)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = bool(found.counts) + (found.round is not None)
    figure, panels = plt.subplots(rows, 3, figsize=(12, 0.9 + 2.9 * rows), squeeze=False, layout="constrained")
    try:
        if found.counts:
            _draw_counts(panels[0], found.counts)
        if found.round is not None:
            _draw_scores(panels[-1], found)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise EnvironmentFault(f"cannot write {path}: {error.strerror}") from error
    finally:
        plt.close(figure)


def shares(counts: np.ndarray) -> np.ndarray:
    """Returns [GROUPS]: the fraction of all sent coefficients that belongs to each group, from the least to the most
    often sent ones."""
    found = np.array([each.sum() for each in np.array_split(np.sort(counts), GROUPS)], dtype=float)
    return found / max(1.0, float(found.sum()))


def ratios(change: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Returns change / value without outliers; 0 where the value is 0."""
    found = np.divide(change, value, out=np.zeros_like(change), where=value != 0)
    far = np.abs(found - np.median(found))
    usual = np.median(far)
    kept: np.ndarray = found[far <= OUTLIERS * usual] if usual else found
    return kept


def _draw_counts(panels: Any, counts: dict[int, np.ndarray]) -> None:
    longest = max(len(each) for each in counts.values())
    mean = np.mean([np.pad(each, (0, longest - len(each))) for each in counts.values()], axis=0)
    _sorted_and_not(panels[0], mean, f"rounds in which it was sent (mean of {len(counts)} nodes)")
    panels[1].plot(np.arange(0, 101), np.percentile(mean, np.arange(0, 101)))
    panels[1].set(xlabel="percentile of the coefficients", ylabel="rounds in which it was sent")
    panels[2].bar(np.arange(GROUPS) * 100 / GROUPS, 100 * shares(mean), width=100 / GROUPS, align="edge")
    panels[2].set(xlabel="coefficients, from the least sent (%)", ylabel="share of all that was sent (%)")


def _draw_scores(panels: Any, found: Dumped) -> None:
    of = f"round {found.round}"
    _sorted_and_not(panels[0], found.change, f"change, {of}")
    _sorted_and_not(panels[1], found.value, f"value, {of}")
    _sorted_and_not(panels[2], ratios(found.change, found.value), f"change / value, {of}")


def _sorted_and_not(panel: Axes, values: np.ndarray, label: str) -> None:
    panel.plot(values, ".", markersize=2, label="in their order")
    panel.plot(np.sort(values), label="sorted")
    panel.set(xlabel="coefficient", ylabel=label)
    panel.legend()
