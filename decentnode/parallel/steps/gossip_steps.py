"""Steps of a model in buckets: each mixes what has arrived, updates the model, and launches the exchange of the result.

`DecentralizedDataParallel` (ddp.py), which is what a script sees, decides when a step is taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from decentnode.optim.parts import can_divide_step
from decentnode.parallel.buckets.bucket import Bucket
from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.steps.optimizer_coverage import OptimizerCoverage
from decentnode.parallel.steps.part_steps import PartSteps, can_mix_in_parts
from decentnode.parallel.transports.base import BucketExchange

DELAYED_FACTOR = 0.5
"""The mixing factor for delayed exchanges. From one exchange to the next, a mode of the differences between ranks is
multiplied by w - c, where it would be by w (1 - c) without delay; w: its eigenvalue of W, c: the fraction of the way to
their target that the steps in between go. For small w and c near 1 the models would oscillate. The factor 1/2 turns w
into (1 + w) / 2, and keeps w - c at or above -1/2."""


class OptimizerStep:
    """The local part of a step: the optimizer's step, with loss scaling, gradient clipping and the learning rate."""

    def __init__(
        self, params: Sequence[Tensor], optimizer: Optimizer, lr_scheduler: Any, scaler: Any, clip_norm: float
    ) -> None:
        """params: those that ranks exchange. clip_norm: largest norm of all their gradients together, 0 for no limit.
        lr_scheduler, scaler: None for none. Raises ValueError if the optimizer has none of the parameters."""
        self._params = list(params)
        self.optimizer, self.lr_scheduler, self.scaler, self.clip_norm = optimizer, lr_scheduler, scaler, clip_norm
        self.coverage = OptimizerCoverage(optimizer, self._params)

    def rate(self) -> float:
        """Returns the learning rate of the optimizer's first group, 1 if it has no group."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer.param_groups else 1.0

    def clip(self) -> None:
        """Clips the gradients, which must be unscaled."""
        if self.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(self._params, self.clip_norm)

    def take(self) -> None:
        """Updates all parameters at once. With a scaler, unscales and clips first; without, `clip` must have been
        called."""
        if self.scaler is None:
            self.optimizer.step()
            return
        if self.clip_norm > 0:
            self.scaler.unscale_(self.optimizer)
            self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for p in self.coverage.unstepped:
            p.grad = None

    def set_exchanged(self, params: Sequence[Tensor]) -> None:
        """Sets the parameters that ranks exchange from now on. The norm of their gradients is summed in this order."""
        self._params = list(params)
        self.coverage.set_exchanged(params)

    def advance_schedule(self) -> None:
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()


class GossipSteps:
    """The steps of one rank's model; between two of them its exchange is in flight."""

    def __init__(
        self, plan: Plan, buckets: Sequence[Bucket], exchange: BucketExchange, local: OptimizerStep
    ) -> None:
        self.plan, self.buckets, self.exchange, self.local = plan, list(buckets), exchange, local
        self.part_steps = PartSteps(self.buckets) if can_mix_in_parts(self.buckets) else None
        """None if every step updates all parameters at once."""
        self.factor = DELAYED_FACTOR if plan.delayed else 1.0
        """The mixing factor: x + factor (W x - x)."""
        self.taken = 0
        """The number of steps taken, which is the round of the topology that the next exchange has."""
        self.learning_rate = 1.0
        """The learning rate of the optimizer's last step."""
        self._initial_versions: list[int] = []
        """torch's version counters of the parameters when the first exchange began."""
        self.must_restart = False
        """Whether a state was loaded, so that the exchange in flight is of another model."""
        self._interrupted_by: str | None = None
        """The name of the exception that interrupted a step."""

    def begin(self) -> None:
        """Starts the exchange of the initial parameters."""
        self.learning_rate = self.rate()
        for bucket in self.buckets:
            bucket.next_round(self.plan, -1, self.learning_rate)
        self.launch(0)
        self._initial_versions = self._versions()

    @torch.no_grad()
    def renew_rules(self) -> None:
        """Replaces the sharing rules after the script has replaced the model, a change that diloco, for example, must
        not take for that of its local steps. The new rules keep what `Sharing.succeed` takes over."""
        for bucket, rule in zip(self.buckets, self.plan.rules(), strict=False):
            rule.succeed(bucket.rule)
            bucket.rule = rule
            bucket.gather()
            bucket.begin_round(self.plan, self.taken, self.rate())
            bucket.scatter()

    def _notice_initial_model(self) -> None:
        """Before the first step, lets the rules begin with the model that the script has loaded since wrapping."""
        if self.taken == 0 and self._versions() != self._initial_versions:
            self.renew_rules()

    def _versions(self) -> list[int]:
        return [p._version for bucket in self.buckets for p in bucket.params]

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Adds buckets, which take part from the next step on."""
        self.buckets = [*self.buckets, *buckets]  # not in place: a step in progress iterates over the old list
        self.part_steps = PartSteps(self.buckets) if can_mix_in_parts(self.buckets) else None

    @torch.no_grad()
    def add_and_restart(
        self, buckets: Sequence[Bucket], make_exchange: Callable[[Plan, Sequence[Bucket]], BucketExchange]
    ) -> None:
        """Adds buckets from now on, and starts the exchange of the parameters as they are. Blocking, on all ranks; only
        while nothing is in flight.

        make_exchange: makes the exchange of all buckets; blocking. The rules of the existing buckets keep their states.
        """
        before, rate = self.exchange, self.rate()
        before.abandon()
        for bucket in self.buckets:
            bucket.drop_buffers()
        self.add(buckets)
        self.exchange = make_exchange(self.plan, self.buckets)
        self.exchange.bytes_sent, self.exchange.wait_seconds = before.bytes_sent, before.wait_seconds
        for bucket in buckets:
            bucket.begin_round(self.plan, self.taken, rate)
            bucket.scatter()
        self.launch(self.taken)

    def take(self) -> None:
        """Takes a step. Blocking until the exchange in flight has finished. Raises PeerLost; RuntimeError after a step
        that was interrupted."""
        self._notice_initial_model()
        if self.local.scaler is None:
            self.local.clip()
        with self._uninterrupted():
            if self._is_local_step():
                self._take_local_step()
            elif self.local.scaler is None and self.part_steps is not None and can_divide_step(self.local.optimizer):
                self._increment_versions()
                self.part_steps.take(self.local.optimizer, self.exchange, self.round_of(self.taken + 1), self.factor)
            else:
                self._take_whole_step()
            self.taken += 1
        self.local.advance_schedule()

    def take_idle(self) -> None:
        """Takes a step without an update: mixes and sends only."""
        self._notice_initial_model()
        with self._uninterrupted():
            if not self._is_local_step():
                self.mix()
                self.launch(self.taken + 1)
            self.taken += 1
        self.local.advance_schedule()

    @contextlib.contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Wraps the part of a step that must be complete: after an interruption ranks would mix different steps."""
        if self._interrupted_by is not None:
            raise RuntimeError(f"a step was interrupted by {self._interrupted_by}, and the exchange cannot continue: "
                               "create the wrapper anew, on all ranks")  # fmt: skip
        try:
            yield
        except BaseException as error:
            self._interrupted_by = type(error).__name__
            raise

    def _is_local_step(self) -> bool:
        """Returns whether this step neither waits for an exchange nor begins one."""
        return self.plan.delayed and not self.plan.exchanges_after(self.round_of(self.taken + 1))

    def _take_local_step(self) -> None:
        self.learning_rate = self.rate()
        self.local.take()
        for bucket in self.buckets:
            if self.exchange.flight_of(bucket) is not None:
                bucket.record_sent(bucket.sent)

    def _take_whole_step(self) -> None:
        self.mix()
        self._increment_versions()  # after mixing, which on GPUs takes a changed version counter for a script's change
        self.learning_rate = self.rate()
        self.local.take()
        self.launch(self.taken + 1)

    def _increment_versions(self) -> None:
        """Lets autograd know that mixing changes the parameters: a second backward pass through a graph from before the
        step then raises, as it does after a step of a torch optimizer."""
        for bucket in self.buckets:
            increment_version(bucket.params)

    def mix(self) -> None:
        """Waits for the exchange in flight and mixes what has arrived into the parameters. Blocking."""
        for bucket in self.buckets:
            bucket.gather()
            self.exchange.finish(bucket, self.factor)
            if not self.exchange.is_paused:
                bucket.next_round(self.plan, self.taken, self.learning_rate)
            bucket.scatter()

    @torch.no_grad()
    def launch(self, step: int) -> None:
        """Starts the exchange of the parameters as they are after `step` steps."""
        for bucket in self.buckets:
            bucket.gather()
        self.exchange.launch(self.buckets, self.round_of(step))

    def restart_exchange(self) -> None:
        """Waits for the exchange in flight without mixing it, and starts that of the current parameters. Blocking."""
        self.exchange.drain()
        self.launch(self.taken)

    def round_of(self, step: int) -> int:
        """Returns the round of the topology in which the exchange of a step takes place."""
        return step

    def rate(self) -> float:
        """Returns the learning rate that the sharing rules are given."""
        return self.local.rate()
