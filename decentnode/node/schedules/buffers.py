"""Exchanges float buffers (such as BatchNorm statistics) beside the parameters, in full precision and never
compressed."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from decentnode.communication.base import Arrival, AveragingGroup, Exchange
from decentnode.communication.run_state import Steps
from decentnode.graph.base import RoundView
from decentnode.metrics.history import ExchangeRecord
from decentnode.node.schedules.schedule import Schedule
from decentnode.payload import Payload


class BufferExchange:
    """Averages a model's float buffers with those of the neighbors once per round, with the mixing weights of the
    view."""

    def __init__(self, *, averaged: bool) -> None:
        """averaged: whether buffers are averaged (`node.buffers: average`); otherwise nothing is sent."""
        self._averaged = averaged
        self._exchange: Exchange | None = None
        self._record: ExchangeRecord | None = None

    def send(self, view: RoundView, schedule: Schedule) -> Steps[None]:
        """Begin the exchange of the model's buffers, as steps, in a channel after those of the rule's phases."""
        self._exchange = None
        if not self._averaged or not schedule.model.buffers.numel():
            return
        payload = Payload({"x": schedule.model.buffers})
        outgoing = dict.fromkeys(view.neighbors, payload)
        group = AveragingGroup(view.averaging, payload) if schedule.averaging_groups and view.averaging else None
        channel = schedule.buffer_channel
        history = schedule.communication.history
        if history is not None:
            self._record = history.sent(view.round, channel, outgoing)
        self._exchange = yield from schedule.communication.exchange_steps(
            view.round, outgoing, view.sources, channel, group
        )

    def mix(self, view: RoundView, schedule: Schedule) -> Steps[None]:
        """Mix arriving buffers into the model's own, as steps, until all sources have sent or are missing."""
        if self._exchange is None:
            return
        flat, exchange = schedule.model.buffers, self._exchange
        for arrival in exchange.steps(schedule.timeout_seconds(schedule.sharing.requirements.phases - 1)):
            if not isinstance(arrival, Arrival):
                yield arrival
                continue
            part, record = flat[arrival.start : arrival.stop], self._record
            if record is not None:
                record.take(arrival.stop, arrival.received, arrival.total)
            if arrival.total is not None:
                part.copy_(_mixed_sum(part, arrival.total, view))
                continue
            received, missing = dict(arrival.received), arrival.missing
            mixed = _mixed(part, received, view.without(missing))
            # Payloads in a neighbor's shared memory may have been overwritten while they were read: mix again without
            # them.
            while spoiled := exchange.spoiled() & received.keys():
                received, missing = {u: p for u, p in received.items() if u not in spoiled}, missing | spoiled
                mixed = _mixed(part, received, view.without(missing))
                if record is not None:
                    record.spoiled(spoiled, arrival.start)
            part.copy_(mixed)
            if record is not None:
                record.stop = arrival.stop
        if self._record is not None:
            self._record.over(exchange.missing, exchange.departed, exchange.undelivered)
            self._record = None

    def abandon(self) -> None:
        """Abandon the exchange in flight, as the generation is over: nothing more of it is mixed."""
        record, self._record = self._record, None
        if record is not None:
            record.broken_off()


def _mixed_sum(part: Tensor, total: Tensor, view: RoundView) -> Tensor:
    """Returns what `_mixed` returns, computed from the sum over a whole averaging group, in which all other members
    have the same weight. It does not use the sharing rule's `mix_sum`, as a rule may mix only a part of the parameters
    or update its own state there."""
    other = next(weight for uid, weight in view.weights.items() if uid != view.uid)
    return (part * (view.weights[view.uid] - other)).add_(total, alpha=other)


def _mixed(part: Tensor, received: Mapping[int, Payload], view: RoundView) -> Tensor:
    """Returns the weighted mean of `part` [n] of this node's buffers and those received, in a new tensor."""
    mixed = part * view.weights[view.uid]
    for uid, payload in received.items():
        mixed.add_(payload.tensors["x"], alpha=view.weights[uid])
    return mixed
