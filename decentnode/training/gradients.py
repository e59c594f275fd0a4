"""Computes the gradient of one optimizer step batch by batch, in the configured precision and with torch.compile if
configured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from decentnode.tasks.base import Task
from decentnode.tensors import FlatModel, at_least_float32
from decentnode.training.compiled import CompileConfig, Forward, compiled, failure_of, reuses_memory
from decentnode.training.losses import Loss
from decentnode.training.precision import LossScale, StepSnapshot, autocast, unsupported
from decentnode.training.supervised_config import SupervisedConfig


def outputs_with_auxiliary(module: nn.Module, given: Any) -> list[Any]:
    """Returns the outputs of a module for a batch, followed by its auxiliary outputs, whose losses are added with the
    factor `module.auxiliary_weight`. given: the module's return value; its auxiliary outputs are the further elements
    of a tuple, if the module has an `auxiliary_weight`."""
    if isinstance(given, tuple) and hasattr(module, "auxiliary_weight"):
        return [each for each in given if each is not None]
    return [given]


class Gradients:
    """Computes gradients of the mean loss into .grad of the model's parameters."""

    def __init__(
        self, config: SupervisedConfig, model: FlatModel, task: Task, loss: Loss, uid: int, *, unequal: bool
    ) -> None:
        """unequal: whether samples are rows of unequal length. Raises EnvironmentFault if the model is to be compiled
        and this machine cannot do so."""
        self._config, self._model, self._task, self._loss = config, model, task, loss
        self._parameters = [p for p in model.module.parameters() if p.requires_grad]
        self._forward: Forward = model.module
        compile_config = CompileConfig() if config.compile is True else config.compile
        if compile_config and compile_config.dynamic is None:
            compile_config = compile_config.model_copy(update={"dynamic": unequal})
        self._compiles = bool(compile_config)
        self._reuses_memory = False
        if compile_config:
            self._reuses_memory = reuses_memory(compile_config, model.device)
            self._forward = compiled(model.module, compile_config, model.device)
        self._scale = LossScale(uid) if config.amp == "fp16" else None
        self._repeated_steps = 0
        """The number of steps repeated since the last report."""
        self._checked: set[str] = set()

    def compute(self, inputs: Tensor, targets: Tensor, total: Tensor) -> int | Tensor:
        """Compute the gradient of the step's mean loss, and add the summed loss to `total`. Returns the number of the
        task's units in the step.

        In fp16, a step whose gradient overflows is repeated with the same random numbers and half the loss scale
        instead of being skipped. So all nodes make the same number of steps, and a sharing rule that derives gradients
        from the local steps never mistakes a skipped step for a gradient of zero.
        """
        if self._scale is None:
            return self._compute(inputs, targets, total, 1.0)
        snapshot = StepSnapshot(self._model.module, self._model.device)
        while True:
            loss = torch.zeros_like(total)
            units = self._compute(inputs, targets, loss, self._scale.scale)
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            if self._scale.unscale_and_check(gradients, loss):
                total.add_(loss)
                return units
            self._repeated_steps += 1
            snapshot.restore()

    def _compute(self, inputs: Tensor, targets: Tensor, total: Tensor, scale: float) -> int | Tensor:
        self.clear()
        size, batch = len(targets), self._config.batch_size
        if size <= batch:
            return self._add_gradient(inputs, targets, total, None, scale)
        total_units = self._task.units(targets)
        moved = set[Tensor]()
        for start in range(0, size, batch):
            part = slice(start, start + batch)
            self._add_gradient(inputs[part], targets[part], total, total_units, scale)
            if self._reuses_memory and start + batch < size:
                self._move_gradients(moved)
        return total_units

    def _move_gradients(self, moved: set[Tensor]) -> None:
        """Move gradients to memory that the next pass does not overwrite. moved: the parameters whose gradients have
        been moved already; the others are added."""
        for p in self._parameters:
            if p.grad is not None and p not in moved:
                p.grad = p.grad.clone()
                moved.add(p)

    def _add_gradient(
        self, inputs: Tensor, targets: Tensor, total: Tensor, total_units: int | Tensor | None, scale: float
    ) -> int | Tensor:
        """Add a batch's gradient, weighted by the batch's fraction of the step's `total_units` units (None:
        unweighted). Returns the batch's units."""
        try:
            loss, units = self.batch_loss(self._forward, inputs, targets), self._task.units(targets)
            weighted = loss if total_units is None else loss * (units / total_units)
            (weighted if scale == 1.0 else weighted * scale).backward()
        except Exception as error:
            fault = (failure_of(error) if self._compiles else None) or unsupported(
                error, self._config.amp, self._model.device)
            if fault is None:
                raise
            raise fault from error
        _add(total, loss, units)
        return units

    def batch_loss(self, forward: Forward, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss of a batch in training."""
        if self._config.amp is None:
            return self._batch_loss(forward, inputs, targets)
        with autocast(self._config.amp, self._model.device):
            loss = self._batch_loss(forward, inputs, targets)
        return loss.float()

    def _batch_loss(self, forward: Forward, inputs: Tensor, targets: Tensor) -> Tensor:
        (outputs, wanted), *others = self._all_aligned("train", forward, inputs, targets)
        loss: Tensor = self._loss.quick_mean(outputs, wanted)
        for other in others:
            loss = loss + self._model.module.auxiliary_weight * self._loss.quick_mean(*other)
        return loss

    def aligned(self, use: str, forward: Forward, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the model's outputs, floats at least in float32, and the targets as `Task.align` returns them, for
        figures: sums over a batch of 16-bit losses have three digits, and those of float16 end at 65,504. The first
        batch of every `use` is checked."""
        outputs, wanted = self._all_aligned(use, forward, inputs, targets)[0]
        return at_least_float32(outputs) if outputs.is_floating_point() else outputs, wanted

    def _all_aligned(
        self, use: str, forward: Forward, inputs: Tensor, targets: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Returns the pair that `aligned` returns, followed by such a pair for each auxiliary output."""
        if self._config.channels_last and inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        outputs = outputs_with_auxiliary(self._model.module, forward(inputs))
        aligned = [self._task.align(each, targets) for each in outputs]
        if use not in self._checked:
            for each in aligned:
                self._task.check(*each)
            self._checked.add(use)
        return aligned

    def clear(self) -> None:
        for p in self._parameters:  # like Optimizer.zero_grad, but without its overhead of 60 us
            p.grad = None

    def clip(self, max_norm: float | None) -> Tensor:
        """Scale the gradient down to norm `max_norm` if its norm is larger (exactly, while torch's clipping adds 1e-6
        to the norm). max_norm: None leaves the gradient unchanged. Returns the norm before clipping."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        if max_norm is not None:
            torch._foreach_mul_(gradients, (max_norm / norm).clamp(max=1.0))
        return norm

    def report(self) -> dict[str, float]:
        """Returns figures of the steps since the last call; empty except in fp16."""
        if self._scale is None:
            return {}
        repeated, self._repeated_steps = self._repeated_steps, 0
        return {"loss_scale": self._scale.scale, "repeated_steps": float(repeated)}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state from which a resumed run continues; empty except in fp16."""
        return {} if self._scale is None else {"loss_scale": self._scale.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. Raises KeyError if it lacks the state that this precision needs."""
        if self._scale is not None:
            self._scale.load_state_dict(state["loss_scale"])


def _add(total: Tensor, mean: Tensor, units: int | Tensor) -> None:
    """Add `mean` times `units` to `total`, in place and without waiting for the device."""
    if isinstance(units, int):
        total.add_(mean.detach(), alpha=units)
    else:
        total.add_(mean.detach() * units)
