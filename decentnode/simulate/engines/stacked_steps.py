"""Local steps of all nodes at once: one forward and backward pass over the stacked parameters, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decentnode.simulate.engines.forward import Forward, Unsuitable
from decentnode.simulate.engines.population import Population
from decentnode.simulate.engines.sampling import StackedSampler
from decentnode.simulate.engines.steps import (
    Local,
    LocalSteps,
    block_rows,
    no_steps,
    raise_if_diverged,
    saved_bytes,
)
from decentnode.tensors import moved
from decentnode.training.base import Direction
from decentnode.training.losses import LOSSES
from decentnode.training.lr_schedules import LearningRateSchedule
from decentnode.training.optimizers import make_optimizer
from decentnode.training.source import Source
from decentnode.training.supervised import Supervised
from decentnode.training.supervised_config import SupervisedConfig

ELEMENTWISE = frozenset({"sgd", "adam", "adamw", "adamax", "nadam", "radam", "adagrad", "adadelta", "rmsprop", "rprop"})
"""Optimizers that work elementwise, so that they treat a stack of models like single ones."""
CPU_BLOCK_BYTES = 32 << 20
"""Memory for parameters, gradients and activations of the nodes that are computed at once: about a core's share of the
last-level cache."""
GPU_BLOCK_BYTES = 4 << 30


class StackedSteps(LocalSteps):
    """Makes the steps of plain supervised training. Batches smaller than those of other nodes are padded with samples
    that have no weight."""

    def __init__(self, population: Population, forward: Forward) -> None:
        """Raises Unsuitable if the training is of another kind. The population's samples are joined."""
        super().__init__(population)
        self.name = forward.name
        self.forward = forward
        trainings = population.trainings
        self._config = config = plain_config(population)
        self._loss = LOSSES[config.loss_for(population.task.loss).name](
            **{**config.loss_for(population.task.loss).arguments(),
               **({"label_smoothing": config.label_smoothing} if config.label_smoothing else {})},
            reduction="none",
        )  # fmt: skip
        self._source, members = join_samples(trainings)
        inputs, targets = self._source.take(torch.from_numpy(members[0][:2]))
        self._check_parts(targets)
        forward.check(inputs)
        self._sampler = StackedSampler([each.sampler for each in trainings], members)  # type: ignore[attr-defined]
        self._steps = trainings[0].steps_per_round  # type: ignore[attr-defined]
        limit = CPU_BLOCK_BYTES if population.device.type == "cpu" else GPU_BLOCK_BYTES
        self._block = block_rows(population, self._bytes_per_node(members[0]), limit)
        self._starts = range(0, population.num_nodes, self._block)
        self._leaves = [torch.nn.Parameter(population.rows[a : a + self._block]) for a in self._starts]
        """The rows of each block, as the optimizer's parameters."""
        self._optimizer = make_optimizer(config.optimizer, self._leaves)
        self._schedule = LearningRateSchedule(config.lr_schedule, self._optimizer)
        self._gradient = torch.zeros_like(population.rows[: self._block])

    def _check_parts(self, targets: Tensor) -> None:
        """Raises Unsuitable if the task's mean loss is not a mean over `Task.parts`."""
        task = self.population.task
        units, parts = task.units(targets), task.parts(targets)
        if parts is None and isinstance(units, int):
            return
        if parts is None or int(parts.sum()) != int(units):
            raise Unsuitable(f"task {task.config.name} counts parts of samples")
        if self._config.loss_for(task.loss).arguments().keys() & {"weight", "ignore_index"}:
            raise Unsuitable("the loss does not weigh all parts of samples alike")

    def _bytes_per_node(self, members: np.ndarray) -> int:
        """Returns the memory that one node needs while it is computed: its row three times, and activations."""
        rows = self.population.rows[:1].detach().clone().requires_grad_()
        sample_indices = np.resize(members, self._sampler.batch)
        activations = saved_bytes(lambda: self._losses(rows, sample_indices, 1)[0].sum())
        return 3 * rows.numel() * rows.element_size() + activations

    @property
    def learning_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def run(self, round: int, directions: list[Direction] | None = None) -> Local:
        population, config = self.population, self._config
        if config.reset_optimizer:
            self._optimizer.state = make_optimizer(config.optimizer, self._leaves).state
        for a, leaf in zip(self._starts, self._leaves, strict=True):
            leaf.data = population.rows[a : a + self._block]
        lr, count = self.learning_rate, population.num_nodes
        totals, units = torch.zeros(2, count, dtype=torch.float64, device=population.device)
        norms = torch.zeros(count, device=population.device)
        samples = np.zeros(count, np.int64)
        for _ in range(self._steps):
            chosen, counts = self._sampler.take()
            samples += counts
            for a, leaf in zip(self._starts, self._leaves, strict=True):
                part = slice(a, a + len(leaf))
                losses, parts = self._step(leaf, chosen[part], counts[part], norms[part], directions, a)
                totals[part] += losses
                units[part] += parts
            if config.lr_schedule.every == "step":
                self._schedule.tick()
        if config.lr_schedule.every == "round":
            self._schedule.tick()
        norms /= max(self._steps, 1)
        found = torch.stack([totals, norms.double(), units]).cpu()  # the only synchronization with the device
        losses = found[0].numpy() / np.maximum(found[2].numpy(), 1)
        raise_if_diverged(losses, round)
        norm = found[1].tolist() if config.takes_norm else []
        return Local(losses, np.full(count, self._steps), samples, lr, [{"gradient_norm": each} for each in norm])

    def rest(self, round: int) -> Local:  # noqa: ARG002
        if self._config.lr_schedule.every == "round":
            self._schedule.tick()
        return no_steps(self.population.num_nodes)

    def _step(
        self, leaf: Tensor, chosen: np.ndarray, counts: np.ndarray, norms: Tensor,
        directions: list[Direction] | None, first: int,
    ) -> tuple[Tensor, Tensor]:
        """Makes one step of a block. Returns the summed losses [n] of its nodes, float64, and the number of units of
        the task that each sum is over [n]."""
        chosen = chosen[:, : counts.max()]  # without needless padding the result is bit-identical to one node's
        rows = leaf.detach()
        parts = [view.detach().requires_grad_() for view in self.population.views(rows)]
        losses, units, means = self._losses_of(parts, chosen, counts)
        found = torch.autograd.grad(means, parts)
        gradient = self._gradient[: len(rows)]
        for target, each in zip(self.population.views(gradient), found, strict=True):
            target.copy_(each)
        if self._config.takes_norm:
            norm = torch.linalg.vector_norm(gradient, dim=1)
            norms += norm
            if self._config.clip_norm is not None:
                gradient.mul_((self._config.clip_norm / norm).clamp(max=1.0).unsqueeze(1))
        if directions is not None:
            for row, (uid, flat) in enumerate(enumerate(gradient[:, : self.population.num_parameters], first)):
                gradient[row, : len(flat)] = directions[uid](flat.clone())
        leaf.grad = gradient
        self._optimizer.step()
        leaf.grad = None
        return losses.detach().double(), units

    def _losses(self, rows: Tensor, chosen: np.ndarray, count: int) -> tuple[Tensor, Tensor, Tensor]:
        return self._losses_of(self.population.views(rows), chosen.reshape(count, -1), np.full(count, len(chosen)))

    def _losses_of(
        self, parts: Sequence[Tensor], chosen: np.ndarray, counts: np.ndarray
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns, for nodes with these parameters on their samples [n, B], of which the first `counts` [n] are valid:
        their summed losses [n]; the number of units of the task that each sum is over [n]; and the sum over the nodes
        of their mean losses, whose gradient is each node's own."""
        nodes, batch = chosen.shape
        device, task = self.population.device, self.population.task
        inputs, targets = self._source.take(torch.from_numpy(chosen.reshape(-1)))
        outputs = self.forward(parts, inputs.unflatten(0, (nodes, batch)))
        each = self._loss(*task.align(outputs.flatten(0, 1), targets)).reshape(nodes, batch, -1)
        of_samples = task.parts(targets)
        if of_samples is None:
            each, units = each.mean(2), moved(torch.from_numpy(counts), device)
        else:
            each, of_samples = each.sum(2), of_samples.reshape(nodes, batch)
            units = of_samples.sum(1)
        if counts.min() == batch:
            losses = each.sum(1)
            return losses, units, losses.sum() / batch if of_samples is None else (losses / units).sum()
        is_valid = moved(torch.from_numpy(np.arange(batch) < counts[:, None]), device)
        losses = (each * is_valid).sum(1)
        if of_samples is not None:
            units = (of_samples * is_valid).sum(1)
        return losses, units, (losses / units).sum()


def plain_config(population: Population) -> SupervisedConfig:
    """Returns the training's config. Raises Unsuitable if the steps of all nodes cannot be made at once."""
    trainings = population.trainings
    if any(type(each) is not Supervised for each in trainings):
        raise Unsuitable(f"training {population.experiment.training.name} is a custom one")
    config: Any = population.experiment.training
    for refused, why in (
        (config.amp, "amp"), (config.compile, "compile"), (config.channels_last, "channels_last"),
        (config.augment, "augment"), (config.ema, "ema"), (config.sampling == "resample", "sampling: resample"),
        (config.optimizer.name not in ELEMENTWISE, f"optimizer {config.optimizer.name}"),
        (config.loss_for(population.task.loss).name not in LOSSES, "a custom loss"),
    ):  # fmt: skip
        if refused:
            raise Unsuitable(f"training has {why}")
    if len({each.steps_per_round for each in trainings}) > 1:  # type: ignore[attr-defined]
        raise Unsuitable("nodes make unequal numbers of steps in a round")
    found: SupervisedConfig = config
    return found


def join_samples(trainings: Sequence[Any]) -> tuple[Source, list[np.ndarray]]:
    """Returns the training samples of all nodes as one source, and for each node the indices of its own. Raises
    Unsuitable if they cannot be joined."""
    pairs = [each.samples_of("train") for each in trainings]
    joined = Source.joined([source for source, _ in pairs])
    if joined is None:
        raise Unsuitable("samples are not arrays of one shape")
    starts = np.cumsum([0, *(len(source) for source, _ in pairs)])
    return joined, [start + members.numpy() for start, (_, members) in zip(starts, pairs, strict=False)]
