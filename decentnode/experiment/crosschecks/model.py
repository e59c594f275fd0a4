"""Checks that a node can train the model: makes it, and computes outputs, loss and gradient of a batch of two."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from decentnode.config.problems import Problem, problem_from_error
from decentnode.errors import UsageError, describe_error
from decentnode.experiment.crosschecks.parts import spec_of
from decentnode.experiment.initial_model import make_model, module_without_values
from decentnode.experiment.tree import Experiment
from decentnode.models.weights import check_weights
from decentnode.samples import DataSpec
from decentnode.tasks.base import Task, shape_of
from decentnode.tensors import FlatModel, problem_of, training_bytes
from decentnode.training.gradients import Gradients, outputs_with_auxiliary
from decentnode.training.losses import Loss
from decentnode.training.optimizers import try_step
from decentnode.training.private_gradients import SampleGradients, mixes_samples
from decentnode.training.source import Source
from decentnode.training.supervised import evaluating
from decentnode.training.supervised_config import SupervisedConfig

MAX_TRIED_ELEMENTS = 1 << 24
"""Models with up to this many elements are tried with values (64 MB, initialized in about .2 s), larger ones on the
meta device, by their shapes only."""
MAX_NODE_BYTES = 1e12
"""The limit on a node's parameters and gradients: no machine has more memory for one of its nodes."""

Path = tuple[str | int, ...]


class Unsuitable(Exception):
    """Carries the problem that a trial has found."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class NeedsValues(Exception):
    """The trial needs values, but the module is on the meta device."""


def check_model(experiment: Experiment) -> Iterator[Problem]:
    """Checks that the model can be made and trained.

    It is made on the meta device first (shapes without memory), and then, unless it is large, with the values that
    nodes start from, and tried on the first samples.
    """
    spec = spec_of(experiment)
    if spec is None:
        return
    keys = type(experiment.model).model_fields
    try:
        module = module_without_values(experiment, spec)
    except UsageError as error:
        yield dataclasses.replace(problem_from_error("model", error, keys), other=("data",))
        return
    if problem := problem_of(module) or _too_large(module):
        yield Problem(("model",), f": {problem}")
        return
    try:
        if getattr(experiment.model, "init", None) is not None:
            check_weights(module, experiment.base_dir / experiment.model.init)  # type: ignore[attr-defined]
    except UsageError as error:
        yield problem_from_error("model", error, keys)
        return
    try:
        task = experiment.make_task()
    except UsageError:  # reported by check_task
        return
    if sum(each.numel() for each in (*module.parameters(), *module.buffers())) <= MAX_TRIED_ELEMENTS:
        module = make_model(experiment, spec)
    with contextlib.suppress(NeedsValues), torch.random.fork_rng(devices=[]):
        try:
            _try_training(experiment, task, module, spec)
        except Unsuitable as found:
            hint = getattr(experiment.open_data().dataset(), "hint", "")
            yield dataclasses.replace(found.problem, hint=found.problem.hint or hint)


def _too_large(module: nn.Module) -> str:
    need = training_bytes(module)
    if need <= MAX_NODE_BYTES:
        return ""
    return (f"the parameters and gradients of one node take {need / 1e12:,.1f} TB of memory, more than a machine has "
            f"({MAX_NODE_BYTES / 1e12:g} TB)")  # fmt: skip


def _try_training(experiment: Experiment, task: Task, module: nn.Module, spec: DataSpec) -> None:
    """Computes one training step, without the optimizer, and one evaluation. Raises Unsuitable, NeedsValues."""
    values = not any(p.is_meta for p in module.parameters())
    inputs, targets = _batch(experiment, spec) if values else _shapes_of_batch(spec)
    if values and inputs.is_floating_point():
        _check_finite(inputs, ("data",), "the inputs of the first samples")
    module.train()
    outputs, wanted = _aligned(task, module, inputs, targets, "forward")
    if values and outputs.is_floating_point():
        _check_finite(outputs, ("model",), "the outputs of the untrained model")
    loss = _loss_of(experiment, task)
    if loss is not None:
        _check_loss(loss, task, outputs, wanted, targets)
        _check_sparse(experiment, module)
        _check_private(experiment, task, module, loss, (inputs, targets))
    with evaluating(module), torch.inference_mode():
        outputs, wanted = _aligned(task, module, inputs, targets, "forward in evaluation mode")
        with _blame(("task",), f"measuring outputs {shape_of(outputs)} raised", "model"):
            task.measure(outputs, wanted)
            if task.generated_sums:
                task.measure_generated(module, inputs, targets)
        if loss is not None:
            with _blame(("training", "loss"), "the sum over a batch raised", "task"):
                loss.summed(outputs, wanted, task.units(targets))


def _batch(experiment: Experiment, spec: DataSpec) -> tuple[Tensor, Tensor]:
    """Returns the first two training samples as nodes get them; if there is only one, twice the same."""
    with _blame(("data",), "reading the first samples raised"):
        dataset = experiment.open_data().dataset()
        chosen = np.array([0, min(1, dataset.num_train() - 1)])
        batch = Source(dataset.train(chosen), torch.device("cpu")).take(torch.arange(2))
    if spec.inputs == "values" and batch[0].shape[1:] != spec.input_shape:
        text = f"samples must have the shape {list(spec.input_shape)} that the dataset declares, got "
        raise Unsuitable(Problem(("data",), f": {text}{list(batch[0].shape[1:])}"))
    return batch


def _shapes_of_batch(spec: DataSpec) -> tuple[Tensor, Tensor]:
    floating = spec.num_classes is None and spec.vocabulary is None
    with torch.device("meta"):
        inputs = torch.empty(2, *spec.input_shape, dtype=torch.float32 if spec.inputs == "values" else torch.int64)
        return inputs, torch.empty(2, *spec.target_shape, dtype=torch.float32 if floating else torch.int64)


def _aligned(task: Task, module: nn.Module, inputs: Tensor, targets: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Returns the model's outputs and the targets in the form in which the task uses them."""
    with _blame(("model",), f"{what} raised", "data"):
        outputs: Any = module(inputs)
    try:
        found = [task.align(each, targets) for each in outputs_with_auxiliary(module, outputs)]
        for each in found:
            task.check(*each)
    except UsageError as error:
        raise Unsuitable(Problem(("model",), f": {error}", other=("task",))) from error
    except Exception as error:
        article = "an" if type(outputs).__name__[0] in "aeiou" else "a"
        gives = shape_of(outputs) if isinstance(outputs, Tensor) else f"{article} {type(outputs).__name__}"
        text = f"{what} gives {gives} for a batch, which task {task.config.name} cannot use"
        why = f": {describe_error(error)}" if isinstance(outputs, Tensor) else "; it takes a tensor"
        raise Unsuitable(Problem(("model",), f": {text}{why}", other=("task",))) from error
    return found[0]


def _loss_of(experiment: Experiment, task: Task) -> Loss | None:
    """Returns the loss; None if the training is not supervised, or if check_task reports the loss."""
    config = experiment.training
    if not isinstance(config, SupervisedConfig):
        return None
    try:
        chosen = config.loss_for(task.loss)
    except UsageError:
        return None
    loss = Loss(chosen, config.label_smoothing)
    if not callable(loss.mean):
        raise Unsuitable(Problem(("training", "loss"), f"must be callable with outputs and targets, got {chosen.name}"))
    return loss


def _check_loss(loss: Loss, task: Task, outputs: Tensor, wanted: Tensor, targets: Tensor) -> None:
    """Checks that the mean loss is one finite number and has a gradient."""
    key = ("training", "loss")
    outputs, wanted = _unambiguous_batch(outputs, wanted)
    with _blame(key, f"the loss of outputs {shape_of(outputs)} and targets {shape_of(wanted)} raised", "task"):
        mean: Any = loss.mean(outputs, wanted)
    if not isinstance(mean, Tensor) or mean.ndim:
        got = shape_of(mean) if isinstance(mean, Tensor) else type(mean).__name__
        raise Unsuitable(Problem(key, f"must give one number for a batch, got {got}"))
    if not mean.is_meta and float(task.units(targets)):  # a batch that is all padding has no mean
        _check_finite(mean.detach(), key, "")
    if not mean.requires_grad:
        raise Unsuitable(Problem(("model",), ": the loss must depend on the trainable parameters", other=key))
    with _blame(("model",), "the backward pass raised"):
        mean.backward()


def _check_sparse(experiment: Experiment, module: nn.Module) -> None:
    """Checks that the optimizer accepts the model's sparse gradients, such as those of an Embedding with
    sparse=True."""
    sparse = {name: p for name, p in module.named_parameters() if p.grad is not None and p.grad.is_sparse}
    if not sparse or not isinstance(experiment.training, SupervisedConfig):
        return
    config = experiment.training.optimizer
    try:
        try_step(config, [*sparse.values()])
    except Exception as error:
        text = (f": optimizer {config.name} does not take sparse gradients, as {next(iter(sparse))} has "
                f"({describe_error(error)})")  # fmt: skip
        hint = "make the layer without sparse=True; sgd and adagrad take them with foreach: false"
        raise Unsuitable(Problem(("model",), text, hint, other=("training", "optimizer"))) from error


def _check_private(
    experiment: Experiment, task: Task, module: nn.Module, loss: Loss, batch: tuple[Tensor, Tensor]
) -> None:
    """Checks that the gradients of single samples can be computed if the training is to be private, and that nothing
    else of a model that nodes send depends on samples."""
    config = experiment.training
    if not isinstance(config, SupervisedConfig) or config.privacy is None or mixes_samples(module):
        return
    if name := _changed_buffer(module, batch[0]):
        text = f": forward changes the buffer {name} in training, and noise does not protect statistics of samples"
        raise Unsuitable(Problem(("model",), text, other=("training", "privacy")))
    if batch[0].is_meta:
        return
    gradients = Gradients(config, FlatModel(module), task, loss, 0, unequal=False)
    with _blame(("training", "privacy"), "computing the gradients of single samples raised", "model"):
        _, losses = SampleGradients(module, gradients.batch_loss).compute(*batch)
    units = task.parts(batch[1])
    losses = losses if units is None else losses[units > 0]
    _check_finite(losses, ("training", "loss"), "with privacy, the loss of each single sample")


def _changed_buffer(module: nn.Module, inputs: Tensor) -> str:
    """Returns the name of a buffer that a forward pass changes; "" if there is none."""
    before = {name: (each, each._version) for name, each in module.named_buffers()}
    with torch.no_grad():
        module(inputs)
    for name, each in module.named_buffers():
        known, version = before.get(name, (None, 0))
        if each is not known or each._version != version:
            return name
    return ""


def _unambiguous_batch(outputs: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the batch with samples repeated until its size differs from all other dimensions of the outputs.

    Otherwise a loss made for regression could pass by accident: with two outputs for each of two samples, it would take
    the dimension of classes for that of samples.
    """
    if not outputs.ndim or not wanted.ndim or not len(outputs) == len(wanted) > 0:
        return outputs, wanted
    size = next(each for each in itertools.count(len(outputs)) if each not in outputs.shape[1:])
    index = torch.arange(size, device=outputs.device) % len(outputs)
    return outputs[index], wanted[index]


def _check_finite(values: Tensor, path: Path, what: str) -> None:
    wrong = values[~values.isfinite()]
    if wrong.numel():
        subject = f": {what} must be finite" if what else "must be finite for the untrained model"
        raise Unsuitable(Problem(path, f"{subject}, got {wrong.flatten()[0].item():g}"))


@contextlib.contextmanager
def _blame(path: Path, what: str, other: str = "") -> Iterator[None]:
    """Turns errors of the block into Unsuitable at `path`, or into NeedsValues if the block needs values of a tensor on
    the meta device."""
    see = (other,) if other else None
    try:
        yield
    except UsageError as error:
        raise Unsuitable(dataclasses.replace(problem_from_error(".".join(map(str, path)), error), other=see)) from error
    except Exception as error:
        if isinstance(error, NotImplementedError | RuntimeError) and "meta" in str(error):
            raise NeedsValues from error
        raise Unsuitable(Problem(path, f": {what} {describe_error(error)}", other=see)) from error

