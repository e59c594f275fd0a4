"""Evaluates the local and the merged model, as steps between which other nodes of the same process can be stepped."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decentnode.communication.base import Communication, Pending
from decentnode.communication.run_state import Steps
from decentnode.errors import PeerLost
from decentnode.metrics.history import History
from decentnode.tasks.base import EMA, Task
from decentnode.tensors import blocks
from decentnode.training.base import EvaluatedSplit, Evaluation, Training


@dataclass(frozen=True)
class EvaluationResult:
    """The result of one evaluation."""

    merged: Tensor
    """[P + B] mean of all models: parameters, then float buffers, at least in float32, in which it was summed. For
    parameters that are not shared, it contains the node's own values."""
    figures: dict[str, float]
    """The figures, with the names of metrics/figures.py."""
    average: Tensor | None = None
    """[P + B] the node's moving average of its models, with the float buffers used to evaluate it; None if no moving
    average is kept."""
    merged_average: Tensor | None = None
    """[P + B] mean of all nodes' moving averages, in the layout of `merged`."""


class Evaluator:
    """Evaluates the model of one node, and the mean of all models together with the other nodes."""

    def __init__(
        self, training: Training, communication: Communication, *, recompute: bool, phases: int, shared: int,
        weight: float | None = None, counts: bool = True,
    ) -> None:
        """recompute: whether the BatchNorm statistics are measured anew for every evaluation (`node.buffers:
        recompute`). phases: the number of phases in a round, which is how many steps other nodes may be behind this
        one. shared: the number of shared parameters, which come first. weight: the weight of this node's model in the
        merged model and in the consensus distance; None: all nodes have the same weight.
        counts: whether this node evaluates models and measures statistics, and so counts in the means over the
        nodes."""
        self._counts = counts
        self._further = [each.name for each in training.further]
        self._training, self._communication = training, communication
        self._recompute, self._phases, self._shared, self._weight = recompute, phases, shared, weight

    def evaluate(self, key: str, closing: bool, share: tuple[int, int]) -> Steps[EvaluationResult]:
        """Evaluate the local model, the merged model and the consensus distance, as steps. Each mean over all nodes is
        waited for at most `communication.timeout_seconds`.

        The merged model is the mean of all models; every node evaluates it on its own part of the test set. Parameters
        that are not shared never leave the node, not even within a mean: in the merged model that a node evaluates, it
        uses its own values for them, and the consensus distance covers only the shared parameters. key: the name of the
        evaluation, the same on all nodes. closing: as for `Communication.mean`. share: (index, count) of this node's
        part of the test set, among the nodes that count.
        """
        training, communication = self._training, self._communication
        timeout = communication.config.timeout_seconds
        model, moments = training.model, self._measure_statistics()
        if moments.numel() and training.num_samples:
            training.load_statistics(moments)
        average = self._moving_average()
        own = self._shared_part(model.values())
        contribution = own if average is None else torch.cat([own, self._shared_part(average)])
        pending = begin_mean(communication, f"{key}/model", self._contribution(contribution), closing)
        # lets the other nodes of this process begin the mean before this one spends time on its local evaluation
        yield None
        splits = training.evaluated
        split_figures = [SplitFigures(split, training.task) for split in splits]
        local_evaluations = [self._evaluate_own(split.name) for split in splits]  # while the mean is in flight
        if average is not None:
            split_figures.append(SplitFigures(replace(splits[0], prefix=EMA.prefix), training.task))
            with self._model_replaced_by(average):
                local_evaluations.append(self._evaluate_own(splits[0].name))
        further = self._measure_further()
        mean, contributors = yield from mean_of(pending, self._phases, timeout)
        mean, weight = self._weighted_mean(mean, own.dtype)
        merged = yield from self._merged_model(mean[: own.numel()], None, f"{key}/statistics", closing)
        merged_evaluations = self._evaluate_merged(merged, share, splits)
        further_of_merged = self._measure_further(merged)
        distance, norm = squared_distance(own[: self._shared], merged[: self._shared])
        distance = weight * distance if weight else 0.0  # without weight, the model may hold NaN
        merged_average = None
        if average is not None:
            mean_of_averages = mean[own.numel() :]
            merged_average = yield from self._merged_model(
                mean_of_averages, average, f"{key}/average-statistics", closing
            )
            merged_evaluations += self._evaluate_merged(merged_average, share, splits[:1])
        packed = [value
                  for each, *pair in zip(split_figures, local_evaluations, merged_evaluations, strict=True)
                  for value in each.packed(*pair)]  # fmt: skip
        sums = torch.tensor([distance, *packed, *self._packed_further(further, further_of_merged)], dtype=torch.float64)
        pending = begin_mean(communication, f"{key}/figures", sums, closing)
        mean, _ = yield from mean_of(pending, self._phases, timeout)
        means = iter(mean.tolist())
        figures = figures_of(split_figures, local_evaluations, means, contributors, norm)
        figures |= further | self._unpack_further(means)
        if training.has_validation and self._counts:
            validation = training.evaluate("validation")
            figures |= {f"validation_{name}": value for name, value in validation.metrics.items()}
        return EvaluationResult(merged, figures, average, merged_average)

    def _contribution(self, own: Tensor) -> Tensor:
        """Returns this node's contribution to the mean over all nodes: `own` [E], or if nodes have different weights,
        [w own, w] [E + 1] in float64. In float64, the model of a single node with all the weight comes out of the mean
        unchanged."""
        if self._weight is None:
            return own
        found = torch.zeros(own.numel() + 1, dtype=torch.float64, device=own.device)
        if self._weight:
            torch.mul(own, self._weight, out=found[:-1])
            found[-1] = self._weight
        return found

    def _weighted_mean(self, mean: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
        """Converts the mean over all nodes of what `_contribution` returned. Returns the weighted mean [E], and this
        node's weight divided by the mean weight. Raises PeerLost if no node has a positive weight."""
        if self._weight is None:
            return mean, 1.0
        weight = float(mean[-1])
        if weight <= 0:
            raise PeerLost("no node is left whose model would be the run's: no server, or none but attackers")
        return (mean[:-1] / weight).to(dtype), self._weight / weight

    def _evaluate_own(self, split: str) -> Evaluation:
        """Returns the evaluation of the local model, or one of no samples if the model does not count."""
        return self._training.evaluate(split) if self._counts else self._nothing()

    def _nothing(self) -> Evaluation:
        return Evaluation(0, dict.fromkeys(self._training.task.all_sums, 0.0), {})

    def evaluate_locally(self) -> dict[str, float]:
        """Evaluate the local model without communication. Returns its figures."""
        training = self._training
        moments = self._measure_statistics()
        if moments.numel() and training.num_samples:
            training.load_statistics(moments)
        figures: dict[str, float] = {}
        for split in training.evaluated:
            figures |= SplitFigures(split, training.task).named(training.evaluate(split.name).metrics)
        figures |= self._measure_further()
        if training.has_validation:
            validation = training.evaluate("validation")
            figures |= {f"validation_{name}": value for name, value in validation.metrics.items()}
        return figures

    def _moving_average(self) -> Tensor | None:
        """Returns the node's moving average [P + B] of its models, with BatchNorm statistics measured for it if they
        are recomputed; None if no moving average is kept."""
        average = self._training.average()
        if average is None or not self._recompute:
            return average
        with self._model_replaced_by(average):
            moments = self._measure_statistics()
            if moments.numel() and self._training.num_samples:
                self._training.load_statistics(moments)
            return self._training.model.values()

    def _shared_part(self, whole: Tensor) -> Tensor:
        """Returns the part of a model [P + B] that leaves the node: shared parameters, then float buffers."""
        kept = slice(self._shared, self._training.model.num_parameters)
        return whole if kept.start == kept.stop else torch.cat([whole[: kept.start], whole[kept.stop :]])

    def _merged_model(
        self, mean: Tensor, own: Tensor | None, key: str, closing: bool
    ) -> Steps[Tensor]:
        """Returns the whole merged model [P + B], as steps, from the mean of what `_shared_part` returned. own: the [P
        + B] model of this node from which the unshared parameters are taken; the current model if None."""
        model = self._training.model
        kept = (model.parameters if own is None else own)[self._shared : model.num_parameters]
        merged = mean
        if kept.numel():
            merged = torch.cat([mean[: self._shared], kept.to(mean.device), mean[self._shared :]])
        if self._recompute:
            merged = yield from self._with_recomputed_statistics(merged, key, closing)
        return merged

    def _with_recomputed_statistics(self, merged: Tensor, key: str, closing: bool) -> Steps[Tensor]:
        """Returns the merged model [P + B] with BatchNorm statistics measured over the data of all nodes, as steps."""
        with self._model_replaced_by(merged):
            moments = self._measure_statistics()
        if not moments.numel():
            return merged
        if not self._counts:
            moments = torch.zeros_like(moments)
        pending = begin_mean(self._communication, key, moments, closing)
        mean, _ = yield from mean_of(pending, self._phases, self._communication.config.timeout_seconds)
        with self._model_replaced_by(merged):
            self._training.load_statistics(mean)
            return self._training.model.values()

    def _evaluate_merged(
        self, merged: Tensor, share: tuple[int, int], splits: Sequence[EvaluatedSplit]
    ) -> list[Evaluation]:
        """Returns the evaluations of the merged model by split, of no samples if this node does not count; of splits
        that all nodes have, only on this node's part."""
        if not self._counts:
            return [self._nothing() for _ in splits]
        with self._model_replaced_by(merged):
            return [self._training.evaluate(split.name, share if split.shared else (0, 1)) for split in splits]

    def _measure_further(self, merged: Tensor | None = None) -> dict[str, float]:
        """Returns what the training measures by itself of the node's own model or of `merged` [P + B]; empty if this
        node does not count."""
        if not self._counts or not self._further:
            return {}
        if merged is None:
            return self._training.measure_further()
        with self._model_replaced_by(merged):
            return self._training.measure_further(merged=True)

    def _packed_further(self, *measured: Mapping[str, float]) -> list[float]:
        """Returns `counted` of the training's own metrics for each of `measured`: those of the node's own model, and of
        the merged one."""
        return [number for each in measured for number in counted(self._further, each)]

    def _unpack_further(self, means: Iterator[float]) -> dict[str, float]:
        """Returns <metric>_mean and <metric>_merged, means over the nodes that have a value. means: an iterator over
        the means of what the nodes packed."""
        return {f"{name}{ending}": value for ending in ("_mean", "_merged")
                for name, value in means_of(self._further, means).items()}  # fmt: skip

    def _measure_statistics(self) -> Tensor:
        """Returns the BatchNorm statistics of the current model over the node's own samples; empty if they are not
        recomputed."""
        if not self._recompute:
            return torch.zeros(0, dtype=torch.float64)
        return self._training.measure_statistics()

    @contextlib.contextmanager
    def _model_replaced_by(self, merged: Tensor) -> Iterator[None]:
        """Loads `merged` [P + B] into the training's model for the duration of a block, and restores the model's own
        values afterwards."""
        model = self._training.model
        parameters, buffers = model.parameters.clone(), model.buffers.clone()
        model.parameters.copy_(merged[: model.num_parameters])
        model.buffers.copy_(merged[model.num_parameters :])
        try:
            yield
        finally:
            model.parameters.copy_(parameters)
            model.buffers.copy_(buffers)


def counted(names: Sequence[str], values: Mapping[str, float]) -> list[float]:
    """Returns 1 and the value for each of `names`, or zeros if there is none, for a mean over the nodes."""
    return [number for name in names for number in (float(name in values), values.get(name, 0.0))]


def means_of(names: Sequence[str], means: Iterator[float]) -> dict[str, float]:
    """Returns by name the means over the nodes that have a value, from the means of what the nodes `counted`. Takes
    all of these from `means`."""
    pairs = [(name, next(means), next(means)) for name in names]
    return {name: value / fraction for name, fraction, value in pairs if fraction}


class SplitFigures:
    """Packs one split's figures for a mean over all nodes, and unpacks them from the mean."""

    def __init__(self, split: EvaluatedSplit, task: Task) -> None:
        self._split, self._task = split, task
        self._names = [each.name for each in task.all_metrics]

    def packed(self, local: Evaluation, merged: Evaluation) -> list[float]:
        """Returns the sums of the merged model, followed by the metrics of the node's own model (`counted`), or, if
        samples are pooled, by the sums of its own model."""
        sums = [merged.sums[name] for name in self._task.all_sums]
        if self._split.pooled:
            return sums + [local.sums[name] for name in self._task.all_sums]
        return sums + counted(self._names, local.metrics)

    def unpack_means(self, means: Iterator[float], nodes: int) -> dict[str, float]:
        """Returns <metric>_mean and <metric>_merged. means: an iterator over the means of what the nodes packed, from
        which this split's values are taken. nodes: the number of contributing nodes."""
        merged = self._metrics_of(means, nodes)
        mean = self._metrics_of(means, nodes) if self._split.pooled else means_of(self._names, means)
        return self.named(mean, "_mean") | self.named(merged, "_merged")

    def _metrics_of(self, means: Iterator[float], nodes: int) -> dict[str, float]:
        return self._task.evaluated({name: nodes * next(means) for name in self._task.all_sums})

    def named(self, metrics: Mapping[str, float], ending: str = "") -> dict[str, float]:
        """Returns the metrics under the names that they have in records."""
        return {f"{self._split.prefix}{name}{ending}": value for name, value in metrics.items()}


def figures_of(
    split_figures: Sequence[SplitFigures], local_evaluations: Sequence[Evaluation], means: Iterator[float], nodes: int,
    norm: float,
) -> dict[str, float]:
    """Returns the figures of an evaluation. means: an iterator over the means over `nodes` nodes of the squared
    distance to the merged model and then of what each of `split_figures` packed. norm: the squared norm of the merged
    model."""
    rms = math.sqrt(next(means))
    figures: dict[str, float] = {}
    for each, found in zip(split_figures, local_evaluations, strict=True):
        figures |= each.named(found.metrics) | each.unpack_means(means, nodes)
    return figures | {"consensus_distance": rms / max(math.sqrt(norm), 1e-30), "consensus_rms": rms,
                      "contributors": nodes}  # fmt: skip


def steps_until_ready(pending: Pending, phases: int) -> Steps[None]:
    """Yields until `pending` is ready, but at most 1 + `phases` times: after a stop, other nodes of the same process
    may be behind by all phases of a round."""
    yield None
    for _ in range(phases):
        if not pending.ready:
            yield None


class RecordedMean(Pending):
    """A mean over all nodes whose completion is noted in the node's history."""

    def __init__(self, of: Pending, history: History, key: str) -> None:
        self._of, self._history, self._key = of, history, key

    @property
    def ready(self) -> bool:
        return self._of.ready

    @property
    def arrived(self) -> bool:
        return self._of.arrived

    def wait(self, timeout_seconds: float) -> tuple[Tensor, int]:
        found = self._of.wait(timeout_seconds)
        self._history.averaged(self._key)
        return found

    def steps(self, timeout_seconds: float) -> Steps[tuple[Tensor, int]]:
        found = yield from self._of.steps(timeout_seconds)
        self._history.averaged(self._key)
        return found


def begin_mean(communication: Communication, key: str, tensor: Tensor, closing: bool = False) -> Pending:
    """Like `Communication.mean`, for a mean on which models or the course of the run depend: it is also noted in the
    node's history, if one is kept."""
    history = communication.history
    if history is None:
        return communication.mean(key, tensor, closing)
    history.averaging(key)
    return RecordedMean(communication.mean(key, tensor, closing), history, key)


def mean_of(pending: Pending, phases: int, timeout_seconds: float) -> Steps[tuple[Tensor, int]]:
    """Returns a mean over all nodes and the number of contributors, as steps: first those of `steps_until_ready`, then
    a wait of at most `timeout_seconds`. Raises what `Pending.wait` raises."""
    yield from steps_until_ready(pending, phases)
    return (yield from pending.steps(timeout_seconds))


def squared_distance(x: Tensor, mean: Tensor) -> tuple[float, float]:
    """Returns (||x - mean||^2, ||mean||^2) in double precision. x, mean: [P].

    Computed block by block: float64 copies of whole models would take more memory than the run itself.
    """
    total = torch.zeros(2, dtype=torch.float64, device=x.device)
    for start, stop in blocks(0, x.numel(), x.device):
        difference = mean[start:stop].double()
        total[1] += difference.square().sum()
        total[0] += difference.sub_(x[start:stop]).square().sum()
    return float(total[0]), float(total[1])
