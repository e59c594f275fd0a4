"""Steps of a model in buckets: each mixes what has arrived, updates it, and launches the exchange of the result.

`DecentralizedDataParallel` (ddp.py) decides when a step is taken, and is what a script sees of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from decentnode.optim.parts import divisible
from decentnode.parallel.buckets.bucket import Bucket
from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.steps.apart import Apart
from decentnode.parallel.steps.part_steps import PartSteps, suit_part_by_part
from decentnode.parallel.transports.base import BucketExchange

DELAYED_FACTOR = 0.5
"""Of the mixing where exchanges are delayed. From one exchange to the next a mode of what ranks differ by is multiplied
by w - c, where it would be by w (1 - c) without delay; w: its eigenvalue of W, c: how far the steps between go toward
where they lead. For small w and c near 1 models swing. Half the way makes (1 + w) / 2 of w, and w - c at least -1/2."""


class OptimizerStep:
    """The local part of a step: the optimizer's, with the loss scaler, the clipping and the schedule of the rate."""

    def __init__(
        self, params: Sequence[Tensor], optimizer: Optimizer, lr_scheduler: Any, scaler: Any, clip_norm: float
    ) -> None:
        """params: those that ranks exchange. clip_norm: largest norm of all their gradients together, 0 for any.
        lr_scheduler, scaler: None for none. Raises ValueError where the optimizer has none of the parameters."""
        self._params = list(params)
        self.optimizer, self.lr_scheduler, self.scaler, self.clip_norm = optimizer, lr_scheduler, scaler, clip_norm
        self.apart = Apart(optimizer, self._params)

    def rate(self) -> float:
        """The learning rate of the optimizer's first group, 1 where it has no group."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer.param_groups else 1.0

    def clip(self) -> None:
        """Clips the gradients. They must be unscaled."""
        if self.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(self._params, self.clip_norm)

    def take(self) -> None:
        """Updates all parameters at once. Where there is a scaler, unscales and clips first; else `clip` was called."""
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
        for p in self.apart.unstepped:
            p.grad = None

    def exchange(self, params: Sequence[Tensor]) -> None:
        """From now on ranks exchange these. The order is that in which the norm of their gradients is summed."""
        self._params = list(params)
        self.apart.exchange(params)

    def advance_schedule(self) -> None:
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()


class GossipSteps:
    """The steps of one rank's model, its exchange in flight between two of them."""

    def __init__(
        self, plan: Plan, buckets: Sequence[Bucket], exchange: BucketExchange, local: OptimizerStep
    ) -> None:
        self.plan, self.buckets, self.exchange, self.local = plan, list(buckets), exchange, local
        self.part_steps = PartSteps(self.buckets) if suit_part_by_part(self.buckets) else None
        """None where steps are taken of all parameters at once."""
        self.factor = DELAYED_FACTOR if plan.delayed else 1.0
        """Of the mixing: x + factor (W x - x)."""
        self.taken = 0
        """Steps taken: the round of the topology that the next exchange has."""
        self.learning_rate = 1.0
        """Of the optimizer's last step."""
        self.must_restart = False
        """Whether a state was loaded, so that what is in flight is of another model."""
        self._broken: str | None = None
        """The name of what broke off a step."""

    def begin(self) -> None:
        """Starts the exchange of the initial parameters."""
        self.learning_rate = self.rate()
        for bucket in self.buckets:
            bucket.next_round(self.plan, -1, self.learning_rate)
        self.launch(0)

    def add(self, buckets: Sequence[Bucket]) -> None:
        """From the next step on, steps are of these buckets, too."""
        self.buckets = [*self.buckets, *buckets]  # a step under way goes on with the list that it has
        self.part_steps = PartSteps(self.buckets) if suit_part_by_part(self.buckets) else None

    @torch.no_grad()
    def take_in(
        self, buckets: Sequence[Bucket], exchange_for: Callable[[Plan, Sequence[Bucket]], BucketExchange]
    ) -> None:
        """Blocking, on all ranks, while nothing is in flight: steps are of these buckets, too, from now on, and the
        exchange of the parameters as they are begins.

        exchange_for: makes the exchange of all buckets; blocking. The rules of the buckets that were there go on.
        """
        before, rate = self.exchange, self.rate()
        before.abandon()
        for bucket in self.buckets:
            bucket.renew_memory()
        self.add(buckets)
        self.exchange = exchange_for(self.plan, self.buckets)
        self.exchange.bytes_sent, self.exchange.wait_seconds = before.bytes_sent, before.wait_seconds
        for bucket in buckets:
            bucket.begin_round(self.plan, self.taken, rate)
            bucket.scatter()
        self.launch(self.taken)

    def take(self) -> None:
        """Blocking until the exchange in flight is over. Raises PeerLost, and RuntimeError after a step that was broken
        off."""
        if self.local.scaler is None:
            self.local.clip()
        with self._whole():
            if self._rests():
                self._take_alone()
            elif self.local.scaler is None and self.part_steps is not None and divisible(self.local.optimizer):
                self._count_change()
                self.part_steps.take(self.local.optimizer, self.exchange, self.round_of(self.taken + 1), self.factor)
            else:
                self._take_at_once()
            self.taken += 1
        self.local.advance_schedule()

    def take_idle(self) -> None:
        """Mixes and sends as in a step, without an update."""
        with self._whole():
            if not self._rests():
                self.mix()
                self.launch(self.taken + 1)
            self.taken += 1
        self.local.advance_schedule()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Around the part of a step that is taken whole or not at all: ranks would else mix what is not of one step."""
        if self._broken is not None:
            raise RuntimeError(f"a step was interrupted by {self._broken}, and the exchange cannot continue: create "
                               "the wrapper anew, on all ranks")  # fmt: skip
        try:
            yield
        except BaseException as error:
            self._broken = type(error).__name__
            raise

    def _rests(self) -> bool:
        """Whether this step neither waits for an exchange nor begins one."""
        return self.plan.delayed and not self.plan.exchanges_after(self.round_of(self.taken + 1))

    def _take_alone(self) -> None:
        self.learning_rate = self.rate()
        self.local.take()
        for bucket in self.buckets:
            if self.exchange.flight_of(bucket) is not None:
                bucket.send_apart(bucket.sent)

    def _take_at_once(self) -> None:
        self.mix()
        self._count_change()  # buckets that look at versions see those of the next snapshot
        self.learning_rate = self.rate()
        self.local.take()
        self.launch(self.taken + 1)

    def _count_change(self) -> None:
        """Lets autograd know that mixing changes the parameters: a second backward pass through a graph of before then
        raises, as after a step of torch's."""
        for bucket in self.buckets:
            increment_version(bucket.params)

    def mix(self) -> None:
        """Blocking: waits for the exchange in flight and mixes what has arrived into the parameters."""
        for bucket in self.buckets:
            bucket.gather()
            self.exchange.finish(bucket, self.factor)
            if not self.exchange.over:
                bucket.next_round(self.plan, self.taken, self.learning_rate)
            bucket.scatter()

    @torch.no_grad()
    def launch(self, step: int) -> None:
        """Starts the exchange of the parameters as they are after `step` steps."""
        for bucket in self.buckets:
            bucket.gather()
        self.exchange.launch(self.buckets, self.round_of(step))

    def launch_anew(self) -> None:
        """Blocking: ends the exchange in flight, mixing nothing, and starts that of the parameters as they are."""
        self.exchange.drain()
        self.launch(self.taken)

    def round_of(self, step: int) -> int:
        """The round of the topology in which the exchange of a step takes place."""
        return step

    def rate(self) -> float:
        """The learning rate of which the sharing rules are told."""
        return self.local.rate()
