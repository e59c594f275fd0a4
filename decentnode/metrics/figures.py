"""The figures of a run: the one table of their names, units and meanings.

summary.json, CSV files, tables, plots and the docs are made from it. Values for programs are in base units (bytes,
seconds, fractions); values for people are scaled, with the unit in their heading. A task describes what it measures
(accuracy, perplexity) as `Metric`s, from which `TaskMetrics` makes the figures and curves of its runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Purpose = Literal["data", "metadata", "protocol", "evaluation", "control"]
"""The purpose for which bytes are sent."""

PURPOSES: dict[Purpose, str] = {
    "data": "tensors of payloads that carry values, as the sharing rule gave them to the transport",
    "metadata": "what payloads carry in addition to values: indices, scales, scalars",
    "protocol": "what transports add: headers, doorbells, acknowledgements, checksums, resent data",
    "evaluation": "tensors of means over all nodes that evaluations ask for",
    "control": "messages about the run: joining, barriers, generations of members, reports, and their means",
}
"""Every purpose with its meaning. Data and metadata are the sharing rule's bytes, and equal on every transport."""

assert tuple(PURPOSES) == get_args(Purpose)

NodeFigures = Mapping[str, float | int | str | None]
"""One node's final figures, as `Node.figures` returns them."""


def non_finite_losses(figures: Mapping[str, Any], *, merged: bool) -> str:
    """Returns which losses of a node's evaluation are NaN or infinity, as text; "" if none is.

    merged: include the loss of the merged model, which all nodes have in common.
    """
    named = {name: value for name, value in figures.items() if name == "loss" or name.endswith("_loss")
             or (merged and name.endswith("loss_merged"))}  # fmt: skip
    return ", ".join(f"{name} is {value}" for name, value in named.items() if not math.isfinite(value))


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
    """The heading in tables and plots, with the unit shown there; empty if neither shows the figure."""
    scale: float = 1.0
    """The factor from the value in summary.json to the value shown."""
    digits: int = 2
    """How many digits are shown after the decimal point."""
    of: tuple[str, ...] = ()
    """The keys of the nodes' figures that it is computed from; empty if the supervisor provides the value."""
    how: Callable[[Sequence[float]], float | int | None] = lambda values: statistics.fmean(values) if values else None
    """The function that computes the figure from all these values, ordered by node."""
    absent: str = "-"
    """What tables show for runs without a value."""

    def combined(self, nodes: Iterable[NodeFigures]) -> float | int | None:
        """Returns the value computed from the nodes' figures; usually None if no node has any."""
        return self.how([float(v) for each in nodes for key in self.of if isinstance(v := each.get(key), int | float)])

    @property
    def common(self) -> bool:
        """Whether all nodes that evaluate together report the same value."""
        return self.how is _first

    def shown(self, value: float) -> str:
        return f"{self.scale * value:.{self.digits}f}"


def _first(values: Sequence[float]) -> float | None:
    return values[0] if values else None


def _least(values: Sequence[float]) -> float | None:
    return min(values, default=None)


def _most(values: Sequence[float]) -> float | None:
    return max(values, default=None)


def _deviation(values: Sequence[float]) -> float | None:
    """Returns the population standard deviation over the nodes, as series have it by round; None for a single value."""
    if not all(map(math.isfinite, values)):
        return math.nan  # pstdev raises
    return statistics.pstdev(values) if len(values) > 1 else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _total(values: Sequence[float]) -> int:
    return round(math.fsum(values))


def _sum(values: Sequence[float]) -> float | None:
    return math.fsum(values) if values else None


def _rounds(values: Sequence[float]) -> int:
    return int(min(values, default=0))


FIGURES = (
    Figure("consensus_rms", "as the parameters", "sqrt(mean over nodes of ||x_i - mean x||^2)", "Node.evaluate",
           "consensus rms", digits=3, of=("consensus_rms",), how=_first),
    Figure("consensus_distance", "1", "consensus_rms / ||mean x||: relative to the size of the mean model",
           "Node.evaluate", "consensus distance", digits=4, of=("consensus_distance",), how=_first),
    Figure("evaluated_round", "rounds", "after which the figures above were found; not the last where a run failed",
           "Node.evaluate", "evaluated after", digits=0, of=("evaluated_round",), how=_least),
    Figure("rounds", "rounds", "that every node finished", "Node.run", "rounds", digits=0, of=("rounds",),
           how=_rounds),
    Figure("round_seconds_median", "s", "from the beginning of a round to its end, median over rounds, then over nodes",
           "Node.finish_round", "ms/round", 1e3, 1, of=("round_seconds_median",), how=_median),
    Figure("virtual_seconds", "s", "until the last node finished its last round, on the virtual time of `simulate`",
           "simulate/virtual.py", of=("virtual_seconds",), how=lambda values: max(values, default=None)),
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
    Figure("bytes_relayed_total", "bytes", "that nodes forwarded for nodes behind NAT, in addition to their own: all "
                                           "data on these connections, counted once for each relay",
           "wire/relay.py", "relayed MB", 1e-6, of=("bytes_relayed",),
           how=_total),
    Figure("bytes_resent_total", "bytes", "of protocol: what was sent again because it did not arrive",
           "communication/zeromq/protocol/link_sender.py", "resent MB", 1e-6, of=("bytes_resent",), how=_total),
    Figure("rounds_without_total", "rounds", "that nodes finished without a neighbor's payload, which arrived too "
                                             "late or not at all, summed over the nodes; `losses` lists them by "
                                             "neighbor",
           "Node.finish_round", "rounds without", digits=0, of=("rounds_without",), how=_total),
    Figure("late_payloads_total", "payloads", "that arrived after their receivers had continued without them; they "
                                              "are dropped",
           "Counters", "late payloads", digits=0, of=("late_payloads",), how=_total),
    Figure("checkpoints", "checkpoints", "that every node wrote", "node/checkpoints/manager.py", "checkpoints",
           digits=0, of=("checkpoints",), how=_least),
    Figure("checkpoints_kept", "checkpoints", "that every node has at the end", "node/checkpoints/manager.py",
           "checkpoints kept", digits=0, of=("checkpoints_kept",), how=_least),
    Figure("bytes_checkpoints_total", "bytes", "of all checkpoints that all nodes wrote", "node/checkpoints/manager.py",
           "checkpoint MB", 1e-6, of=("bytes_checkpoints",), how=_total),
    Figure("checkpoint_copy_seconds", "s", "in which the training thread copied its state, for the node with the most",
           "node/checkpoints/manager.py", "checkpoint copy s", digits=3, of=("checkpoint_copy_seconds",), how=_most),
    Figure("checkpoint_wait_seconds", "s", "in which the training thread waited for the disk, likewise",
           "node/checkpoints/manager.py", "checkpoint wait s", digits=3, of=("checkpoint_wait_seconds",), how=_most),
    Figure("checkpoint_cpu_seconds", "s", "of CPU time of the threads that write checkpoints, all nodes together",
           "checkpoint/writer.py", "checkpoint CPU s", digits=3, of=("checkpoint_cpu_seconds",), how=_sum),
    Figure("bytes_sent_per_node", "bytes", "bytes_sent_total / nodes that sent", "report/compare.py",
           "payload MB/node", 1e-6),
    Figure("bytes_metadata_per_node", "bytes", "bytes_metadata_total / nodes that sent", "report/compare.py",
           "metadata MB/node", 1e-6),
    Figure("start_seconds", "s", "from the command until all nodes were connected", "launch/supervising/run.py",
           "start s", digits=1),
    Figure("wall_seconds", "s", "from the command to the end", "launch/supervising/run.py", "wall s", digits=1),
)  # fmt: skip
"""The figures of runs of every task."""
BY_NAME = {figure.name: figure for figure in FIGURES}

COMPARED = (
    "consensus_rms", "consensus_distance", "bytes_sent_per_node", "bytes_metadata_per_node", "round_seconds_median",
)  # fmt: skip
"""The columns of `decentnode compare` that follow those of the task."""


@dataclass(frozen=True)
class Curve:
    """A figure that changes during a run, read from metrics.jsonl."""

    kind: str
    """The kind of records that contain it."""
    key: str
    label: str
    """The label of the vertical axis, with the unit."""
    scale: float = 1.0
    logarithmic: bool = False
    """Whether the axis is logarithmic if the values span more than half a decade."""
    spread: bool = True
    """Whether each node has its own value, so that there is a lowest and a highest."""
    merged: str = ""
    """The key of the same figure for the merged model; empty if there is none."""
    pooled: str = ""
    """The key of the figure for the test samples of all nodes together, if each node has only a part of them. It is
    then the mean over the nodes; empty: the mean of their values is."""


CURVES = {
    "loss": Curve("round", "loss", "training loss", logarithmic=True),
    "gradient_norm": Curve("round", "gradient_norm", "norm of the local gradient", logarithmic=True),
    "consensus_distance": Curve("evaluation", "consensus_distance", "consensus distance (relative)",
                                logarithmic=True, spread=False),
    "consensus_rms": Curve("evaluation", "consensus_rms", "consensus rms (absolute)", logarithmic=True, spread=False),
}  # fmt: skip
"""The curves of runs of every task; `gradient_norm` exists only if `training` asks for it."""


@dataclass(frozen=True)
class Metric:
    """One figure that a task measures for a model on test samples."""

    name: str
    """The key in metrics.jsonl; summary.json has it with _mean, _min, _max, _deviation or _merged appended."""
    unit: str
    """The unit of the value in these files."""
    meaning: str
    """The meaning, as the end of the sentence "It is ..."."""
    better: Literal["higher", "lower"]
    word: str = ""
    """The name for people; empty: the name with spaces."""
    short: str = ""
    """The name in the console line of each evaluation; empty: the name."""
    suffix: str = ""
    """The unit of scaled values in headings, such as %."""
    scale: float = 1.0
    """The factor from the value in the files to the value in tables and plots."""
    digits: int = 3
    """How many digits tables show after the decimal point."""
    logarithmic: bool = False
    """Whether plots have a logarithmic axis if the values span more than half a decade."""
    samples: str = "test"
    """The samples that it is measured on, for the labels of plots; empty if `word` says so already."""
    of_merged: bool = True
    """Whether the merged model has a value as well."""
    compared: Literal["", "mean", "min", "max"] = ""
    """Which value over the nodes `decentnode compare` shows even if this is not the main metric; empty: none."""
    pooled: bool = False
    """Whether each node has only a part of the test samples; the mean over the nodes is then that of all samples."""

    @property
    def text(self) -> str:
        return self.word or self.name.replace("_", " ")

    @property
    def line_name(self) -> str:
        return self.short or self.name

    @property
    def worst(self) -> Literal["min", "max"]:
        """Whether the worst node's value is the minimum or the maximum over the nodes."""
        return "min" if self.better == "higher" else "max"

    def figures(self, main: bool) -> tuple[Figure, ...]:
        """Returns the figures over the nodes of a run.

        main: whether this is the task's first metric, whose name headings need not repeat.
        """
        behind = f" {self.suffix}" if self.suffix else ""
        of = "" if main else f" {self.text}"
        kind: dict[str, Any] = {"unit": self.unit, "where": "Node.evaluate", "scale": self.scale, "digits": self.digits}
        low, high = ("worst", "best") if self.better == "higher" else ("best", "worst")
        mean: dict[str, Any] = {"of": (self.name,)}
        if self.pooled:  # every node reports the mean itself
            mean = {"of": (f"{self.name}_mean",), "how": _first}
        merged = f"merged{of}{behind}"
        return (
            Figure(f"{self.name}_mean", meaning=f"{self.meaning}; of a node's own model, mean over the nodes",
                   title=f"{self.text}{behind}", **mean, **kind),
            Figure(f"{self.name}_min", meaning=f"the same of the {low} node", title=f"{low} node{of}{behind}",
                   of=(self.name,), how=_least, **kind),
            Figure(f"{self.name}_max", meaning=f"the same of the {high} node", title=f"{high} node{of}{behind}",
                   of=(self.name,), how=_most, **kind),
            Figure(f"{self.name}_deviation", meaning="the standard deviation of the same over the nodes of a run",
                   title=f"deviation over nodes{of}{behind}", of=(self.name,), how=_deviation, **kind),
            *([Figure(f"{self.name}_merged", meaning="the same of the mean of all models", title=merged,
                      of=(f"{self.name}_merged",), how=_first, **kind)] if self.of_merged else []),
        )  # fmt: skip

    def curve(self) -> Curve:
        unit = self.suffix or (self.unit if self.unit != "1" else "")
        label = f"{self.samples} {self.text}".lstrip() + (f" ({unit})" if unit else "")
        merged = f"{self.name}_merged" if self.of_merged else ""
        pooled = f"{self.name}_mean" if self.pooled else ""
        return Curve("evaluation", self.name, label, self.scale, self.logarithmic, merged=merged, pooled=pooled)


LOSS = Metric("loss", "1", "the mean loss on the test samples", "lower", word="loss", digits=4, logarithmic=True)
"""The metric of every task."""
ACCURACY = Metric(
    "accuracy", "fraction", "of the test samples whose likeliest class is the right one", "higher", short="acc",
    suffix="%", scale=100, digits=2,
)  # fmt: skip
"""The main metric of classification, and of runs from before there were tasks. It is defined here so that programs that
show runs need not import the tasks' modules."""


@dataclass(frozen=True)
class TaskMetrics:
    """What runs of one task measure, as summary.json and task.json describe it to readers of a run."""

    task: str
    """The name of the task, or "package.module:Class"."""
    metrics: tuple[Metric, ...]
    """The metrics; the first is the main one, which tables, plots and console lines show."""

    @property
    def main(self) -> Metric:
        return self.metrics[0]

    @functools.cached_property
    def figures(self) -> tuple[Figure, ...]:
        """All figures of a run of this task, those of the metrics first."""
        own = (each.figures(each is self.main) for each in self.metrics)
        return (*(figure for figures in own for figure in figures), *FIGURES)

    @functools.cached_property
    def by_name(self) -> dict[str, Figure]:
        return {figure.name: figure for figure in self.figures}

    @property
    def compared(self) -> tuple[str, ...]:
        """The columns of `decentnode compare`."""
        main = self.main
        own = (f"{main.name}_{each}" for each in ("mean", main.worst, "deviation", "merged"))
        further = (f"{each.name}_{each.compared}" for each in self.metrics[1:] if each.compared)
        return (*own, *further, *COMPARED)

    @functools.cached_property
    def curves(self) -> dict[str, Curve]:
        """The curves that `decentnode plot` can draw, by name. A metric has its own name, except that the loss on test
        samples is `test_loss`, because `loss` is the training loss."""
        return {**{curve_name(each): each.curve() for each in self.metrics}, **CURVES}

    def plain(self) -> dict[str, Any]:
        """Returns plain data for JSON, which `from_plain` reads back."""
        return {"name": self.task, "metrics": [dataclasses.asdict(each) for each in self.metrics]}

    @classmethod
    def from_plain(cls, found: Any) -> TaskMetrics:
        """Returns the TaskMetrics that `plain` described. Raises ValueError for anything else."""
        known = {field.name for field in dataclasses.fields(Metric)}
        try:
            metrics = tuple(Metric(**{key: value for key, value in each.items() if key in known})
                            for each in found["metrics"])  # fmt: skip
            made = cls(str(found["name"]), metrics)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"a run's task must have a name and metrics, got {found!r:.200}") from error
        if not metrics:
            raise ValueError(f"task {made.task} must have a metric")
        return made


def curve_name(metric: Metric) -> str:
    return "test_loss" if metric.name == "loss" else metric.name


MAX_COUNTS_CHARACTERS = 240
"""The maximum number of characters of counts by uid in one figure of a node."""


def packed_counts(counts: Mapping[int, int]) -> str:
    """Returns counts by uid as one short text, "uid:count" by descending count, as many as fit into
    MAX_COUNTS_CHARACTERS."""
    text = ""
    for uid, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        longer = f"{text} {uid}:{count}".strip()
        if len(longer) > MAX_COUNTS_CHARACTERS:
            break
        text = longer
    return text


def unpacked_counts(text: object) -> dict[int, int]:
    """Returns the counts that `packed_counts` encoded; {} for anything else."""
    pairs = [each.partition(":") for each in text.split()] if isinstance(text, str) else []
    return {int(uid): int(count) for uid, _, count in pairs if uid.isdecimal() and count.isdecimal()}


AXES = {"rounds": "rounds", "seconds": "time (s)", "bytes": "payloads sent by all nodes"}
"""The horizontal axes of plots with their labels; the unit of bytes depends on their size."""
VIRTUAL = "virtual_seconds"
VIRTUAL_AXES = {**AXES, VIRTUAL: "virtual time (s)"}
"""The axes of plots of runs with virtual time."""
TRAINED_AXES = {"epochs": "epochs", "samples": "samples that all nodes trained on"}
"""Axes that are used only on request. An epoch is as many samples as all nodes have to train on, however many each node
has trained on."""
EVERY_AXIS = {**VIRTUAL_AXES, **TRAINED_AXES}
VIRTUAL_FILE = "virtual.json"
"""The file in a run's folder with the virtual time that `decentnode timeline` computed after the run."""
