"""Runs a peer sampler: exchanges its messages in a mailbox of their own, and makes its targets the neighbors of a
round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decentnode import rng
from decentnode.communication.base import Communication
from decentnode.communication.parts import Collected, Schema
from decentnode.communication.run_state import Steps
from decentnode.errors import PeerFault
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, ScalarSpec, TensorSpec
from decentnode.samplers.base import Sampler, Shuffle
from decentnode.samplers.messages import MALFORMED, shuffle_of, tables_of

logger = logging.getLogger(__name__)

MAILBOX_CAPACITY = 8
"""The capacity of the mailbox per source, which is more messages than a node sends to another one in a round."""
_KIND_SPEC = ScalarSpec(int, 0, 3)
"""The kind of a message: 1 for an answer, plus 2 for a shuffle between nearby nodes."""


def sampler_schema(sampler: Sampler) -> Schema:
    """Returns the schema of a sampler's messages."""
    longest, elements = sampler.longest, sampler.around.profile_elements
    tensors = {"uids": TensorSpec(torch.int64, longest, exact=False),
               "ages": TensorSpec(torch.int64, longest, exact=False)}  # fmt: skip
    if elements:
        tensors["profiles"] = TensorSpec(torch.float32, longest * elements, exact=False)
    return Schema(longest, tensors, elementwise=False, mailbox=MAILBOX_CAPACITY)


class Sampling:
    """Runs one node's sampler. Used from the training thread."""

    def __init__(
        self, sampler: Sampler, communication: Communication, channel: int,
        profile: Callable[[int], np.ndarray | None] = lambda _round: None,
    ) -> None:
        """channel: the channel of the sampler's mailbox. profile: returns the node's profile as of a round; None: its
        previous profile stays valid."""
        self.sampler = sampler
        self._communication, self._channel, self._profile = communication, channel, profile
        self._sent = 0

    def round(self, round: int) -> Steps[None]:
        """At the beginning of a round, process and answer the messages that have arrived, and begin the round's
        shuffles, as steps. Does not wait for messages."""
        messages = yield from self._communication.collect_steps(self._channel)
        profile = self._profile(round)
        if profile is not None:
            self.sampler.profile = profile
        for each in messages:
            try:
                answer = self.sampler.receive(each.source, self._parse(each), round)
            except PeerFault as fault:
                logger.warning("round %d: refused a shuffle of node %d: %s", round, each.source, fault)
                self._communication.counters.fault(fault.reason, each.source, str(fault))
                continue
            if answer is not None and answer.entries:
                self._send(each.source, answer)
        for uid, message in self.sampler.begin(round).items():
            self._send(uid, message)

    def with_sampled_neighbors(self, view: RoundView) -> RoundView:
        """Returns the view of a round with the sampler's targets as neighbors, and without sources, as no payload is
        expected from a particular node."""
        targets = tuple(uid for uid in self.sampler.targets(view.round) if uid in view.members)
        shares = dict.fromkeys(sorted((view.uid, *targets)), 1.0 / (len(targets) + 1))
        return replace(view, neighbors=targets, sources=(), weights={view.uid: 1.0}, out_weights=shares,
                       averaging_group=())  # fmt: skip

    def forget(self, uids: Collection[int]) -> None:
        """Remove nodes that are no longer members."""
        self.sampler.forget(uids)

    def _send(self, uid: int, message: Shuffle) -> None:
        tables = tables_of(message.entries, self.sampler.around.profile_elements)
        tensors = {name: torch.from_numpy(table) for name, table in tables.items()}
        payload = Payload(tensors, {"kind": message.reply + 2 * message.near}, frozenset(tensors))
        self._sent += 1  # used in place of the round, as a node may send several messages in one round
        self._communication.publish(self._sent, {uid: payload}, self._channel)

    def _parse(self, each: Collected) -> Shuffle:
        kind = each.payload.scalars.get("kind")
        if not _KIND_SPEC.accepts(kind):
            raise PeerFault(MALFORMED, f"kind of {kind} from {each.source}")
        assert isinstance(kind, int)
        tables = {name: tensor.cpu().numpy() for name, tensor in each.payload.tensors.items()}
        return shuffle_of(self.sampler, tables, reply=bool(kind & 1), near=bool(kind & 2))

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the state that is kept between rounds."""
        return {"sampler": self.sampler.state_dict(), "sent": self._sent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.sampler.load_state_dict(state["sampler"])
        self._sent = state["sent"]


class Sketch:
    """A random projection of a model to a few numbers, the same on all nodes: each parameter is added to or subtracted
    from one of them (a count sketch, Charikar, Chen and Farach-Colton 2002). It approximately preserves distances and
    cosines between models."""

    def __init__(self, seed: int, parameters: int, elements: int) -> None:
        draws = rng.stream(seed, rng.GLOBAL, "sampler sketch")
        self._elements = elements
        self._places = torch.from_numpy(draws.integers(0, elements, parameters))
        self._signs = torch.from_numpy(draws.integers(0, 2, parameters, np.int8) * 2 - 1)

    def __call__(self, model: Tensor) -> np.ndarray:
        """Returns the sketch [elements] float32 of a model [P]."""
        signed = model.detach().to("cpu", torch.float32) * self._signs
        return torch.zeros(self._elements).index_add_(0, self._places, signed).numpy()
