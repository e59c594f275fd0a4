"""Evaluates all nodes and the merged model, and computes the figures that each node of a run reports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decentnode.node.measuring.evaluation import SplitFigures, figures_of
from decentnode.simulate.engines.forward import Forward, Unsuitable
from decentnode.simulate.engines.jobs import evaluation_of
from decentnode.simulate.engines.population import Population
from decentnode.simulate.engines.steps import saved_bytes
from decentnode.tasks.base import LOSS_SUMS
from decentnode.tensors import sum_dtype
from decentnode.training.base import EvaluatedSplit, Evaluation
from decentnode.training.losses import Loss
from decentnode.training.supervised import evaluation_batch

CHUNK_ELEMENTS = 1 << 17
"""Largest number of input elements of the test samples that are evaluated at once."""
CPU_BYTES = 64 << 20
"""Memory for the activations of the nodes that are evaluated at once."""
GPU_BYTES = 2 << 30


@dataclass(frozen=True)
class EvaluationResult:
    """The result of one evaluation."""

    merged: Tensor
    """[P + B] mean of all models: parameters, then float buffers, at least in float32."""
    figures: list[dict[str, float]]
    """Per node, by the names in metrics/figures.py."""
    sent: int
    """Bytes that the evaluation sends over one link of the control tree in one direction."""


class Evaluator:
    """Evaluates the rows of a population."""

    def __init__(self, population: Population, forward: Forward | None) -> None:
        """forward: computes the outputs of many nodes at once; None: each node evaluates itself.

        Raises Unsuitable if the run needs an evaluation that this class does not support.
        """
        config = population.experiment
        if config.node.buffers == "recompute" and population.buffers.numel():
            raise Unsuitable("node.buffers: recompute")
        if getattr(config.training, "ema", None) is not None:
            raise Unsuitable("training.ema")
        self._population, self._forward = population, forward
        self._splits = population.trainings[0].evaluated
        self._split_figures = [SplitFigures(split, population.task) for split in self._splits]
        fragments = population.shared[0].fragments
        self._shared = fragments[-1].stop if fragments else population.num_parameters
        self._activation_bytes = 0
        """Bytes of activations per node and sample; 0 until measured."""

    def evaluate(self) -> EvaluationResult:
        """Evaluates every node's model and the mean of all models. Blocking."""
        population = self._population
        count, size, shared = population.num_nodes, population.num_parameters, self._shared
        parameters, buffers = population.parameters, population.buffers
        wide = sum_dtype(parameters.dtype)
        merged = torch.cat([parameters.mean(0, dtype=wide), buffers.mean(0).to(wide)])
        local = list(zip(*(self._local(split) for split in self._splits), strict=True))
        of_merged = self._of_merged(merged, [*self._splits])
        centers = merged[:shared]
        distances = torch.cat([
            torch.linalg.vector_norm(rows[:, :shared] - centers, dim=1, dtype=torch.float64).square()
            for rows in parameters.split(max(1, (1 << 22) // max(1, size)))
        ])  # fmt: skip
        norm = float(torch.linalg.vector_norm(centers, dtype=torch.float64).square())
        packed = [
            [value for split, *both in zip(self._split_figures, own, theirs, strict=True)
             for value in split.packed(*both)]
            for own, theirs in zip(local, of_merged, strict=True)
        ]
        mean = [float(distances.mean()), *torch.tensor(packed, dtype=torch.float64).mean(0).tolist()]
        figures = [figures_of(self._split_figures, own, iter(mean), count, norm) for own in local]
        if population.trainings[0].has_validation:
            found = self._local(EvaluatedSplit("validation", shared=False))
            for each, validation in zip(figures, found, strict=True):
                each |= {f"validation_{name}": value for name, value in validation.metrics.items()}
        sent = (shared + buffers.shape[1]) * merged.element_size() + 8 * len(mean)
        population.release()
        return EvaluationResult(merged, figures, sent)

    # -- the nodes' own models

    def _local(self, split: EvaluatedSplit) -> list[Evaluation]:
        """Returns every node's evaluation of its own model."""
        if split.shared and self._forward is not None and not self._population.task.generated_sums:
            return self._stacked(split, self._forward)
        return [*map(evaluation_of, self._population.run_job("evaluate", split.name))]

    def _stacked(self, split: EvaluatedSplit, forward: Forward) -> list[Evaluation]:
        population, task = self._population, self._population.task
        training: Any = population.trainings[0]
        source, members = training.samples_of(split.name)
        size = evaluation_batch(CHUNK_ELEMENTS, source, task, population.device)
        names = task.all_sums
        totals = torch.zeros(population.num_nodes, len(names), dtype=torch.float64, device=population.device)
        with torch.no_grad(), _evaluating(training):
            for chosen in members.split(size):
                if not len(chosen):
                    continue
                inputs, targets = source.take(chosen)
                block = self._nodes_per_block(forward, inputs, len(chosen))
                for first in range(0, population.num_nodes, block):
                    rows = population.rows[first : first + block]
                    outputs = forward(population.views(rows), inputs[None])
                    totals[first : first + block] += self._sums(training._loss, outputs, targets)
        found = [dict(zip(names, each, strict=True)) for each in totals.tolist()]
        return [Evaluation(len(members), sums, task.evaluated(sums)) for sums in found]

    def _nodes_per_block(self, forward: Forward, inputs: Tensor, samples: int) -> int:
        population = self._population
        if not self._activation_bytes:
            rows = population.rows[:1].detach().clone().requires_grad_()
            with torch.enable_grad():
                kept = saved_bytes(lambda: forward(population.views(rows), inputs[None, :2]))
            self._activation_bytes = max(64, 2 * kept // min(2, len(inputs)))
        limit = CPU_BYTES if population.device.type == "cpu" else GPU_BYTES
        return max(1, min(population.num_nodes, limit // (self._activation_bytes * samples)))

    def _sums(self, loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the sums [n, S] float64 of nodes with these outputs [n, B, ...], in the order of `task.all_sums`."""
        task = self._population.task
        units = task.units(targets)

        def loss_of(given: Tensor) -> Tensor:
            return loss.summed(*task.align(given, targets), units)

        def one(given: Tensor, summed: Tensor) -> Tensor:
            found = {LOSS_SUMS[0]: summed, **task.measure(*task.align(given, targets))}
            every = [units * torch.ones_like(summed) if name == LOSS_SUMS[1] else found[name]
                     for name in task.all_sums]  # fmt: skip
            return torch.stack([value.double() for value in every])

        # On a CPU, vmap is no faster for the loss than a loop, and imports SymPy for the cross entropy: a tenth of the
        # CPU time of a short run of 1,024 nodes.
        losses = [loss_of(each) for each in outputs] if outputs.device.type == "cpu" else None
        try:
            summed = torch.func.vmap(loss_of)(outputs) if losses is None else torch.stack(losses)
            return torch.func.vmap(one)(outputs, summed)
        except RuntimeError:  # a task's measures may depend on values, which vmap does not support
            summed = torch.stack(losses or [loss_of(each) for each in outputs])
            return torch.stack([one(*each) for each in zip(outputs, summed, strict=True)])

    # -- the merged model

    def _of_merged(self, merged: Tensor, splits: Sequence[EvaluatedSplit]) -> list[list[Evaluation]]:
        """Returns for each node its evaluations of the merged model, in which parameters that are not shared are the
        node's own."""
        population, count = self._population, self._population.num_nodes
        if self._shared < population.num_parameters or (population.forks and not all(each.shared for each in splits)):
            named = [(each.name, each.shared) for each in splits]
            found = population.run_job("evaluate_merged", (self._shared, count, named), merged)
            return [[*map(evaluation_of, each)] for each in found]
        with population.holding(merged):
            parts: list[list[Evaluation]] = []
            for split in splits:
                if split.shared:  # the sums over all nodes' parts are the sums of the whole split
                    whole_split = population.trainings[0].evaluate(split.name)
                    sums = {key: value / count for key, value in whole_split.sums.items()}
                    each = Evaluation(whole_split.samples, sums, whole_split.metrics)
                    parts.append([each] * count)
                else:
                    parts.append([training.evaluate(split.name) for training in population.trainings])
        return [list(each) for each in zip(*parts, strict=True)]


@contextlib.contextmanager
def _evaluating(training: Any) -> Iterator[None]:
    module = training.model.module
    mode = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(mode)
