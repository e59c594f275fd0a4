"""Shows which node has which training samples: a table for the terminal, and a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from decentnode.data.opened import OpenedData
from decentnode.errors import UsageError
from decentnode.samples import AnySamples, ImageFiles, Samples

LEVELS = " ▁▂▃▄▅▆▇█"
MAX_CLASSES = 100
"""With more classes, the terminal shows no column per class."""


@dataclass(frozen=True)
class Shares:
    """The training samples of every node."""

    sizes: list[int]
    classes: np.ndarray | None
    """[nodes, C] number of samples of every class; None if the targets are not classes."""
    keys: list[int] | None
    """How many writers, speakers or users each node has; None if samples have no such keys."""

    def facts(self) -> list[dict[str, Any]]:
        """Returns one dict per node, for JSON."""
        nodes: list[dict[str, Any]] = [{"node": uid, "samples": size} for uid, size in enumerate(self.sizes)]
        for uid, each in enumerate(nodes):
            if self.classes is not None:
                each["classes"] = self.classes[uid].tolist()
            if self.keys is not None:
                each["keys"] = self.keys[uid]
        return nodes


def shares_of(data: OpenedData) -> Shares:
    """Returns the shares of the nodes whose files are on this machine. Raises DataError."""
    sizes: list[int] = []
    classes: list[np.ndarray] = []
    keys: list[int] = []
    num_classes = data.spec.num_classes
    for uid, part in sorted(data.shares().items()):
        dataset = data.dataset(uid)
        labels, owners = dataset.train_targets(), dataset.train_keys()
        sizes.append(len(part))
        if num_classes is not None and labels is not None:
            classes.append(np.bincount(labels[part], minlength=num_classes))
        if owners is not None:
            keys.append(len(np.unique(owners[part])))
    return Shares(sizes, np.array(classes) if classes else None, keys or None)


def lines(shares: Shares) -> list[str]:
    """Returns one line per node. The height of a class's bar is its number of samples, relative to the largest number
    that any node has of any class."""
    bars = shares.classes if shares.classes is not None and shares.classes.shape[1] <= MAX_CLASSES else None
    heading = "node    samples" + ("  classes" if shares.classes is not None else "") + (
        "     keys" if shares.keys is not None else "") + ("  samples of each class" if bars is not None else "")
    texts = [heading]
    for uid, size in enumerate(shares.sizes):
        line = f"{uid:4} {size:10,}"
        if shares.classes is not None:
            line += f" {(shares.classes[uid] > 0).sum():8}"
        if shares.keys is not None:
            line += f" {shares.keys[uid]:8,}"
        if bars is not None:
            # Rounded up, so that only a class without samples is blank
            heights = np.ceil(bars[uid] * (len(LEVELS) - 1) / max(bars.max(), 1)).astype(int)
            line += "  |" + "".join(LEVELS[height] for height in heights) + "|"
        texts.append(line)
    return texts


def draw(shares: Shares, path: Path, title: str) -> None:
    """Writes a picture: a circle per node and class whose area is the number of samples, or a bar per node. Raises
    UsageError."""
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise UsageError(f"{path}: must end in .png, .pdf or .svg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    nodes, meaning = len(shares.sizes), ""
    if shares.classes is None:
        figure = Figure(figsize=(max(4.0, 0.2 * nodes), 3.0), layout="constrained")
        axis = figure.subplots()
        axis.bar(range(nodes), shares.sizes)
        axis.set_ylabel("training samples")
    else:
        count = shares.classes.shape[1]
        figure = Figure(figsize=(max(4.0, 0.25 * nodes), max(3.0, 0.2 * count)), layout="constrained")
        axis = figure.subplots()
        cells = np.argwhere(shares.classes > 0)
        largest = shares.classes.max()
        areas = shares.classes[cells[:, 0], cells[:, 1]] / largest
        meaning = f"\narea: samples, {largest:,} in the largest circle"
        axis.scatter(cells[:, 0], cells[:, 1], s=180 * areas, linewidths=0)
        axis.set_ylabel("class")
        axis.set_ylim(-0.7, count - 0.3)
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel(f"node{meaning}")
    axis.set_xlim(-0.7, nodes - 0.3)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_title(title)
    figure.savefig(path, dpi=150)


def normalization(data: OpenedData) -> dict[str, Any]:
    """Returns the scale and offset that are applied to inputs, per channel if they differ; empty if inputs are
    unchanged or a Dataset transforms them."""
    samples = _first(data)
    is_known = isinstance(samples, ImageFiles) or (isinstance(samples, Samples) and not samples.ids)
    return {name: getattr(samples, name) for name in ("scale", "offset")} if is_known else {}


def inputs(data: OpenedData) -> str:
    """Returns a line that describes the model's inputs."""
    samples, shape = _first(data), f"inputs {[*data.spec.input_shape]}"
    if isinstance(samples, ImageFiles):
        return f"{shape} read from files, times {_text(samples.scale)}, plus {_text(samples.offset)}"
    if not isinstance(samples, Samples):
        return f"{shape} as the Dataset makes them"
    if samples.ids:
        return f"{shape} of whole numbers"
    if samples.scale == 1 and samples.offset == 0:
        return f"{shape} {samples.inputs.dtype} as they are"
    span = ""
    if samples.inputs.dtype == np.uint8 and not isinstance(samples.scale, tuple) \
            and not isinstance(samples.offset, tuple):  # fmt: skip
        low, high = (value * samples.scale + samples.offset for value in (0, 255))
        span = f", from {low:.4g} to {high:.4g}"
    return f"{shape} {samples.inputs.dtype}, times {_text(samples.scale)}, plus {_text(samples.offset)}{span}"


def _text(value: float | tuple[float, ...]) -> str:
    return f"({', '.join(map(_text, value))})" if isinstance(value, tuple) else f"{value:.6g}"


def tested(data: OpenedData) -> int:
    """Returns the number of test samples for a node's own model: if each node has a part of the test set, the size of
    the largest part; if nodes are tested on samples of their own, the size of the test set."""
    sampled = data.tested() if data.test != "own" else None
    count = data.dataset().num_test() if sampled is None else len(sampled)
    return -(-count // data.num_nodes) if data.sharded else count


def _first(data: OpenedData) -> AnySamples:
    return data.dataset().train(np.zeros(1, np.int64))
