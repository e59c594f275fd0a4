"""The config of supervised training, and what follows from it: the steps of a round, the ticks of the learning-rate
schedule."""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, PositiveInt

from decentnode.config.component import ADDED, Config, Settings
from decentnode.errors import UsageError
from decentnode.training.arguments import problem_at
from decentnode.training.augment import AugmentConfig
from decentnode.training.average import EMAConfig
from decentnode.training.compiled import CompileConfig
from decentnode.training.losses import LossConfig
from decentnode.training.lr_schedules import LearningRateSchedule, ScheduleConfig
from decentnode.training.optimizers import OptimizerConfig, trial_of
from decentnode.training.precision import Precision
from decentnode.training.privacy import PrivacyConfig


def _by_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _decay(value: Any) -> Any:
    return {"decay": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


class ValidationConfig(Settings):
    """Samples that are set aside to choose hyperparameters with."""

    source: Literal["train", "test"] = "train"
    """train: a part of this node's own samples, on which it then does not train. test: a part of the test set, the same
    on all nodes, on which they are then not tested."""
    fraction: float = Field(0.1, gt=0, lt=1)
    """Fraction of the samples that is set aside."""

    def aside(self, samples: int) -> int:
        """Returns how many of `samples` samples are set aside."""
        return max(1, round(self.fraction * samples))


@functools.cache
def _default_loss(name: str) -> LossConfig:
    """Returns the config of a task's loss. Checking it anew for each of many nodes takes as long as the rest of making
    a node."""
    return LossConfig(name=name)


class SupervisedConfig(Config):
    batch_size: int = Field(16, ge=1)
    """Samples of one forward and backward pass."""
    local_steps: int | None = Field(None, ge=0)
    """Optimizer steps per round; the next round continues the epoch where this one stopped. Default: 1, if
    `local_epochs` is not given either."""
    local_epochs: int | None = Field(None, ge=1)
    """Passes over the node's samples per round, instead of local_steps."""
    local_seconds: Annotated[float | None, ADDED] = Field(None, gt=0)
    """Seconds that the local steps of a round take, instead of their number: each node makes as many steps as fit at
    its own measured speed, at least one. The first round has one step, and each next round at most twice as many as
    the one before. Slow nodes then make fewer steps and do not delay the others. Such a run does not repeat to the
    bit."""
    accumulate: int = Field(1, ge=1)
    """Number of batches whose gradients make one optimizer step, which then covers batch_size * accumulate samples."""
    clip_norm: float | None = Field(None, gt=0)
    """Largest 2-norm of a step's gradient; a larger gradient is scaled down to it. Default: no clipping."""
    privacy: Annotated[PrivacyConfig | None, ADDED] = None
    """Differentially private training: what a node sends does not reveal whether a sample is among its own, up to an
    epsilon that evaluations report. Every step then takes each sample with the same probability, so that the sizes of
    batches vary. Default: none."""
    gradient_norm: Annotated[bool, ADDED] = False
    """Whether records of rounds have `gradient_norm`: the 2-norm of a step's whole gradient, before clipping and before
    the sharing rule sees it, averaged over the round's steps. With `clip_norm` they always have it."""
    optimizer: Annotated[OptimizerConfig, pydantic.BeforeValidator(_by_name)] = Field(
        default={"name": "sgd", "lr": 0.1}, validate_default=True
    )
    """The optimizer: one of torch.optim by its lower-case name, with its own arguments."""
    lr_schedule: Annotated[ScheduleConfig, pydantic.BeforeValidator(_by_name)] = Field(
        default={"name": "constant"}, validate_default=True
    )
    """How the learning rate changes over the rounds, or over the steps."""
    reset_optimizer: bool = False
    """Whether every round starts with a fresh optimizer, as in decentralizepy; otherwise its state, such as momentum,
    is kept."""
    validation: ValidationConfig | None = None
    """Samples set aside for validation. Default: none."""
    sampling: Literal["fixed", "resample"] = "fixed"
    """Which samples a node trains on. fixed: its own share, for the whole run. resample: at each of its epochs, all
    training samples are dealt anew by the partition, so that over time a node sees all of them; papers differ in this.
    With shares of unequal size, nodes begin their epochs at different times, and local_epochs counts the steps of the
    share with which a round begins."""
    augment: Annotated[AugmentConfig | None, ADDED] = None
    """What is done to training images. Default: nothing."""
    shuffle: bool = True
    """Whether every epoch takes the samples in a new random order; otherwise in the stored order."""
    drop_last: bool = False
    """Leave out the last, smaller step of an epoch. Without this, a last batch of one sample is still left out if the
    model has batch normalization after a linear layer, because one value has no variance to divide by."""
    loss: Annotated[LossConfig, pydantic.BeforeValidator(_by_name)] | None = None
    """Function of the model's outputs and the targets, whose mean is minimized: a loss of torch.nn, with its own
    arguments. Default: that of the task."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Label smoothing of the cross entropy in training; evaluation has none."""
    amp: Annotated[Precision | None, ADDED] = None
    """Automatic mixed precision: training runs forward passes in bf16 or fp16 where torch considers that safe.
    Parameters, gradients, payloads and evaluations stay float32. With fp16 the loss is scaled by a power of two, and a
    step whose gradient overflows is repeated with half the scale. Default: float32."""
    compile: Annotated[bool | CompileConfig, ADDED] = False
    """Whether torch.compile compiles the training steps: true, or a section with its arguments. Evaluations run without
    it. Needs a C++ compiler on a CPU, triton on a GPU."""
    channels_last: Annotated[bool, ADDED] = False
    """Whether images and convolutions are stored with their channels last (NHWC), which tensor cores and 16-bit kernels
    need. All nodes' parameters then have this layout, so rules that choose by position see another order."""
    cudnn_deterministic: Annotated[bool, ADDED] = False
    """Whether convolutions and recurrent layers on a GPU use only cuDNN kernels with a fixed order of additions, so
    that a run repeats to the bit: `torch.backends.cudnn.deterministic` in the processes that nodes train in. Kernels
    outside of cuDNN are not affected."""

    ema: Annotated[EMAConfig | None, ADDED, pydantic.BeforeValidator(_decay)] = None
    """Exponential moving average of the node's models: its decay, or a section. Evaluations measure it as
    `ema_<metric>`, and models/ema/ holds the averages of all nodes and their mean. It does not change what is trained
    or sent. Default: none."""
    evaluate_train: Annotated[PositiveInt | Literal["all"] | None, ADDED] = None
    """On how many of the node's training samples (evenly spaced), or on all, evaluations also measure the metrics, as
    `train_<metric>`. Default: none."""
    evaluate_membership: Annotated[PositiveInt | Literal["all"] | None, ADDED] = None
    """On how many of the node's training samples, or on all, and on as many test samples (evenly spaced) evaluations
    also measure `membership_auc`, which tells how much losses reveal of what the model was trained on. Test samples are
    those that are distributed as the node's training samples if it has such (`data.test`). Default: none."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> SupervisedConfig:
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError("must have local_steps or local_epochs, got both")
        if self.local_seconds is not None:
            if self.local_steps is not None or self.local_epochs is not None:
                other = "local_epochs" if self.local_steps is None else "local_steps"
                raise ValueError(f"must have local_seconds or a number of local steps or epochs, got both; {other}: "
                                 "null overrides the value of an extended file")  # fmt: skip
            if self.lr_schedule.every == "step":
                raise ValueError("must have lr_schedule.every: round with local_seconds: the number of steps is not "
                                 "known in advance")  # fmt: skip
        if self.sampling == "resample" and self.validation is not None and self.validation.source == "train":
            raise ValueError("must have validation.source: test with sampling: resample, which trains on all samples")
        if self.privacy is not None:
            self._check_privacy()
        if self.label_smoothing and self.loss is not None and self.loss.name != "cross_entropy":
            raise ValueError(f"must have loss cross_entropy with label_smoothing, got {self.loss.name}")
        try:
            LearningRateSchedule(self.lr_schedule, trial_of(self.optimizer))
        except (ValueError, KeyError) as error:  # one_cycle and cyclic move a momentum, which not every optimizer has
            text = f"must suit optimizer {self.optimizer.name}: {error}"
            raise problem_at("lr_schedule", text, self.lr_schedule.name) from error
        return self

    def _check_privacy(self) -> None:
        """Raises ValidationError for a key that does not go with `privacy`."""
        for key, wanted, why in (
            ("shuffle", True, "every step draws its samples"),
            ("drop_last", False, "every step draws its samples"),
            ("sampling", "fixed", "epsilon is that of a node's own samples"),
            ("compile", False, "torch.compile cannot compute the gradients of single samples"),
        ):
            if (value := getattr(self, key)) != wanted:
                raise problem_at(key, f"must be {str(wanted).lower()} with privacy: {why}", value)
        if self.amp == "fp16":
            raise problem_at("amp", "must not be fp16 with privacy, whose gradients would overflow; use bf16", "fp16")

    @property
    def takes_norm(self) -> bool:
        """Whether the norm of every step's gradient is computed."""
        return self.gradient_norm or self.clip_norm is not None

    def loss_for(self, default: str) -> LossConfig:
        """Returns the configured loss, or the task's default loss. Raises UsageError if label smoothing is configured
        and this loss has none."""
        found = self.loss or _default_loss(default)
        if self.label_smoothing and found.name != "cross_entropy":
            raise UsageError(f"training.label_smoothing must be 0 with loss {found.name}, got {self.label_smoothing:g}")
        return found

    def steps_per_round(self, samples: int) -> int:
        """Returns the number of optimizer steps in one round of a node with `samples` training samples per epoch."""
        if self.local_epochs is None:
            return 1 if self.local_steps is None else self.local_steps
        whole, rest = divmod(samples, self.batch_size * self.accumulate)
        return self.local_epochs * (whole + (1 if rest and not self.drop_last else 0))

    def leaves_one(self, samples: int) -> bool:
        """Returns whether a node with `samples` samples gets a batch of one sample."""
        step = self.batch_size * self.accumulate
        return self.batch_size == 1 or (samples % step % self.batch_size == 1 and not self.drop_last)

    def problem_of_single_sample(self, samples: int) -> str:
        """Returns the reason why a node with `samples` samples cannot train a model that needs batches of at least two;
        "" if it can, possibly without its last sample."""
        why = "must be at least 2 for a model with batch normalization behind a linear layer"
        if self.batch_size == 1:
            return f"training.batch_size {why}, got 1"
        if samples == 1:
            return f"the number of training samples {why}, got 1; choose another partition"
        return ""

    def problem_of_validation(self, samples: int) -> str:
        """Returns the reason why validation cannot be set aside from `samples` samples of its source, as none would be
        left; "" if it can."""
        if self.validation is None or self.validation.aside(samples) < samples:
            return ""
        return (f"must leave samples of the {samples} {self.validation.source} samples, got "
                f"{self.validation.fraction:g}; choose another partition or a smaller fraction")  # fmt: skip

    def problem_of_steps(self, samples: int) -> str:
        """Returns the reason why a node cannot train on `samples` samples; "" if it can."""
        step = self.batch_size * self.accumulate
        if samples == 0:
            return "no training sample; choose another partition"
        if self.drop_last and samples < step:
            return (f"{samples} training samples, fewer than one step of {step}, which training.drop_last leaves out; "
                    "choose another partition or a smaller batch_size")  # fmt: skip
        return ""

    def most_ticks(self, rounds: int, samples: int, *, needs_two_samples: bool = False) -> int:
        """Returns how often the learning-rate schedule ticks in `rounds` rounds of a node with a share of `samples`
        samples. needs_two_samples: whether the model cannot train on a batch of one sample, so that epochs leave such a
        batch out."""
        if self.lr_schedule.every == "round":
            return rounds
        if self.validation is not None and self.validation.source == "train":
            samples -= self.validation.aside(samples)
        return rounds * self.steps_per_round(samples - (needs_two_samples and self.leaves_one(samples)))
