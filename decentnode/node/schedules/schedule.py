"""The base class of schedules, which alone decide in which order a round makes its local steps, exchanges and mixes.
The schedules themselves are in sequential.py, overlapped.py and asynchronous/.

Methods that may have to wait are generators of steps (`run_state.Steps`).

For a rule with several phases, a round is a sequence of exchanges: `begin` sends the first, `mix` and `send` go from
each one to the next, `finish` mixes the last. For a rule with one phase only `begin` and `finish` are called. In each
phase, all fragments that are due in the round are sent before any of them is mixed; both happen in the order of the
fragments. Local steps come before the first phase, or before a later one if the rule says so
(`Requirements.steps_before`).
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from decentnode import clock
from decentnode.communication.base import Communication
from decentnode.communication.run_state import Steps
from decentnode.graph.base import RoundView
from decentnode.node.schedules.asynchronous.config import AsynchronousConfig
from decentnode.node.schedules.asynchronous.cuts import Cuts
from decentnode.node.schedules.dumps import Dumps
from decentnode.node.schedules.fragment_exchange import ExchangeOutcome, FragmentExchange, RoundTimes, Slice
from decentnode.sharing.base import Sharing
from decentnode.tensors import FlatModel
from decentnode.training.base import Training, Update
from decentnode.wire.generation import Generation

NO_STEPS = Update(0, 0, math.nan)
"""The update of a round in which the node makes no local steps."""


class Schedule(abc.ABC):
    """Makes one round at a time, divided where the neighbors have to act before it can continue."""

    def __init__(
        self, training: Training, fragments: Sequence[FragmentExchange], communication: Communication, *,
        averaging_groups: bool = False, in_background: bool | None = None, averages_buffers: bool = True,
        asynchronous: AsynchronousConfig | None = None,
    ) -> None:
        """fragments: in the order of their parts of the model. averaging_groups: whether the transport may average a
        whole group of nodes at once. If a member of such a group is missing, all others count as missing as well.

        in_background: `node.mix_in_background` of the config; None: if it is worthwhile. averages_buffers: whether
        float buffers are averaged as well. asynchronous: the config section `node.asynchronous`.
        """
        self.averages_buffers, self.asynchronous_config = averages_buffers, asynchronous
        self.averaging_groups = averaging_groups
        self.in_background = in_background
        self.training = training
        self.fragments = tuple(fragments)
        self.communication = communication
        self.make_times: Callable[[], RoundTimes] = RoundTimes
        """Creates the `RoundTimes` of a round; the node replaces it for rounds that are traced."""
        self.times = RoundTimes()
        self.update = NO_STEPS
        """The result of the current round's local steps, once they are made."""
        self.last_trained_round = -1
        """The last round whose local steps have been made; -1 before the first."""
        self._due: tuple[FragmentExchange, ...] = ()
        """The fragments that are exchanged in the current round."""
        self.weights_in: Callable[[int], Mapping[int, float]] = lambda _round: {}
        """Returns the node's row of W in another round, among the current members. The node sets it in each round."""
        self.trains_in: Callable[[int], bool] = lambda _round: True
        """Returns whether the node makes local steps in a round if its rules let it (`node.training_rounds`)."""
        self.cuts = Cuts()
        """Under an asynchronous schedule: which checkpoints form a consistent cut. Outlives generations."""

    asynchronous: ClassVar[bool] = False
    """Whether nodes can be in different rounds at the same time. Such a schedule exchanges float buffers itself."""

    @property
    def model(self) -> FlatModel:
        return self.training.model

    @property
    def sharing(self) -> Sharing:
        """The sharing rule of the first fragment; the rules of the other fragments have the same requirements."""
        return self.fragments[0].rule

    @property
    def due(self) -> list[int]:
        """The indices of the fragments that are exchanged in the current round."""
        return [each.fragment.index for each in self._due]

    @property
    def buffer_channel(self) -> int:
        """The channel of the float buffers' exchange, which follows those of all fragments and phases."""
        return len(self.fragments) * self.sharing.requirements.phases

    @functools.cached_property
    def _is_one_fragment(self) -> bool:
        """Whether the whole model is exchanged as one fragment: then its parameters may be placed in the transport's
        publish buffer."""
        elements = self.model.parameters.numel()
        return len(self.fragments) == 1 and self.fragments[0].fragment.elements == elements

    def report(self) -> dict[str, float]:
        """Returns further figures of the round for metrics.jsonl."""
        return {}

    def succeed(self, former: Schedule, generation: Generation, lost: Collection[int]) -> None:  # noqa: B027
        """In a new membership generation, take over the state of the previous schedule that outlives a generation; here
        nothing. lost: nodes that were members during the previous schedule and lost their state."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that the schedule itself keeps between rounds; nothing changes the tensors in it in
        place."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restores what `state_dict` returned."""

    def drain(self, view: RoundView) -> Steps[None]:  # noqa: ARG002
        """After the last round, complete the exchanges in flight, as steps. view: the view of the round that would be
        next."""
        yield from ()

    def dump(self, round: int, dumps: Dumps) -> None:
        """After the round, write what the rules of the exchanged fragments chose to send."""
        for fragment in self._due:
            fragment.dump(round, dumps)

    def begin(self, round: int, views: Sequence[Sequence[RoundView]], check: Callable[[], None]) -> Steps[None]:
        """Make the local steps, unless they come in a later phase, and begin the first phase's exchanges, as steps.
        views: by fragment and phase. check: called after the local steps, before their result is sent."""
        self.times, self.update = self.make_times(), NO_STEPS
        for fragment, each in zip(self.fragments, views, strict=True):
            fragment.enter(round, each)
        self._due = tuple(fragment for fragment in self.fragments if fragment.is_due)
        return self._begin(round, check)

    @abc.abstractmethod
    def _begin(self, round: int, check: Callable[[], None]) -> Steps[None]:
        """Do the work of `begin` once the fragments have their views."""

    @abc.abstractmethod
    def mix(self) -> Steps[list[ExchangeOutcome]]:
        """Wait for the exchanges of a phase other than the last, and mix their payloads into the model, as steps."""

    def send(self, phase: int) -> Steps[None]:
        """Begin the exchanges of a later phase with the model that `mix` produced, as steps."""
        return self._send(self.model.parameters, phase)

    @abc.abstractmethod
    def finish(self) -> Steps[list[ExchangeOutcome]]:
        """Wait for the last phase's exchanges, mix their payloads into the model, and end the round, as steps."""

    def abandon(self) -> None:
        """Abandon the current round, after the communication reported that the generation or the run is over."""
        for fragment in self._due:
            fragment.abandon()

    def timeout_seconds(self, phase: int) -> float:
        """Returns the longest wait for a neighbor in a phase, as the rule defines it."""
        return self.sharing.wait_seconds(phase, self.communication.config.timeout_seconds)

    def _timeout_of(self, fragment: FragmentExchange) -> float:
        return self.timeout_seconds(fragment.view.phase)

    def _send(self, model: Tensor, phase: int) -> Steps[None]:
        started = clock.now()
        for fragment in self._due:
            yield from fragment.send(model, phase)
        self.times.send += clock.now() - started

    def _train(self, round: int) -> Steps[None]:
        """Make the local steps if all rules let the node train in this round, as steps."""
        trains = self.training.num_samples > 0 and self.trains_in(round) \
            and all(each.rule.trains(each.view) for each in self.fragments)
        leaves_out = trains and self._is_result_obsolete(round)
        if leaves_out:
            trains = False
            for fragment in self.fragments:
                fragment.rule.leave_out(fragment.view)
        started = clock.now()
        if trains:
            direct = self._replace_gradient if self.sharing.requirements.gradient else None
            self.update = update = self.training.local_update(round, direct)
            for fragment in self.fragments:
                fragment.rule.trained(update.samples, update.samples if update.units is None else update.units)
        else:
            self.training.rest(round)
        self.last_trained_round = round
        if self.communication.history is not None:
            self.communication.history.steps(round, left_out=leaves_out)
        computed = self.communication.computed(round) if trains else None
        if computed is not None:
            yield computed
        seconds = clock.now() - started
        if trains:
            self.training.took(seconds)
        self.times.train += seconds

    def _is_result_obsolete(self, round: int) -> bool:
        """Returns whether the only node that would use the result of the local steps has already continued without this
        one. If a node still made the steps of all rounds that it missed, it would fall behind further and further, and
        delay the next evaluation."""
        if not self.communication.continues_without_late:
            return False
        takes = [each.rule.steps_are_for(each.view) for each in self.fragments]
        return all(uid is not None and self.communication.has_sent_later(round, uid) for uid in takes)

    def _replace_gradient(self, gradient: Tensor) -> Tensor:
        for fragment in self.fragments:
            fragment.direct(gradient)
        return gradient

    def _acquire_slot(self, model: Tensor) -> Steps[Tensor | None]:
        """Returns a slot of the publish buffer to which the mixed model may be written, as steps, so that the transport
        need not copy it next time; None if the payload is not the model itself. Waits until the neighbors have read the
        slot."""
        if not self._is_one_fragment or not self._due or model.device.type != "cpu":
            return None
        if not self.sharing.requirements.elementwise:
            return None
        if not self._due[0].sends_memory_of(model):
            return None
        started = clock.now()
        timeout_seconds = self.communication.config.timeout_seconds
        slot = yield from self.communication.acquire_slot_steps(model, timeout_seconds)
        self.times.wait += clock.now() - started
        return slot

    def _mix_in_place(self) -> Steps[None]:
        """Mix the arrivals of the exchanges in flight into the model, as steps; the model may move to another slot."""
        started, waited = clock.now(), self.times.wait
        model, slot, chosen = self.model.parameters, None, False
        for fragment in self._due:
            part = fragment.part(model)
            for each in fragment.slices(self._timeout_of(fragment), self.times):
                if not isinstance(each, Slice):
                    yield each
                    continue
                # neighbors that have sent their models have usually read this node's previous one, so that its slot is
                # free
                if not chosen:
                    chosen = True
                    slot = yield from self._acquire_slot(model)
                with torch.no_grad():
                    each.mix(fragment.rule, part, slot)
                if slot is None:
                    fragment.mark_mixed(each.stop)
        if slot is not None:
            self.model.rebind(slot)
        self.times.mix += clock.now() - started - (self.times.wait - waited)

    def _settle_all(self) -> list[ExchangeOutcome]:
        return [fragment.settle(self.times) for fragment in self._due]
