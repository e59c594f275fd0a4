"""Supervised training: local steps of a torch.optim optimizer on this node's own samples."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from decentnode import rng
from decentnode.config import component
from decentnode.errors import CheckpointError, Diverged
from decentnode.metrics.figures import Metric
from decentnode.metrics.generation_samples import GenerationSamples
from decentnode.samples import NodeSamples
from decentnode.tasks.base import EMA, LOSS_SUMS, OWN, TRAIN, Task, Variant
from decentnode.tensors import FlatModel, sum_dtype
from decentnode.training import statistics
from decentnode.training.average import ModelAverage
from decentnode.training.base import Direction, EvaluatedSplit, Evaluation, Training, Update
from decentnode.training.gradients import Gradients
from decentnode.training.losses import Loss
from decentnode.training.lr_schedules import LearningRateSchedule
from decentnode.training.membership import MEMBERSHIP, membership_auc
from decentnode.training.optimizers import load_state, make_optimizer
from decentnode.training.pace import Pace
from decentnode.training.privacy import EPSILON
from decentnode.training.private_gradients import PrivateGradients
from decentnode.training.sampler import PoissonSampler, Sampler
from decentnode.training.share import NodeShare
from decentnode.training.source import Source
from decentnode.training.supervised_config import SupervisedConfig

logger = logging.getLogger(__name__)

EVALUATION_ELEMENTS = 1 << 17
"""The number of input elements in one evaluation batch (42 images of 3x32x32); a convolution's activations are ten
times as many. With it, GN-LeNet takes .13 s for 1,000 images, and .27 s at eight times the batch, which also needs more
memory. For images of 224x224 a batch is one image: ResNet-50 takes 37 MB and .20 s of CPU time for it; for batches of 8
240 MB and .17 s per image, for 32 583 MB and .28 s per image."""
OUTPUT_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}
"""The largest number of output elements for one evaluation batch: a value per token of the vocabulary for every
position of a text takes more memory than everything else. On a GPU it is 1 GB, five rows of GPT-2."""

MAX_DEALT_KEPT = 64
"""The number of generations for which `dealt` is kept; metrics.jsonl contains all of them."""
MEASURED_SAMPLES = 4096
"""The largest number of a node's samples from which BatchNorm statistics are measured anew."""


class Supervised(Training):
    """Minibatch training: x <- optimizer(x, gradient of the mean loss of the step's samples), several times a round.

    The order of an epoch's samples depends on (seed, uid, epoch); what torch draws in a round on (seed, uid, round).
    """

    Config: ClassVar[type[component.Config]] = SupervisedConfig

    def __init__(
        self, config: SupervisedConfig, model: FlatModel, task: Task, data: NodeSamples, *, seed: int, uid: int
    ) -> None:
        """data: this node's share. Raises DataError if it is too small, possibly only after validation samples are set
        aside."""
        self.config = config
        self.model = model
        self.task = task
        self._loss = Loss(config.loss_for(task.loss), config.label_smoothing, model.device)
        self._seed, self._uid = seed, uid
        self.share = NodeShare(config, model, data, seed=seed, uid=uid)
        unequal = self.share.splits["train"][0].unequal
        self._gradients = Gradients(config, model, task, self._loss, uid, unequal=unequal)
        self._private: PrivateGradients | None = None
        if config.privacy is not None and self.share.trains:
            self._private = PrivateGradients(config.privacy, model.module, task, self._gradients.batch_loss,
                                             batch_size=config.batch_size, seed=seed, uid=uid)  # fmt: skip
        self.evaluated = (EvaluatedSplit(shared=data.shared_test, pooled=data.pooled),)
        if data.own is not None:
            self.evaluated += (EvaluatedSplit("own", OWN.prefix, shared=False),)
        if config.evaluate_train is not None:
            self.evaluated += (EvaluatedSplit("train", TRAIN.prefix, shared=False),)
        self.further = self.further_metrics(config)
        self.members: tuple[int, ...] | None = None
        self.dealt: list[GenerationSamples] = [GenerationSamples(0, 0, self.share.usable, 0)]
        self._parameters = [p for p in model.module.parameters() if p.requires_grad]
        self._optimizer = make_optimizer(config.optimizer, self._parameters)
        self._schedule = LearningRateSchedule(config.lr_schedule, self._optimizer)
        self._average = ModelAverage(config.ema, model) if config.ema is not None else None
        self._pace = Pace(config.local_seconds) if config.local_seconds is not None else None
        self._pace_steps = 0
        self._parts: tuple[nn.Module, ...] | None = None

    @classmethod
    def variants(cls, config: SupervisedConfig) -> tuple[Variant, ...]:
        wanted = ((config.ema, EMA), (config.evaluate_train, TRAIN))
        return tuple(variant for key, variant in wanted if key is not None)

    @classmethod
    def further_metrics(cls, config: SupervisedConfig) -> tuple[Metric, ...]:
        accounted = config.privacy is not None and config.privacy.noise > 0
        return (*((EPSILON,) if accounted else ()), *((MEMBERSHIP,) if config.evaluate_membership else ()))

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """The current number of this node's training samples."""
        return self.share.num_samples

    @property
    def sampler(self) -> Sampler:
        """The order of the training samples, as `NodeShare.sampler`."""
        return self.share.sampler

    @property
    def steps_per_round(self) -> int:
        """The number of optimizer steps of one round."""
        return self.config.steps_per_round(self.sampler.usable)

    @property
    def learning_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def samples_of(self, split: str) -> tuple[Source, Tensor]:
        """Returns a split's source and the indices [M] of its samples in the source, on the CPU. Raises KeyError."""
        return self.share.splits[split]

    # -- local steps ------------------------------------------------------------------------------------------

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        """direction: applied in every step to the clipped gradient, before the optimizer uses it."""
        if self.draws:
            seed_torch(rng.torch_seed(self._seed, self._uid, "training", round), self.model.device)
        if self.config.reset_optimizer:
            # Some optimizers (Adagrad) create their state in the constructor: use a new optimizer's state, not an empty
            # one.
            self._optimizer.state = make_optimizer(self.config.optimizer, self._parameters).state
        if not self._is_in_training_mode():
            self.model.module.train()
        self.share.deal(self.sampler.upcoming)
        steps, config, samples = self.steps_per_round, self.config, 0
        if self._pace is not None:
            steps = self._pace_steps = self._pace.steps()
        learning_rate = self.learning_rate
        loss, norms = torch.zeros(2, device=self.model.device)
        units: int | Tensor = 0
        last_gradient = None
        for step, (inputs, targets) in enumerate(self.share.batches(steps), 1):
            samples += len(targets)
            units = units + self._step_gradient(inputs, targets, loss)
            if config.takes_norm:
                norms += self._gradients.clip(config.clip_norm)
            if self.keep_gradient and step == steps:
                last_gradient = self.model.gradients()
            if direction is not None:
                self.model.set_gradients(direction(self.model.gradients()))
            self._optimizer.step()
            if self._average is not None and self._average.every == "step":
                self._average.add()
            if config.lr_schedule.every == "step":
                self._schedule.tick()
        self._gradients.clear()
        self.dealt[-1].trained += samples
        if config.lr_schedule.every == "round":
            self._schedule.tick()
        # a subclass may still change the model
        with_sum = self.keep_sum and type(self).local_update is Supervised.local_update
        loss_sum, norm_sum, unit_sum, parameters_sum = self._copy_to_host(loss, norms, units, with_sum)
        mean = loss_sum / max(unit_sum, 1)
        if not math.isfinite(mean):
            raise Diverged(
                f"node {self._uid}: the training loss is {mean} in round {round}; "
                "try a smaller learning rate (training.optimizer.lr) or training.clip_norm"
            )
        report = {"lr": learning_rate, **self._gradients.report()}
        if config.takes_norm:
            report["gradient_norm"] = norm_sum / max(steps, 1)
        return Update(steps, samples, mean, report, last_gradient, int(unit_sum),
                      parameters_sum if with_sum else None)  # fmt: skip

    def _is_in_training_mode(self) -> bool:
        """Returns whether `train()` would change nothing. Asking is ten times as fast."""
        if self._parts is None:
            parts = tuple(self.model.module.modules())
            # a user's `train` may do more than set the mode, or keep parts of the model in evaluation mode
            self._parts = parts if all(type(part).train is nn.Module.train for part in parts) else ()
        return bool(self._parts) and all(part.training for part in self._parts)

    def _step_gradient(self, inputs: Tensor, targets: Tensor, loss: Tensor) -> int | Tensor:
        """Compute the gradient of a step as `Gradients.compute` or `PrivateGradients.compute` does."""
        if self._private is None:
            return self._gradients.compute(inputs, targets, loss)
        assert isinstance(self.sampler, PoissonSampler)
        return self._private.compute(inputs, targets, loss, self.sampler)

    def _copy_to_host(self, loss: Tensor, norms: Tensor, units: int | Tensor, with_sum: bool) -> list[float]:
        """Returns the values of the arguments and, if `with_sum` is set, the sum of the parameters (else 0). Except
        with fp16, this is the only point of a round where the host waits for the device."""
        dtype = sum_dtype(self.model.dtype)
        total = self.model.parameters.detach().sum(dtype=dtype) if with_sum else 0.0
        if loss.device.type == "cpu":
            return [float(value) for value in (loss, norms, units, total)]  # takes 1 us, the code below 25
        every = [as_scalar(value, loss.device) for value in (loss, norms, units, total)]
        found: list[float] = torch.stack(every).tolist()
        return found

    def took(self, seconds: float) -> None:
        if self._pace is not None and self._pace_steps:
            self._pace.record(self._pace_steps, seconds)

    def rest(self, round: int) -> None:  # noqa: ARG002
        if self.config.lr_schedule.every == "round":
            self._schedule.tick()

    def finish_round(self) -> None:
        if self._average is not None and self._average.every == "round":
            self._average.add()

    def average(self) -> Tensor | None:
        return None if self._average is None else self._average.value()

    def deal_among(self, members: tuple[int, ...], generation: int, first_round: int) -> None:
        """See `Training.deal_among`. Raises DataError if the samples of other nodes cannot be read on this machine."""
        adopted, first = 0, self.members is None and not generation and not first_round
        if self.share.trains and not first:  # at first, the share is already the one among all nodes
            adopted = self.share.deal_among(members, generation, first_round)
        self.members = members
        last = GenerationSamples(generation, first_round, self.share.usable, adopted)
        self.dealt = [*(each for each in self.dealt[-MAX_DEALT_KEPT:] if each.trained), last]

    # -- evaluation -------------------------------------------------------------------------------------------

    @property
    def has_validation(self) -> bool:
        return "validation" in self.share.splits

    def evaluate(self, split: str = "test", part: tuple[int, int] = (0, 1)) -> Evaluation:
        """See `Training.evaluate`. "train" is a split as well: the samples that this node trains on, or as many of them
        as `evaluate_train` says."""
        if split not in self.share.splits:
            raise ValueError(f"split must be one of {', '.join(self.share.splits)}, got {split!r}")
        source, members = self.share.splits[split]
        most = self.config.evaluate_train
        if split == "train" and isinstance(most, int):
            members = evenly_spaced(members, most)
        members = members[part[0] :: part[1]]
        size = self._evaluation_batch(source) if len(members) else 1
        if self.model.device.type != "cpu":
            size = max(size, self.config.batch_size)  # one image of 224x224 at a time would leave a GPU idle
        names = self.task.all_sums
        total = torch.zeros(len(names), dtype=torch.float64, device=self.model.device)
        with evaluating(self.model.module), torch.inference_mode():
            for inputs, targets in source.batches(members.split(size)):
                total += self._sums(inputs, targets)
        sums = dict(zip(names, total.tolist(), strict=True))
        return Evaluation(len(members), sums, self.task.evaluated(sums))

    def _evaluation_batch(self, source: Source) -> int:
        return evaluation_batch(EVALUATION_ELEMENTS, source, self.task, self.model.device)

    def _sums(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the sums of one batch, float64, in the order of `task.all_sums`."""
        outputs, wanted = self._gradients.aligned("test", self.model.module, inputs, targets)
        units = self.task.units(targets)
        found = self.task.measure(outputs, wanted)
        if self.task.generated_sums:
            found |= self.task.measure_generated(self.model.module, inputs, targets)
        every = dict(zip(LOSS_SUMS, (self._loss.summed(outputs, wanted, units), units), strict=True)) | found
        return torch.stack([as_scalar(every[name], self.model.device) for name in self.task.all_sums])

    def measure_further(self, merged: bool = False) -> dict[str, float]:
        """See `Training.measure_further`. Only the node's own model has an epsilon."""
        found: dict[str, float] = {}
        privacy, wanted = self.config.privacy, self.config.evaluate_membership
        if self._private is not None and privacy is not None and privacy.noise and not merged:
            found[EPSILON.name] = self._private.accountant.epsilon(privacy.delta)
        if wanted is None:
            return found
        splits = "train", "own" if "own" in self.share.splits else "test"
        most = min(len(self.share.splits[each][1]) for each in splits)
        if most:
            most = most if wanted == "all" else min(most, wanted)
            found[MEMBERSHIP.name] = membership_auc(*(self._sample_losses(each, most) for each in splits))
        return found

    def _sample_losses(self, split: str, most: int) -> np.ndarray:
        """Returns the mean loss of each of `most` samples of a split, float64."""
        source, members = self.share.splits[split]
        losses = []
        with evaluating(self.model.module), torch.inference_mode():
            for inputs, targets in source.batches(evenly_spaced(members, most).split(1)):
                outputs, wanted = self._gradients.aligned("test", self.model.module, inputs, targets)
                units = self.task.units(targets)
                losses.append(as_scalar(self._loss.summed(outputs, wanted, units) / units, self.model.device))
        return torch.stack(losses).cpu().numpy()

    def measure_statistics(self) -> Tensor:
        """See `Training.measure_statistics`. Uses at most MEASURED_SAMPLES of the samples, evenly spaced."""
        source, members = self.share.splits["train"]
        members = members[:: max(1, -(-len(members) // MEASURED_SAMPLES))]
        size = max(2, self._evaluation_batch(source))
        if not len(members):
            return statistics.measure(self.model.module, ())
        batches = members.tensor_split(max(1, len(members) // size))  # no batch of one sample if there are more samples
        return statistics.measure(self.model.module, (inputs for inputs, _ in source.batches(batches)))

    def load_statistics(self, moments: Tensor) -> None:
        statistics.load(self.model.module, moments)

    # -- state ------------------------------------------------------------------------------------------------

    def skip_to(self, round: int, trains_in: Callable[[int], bool] = lambda _round: True) -> None:
        total, before = 0, self.sampler.steps_made if self.share.trains else 0
        self.share.move_to(0, 0)
        for _ in filter(trains_in, range(round if self.share.trains else 0)):
            self.share.deal(self.sampler.upcoming)
            steps = self.steps_per_round
            total += steps
            self.share.skip(steps)
        if self._private is not None and isinstance(self.sampler, PoissonSampler):
            # before it lost its state, the node may also have made the steps of the round that it begins
            again = self.steps_per_round if trains_in(round) else 0
            lost = max(0, total - before) + again if self._pace is None else None
            self._private.accountant.count_lost(self.sampler.rate, lost)
        self._schedule.restore(round if self.config.lr_schedule.every == "round" else total)

    def state_dict(self) -> dict[str, Any]:
        """See `Training.state_dict`. The tensors are not copies, and the next round changes them."""
        return {
            "optimizer": self._optimizer.state_dict(), "ticks": self._schedule.ticks,
            **({"epoch": self.sampler.epoch, "cursor": self.sampler.cursor} if self.share.trains else {}),
            **({} if self.members is None
               else {"members": list(self.members), "dealt": [list(astuple(each)) for each in self.dealt]}),
            **self._gradients.state_dict(),
            **({} if self._average is None else {"ema": self._average.state_dict()}),
            **({} if self._private is None else {"privacy": self._private.accountant.state_dict()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. Raises CheckpointError if the state does not fit this training."""
        try:
            load_state(self._optimizer, state["optimizer"])
            self._gradients.load_state_dict(state)
            if self._average is not None:
                self._average.load_state_dict(state["ema"])
            if self._private is not None:
                self._private.accountant.load_state_dict(state["privacy"])
            self._schedule.restore(int(state["ticks"]))
            if "members" in state:
                dealt = [GenerationSamples(*each) for each in state["dealt"]]
                self.deal_among(tuple(state["members"]), dealt[-1].generation, dealt[-1].first_round)
                self.dealt = dealt
            if self.share.trains:
                self.share.move_to(int(state["epoch"]), int(state["cursor"]))
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"node {self._uid}: the training state does not fit: {error!r}") from error


def evaluation_batch(elements: int, source: Source, task: Task, device: torch.device) -> int:
    """Returns the size of an evaluation batch, so that its inputs have at most `elements` elements and the model's
    outputs at most OUTPUT_ELEMENTS."""
    outputs = max(1, math.prod(task.data.target_shape) * (task.data.vocabulary or 1))
    most = OUTPUT_ELEMENTS.get(device.type, OUTPUT_ELEMENTS["cpu"])
    return max(1, min(1024, elements // source.sample_elements, most // outputs))


def evenly_spaced(members: Tensor, most: int) -> Tensor:
    """Returns at most `most` of the elements of `members` [M]."""
    return members[torch.arange(0, len(members), max(1.0, len(members) / most)).long()[:most]]


def as_scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """Returns a float64 scalar on the device. Only blocks for a tensor on another device."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed the generators that a module on `device` draws from, and those of no other backend."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set the module to evaluation mode for the duration of a block, and restore the mode of every submodule
    afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
