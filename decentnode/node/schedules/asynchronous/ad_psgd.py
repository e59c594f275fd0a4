"""Pairwise averaging without rounds in common, on any connected graph."""

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
from decentnode.wire.generation import Generation

KEPT = 8
"""Messages of one neighbor that may wait here. Of a pair at most an offer and its withdrawal, an answer and a word that
one was applied are under way in a direction; what is lost beyond is asked for again."""
OFFER, WITHDRAW, ANSWER, DECLINE, APPLIED, CLOSED = "offer", "withdraw", "answer", "decline", "applied", "closed"
KINDS = (OFFER, WITHDRAW, ANSWER, DECLINE, APPLIED, CLOSED)
"""What a message says, each with the number of an offer: of the sender (offer, withdraw, applied), of the receiver
(answer, decline), or one more than the sender's last (closed: it makes no others)."""
LOOK_SECONDS = 0.5
"""At the end: how long to wait for a neighbor's word before it is asked again."""


@dataclass
class _Pair:
    """What a node knows of the offers between it and one neighbor."""

    offered: int = 0
    """The number of the last offer to the neighbor."""
    open: bool = False
    """Whether that one is neither answered nor declined."""
    withdrawn: bool = False
    due: int = 0
    """The round in which it is to be withdrawn, or its withdrawal to be said again."""
    confirm: int = 0
    """The offer of which is still to be said that its answer was applied; 0: none."""
    settled: int = 0
    """The last offer of the neighbor that was answered or declined here."""
    change: Tensor | None = None
    """[P + B] what the answer to it added here, until the neighbor has said that it took as much away."""
    unsaid: bool = False
    """Whether the answer or the decline is still to be said."""
    closed: bool = False
    """Whether the neighbor makes no further offers."""

    @property
    def owes(self) -> bool:
        """Whether something is under way between the two."""
        return self.open or self.unsaid or self.change is not None or bool(self.confirm)


class ADPSGD(Asynchronous):
    """Asynchronous decentralized parallel SGD (Lian et al. 2018, arXiv 1710.06952, algorithm 1): after its local steps
    a node averages with one random neighbor, x_i, x_j <- (x_i + x_j) / 2, and nobody waits for anybody.

    Node i offers its model x. Node j, when it comes to it, adds d = (x - x_j) / 2 to its own and answers d, and i takes
    d away from what its model has become meanwhile. So the sum of the two is kept, to rounding, once both have acted:

    - An offer is settled once: answered or declined, under its number. j keeps d until i has said that it applied it,
      and says it again to whoever asks again, also in another generation of members; i applies no number twice.
    - i has one offer under way at a time. It withdraws one that is not answered within `patience` of its rounds and
      tries another neighbor; what was withdrawn is not over before j has declined it or has answered it.
    - While i waits for an answer it answers one other offer itself and declines further ones: its next model is then a
      convex combination of others.

    Nobody waits while it acts, so that there is no deadlock on any graph; no two sides are needed.
    """

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._pairs: dict[int, _Pair] = {}
        self._messages = 0
        self._answered_meanwhile = False
        """Whether an offer was answered since the own one was made."""
        self._refused: int | None = None
        """The neighbor that declined last."""
        self.given: Counter[int] = Counter()
        """By neighbor: its offers that were answered here."""
        self.taken: Counter[int] = Counter()
        """By neighbor: own offers whose answers were applied here."""
        self._former = frozenset[int]()
        """Members that may have been neighbors before this generation: something may be under way between them and this
        node, though the graph is another now."""

    # -- the model as one vector

    def _vector(self) -> Tensor:
        """[P + B] a copy: parameters, then float buffers where they are averaged."""
        model = self.model
        if not self.averages_buffers or not model.buffers.numel():
            return model.parameters.clone()
        return torch.cat([model.parameters, model.buffers.to(model.dtype)])

    def _add(self, change: Tensor, sign: float) -> None:
        model, count = self.model, self.model.num_parameters
        model.parameters.add_(change[:count], alpha=sign)
        if change.numel() > count:
            model.buffers.add_(change[count:].to(model.buffers.dtype), alpha=sign)

    # -- a round

    def _mix_round(self, round: int) -> Steps[None]:
        found = yield from self.collect()
        started, sent = clock.now(), self.times.send
        with torch.no_grad():
            self._hear(found)
            self._withdraw(round)
            self._offer(round)
        self.times.mix += clock.now() - started - (self.times.send - sent)

    def _pair(self, uid: int) -> _Pair:
        return self._pairs.setdefault(uid, _Pair())

    def _say(self, uid: int, kind: str, number: int, model: Tensor | None = None) -> bool:
        """Returns whether it was sent."""
        self._messages += 1
        tensor = torch.empty(0, dtype=self.model.dtype, device=self.model.device) if model is None else model
        payload = Payload({"x": tensor}, {kind: number})
        return not self.publish(self._messages, {uid: payload})

    def _hear(self, found: list[Collected]) -> None:
        """Take in what neighbors said: first what settles own offers, then answer theirs."""
        offers: dict[int, Collected] = {}
        for each in found:
            said = _said(each.payload, self._elements)
            if said is None:
                self.communication.counters.fault("malformed_payload", each.source, f"message {each.round}")
                continue
            kind, number = said
            pair = self._pair(each.source)
            if kind in (ANSWER, DECLINE):
                self._close(each, pair, kind, number)
                continue
            if kind == CLOSED:
                pair.closed, number = True, number - 1
            if number > pair.settled:
                pair.settled, pair.change, pair.unsaid = number, None, True
                if kind == OFFER:
                    offers[each.source] = each
            elif number == pair.settled and kind == WITHDRAW and each.source in offers:
                del offers[each.source]
            elif number == pair.settled and kind == APPLIED:
                pair.change, pair.unsaid = None, False
            elif number == pair.settled and kind in (OFFER, WITHDRAW):  # asked again, as what was said is lost
                pair.unsaid = True
        for uid, offered in offers.items():
            self._answer(offered, self._pairs[uid])
        self._say_unsaid()

    def _say_unsaid(self) -> None:
        for uid, pair in self._pairs.items():
            if pair.confirm and self._say(uid, APPLIED, pair.confirm):
                pair.confirm = 0
            if pair.unsaid:
                kind = DECLINE if pair.change is None else ANSWER
                pair.unsaid = not self._say(uid, kind, pair.settled, pair.change)

    def _close(self, said: Collected, pair: _Pair, kind: str, number: int) -> None:
        """A neighbor answers or declines an own offer."""
        uid = said.source
        if number == pair.offered and pair.open:
            pair.open = False
            if kind == ANSWER:
                self.record_new([said])
                self._add(said.payload.tensors["x"], -1.0)
                self.taken[uid] += 1
            else:
                self._refused = uid
        if kind == ANSWER:
            pair.confirm = number

    def _answer(self, offered: Collected, pair: _Pair) -> None:
        """Average with what a neighbor offers, unless too much is promised already; then the answer is a decline."""
        waits = any(each.open and not each.withdrawn for each in self._pairs.values())
        if waits and self._answered_meanwhile:
            return
        self._answered_meanwhile = True
        self.record_new([offered])
        pair.change = (offered.payload.tensors["x"] - self._vector()).mul_(0.5)
        self._add(pair.change, 1.0)
        self.given[offered.source] += 1

    def _withdraw(self, round: int) -> None:
        """Withdraw what was not answered for too long, and ask again, ever less often, what became of it."""
        for uid, pair in self._pairs.items():
            if pair.open and round >= pair.due:
                pair.withdrawn, pair.due = True, round + 2 * max(self.config.patience, round - pair.due)
                self._say(uid, WITHDRAW, pair.offered)

    def _offer(self, round: int) -> None:
        """Offer the model to a random neighbor, if no other offer is under way."""
        if self.communication.stopping or any(pair.open and not pair.withdrawn for pair in self._pairs.values()):
            return
        free = [uid for uid in self.view.neighbors if not self._pair(uid).open]
        others = [uid for uid in free if uid != self._refused] or free
        self._refused = None
        if not others:
            return
        uid = others[int(self.view.rng("partner").integers(len(others)))]
        pair = self._pair(uid)
        if self._say(uid, OFFER, pair.offered + 1, self._vector()):
            pair.offered, pair.open, pair.withdrawn = pair.offered + 1, True, False
            pair.due = round + self.config.patience
            self._answered_meanwhile = False

    @property
    def _elements(self) -> int:
        """P + B."""
        buffers = self.model.buffers.numel() if self.averages_buffers else 0
        return self.model.num_parameters + buffers

    # -- ends

    def drain(self, view: RoundView) -> Steps[None]:
        """Until no neighbor makes another offer, and nothing is under way between it and this node; for the time-out of
        the communication at most. Former neighbors count, too.

        What is asked again of a neighbor that is still in a long round fills its mailbox, which keeps the newest
        messages alone: the word that no offers follow is said again behind it."""
        config, due, closed = self.communication.config, clock.now(), set[int]()
        others = self._former.union(view.neighbors)
        deadline = clock.now() + config.timeout_seconds
        while clock.now() < deadline:
            again = clock.now() >= due
            for uid in others:
                pair = self._pair(uid)
                if pair.open and (again or not pair.withdrawn):
                    pair.withdrawn = True
                    self._say(uid, WITHDRAW, pair.offered)
                pair.unsaid = pair.unsaid or (again and pair.change is not None)
                if again and (pair.owes or not pair.closed):
                    closed.discard(uid)
                if uid not in closed and self._say(uid, CLOSED, pair.offered + 1):
                    closed.add(uid)
            self._say_unsaid()
            pairs = [self._pairs[uid] for uid in others]
            if all(pair.closed and not pair.owes for pair in pairs) and closed.issuperset(others):
                return
            if again:
                due = clock.now() + LOOK_SECONDS
            found = yield from self.collect(count=1, seconds=LOOK_SECONDS)
            with torch.no_grad():
                self._hear(found)

    def succeed(self, former: Schedule, generation: Generation, lost: Collection[int]) -> None:  # noqa: ARG002
        if not isinstance(former, ADPSGD) or self.communication.uid in generation.fresh:
            return
        stay = {*generation.members} - generation.fresh
        self._pairs = {uid: pair for uid, pair in former._pairs.items() if uid in stay}
        self._messages, self.given, self.taken = former._messages, former.given, former.taken
        self._former = frozenset(stay - {self.communication.uid})
        self._say_again()

    def _say_again(self) -> None:
        """What was under way is lost."""
        for pair in self._pairs.values():
            pair.unsaid, pair.due, pair.closed = pair.unsaid or pair.change is not None, 0, False

    def state_dict(self) -> dict[str, Any]:
        return {"pairs": {uid: dict(vars(pair)) for uid, pair in self._pairs.items()}, "messages": self._messages,
                "given": dict(self.given), "taken": dict(self.taken), "former": sorted(self._former),
                "answered_meanwhile": self._answered_meanwhile, "refused": self._refused}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pairs = {uid: _Pair(**each) for uid, each in state["pairs"].items()}
        self._messages, self._refused = int(state["messages"]), state["refused"]
        self._answered_meanwhile = bool(state["answered_meanwhile"])
        self._former = frozenset(state.get("former", ()))
        self.given, self.taken = Counter(state["given"]), Counter(state["taken"])
        self._say_again()

    def report(self) -> dict[str, float]:
        return {"averaged_pairs": self.given.total() + self.taken.total()}


def _said(payload: Payload, elements: int) -> tuple[str, int] | None:
    """Returns what a message says: kind and number; None where it is none."""
    scalars: Mapping[str, int | float] = payload.scalars
    if len(scalars) != 1:
        return None
    (kind, number), = scalars.items()
    carries = elements if kind in (OFFER, ANSWER) else 0
    if kind not in KINDS or not isinstance(number, int) or isinstance(number, bool) or number < 1:
        return None
    return (kind, number) if payload.tensors["x"].numel() == carries else None


def pair_schemas(schemas: tuple[Schema, ...]) -> tuple[Schema, ...]:
    """The one channel of the messages between pairs: of a model with its float buffers, or of nothing. schemas: of the
    model, then of its buffers where there are any."""
    elements = sum(schema.elements for schema in schemas)
    (spec,) = schemas[0].tensors.values()
    return (Schema(elements, {"x": TensorSpec(spec.dtype, elements, exact=False)}, False, mailbox=KEPT),)
