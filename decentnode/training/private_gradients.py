"""Computes the gradient of a differentially private step: those of all samples, clipped, summed, and with noise."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from decentnode import rng
from decentnode.tasks.base import Task
from decentnode.tensors import known_all
from decentnode.training.compiled import Forward
from decentnode.training.privacy import Accountant, PrivacyConfig, draws_seed
from decentnode.training.sampler import PoissonSampler

logger = logging.getLogger(__name__)
# Of attention on a CPU, which torch.vmap computes sample by sample: still twice as fast as attention that it can batch
# (32 texts of 64 tokens, width 64: 21 ms a step, and 46 ms with SDPBackend.MATH).
warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented the batching rule")

SampleLoss = Callable[[Forward, Tensor, Tensor], Tensor]
"""Returns the mean loss of a batch, for a forward pass, inputs and targets."""

CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}
"""The largest number of elements of the gradients that are computed at once: 64 MB on a CPU, 1 GB on a GPU."""


def mixes_samples(module: nn.Module) -> str:
    """Returns the name and class of a layer through which a sample changes more than its own gradient; "" if there is
    none."""
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) or (isinstance(part, _InstanceNorm) and part.track_running_stats):
            return f"{name or 'the module'} ({type(part).__name__})"
    return ""


class SampleGradients:
    """Computes the gradient of each sample of a batch, all at once with torch.vmap or, for layers that it cannot
    compute (GRU), one after the other."""

    def __init__(self, module: nn.Module, loss: SampleLoss) -> None:
        self._module, self._loss = module, loss
        self._names = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._vectorizes: bool | None = None

    def compute(self, inputs: Tensor, targets: Tensor) -> tuple[list[Tensor], Tensor]:
        """Returns the gradients [B, *shape] of each trainable parameter, and the mean losses [B] of the samples.
        inputs, targets: [B, ...], at least one sample."""
        if self._vectorizes is None:
            self._vectorizes = self._can_vectorize(inputs[:1], targets[:1])
        parameters = {name: p.detach() for name, p in self._names.items()}
        if self._vectorizes:
            gradients, losses = self._vectorized(parameters, inputs, targets)
            return [*gradients.values()], losses
        found = [grad_and_value(self._loss_of)(parameters, *each) for each in zip(inputs, targets, strict=True)]
        stacked = [torch.stack([gradients[name] for gradients, _ in found]) for name in parameters]
        return stacked, torch.stack([loss for _, loss in found])

    def _loss_of(self, parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of one sample."""
        def forward(batch: Tensor) -> Any:
            return functional_call(self._module, parameters, (batch,))

        return self._loss(forward, inputs[None], targets[None])

    def _vectorized(self, *arguments: Any) -> tuple[dict[str, Tensor], Tensor]:
        compute = vmap(grad_and_value(self._loss_of), in_dims=(None, 0, 0), randomness="different")
        found: tuple[dict[str, Tensor], Tensor] = compute(*arguments)
        return found

    def _can_vectorize(self, inputs: Tensor, targets: Tensor) -> bool:
        """Tries one sample; what torch draws meanwhile does not count."""
        devices = [inputs.device] if inputs.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            try:
                self._vectorized({name: p.detach() for name, p in self._names.items()}, inputs, targets)
            except RuntimeError as error:
                logger.info("gradients are computed sample by sample, which is slow: %.200s", error)
                return False
        return True


class PrivateGradients:
    """Computes (sum over the step's samples of clipped gradients + noise) / (expected number of samples)."""

    def __init__(
        self, config: PrivacyConfig, module: nn.Module, task: Task, loss: SampleLoss, *, batch_size: int, seed: int,
        uid: int,
    ) -> None:
        """batch_size: the largest number of samples of one forward pass."""
        self._config, self._task, self._seed, self._uid = config, task, draws_seed(config, seed), uid
        self._each = SampleGradients(module, loss)
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        device = self._parameters[0].device
        most = CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cpu"]) // sum(p.numel() for p in self._parameters)
        self._chunk = max(1, min(batch_size, most))
        self._generator = torch.Generator(device)
        self.accountant = Accountant(config.noise)

    def compute(self, inputs: Tensor, targets: Tensor, total: Tensor, sampler: PoissonSampler) -> int | Tensor:
        """Compute the gradient of a step into .grad of the parameters, and add the summed loss to `total`. Returns the
        number of the task's units in the step. The step may have no samples: its gradient is noise."""
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in self._parameters]
        for start in range(0, len(targets), self._chunk):
            part = slice(start, start + self._chunk)
            gradients, losses = self._each.compute(inputs[part], targets[part])
            self._add_clipped(sums, gradients)
            units = self._task.parts(targets[part])
            if units is None:  # equally many per sample: one, or the numbers of a regression's target
                total.add_(losses.sum() * (self._task.units(targets[part]) / len(losses)))
            else:
                total.add_((losses * units).where(units > 0, 0).sum())
        self._add_noise(sums)
        self.accountant.count(sampler.rate)
        for p, each in zip(self._parameters, sums, strict=True):
            p.grad = each.div_(sampler.rate * sampler.num_samples).to(p.dtype)
        return self._task.units(targets)

    def _add_clipped(self, sums: list[Tensor], gradients: list[Tensor]) -> None:
        """Add the clipped gradients of samples to `sums`. A gradient that is not finite has no bound, and counts as
        zero."""
        flat = [each.flatten(1).float() for each in gradients]
        norms = torch.stack([torch.linalg.vector_norm(each, dim=1) for each in flat]).norm(dim=0)  # [B]
        factors = (self._config.clip / norms).clamp(max=1.0)
        if not known_all(norms.isfinite()):
            factors = factors.where(norms.isfinite(), 0)
            flat = [each.where(norms.isfinite()[:, None], 0) for each in flat]
        for total, each in zip(sums, flat, strict=True):
            total.add_((factors @ each).view_as(total))

    def _add_noise(self, sums: list[Tensor]) -> None:
        """Add the noise of the next step, which depends on the number of steps made."""
        if not self._config.noise:
            return
        self._generator.manual_seed(rng.torch_seed(self._seed, self._uid, "privacy noise", self.accountant.steps))
        for total in sums:
            drawn = torch.randn(total.shape, generator=self._generator, device=total.device)
            total.add_(drawn, alpha=self._config.noise * self._config.clip)
