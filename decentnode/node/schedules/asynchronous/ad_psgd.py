"""Schedule ad_psgd: asynchronous pairwise averaging on any connected graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decentnode import clock
from decentnode.communication.parts import Collected, Schema
from decentnode.communication.run_state import Steps
from decentnode.graph.base import RoundView
from decentnode.node.schedules.asynchronous.base import Asynchronous
from decentnode.node.schedules.schedule import Schedule
from decentnode.payload import Payload, TensorSpec
from decentnode.tensors import sum_dtype
from decentnode.wire.generation import Generation

MAILBOX_CAPACITY = 8
"""The capacity of the mailbox per neighbor. At most an offer, its withdrawal, an answer and a confirmation are in
flight from one node of a pair to the other; a message that is lost beyond that is requested again."""
OFFER, WITHDRAW, ANSWER, DECLINE, APPLIED, CLOSED = "offer", "withdraw", "answer", "decline", "applied", "closed"
KINDS = (OFFER, WITHDRAW, ANSWER, DECLINE, APPLIED, CLOSED)
"""The kinds of messages. Each carries the number of an offer: one of the sender's (offer, withdraw, applied), one of
the receiver's (answer, decline), or the sender's last plus one (closed: all its offers are settled, and it makes no
further ones)."""
RETRY_SECONDS = 0.5
"""At the end of the run: how long to wait for a neighbor's message before it is requested again."""


@dataclass
class _Pair:
    """The state of the offers between this node and one neighbor."""

    offered: int = 0
    """The number of this node's last offer to the neighbor."""
    open: bool = False
    """Whether that offer is neither answered nor declined yet."""
    withdrawn: bool = False
    due: int = 0
    """The round in which that offer is to be withdrawn, or its withdrawal to be sent again."""
    confirm: int = 0
    """The offer whose answer was applied here, which is still to be confirmed to the neighbor; 0: none."""
    settled: int = 0
    """The number of the neighbor's last offer that was answered or declined here."""
    change: Tensor | None = None
    """[P + B] what this node added to its model when it answered that offer; kept until the neighbor has confirmed that
    it subtracted the same."""
    unsaid: bool = False
    """Whether the answer or the decline is still to be sent."""
    closed: bool = False
    """Whether the neighbor has announced that it makes no further offers."""

    @property
    def is_unsettled(self) -> bool:
        """Whether an offer, an answer or a confirmation between the two nodes is not completed."""
        return self.open or self.unsaid or self.change is not None or bool(self.confirm)


class ADPSGD(Asynchronous):
    """Asynchronous decentralized parallel SGD (Lian et al. 2018, arXiv 1710.06952, algorithm 1): after its local steps
    a node averages with one random neighbor, x_i, x_j <- (x_i + x_j) / 2, and no node waits for another.

    Node i offers its model x. When node j processes the offer, it adds d = (x - x_j) / 2 to its own model and answers
    d, and i subtracts d from what its model has become meanwhile. So the sum of the two models is preserved, up to
    rounding, once both have acted:

    - An offer is settled once, under its number: it is answered or declined. j keeps d until i has confirmed that it
      applied it, and sends it again on request, also in a later membership generation; i applies no number twice.
    - i has one active offer at a time. It withdraws an offer that is not answered within `patience` of its rounds and
      tries another neighbor; a withdrawn offer remains open until j has declined or answered it.
    - While i waits for an answer, it answers one offer of another node and declines further ones: so its next model is
      a convex combination of models.

    No node blocks while it averages, so that there is no deadlock on any graph, and the graph need not be bipartite.
    """

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._pairs: dict[int, _Pair] = {}
        self._messages = 0
        self._answered_meanwhile = False
        """Whether this node has answered an offer since it made its own last one."""
        self._last_decliner: int | None = None
        """The neighbor that declined this node's last offer."""
        self.given: Counter[int] = Counter()
        """neighbor -> the number of its offers that were answered here."""
        self.taken: Counter[int] = Counter()
        """neighbor -> the number of this node's offers whose answers were applied here."""
        self._former = frozenset[int]()
        """The members that may have been neighbors before this generation: offers between them and this node may be
        unsettled, although the graph has changed."""

    # -- the model as one vector

    def _vector(self) -> Tensor:
        """Returns a copy [P + B] of the model: parameters, then float buffers if they are averaged."""
        model = self.model
        return model.values()[: self._elements] if model.buffers.numel() else model.parameters.clone()

    def _add(self, change: Tensor, sign: float) -> None:
        model, count = self.model, self.model.num_parameters
        model.parameters.add_(change[:count], alpha=sign)
        if change.numel() > count:
            model.buffers.add_(change[count:], alpha=sign)

    # -- a round

    def _mix_round(self, round: int) -> Steps[None]:
        found = yield from self.collect()
        started, sent = clock.now(), self.times.send
        with torch.no_grad():
            self._process_messages(found)
            self._withdraw(round)
            self._offer(round)
        self.times.mix += clock.now() - started - (self.times.send - sent)

    def _pair(self, uid: int) -> _Pair:
        return self._pairs.setdefault(uid, _Pair())

    def _send_message(self, uid: int, kind: str, number: int, model: Tensor | None = None) -> bool:
        """Send a message to a neighbor. Returns whether it was sent."""
        self._messages += 1
        if model is None:
            dtype = _vector_dtype(self.model.dtype, self.model.buffers.numel())
            model = torch.empty(0, dtype=dtype, device=self.model.device)
        payload = Payload({"x": model}, {kind: number})
        return not self.publish(self._messages, {uid: payload})

    def _process_messages(self, found: list[Collected]) -> None:
        """Process messages from neighbors: first those that settle this node's own offers, then answer the neighbors'
        offers."""
        offers: dict[int, Collected] = {}
        for each in found:
            message = _parse_message(each.payload, self._elements)
            if message is None:
                self.communication.counters.fault("malformed_payload", each.source, f"message {each.round}")
                continue
            kind, number = message
            pair = self._pair(each.source)
            if kind in (ANSWER, DECLINE):
                self._settle_own_offer(each, pair, kind, number)
                continue
            if kind == CLOSED:  # also confirms the last offer, as the mailbox may have dropped that confirmation
                pair.closed, kind, number = True, APPLIED, number - 1
            if number > pair.settled:
                pair.settled, pair.change, pair.unsaid = number, None, True
                if kind == OFFER:
                    offers[each.source] = each
            elif number == pair.settled and kind == WITHDRAW and each.source in offers:
                del offers[each.source]
            elif number == pair.settled and kind == APPLIED:
                pair.change, pair.unsaid = None, False
            elif number == pair.settled and kind in (OFFER, WITHDRAW):  # requested again, as the reply is lost
                pair.unsaid = True
        for uid, offered in offers.items():
            self._answer(offered, self._pairs[uid])
        self._send_pending_replies()

    def _send_pending_replies(self) -> None:
        for uid, pair in self._pairs.items():
            if pair.confirm and self._send_message(uid, APPLIED, pair.confirm):
                pair.confirm = 0
            if pair.unsaid:
                kind = DECLINE if pair.change is None else ANSWER
                pair.unsaid = not self._send_message(uid, kind, pair.settled, pair.change)

    def _settle_own_offer(self, message: Collected, pair: _Pair, kind: str, number: int) -> None:
        """Process a neighbor's answer to one of this node's offers, or its decline."""
        uid = message.source
        if number == pair.offered and pair.open:
            pair.open = False
            if kind == ANSWER:
                self.record_new_payloads([message])
                self._add(message.payload.tensors["x"], -1.0)
                self.taken[uid] += 1
            else:
                self._last_decliner = uid
        if kind == ANSWER:
            pair.confirm = number

    def _answer(self, offered: Collected, pair: _Pair) -> None:
        """Average with the model that a neighbor offers; decline if this node waits for an answer itself and has
        answered another offer meanwhile."""
        is_waiting = any(each.open and not each.withdrawn for each in self._pairs.values())
        if is_waiting and self._answered_meanwhile:
            return
        self._answered_meanwhile = True
        self.record_new_payloads([offered])
        pair.change = (offered.payload.tensors["x"] - self._vector()).mul_(0.5)
        self._add(pair.change, 1.0)
        self.given[offered.source] += 1

    def _withdraw(self, round: int) -> None:
        """Withdraw offers that have not been answered for too long, and repeat the withdrawal at growing intervals
        until the neighbor replies."""
        for uid, pair in self._pairs.items():
            if pair.open and round >= pair.due:
                pair.withdrawn, pair.due = True, round + 2 * max(self.config.patience, round - pair.due)
                self._send_message(uid, WITHDRAW, pair.offered)

    def _offer(self, round: int) -> None:
        """Offer the model to a random neighbor, unless an offer is active."""
        if self.communication.stopping or any(pair.open and not pair.withdrawn for pair in self._pairs.values()):
            return
        available = [uid for uid in self.view.neighbors if not self._pair(uid).open]
        candidates = [uid for uid in available if uid != self._last_decliner] or available
        self._last_decliner = None
        if not candidates:
            return
        uid = candidates[int(self.view.rng("partner").integers(len(candidates)))]
        pair = self._pair(uid)
        if self._send_message(uid, OFFER, pair.offered + 1, self._vector()):
            pair.offered, pair.open, pair.withdrawn = pair.offered + 1, True, False
            pair.due = round + self.config.patience
            self._answered_meanwhile = False

    @property
    def _elements(self) -> int:
        """The length P + B of the vector that is averaged."""
        buffers = self.model.buffers.numel() if self.averages_buffers else 0
        return self.model.num_parameters + buffers

    # -- ends

    def drain(self, view: RoundView) -> Steps[None]:
        """Settle all offers, as steps: return once no neighbor or former neighbor makes further offers and nothing
        between it and this node is unsettled, at the latest after the time-out of the communication.

        Repeated requests can fill the mailbox of a neighbor that is still in a long round. As the mailbox only keeps
        the newest messages, `closed` is sent again after each repetition. It is sent once the neighbor has replied to
        the last offer, so that it confirms that offer as well."""
        config, due, closed = self.communication.config, clock.now(), set[int]()
        peers = self._former.union(view.neighbors)
        deadline = clock.now() + config.timeout_seconds
        while clock.now() < deadline:
            is_retry = clock.now() >= due
            for uid in peers:
                pair = self._pair(uid)
                if pair.open and (is_retry or not pair.withdrawn):
                    pair.withdrawn = True
                    self._send_message(uid, WITHDRAW, pair.offered)
                pair.unsaid = pair.unsaid or (is_retry and pair.change is not None)
                if is_retry and (pair.is_unsettled or not pair.closed):
                    closed.discard(uid)
                if uid not in closed and not pair.open and self._send_message(uid, CLOSED, pair.offered + 1):
                    closed.add(uid)
            self._send_pending_replies()
            pairs = [self._pairs[uid] for uid in peers]
            if all(pair.closed and not pair.is_unsettled for pair in pairs) and closed.issuperset(peers):
                return
            if is_retry:
                due = clock.now() + RETRY_SECONDS
            found = yield from self.collect(count=1, seconds=RETRY_SECONDS)
            with torch.no_grad():
                self._process_messages(found)

    def succeed(self, former: Schedule, generation: Generation, lost: Collection[int]) -> None:  # noqa: ARG002
        if not isinstance(former, ADPSGD) or self.communication.uid in generation.fresh:
            return
        remaining = {*generation.members} - generation.fresh
        self._pairs = {uid: pair for uid, pair in former._pairs.items() if uid in remaining}
        self._messages, self.given, self.taken = former._messages, former.given, former.taken
        self._former = frozenset(remaining - {self.communication.uid})
        self._mark_for_resend()

    def _mark_for_resend(self) -> None:
        """Mark all unconfirmed messages to be sent again, as messages in flight are lost."""
        for pair in self._pairs.values():
            pair.unsaid, pair.due, pair.closed = pair.unsaid or pair.change is not None, 0, False

    def state_dict(self) -> dict[str, Any]:
        return {"pairs": {uid: dict(vars(pair)) for uid, pair in self._pairs.items()}, "messages": self._messages,
                "given": dict(self.given), "taken": dict(self.taken), "former": sorted(self._former),
                "answered_meanwhile": self._answered_meanwhile, "refused": self._last_decliner}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pairs = {uid: _Pair(**each) for uid, each in state["pairs"].items()}
        self._messages, self._last_decliner = int(state["messages"]), state["refused"]
        self._answered_meanwhile = bool(state["answered_meanwhile"])
        self._former = frozenset(state.get("former", ()))
        self.given, self.taken = Counter(state["given"]), Counter(state["taken"])
        self._mark_for_resend()

    def report(self) -> dict[str, float]:
        return {"averaged_pairs": self.given.total() + self.taken.total()}


def _parse_message(payload: Payload, elements: int) -> tuple[str, int] | None:
    """Returns the kind and the number of a message; None if it is not a valid one."""
    scalars: Mapping[str, int | float] = payload.scalars
    if len(scalars) != 1:
        return None
    (kind, number), = scalars.items()
    carries = elements if kind in (OFFER, ANSWER) else 0
    if kind not in KINDS or not isinstance(number, int) or isinstance(number, bool) or number < 1:
        return None
    return (kind, number) if payload.tensors["x"].numel() == carries else None


def _vector_dtype(model: torch.dtype, num_buffers: int) -> torch.dtype:
    """Returns the dtype of the vector that is averaged: that of the model, or at least float32 if the model has float
    buffers, which need not be numbers of float16 or bfloat16."""
    return sum_dtype(model) if num_buffers else model


def pair_schemas(schemas: tuple[Schema, ...]) -> tuple[Schema, ...]:
    """Returns the schema of the single channel for messages between pairs, which carry a model with its float buffers
    or nothing. schemas: that of the model, then that of its buffers if it has any."""
    of_model, *of_buffers = schemas
    num_buffers = sum(schema.elements for schema in of_buffers)
    elements, (spec,) = of_model.elements + num_buffers, of_model.tensors.values()
    dtype = _vector_dtype(spec.dtype, num_buffers)
    return (Schema(elements, {"x": TensorSpec(dtype, elements, exact=False)}, False, mailbox=MAILBOX_CAPACITY),)
