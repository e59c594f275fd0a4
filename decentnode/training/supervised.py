"""Supervised learning: local steps of a torch.optim optimizer on this node's own samples."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pydantic
import torch
from pydantic import Field
from torch import Tensor, nn

from decentnode import component, rng
from decentnode.component import Config
from decentnode.data.base import Samples
from decentnode.errors import DataError, Diverged
from decentnode.tensors import FlatModel
from decentnode.training.base import Direction, Evaluation, Training, Update
from decentnode.training.optimizers import OptimizerConfig, make_optimizer
from decentnode.training.sampler import Sampler
from decentnode.training.schedules import Schedule, ScheduleConfig
from decentnode.training.source import Source

LOSSES = {"cross_entropy": nn.functional.cross_entropy, "nll": nn.functional.nll_loss}
EVALUATION_ELEMENTS = 1 << 20
"""Input elements of one evaluation batch: enough to be efficient, small enough to stay in the cache."""


def _by_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class ValidationConfig(pydantic.BaseModel):
    """Samples that are set aside to choose hyperparameters with."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    source: Literal["train", "test"] = "train"
    """train: a part of this node's own samples, which it then does not train on. test: a part of the test set, which
    is then not tested on."""
    fraction: float = Field(0.1, gt=0, lt=1)
    """The part that is set aside."""


class SupervisedConfig(Config):
    batch_size: int = Field(16, ge=1)
    """Samples per gradient."""
    local_steps: int | None = Field(None, ge=0)
    """Optimizer steps per round; 1 when neither this nor local_epochs is given."""
    local_epochs: int | None = Field(None, ge=1)
    """Passes over the node's samples per round, instead of local_steps."""
    accumulate: int = Field(1, ge=1)
    """Batches whose gradients are averaged into one optimizer step."""
    clip_norm: float | None = Field(None, gt=0)
    """Largest norm of the whole gradient; larger ones are scaled down."""
    optimizer: Annotated[OptimizerConfig, pydantic.BeforeValidator(_by_name)] = OptimizerConfig.model_validate(
        {"name": "sgd", "lr": 0.1}
    )
    """Any optimizer of torch.optim by its lower-case name, with its own arguments."""
    lr_schedule: Annotated[ScheduleConfig, pydantic.BeforeValidator(_by_name)] = ScheduleConfig.model_validate({})
    """Learning rate over the rounds."""
    reset_optimizer: bool = False
    """Start every round with a fresh optimizer, as decentralizepy does; otherwise momentum is kept across rounds."""
    validation: ValidationConfig | None = None
    """Samples set aside for validation."""
    shuffle: bool = True
    """Draw a new order of the samples for every epoch."""
    drop_last: bool = False
    """Leave out the last, smaller batch of an epoch."""
    loss: Literal["cross_entropy", "nll"] = "cross_entropy"
    """Function of the model's outputs and the targets."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Label smoothing of the cross entropy."""

    @pydantic.model_validator(mode="after")
    def _one_length(self) -> SupervisedConfig:
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError("training must have local_steps or local_epochs, got both")
        if self.label_smoothing and self.loss != "cross_entropy":
            raise ValueError(f"label_smoothing must go with loss cross_entropy, got {self.loss}")
        return self


class Supervised(Training):
    Config: ClassVar[type[component.Config]] = SupervisedConfig

    def __init__(
        self, config: component.Config, model: FlatModel, train: Samples, test: Samples, *, seed: int, uid: int
    ) -> None:
        """train: this node's share. Raises DataError when nothing is left to train on."""
        assert isinstance(config, SupervisedConfig)
        self.config = config
        self.model = model
        self._seed, self._uid = seed, uid
        train, test, validation = self._split(train, test)
        device = model.device
        self._train, self._test = Source(train, device), Source(test, device)
        self._validation = None if validation is None else Source(validation, device)
        self.num_samples = len(train)
        if not self.num_samples:
            raise DataError(f"node {uid} has no training sample left; choose another partition or a smaller validation")
        step_samples = config.batch_size * config.accumulate
        if config.drop_last and self.num_samples < step_samples:
            raise DataError(f"node {uid} has {self.num_samples} samples, fewer than one step of {step_samples} "
                            f"(drop_last); choose another partition or a smaller batch_size")
        self._sampler = Sampler(self.num_samples, step_samples, seed=seed, uid=uid, shuffle=config.shuffle,
                                drop_last=config.drop_last)
        self._parameters = [p for p in model.module.parameters() if p.requires_grad]
        self._ticks = 0
        self._renew_optimizer()

    def _renew_optimizer(self) -> None:
        self._optimizer = make_optimizer(self.config.optimizer, self._parameters)
        self._schedule = Schedule(self.config.lr_schedule, self._optimizer)
        self._schedule.restore(self._ticks)

    def _split(self, train: Samples, test: Samples) -> tuple[Samples, Samples, Samples | None]:
        wanted = self.config.validation
        if wanted is None:
            return train, test, None
        own = wanted.source == "train"
        samples, uid = (train, self._uid) if own else (test, rng.GLOBAL)
        order = rng.stream(self._seed, uid, "validation").permutation(len(samples))
        aside = max(1, round(wanted.fraction * len(samples)))
        kept, taken = samples.take(np.sort(order[aside:])), samples.take(np.sort(order[:aside]))
        return (kept, test, taken) if own else (train, kept, taken)

    @property
    def has_validation(self) -> bool:
        return self._validation is not None

    @property
    def steps_per_round(self) -> int:
        """Optimizer steps of one round."""
        if self.config.local_epochs is not None:
            return self.config.local_epochs * self._sampler.steps_per_epoch
        return 1 if self.config.local_steps is None else self.config.local_steps

    # -- local steps ------------------------------------------------------------------------------------------

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        """direction is applied to the (clipped) gradient of every step, before the optimizer sees it."""
        torch.manual_seed(rng.torch_seed(self._seed, self._uid, "training", round))
        if self.config.reset_optimizer:
            self._renew_optimizer()
        self.model.module.train()
        indices, sizes = self._sampler.take(self.steps_per_round)
        inputs, targets = self._train.take(torch.from_numpy(indices).to(self.model.device))
        loss, norm, start = torch.zeros((), device=self.model.device), None, 0
        for size in sizes:
            loss += self._gradient(inputs[start : start + size], targets[start : start + size]) * size
            if self.config.clip_norm is not None:
                norm = nn.utils.clip_grad_norm_(self._parameters, self.config.clip_norm)
            if direction is not None:
                self._replace_gradients(direction(self.model.gradients()))
            start += size
            if self.keep_gradient and start == len(indices):
                self._last_gradient = self.model.gradients()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            if self._schedule.every == "step":
                self._tick()
        lr = self._optimizer.param_groups[0]["lr"]
        if self._schedule.every == "round":
            self._tick()
        mean = float(loss) / len(indices) if len(indices) else 0.0
        if not math.isfinite(mean):
            raise Diverged(f"node {self._uid}: the training loss is {mean} in round {round}; "
                           f"try a smaller learning rate (training.optimizer.lr) or training.clip_norm")
        report = {"lr": float(lr)} | ({"gradient_norm": float(norm)} if norm is not None else {})
        last = self._last_gradient if self.keep_gradient and len(indices) else None
        return Update(len(sizes), len(indices), mean, report, last)

    def _tick(self) -> None:
        self._schedule.tick()
        self._ticks = self._schedule.ticks

    def _gradient(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Gradients of the mean loss over a step's samples into .grad; the loss, detached."""
        count, batch = len(targets), self.config.batch_size
        if count <= batch:
            loss = self._loss(self.model.module(inputs), targets)
            loss.backward()
            return loss.detach()
        total = torch.zeros((), device=inputs.device)
        for start in range(0, count, batch):
            part = targets[start : start + batch]
            loss = self._loss(self.model.module(inputs[start : start + batch]), part) * (len(part) / count)
            loss.backward()
            total += loss.detach()
        return total

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.config.label_smoothing:
            return nn.functional.cross_entropy(outputs, targets, label_smoothing=self.config.label_smoothing)
        return LOSSES[self.config.loss](outputs, targets)

    def _replace_gradients(self, flat: Tensor) -> None:
        offset = 0
        for p in self._parameters:
            part = flat[offset : offset + p.numel()].as_strided(p.shape, p.stride())
            p.grad = part.clone() if p.grad is None else p.grad.copy_(part)
            offset += p.numel()

    # -- evaluation -------------------------------------------------------------------------------------------

    def evaluate(self, split: str = "test", part: tuple[int, int] = (0, 1)) -> Evaluation:
        sources = {"test": self._test, "validation": self._validation, "train": self._train}
        source = sources.get(split)
        if source is None:
            raise ValueError(f"split must be test, train or (where configured) validation, got {split!r}")
        module = self.model.module
        was_training = module.training
        module.eval()
        try:
            with torch.inference_mode():
                return self._evaluate(source, torch.arange(part[0], len(source), part[1], device=self.model.device))
        finally:
            module.train(was_training)

    def _evaluate(self, source: Source, indices: Tensor) -> Evaluation:
        if not len(indices):
            return Evaluation(0.0, 0.0, 0)
        loss = correct = torch.zeros((), dtype=torch.float64, device=self.model.device)
        batch = max(1, min(1024, EVALUATION_ELEMENTS // source.sample_elements))
        for chosen in indices.split(batch):
            inputs, targets = source.take(chosen)
            outputs = self.model.module(inputs)
            loss = loss + self._loss(outputs, targets).double() * len(targets)
            correct = correct + (outputs.argmax(1) == targets).sum()
        return Evaluation(float(loss) / len(indices), float(correct) / len(indices), len(indices))

    # -- state ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self._optimizer.state_dict(), "ticks": self._ticks,
            "epoch": self._sampler.epoch, "cursor": self._sampler.cursor,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ticks = state["ticks"]
        self._renew_optimizer()
        self._optimizer.load_state_dict(state["optimizer"])
        self._sampler.epoch, self._sampler.cursor = state["epoch"], state["cursor"]
