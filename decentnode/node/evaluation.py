"""Evaluation of the local and of the merged model, in steps that other nodes of the same process can be stepped
between."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decentnode.communication.base import Communication, Pending
from decentnode.tasks.base import Task
from decentnode.tensors import blocks
from decentnode.training.base import Evaluation, Training


@dataclass(frozen=True)
class Evaluated:
    """The result of one evaluation."""

    merged: Tensor
    """[P + B] mean of all models: parameters, then float buffers."""
    figures: dict[str, float]
    """By the names of metrics/figures.py."""


class Evaluator:
    """Evaluates the model of one node, and the mean of all models together with the other nodes."""

    def __init__(self, training: Training, communication: Communication, *, recompute: bool, phases: int) -> None:
        """recompute: whether float buffers are statistics that are measured anew (`node.buffers: recompute`). phases:
        of a round, for as many steps others may be behind this node."""
        self._training, self._communication = training, communication
        self._recompute, self._phases = recompute, phases

    def evaluate(self, key: str, closing: bool, share: tuple[int, int]) -> Generator[None, None, Evaluated]:
        """Evaluate the local model, the merged model and the consensus distance. Yields where other nodes have to act;
        blocking for at most `communication.timeout_seconds` for each of the means over all nodes.

        The merged model is the mean of all models; every node evaluates it on its own part of the test set. key: names
        the evaluation, the same on all nodes. share: (index, count) of this node's part of the test set.
        """
        training, communication = self._training, self._communication
        timeout = communication.config.timeout_seconds
        model, measured = training.model, self._measure()
        if measured.numel():
            training.load_statistics(measured)
        own = torch.cat([model.parameters, model.buffers.to(model.dtype)])
        pending = communication.mean(f"{key}/model", own, closing)
        local = training.evaluate("test")  # while the mean is on its way
        yield from steps_until_ready(pending, self._phases)
        merged, contributors = pending.wait(timeout)
        if measured.numel():
            merged = yield from self._recomputed(merged, f"{key}/statistics", closing)
        of_merged = self._evaluate_merged(merged, share)
        distance, norm = squared_distance(own[: model.num_parameters], merged[: model.num_parameters])
        task = training.task
        names = [each.name for each in task.measured().metrics]
        packed = _packed(task, names, distance, of_merged, local)
        pending = communication.mean(f"{key}/figures", packed, closing)
        yield from steps_until_ready(pending, self._phases)
        mean, _ = pending.wait(timeout)
        rms = math.sqrt(float(mean[0]))
        figures = {**local.metrics, **self._over_nodes(names, mean[1:].tolist(), contributors)}
        figures |= {"consensus_distance": rms / max(math.sqrt(norm), 1e-30), "consensus_rms": rms,
                    "contributors": contributors}  # fmt: skip
        if training.has_validation:
            validation = training.evaluate("validation")
            figures |= {f"validation_{name}": value for name, value in validation.metrics.items()}
        return Evaluated(merged, figures)

    def _over_nodes(self, names: Sequence[str], means: Sequence[float], nodes: int) -> dict[str, float]:
        """Returns <metric>_mean over the nodes that could tell one, and <metric>_merged of the merged model.

        means: over so many nodes, as `_packed` orders them, without the distance.
        """
        task = self._training.task
        sums = {name: mean * nodes for name, mean in zip(task.all_sums, means[: len(task.all_sums)], strict=True)}
        told, *local = means[len(task.all_sums) :]
        found = {f"{name}_mean": mean / told for name, mean in zip(names, local, strict=True) if told}
        return {**found, **{f"{name}_merged": value for name, value in task.evaluated(sums).items()}}

    def _recomputed(self, merged: Tensor, key: str, closing: bool) -> Generator[None, None, Tensor]:
        """Returns the merged model [P + B] with the statistics that it has over the data of all nodes."""
        with self._holding(merged):
            measured = self._measure()
        pending = self._communication.mean(key, measured, closing)
        yield from steps_until_ready(pending, self._phases)
        mean, _ = pending.wait(self._communication.config.timeout_seconds)
        with self._holding(merged):
            self._training.load_statistics(mean)
            model = self._training.model
            return torch.cat([model.parameters, model.buffers.to(model.dtype)])

    def _evaluate_merged(self, merged: Tensor, share: tuple[int, int]) -> Evaluation:
        with self._holding(merged):
            return self._training.evaluate("test", share)

    def _measure(self) -> Tensor:
        """Returns statistics of the present model over the node's own samples; empty where they are not recomputed."""
        if not self._recompute:
            return torch.zeros(0, dtype=torch.float64)
        return self._training.measure_statistics()

    @contextlib.contextmanager
    def _holding(self, merged: Tensor) -> Iterator[None]:
        """The training's model is `merged` [P + B] in this block; its own values are restored afterwards."""
        model = self._training.model
        parameters, buffers = model.parameters.clone(), model.buffers.clone()
        model.parameters.copy_(merged[: model.num_parameters])
        model.buffers.copy_(merged[model.num_parameters :])
        try:
            yield
        finally:
            model.parameters.copy_(parameters)
            model.buffers.copy_(buffers)


def _packed(task: Task, names: Sequence[str], distance: float, of_merged: Evaluation, local: Evaluation) -> Tensor:
    """Returns what is averaged over the nodes, float64: the squared distance, the sums of the merged model, 1 where
    this node's own test samples gave metrics, and these (zeros elsewhere)."""
    told = [1.0, *(local.metrics[name] for name in names)] if local.metrics else [0.0] * (1 + len(names))
    return torch.tensor([distance, *(of_merged.sums[name] for name in task.all_sums), *told], dtype=torch.float64)


def steps_until_ready(pending: Pending, phases: int) -> Iterator[None]:
    """Yields until `pending` is ready, but at most 1 + `phases` times: after a stop, other nodes of the same process
    may be all phases of a round behind."""
    yield
    for _ in range(phases):
        if not pending.ready:
            yield


def squared_distance(x: Tensor, mean: Tensor) -> tuple[float, float]:
    """Returns (||x - mean||^2, ||mean||^2) in double precision. x, mean: [P].

    Computed block by block: double copies of whole models would take more memory than the run.
    """
    total = torch.zeros(2, dtype=torch.float64, device=x.device)
    for start, stop in blocks(0, x.numel()):
        far = mean[start:stop].double()
        total[1] += far.square().sum()
        total[0] += far.sub_(x[start:stop]).square().sum()
    return float(total[0]), float(total[1])
