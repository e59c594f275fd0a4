"""The figures of a run: the one table of their names, units and meanings.

summary.json, CSV files, tables, plots and the docs use it. Values for programs are in base units (bytes, seconds,
fractions); values for people are scaled, and their heading has the unit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Purpose = Literal["data", "metadata", "protocol", "evaluation", "control"]
"""The purpose for which bytes were sent."""

PURPOSES: dict[Purpose, str] = {
    "data": "tensors of payloads that carry values, as the sharing rule gave them to the transport",
    "metadata": "what payloads carry beside values: indices, scales, scalars",
    "protocol": "what transports add: headers, doorbells, acknowledgements, checksums, whatever is sent again",
    "evaluation": "tensors of means over all nodes that evaluations ask for",
    "control": "messages about the run: joining, barriers, generations of members, reports, and their means",
}
"""Data and metadata are the sharing rule's bytes, the same number on every transport."""

assert tuple(PURPOSES) == get_args(Purpose)

NodeFigures = Mapping[str, float | int | str | None]
"""One node's closing figures, as `Node.figures` returns them."""


@dataclass(frozen=True)
class Figure:
    """One number of a run's summary."""

    name: str
    """The key in summary.json and the column in CSV files."""
    unit: str
    """The unit of the value in summary.json."""
    meaning: str
    where: str
    """The file that computes it."""
    title: str = ""
    """The heading in tables and plots, with the unit shown there; empty where neither shows it."""
    scale: float = 1.0
    """Factor from the value in summary.json to the shown one."""
    digits: int = 2
    """Digits that are shown after the decimal point."""
    of: tuple[str, ...] = ()
    """Keys of the nodes' figures that it is computed from; empty where the supervisor gives it."""
    how: Callable[[Sequence[float]], float | int | None] = lambda values: statistics.fmean(values) if values else None
    """Function of all these values, one after the other by node."""

    def combined(self, nodes: Iterable[NodeFigures]) -> float | int | None:
        """Returns the value from the nodes' figures; None where no node has any."""
        return self.how([float(v) for each in nodes for key in self.of if isinstance(v := each.get(key), int | float)])

    def shown(self, value: float) -> str:
        return f"{self.scale * value:.{self.digits}f}"


def _first(values: Sequence[float]) -> float | None:
    return values[0] if values else None


def _least(values: Sequence[float]) -> float | None:
    return min(values, default=None)


def _most(values: Sequence[float]) -> float | None:
    return max(values, default=None)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _total(values: Sequence[float]) -> int:
    return round(math.fsum(values))


def _rounds(values: Sequence[float]) -> int:
    return int(min(values, default=0))


FIGURES = (
    Figure("accuracy_mean", "fraction", "of the test set that a node's own model gets right, mean over the nodes",
           "Node.evaluate", "accuracy %", 100, of=("accuracy",)),
    Figure("accuracy_min", "fraction", "the same of the worst node", "Node.evaluate", "worst node %", 100,
           of=("accuracy",), how=_least),
    Figure("accuracy_max", "fraction", "the same of the best node", "Node.evaluate", "best node %", 100,
           of=("accuracy",), how=_most),
    Figure("accuracy_merged", "fraction", "of the test set that the mean of all models gets right", "Node.evaluate",
           "merged %", 100, of=("accuracy_merged",), how=_first),
    Figure("loss_mean", "1", "test loss of a node's own model, mean over the nodes", "Node.evaluate", "test loss",
           digits=4, of=("loss",)),
    Figure("consensus_rms", "as the parameters", "sqrt(mean over nodes of ||x_i - mean x||^2)", "Node.evaluate",
           "consensus rms", digits=3, of=("consensus_rms",), how=_first),
    Figure("consensus_distance", "1", "consensus_rms / ||mean x||: relative to the size of the mean model",
           "Node.evaluate", "consensus distance", digits=4, of=("consensus_distance",), how=_first),
    Figure("evaluated_round", "rounds", "after which the figures above were found; not the last where a run failed",
           "Node.evaluate", "evaluated after", digits=0, of=("evaluated_round",), how=_least),
    Figure("rounds", "rounds", "that every node finished", "Node.run", "rounds", digits=0, of=("rounds",),
           how=_rounds),
    Figure("round_seconds_median", "s", "from the begin of a round to its end, median over rounds, then over nodes",
           "Node.finish_round", "ms/round", 1e3, 1, of=("round_seconds_median",), how=_median),
    Figure("bytes_sent_total", "bytes", "data + metadata: what the sharing rules of all nodes sent",
           "Counters.sent", "payload MB", 1e-6, of=("bytes_data", "bytes_metadata"), how=_total),
    *(
        Figure(f"bytes_{purpose}_total", "bytes", meaning,
               "Counters.sent" if purpose in ("data", "metadata") else "Links, Counters", f"{purpose} MB", 1e-6,
               of=(f"bytes_{purpose}",), how=_total)
        for purpose, meaning in PURPOSES.items()
    ),
    Figure("bytes_saved_total", "bytes", "of data and metadata, not sent: one call of a whole clique (all_reduce) did",
           "communication/torch_distributed/group_collective.py", "saved MB", 1e-6, of=("bytes_saved",), how=_total),
    Figure("bytes_sent_per_node", "bytes", "bytes_sent_total / nodes", "report/compare.py", "payload MB/node", 1e-6),
    Figure("bytes_metadata_per_node", "bytes", "bytes_metadata_total / nodes", "report/compare.py",
           "metadata MB/node", 1e-6),
    Figure("start_seconds", "s", "from the command until all nodes were connected", "launch/run.py",
           "start s", digits=1),
    Figure("wall_seconds", "s", "from the command to the end", "launch/run.py", "wall s", digits=1),
)  # fmt: skip
BY_NAME = {figure.name: figure for figure in FIGURES}

COMPARED = (
    "accuracy_mean", "accuracy_min", "accuracy_merged", "consensus_rms", "consensus_distance", "bytes_sent_per_node",
    "bytes_metadata_per_node", "round_seconds_median",
)  # fmt: skip
"""The columns of `decentnode compare`."""


@dataclass(frozen=True)
class Curve:
    """A figure that changes during a run, read from metrics.jsonl."""

    kind: str
    """The kind of records that have it."""
    key: str
    label: str
    """The label of its axis, with the unit."""
    scale: float = 1.0
    logarithmic: bool = False
    """Whether the axis is logarithmic where values span more than half a decade."""
    spread: bool = True
    """Whether nodes have values of their own, so that there is a lowest and a highest."""
    merged: str = ""
    """The key of the same figure of the merged model."""


CURVES = {
    "accuracy": Curve("evaluation", "accuracy", "test accuracy (%)", 100, merged="accuracy_merged"),
    "loss": Curve("round", "loss", "training loss", logarithmic=True),
    "consensus_distance": Curve("evaluation", "consensus_distance", "consensus distance (relative)",
                                logarithmic=True, spread=False),
    "consensus_rms": Curve("evaluation", "consensus_rms", "consensus rms (absolute)", logarithmic=True, spread=False),
}  # fmt: skip
"""The curves that `decentnode plot` draws."""

AXES = {"rounds": "rounds", "seconds": "time (s)", "bytes": "payloads sent by all nodes"}
"""The horizontal axes that it draws against; the unit of bytes follows from their size."""
