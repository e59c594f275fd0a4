"""Secure aggregation: a node learns only the weighted sum of its neighbors' models, none of the models."""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from decentnode import rng
from decentnode.compression import select
from decentnode.config import component
from decentnode.config.component import ADDED, Config
from decentnode.errors import EnvironmentFault, PeerFault, UsageError
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing.base import Sharing
from decentnode.sharing.requirements import Requirements
from decentnode.tensors import blocks, moved

if TYPE_CHECKING:
    from decentnode.sharing.masks import KeyPair

logger = logging.getLogger(__name__)

PUBLIC_KEYS, RELAYED_KEYS, MODELS = range(3)
"""The phases of a round: what nodes send in them."""
PUBLIC_KEY_BYTES = 32
RECORD = struct.Struct(f"<I{PUBLIC_KEY_BYTES}s")
"""A relayed key: the uid of its node, and the public key."""
MAX_NEIGHBORS = 1024
"""Receivers reserve memory for as many relayed keys, 36 KiB."""
LARGEST_INTEGER = 1 << 30
"""The integer of a model's entry of size `largest`. The sum over all neighbors, whose weights are one at most, is then
less than 2^31 with all roundings."""
FEWEST_SENDERS = 2
"""The sum of fewer models is a model."""


class SecureAggregationConfig(Config):
    largest: float = Field(128.0, ge=1e-6, le=1e9)
    """The largest absolute value that an entry of a model may have; a larger one ends the run with an error. Entries
    are rounded to multiples of `largest` / 2^30, by default to 1.2e-7."""
    fraction: Annotated[float, ADDED, Field(gt=0, le=1)] = 1.0
    """Part of the model's entries that a node sends in a round: the same random ones on all nodes, other ones in every
    round. If K of P entries are sent, each is sent at least once in any ceil(P / K) rounds that follow a multiple of
    this number."""


class SecureAggregation(Sharing):
    """x_i <- W_ii x_i + sum_j W_ij x_j, where node i learns only the sum (Bonawitz et al. 2017, with the neighbors of a
    node in place of the clients of a server).

    Node j sends to node i the entries of W_ij x_j as integers, plus masks that cancel in the sum over the neighbors of
    i modulo 2^32 (masks.py). Before that, in two short phases, every node sends a new public key to its neighbors, and
    then all public keys that it received back to them. A neighbor of i whose public key is missing is left out of the
    sum, and i gives its weight to its own model. If anything is missing later, the masks do not cancel, and i keeps its
    own model in this round.

    With `fraction`, all nodes send and mix the same random entries. Seed and round determine them, so that they tell
    nothing about models, masks cancel as before, and every mix keeps the mean of all models. In CESAR (Biswas et al.
    2024) nodes choose entries themselves and tell them to each other.

    It protects against nodes that follow the protocol, not against nodes that pass on wrong keys. A receiver can
    subtract the models of nodes that cooperate with it from its sum.
    """

    Config: ClassVar[type[component.Config]] = SecureAggregationConfig
    config: SecureAggregationConfig
    requirements = Requirements(
        symmetric=True, doubly_stochastic=True, min_neighbors=FEWEST_SENDERS, phases=3, compresses=True, private=True
    )

    def __init__(self, config: SecureAggregationConfig) -> None:
        super().__init__(config)
        try:
            import decentnode.sharing.masks  # noqa: F401
        except ImportError as error:
            raise EnvironmentFault("secure_aggregation needs the library cryptography, which is not installed here; "
                                   "pip install 'decentnode[security]'") from error
        self._scale = LARGEST_INTEGER / config.largest
        self._elements = 0
        """The number of parameters."""
        # all of the following is of one round
        self._own: KeyPair | None = None
        self._senders: dict[int, bytes] = {}
        """The public keys of the nodes whose models this node adds; empty if they are too few."""
        self._senders_of: dict[int, dict[int, bytes]] = {}
        """For each neighbor, what it sent of `_senders`."""

    def set_parameter_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self._elements = sum(map(math.prod, shapes))

    def plan(self, view: RoundView) -> RoundView:
        """Leaves out neighbors without weight, which would hide nothing in the sum."""
        if len(view.neighbors) > MAX_NEIGHBORS:
            raise UsageError(f"sharing: secure_aggregation needs a graph with at most {MAX_NEIGHBORS} neighbors per "
                             f"node, node {view.uid} has {len(view.neighbors)}")  # fmt: skip
        return view.among([uid for uid, weight in view.weights.items() if weight > 0])

    def phase_bytes(self, view: RoundView, elements: int) -> tuple[float, ...]:
        return PUBLIC_KEY_BYTES, RECORD.size * len(view.sources), 4 * self._count(elements)

    def _count(self, elements: int) -> int:
        """Returns how many of the entries of a model are sent."""
        return select.count_of(self.config.fraction, elements)

    def _sent_entries(self, model: Tensor, view: RoundView) -> Tensor | None:
        """Returns the positions [K] int64 of the entries that all nodes send in this round, each once; None for all.

        Rounds take turns to continue on a walk through all entries, with a random start and a random step, modulo the
        number of entries. It costs less than masks, where a random permutation would cost more.
        """
        elements, count = model.numel(), self._count(model.numel())
        if count == elements:
            return None
        turn = view.round % math.ceil(elements / count)
        draws = rng.stream(view.seed, rng.GLOBAL, view.purpose("secure_aggregation"), view.round - turn)
        first, step = int(draws.integers(elements)), int(draws.integers(1, elements))
        while math.gcd(step, elements) > 1:  # the walk would come back to its start before it has seen all entries
            step += 1
        first += step * count * turn
        return torch.arange(first, first + step * count, step, device=model.device).remainder_(elements)

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        if view.phase == MODELS:
            finite, at = self._check_range(model, view), self._sent_entries(model, view)
            sent = model if at is None else model.index_select(0, at)
            return {uid: self._masked(sent, uid, view) if finite else _payload(model.device)
                    for uid in view.neighbors}  # fmt: skip
        if view.phase == PUBLIC_KEYS:
            from decentnode.sharing.masks import KeyPair

            self._own, self._senders, self._senders_of = KeyPair(), {}, {}
            keys = self._own.public
        else:
            keys = b"".join(RECORD.pack(uid, public) for uid, public in self._senders.items())
        return dict.fromkeys(view.neighbors, _payload(model.device, keys))

    def _check_range(self, model: Tensor, view: RoundView) -> bool:
        """Returns whether all entries of a model are finite. Raises UsageError if one of them is too large to be sent:
        an integer that wraps, or an entry that is clipped, would silently change the mean of all models."""
        lowest, highest = torch.stack(torch.aminmax(model)).tolist() if model.numel() else (0.0, 0.0)
        largest = max(-lowest, highest)
        if not math.isfinite(largest):
            logger.warning("round %d: node %d sends nothing, as its model has NaN or infinity", view.round, view.uid)
        elif largest > self.config.largest:
            raise UsageError(f"sharing.largest must be at least the absolute value of every entry of a model, got "
                             f"{self.config.largest:g}, and {largest:g} in the model of node {view.uid} in round "
                             f"{view.round}")  # fmt: skip
        return math.isfinite(largest)

    def _masked(self, sent: Tensor, receiver: int, view: RoundView) -> Payload:
        """Returns the payload for a neighbor; an empty one if it does not have this node's key, and so cannot remove
        the masks. sent: [K], the entries of the model that are sent."""
        senders = self._senders_of.get(receiver, {})
        if view.uid not in senders:
            return _payload(sent.device)
        from decentnode.sharing.masks import add_masks

        assert self._own is not None
        factor, wide = self._scale * view.weights[receiver], torch.promote_types(sent.dtype, torch.float32)
        integers = torch.empty(sent.numel(), dtype=torch.int32, device=sent.device)
        for a, b in blocks(0, sent.numel(), sent.device):
            integers[a:b] = (sent[a:b].to(wide) * factor).round_()
        masked = integers.cpu()
        add_masks(masked.numpy().view(np.uint32), [(self._own.mask_key(public, receiver), view.uid < uid)
                                                   for uid, public in senders.items() if uid != view.uid])  # fmt: skip
        return _payload(sent.device, integers=moved(masked, sent.device))

    def unpack(self, payload: Payload, uid: int, view: RoundView) -> Payload:
        keys, x = payload.tensors["keys"], payload.tensors["x"]
        count = x.numel()
        if view.phase == PUBLIC_KEYS:
            from decentnode.sharing.masks import check_public

            keys = keys.cpu()
            check_public(_bytes(keys))  # here too: who relays a bad key is to blame for it
            fits = len(keys) == PUBLIC_KEY_BYTES and count == 0
        elif view.phase == RELAYED_KEYS:
            assert self._own is not None
            keys = keys.cpu()
            senders = _relayed(keys)
            for public in senders.values():
                self._own.secret(public)  # as check_public, and remembers the secret
            same = senders.get(view.uid, self._own.public) == self._own.public
            fits = len(keys) == RECORD.size * len(senders) and len(senders) != 1 and same and count == 0
        else:
            fits = len(keys) == 0 and count in (0, self._count(self._elements))
        if not fits:
            raise PeerFault("malformed_payload", f"{len(keys)} bytes of keys and {count} integers in phase "
                            f"{view.phase} from {uid}")  # fmt: skip
        return Payload({"keys": keys, "x": x})

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        if view.phase == PUBLIC_KEYS:
            found = {uid: _bytes(payload.tensors["keys"]) for uid, payload in received.items()}
            self._senders = found if len(found) >= FEWEST_SENDERS else {}
        elif view.phase == RELAYED_KEYS:
            self._senders_of = {uid: _relayed(payload.tensors["keys"]) for uid, payload in received.items()}
        else:
            self._add(model, {uid: payload.tensors["x"] for uid, payload in received.items()}, view)
            self._own, self._senders, self._senders_of = None, {}, {}

    def _add(self, model: Tensor, received: Mapping[int, Tensor], view: RoundView) -> None:
        """Mixes the sum of the neighbors' integers into the model [P], in place. received: [K] or [0] int32 by uid."""
        arrived = [received[uid] for uid in self._senders if uid in received and received[uid].numel()]
        if not arrived or len(arrived) < len(self._senders):
            if view.neighbors:
                logger.warning("round %d: node %d keeps its own model, as masked models arrived from only %d of %d "
                               "neighbors", view.round, view.uid, len(arrived), len(view.neighbors))  # fmt: skip
            return
        own = view.without([uid for uid in view.sources if uid not in self._senders]).weights[view.uid]
        wide = torch.promote_types(model.dtype, torch.float32)
        at = self._sent_entries(model, view)
        mixed = model if at is None else model.index_select(0, at)
        for a, b in blocks(0, mixed.numel(), mixed.device):
            total = arrived[0][a:b].clone()
            for each in arrived[1:]:
                total += each[a:b]  # modulo 2^32, as integers of torch wrap
            mixed[a:b] = mixed[a:b].to(wide) * own + total.to(wide) / self._scale
        if at is not None:
            model.index_copy_(0, at, mixed)

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:  # noqa: ARG002
        return {"keys": TensorSpec(torch.uint8, MAX_NEIGHBORS * RECORD.size, exact=False),
                "x": TensorSpec(torch.int32, self._count(elements), exact=False)}  # fmt: skip


def _payload(device: torch.device, keys: bytes = b"", integers: Tensor | None = None) -> Payload:
    """Returns a payload with keys, or with the integers of a model, or with nothing."""
    if integers is None:
        integers = torch.empty(0, dtype=torch.int32, device=device)
    found = torch.from_numpy(np.frombuffer(bytearray(keys), np.uint8))
    return Payload({"keys": moved(found, device), "x": integers}, metadata=frozenset({"keys"}))


def _bytes(keys: Tensor) -> bytes:
    return keys.cpu().numpy().tobytes()


def _relayed(keys: Tensor) -> dict[int, bytes]:
    """Returns the public keys by uid of relayed keys."""
    return dict(RECORD.iter_unpack(_bytes(keys)))
