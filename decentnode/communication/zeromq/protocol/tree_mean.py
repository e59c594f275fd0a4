"""Means over all nodes along the control tree: sums go up chunk by chunk, the mean comes down. No sockets."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from decentnode.communication.receive.chunking import MESSAGE_COST, chunk_elements, from_buffer
from decentnode.errors import PeerFault
from decentnode.wire.control_tree import ControlTree
from decentnode.wire.messages import Part

MAX_FINISHED = 1024
"""Number of finished means that are remembered, so that late pieces of them are dropped."""


@dataclass(frozen=True)
class OutgoingPart:
    """A piece to send. `tensor` is a view of a tensor that changes later, so that its bytes must be read at once."""

    to: int
    key: str
    down: int
    chunk: int
    contributors: int
    tensor: Tensor


@dataclass
class _Mean:
    """One mean in progress. `tensor` [N] is first this node's share, then the sum over its subtree, then the mean."""

    tensor: Tensor
    elements_per_chunk: int
    pending: list[dict[int, tuple[int, Tensor]]] = field(default_factory=list)
    """For each chunk: child -> (contributors, sum) that is not added yet."""
    added: list[int] = field(default_factory=list)
    """For each chunk: how many children are added."""
    contributors: list[int] = field(default_factory=list)
    down: set[int] = field(default_factory=set)
    """Chunks whose mean is known."""

    def __post_init__(self) -> None:
        chunks = self.chunks
        self.pending = [{} for _ in range(chunks)]
        self.added = [0] * chunks
        self.contributors = [1] * chunks

    @property
    def chunks(self) -> int:
        return max(1, -(-self.tensor.numel() // self.elements_per_chunk))

    def part(self, chunk: int) -> Tensor:
        start = chunk * self.elements_per_chunk
        return self.tensor[start : start + self.elements_per_chunk]


class TreeMeans:
    """All means of one node. Not thread-safe. Children are added to each chunk in ascending order of their uids."""

    def __init__(self, tree: ControlTree, chunk_bytes: int) -> None:
        self._tree = tree
        self._chunk_bytes = chunk_bytes
        self._running: dict[str, _Mean] = {}
        self._early: dict[str, list[tuple[Part, memoryview]]] = {}
        self._finished: dict[str, None] = {}
        """Keys of the last MAX_FINISHED means that are finished or given up."""
        self.done: dict[str, tuple[Tensor, int]] = {}
        self.consumed: list[tuple[int, int]] = []
        """(uid, bytes) of the pieces that were consumed since the caller last cleared the list."""

    def begin(self, key: str, tensor: Tensor) -> list[OutgoingPart]:
        """Starts the mean `key` with this node's share, and returns the pieces to send. The tensor becomes the result
        and must not be used meanwhile."""
        if key in self._running or key in self.done or key in self._finished:
            raise ValueError(f"mean key must be new, got {key!r} again")
        mean = _Mean(tensor, chunk_elements(self._chunk_bytes, tensor.dtype))
        self._running[key] = mean
        out: list[OutgoingPart] = []
        for chunk in range(mean.chunks):
            out += self._advance(key, mean, chunk)
        for message, buffer in self._early.pop(key, []):
            out += self.receive(message, buffer)
        return out

    def give_up(self, key: str) -> None:
        """Forgets a mean; pieces of it that still arrive are dropped."""
        self._running.pop(key, None)
        self.done.pop(key, None)
        self._end(key)
        for message, buffer in self._early.pop(key, []):
            self.consumed.append((message.source, buffer.nbytes + MESSAGE_COST))

    def take(self, key: str) -> tuple[Tensor, int] | None:
        """Returns the result (mean [N], contributors) once it is known, and forgets it; None before."""
        result = self.done.pop(key, None)
        if result is not None:
            self._end(key)
        return result

    def _end(self, key: str) -> None:
        self._finished[key] = None
        if len(self._finished) > MAX_FINISHED:
            del self._finished[next(iter(self._finished))]

    def waiting_for(self, key: str) -> list[int]:
        """Returns the nodes that this mean waits for: children whose pieces are missing, or the parent."""
        mean = self._running.get(key)
        if mean is None:
            return []
        for chunk in range(mean.chunks):
            if mean.added[chunk] < len(self._tree.children):
                return [c for c in self._tree.children[mean.added[chunk] :] if c not in mean.pending[chunk]]
        return [] if self._tree.parent is None else [self._tree.parent]

    def receive(self, message: Part, buffer: memoryview) -> list[OutgoingPart]:
        """Handles a received piece, and returns the pieces to send. Raises PeerFault for a piece that fits no mean."""
        allowed = (self._tree.parent,) if message.down else self._tree.children
        if message.source not in allowed:
            raise PeerFault("wrong_sender", f"part of {message.key!r} from {message.source}")
        if message.key in self._finished or message.key in self.done:
            raise PeerFault("stale_part", message.key)
        mean = self._running.get(message.key)
        if mean is None:
            self._early.setdefault(message.key, []).append((message, buffer))
            return []
        if message.chunk >= mean.chunks:
            raise PeerFault("wrong_shape", f"chunk {message.chunk} of {message.key!r}")
        part = mean.part(message.chunk)
        if buffer.nbytes != part.numel() * part.element_size():
            raise PeerFault("wrong_size", f"{buffer.nbytes} bytes in {message.key!r}")
        arrived = from_buffer(buffer, part.dtype)
        if message.chunk in mean.down:
            raise PeerFault("duplicate_chunk", f"part of {message.key!r} from {message.source}")
        if message.down:
            self.consumed.append((message.source, buffer.nbytes + MESSAGE_COST))
            part.copy_(arrived)
            return self._send_down(message.key, mean, message.chunk, message.contributors)
        if message.source in mean.pending[message.chunk]:
            raise PeerFault("duplicate_chunk", f"part of {message.key!r} from {message.source}")
        self.consumed.append((message.source, buffer.nbytes + MESSAGE_COST))
        mean.pending[message.chunk][message.source] = (message.contributors, arrived)
        return self._advance(message.key, mean, message.chunk)

    def _advance(self, key: str, mean: _Mean, chunk: int) -> list[OutgoingPart]:
        """Adds the next children's sums to a chunk; once all are added, passes it up or, on the root, down the tree."""
        children, part = self._tree.children, mean.part(chunk)
        while mean.added[chunk] < len(children) and children[mean.added[chunk]] in mean.pending[chunk]:
            contributors, below = mean.pending[chunk].pop(children[mean.added[chunk]])
            part.add_(below)
            mean.contributors[chunk] += contributors
            mean.added[chunk] += 1
        if mean.added[chunk] < len(children):
            return []
        if self._tree.parent is not None:
            return [OutgoingPart(self._tree.parent, key, 0, chunk, mean.contributors[chunk], part)]
        part.div_(mean.contributors[chunk])
        return self._send_down(key, mean, chunk, mean.contributors[chunk])

    def _send_down(self, key: str, mean: _Mean, chunk: int, contributors: int) -> list[OutgoingPart]:
        mean.contributors[chunk] = contributors
        mean.down.add(chunk)
        if len(mean.down) == mean.chunks:
            del self._running[key]
            self.done[key] = (mean.tensor, min(mean.contributors))
        return [OutgoingPart(child, key, 1, chunk, contributors, mean.part(chunk)) for child in self._tree.children]


def own_share(tensor: Tensor) -> Tensor:
    """Returns a flat contiguous CPU copy of a tensor, which a mean may change in place."""
    return tensor.detach().reshape(-1).to("cpu", copy=True).contiguous() if tensor.numel() else torch.empty(0)
