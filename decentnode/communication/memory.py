"""The way of payloads between nodes of one host: boards in shared memory, and doorbells that say what lies there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path

from torch import Tensor

from decentnode.communication.base import Counters, Schema
from decentnode.communication.bell import MAX_DATAGRAM, DatagramBell
from decentnode.communication.board import Board, Layout, Reader, path_of
from decentnode.communication.inbox import Inbox, Status
from decentnode.errors import EnvironmentFault, PeerFault
from decentnode.payload import Payload
from decentnode.wire import codec
from decentnode.wire.messages import Message, Slot

logger = logging.getLogger(__name__)

STEPS = ("boards made", "boards mapped")
"""Barriers of `MemoryPath.open`: nodes without a board pass them too."""


class MemoryPath:
    """One node's board, its mappings of the others' boards, and its bell. Used from the training thread."""

    def __init__(
        self,
        uid: int,
        schemas: tuple[Schema, ...],
        num_nodes: int,
        inbox: Inbox,
        status: Status,
        counters: Counters,
        admit: Callable[[Message], object],
        refuse: Callable[[PeerFault], None],
    ) -> None:
        """admit: raises PeerFault for a message that may not be said now. refuse: counts a fault."""
        self.readers: frozenset[int] = frozenset()
        """Neighbors that read this node's board."""
        self._uid, self._schemas, self._layout = uid, schemas, Layout(schemas, num_nodes)
        self._inbox, self._status, self._counters = inbox, status, counters
        self._admit, self._refuse = admit, refuse
        self._board: Board | None = None
        self._mapped: dict[int, Reader] = {}
        self._bell: DatagramBell | None = None

    def open(
        self, folder: Path, run: str, others: Collection[int], required: bool, barrier: Callable[[str], None]
    ) -> None:
        """Make this node's board, map those of `others`, and take the names away when everybody has them. Blocking.

        A board's name comes from the run's id and the uid, its size from the local schema. Raises EnvironmentFault
        when there is no room for a board and it is `required`.
        """
        self._bell = DatagramBell(folder, self._uid, self._on_datagram)
        try:
            self._board = Board(path_of(run, self._uid), self._layout)
        except EnvironmentFault as error:
            if required:
                raise
            logger.warning("payloads leave over ipc: %s", error)
        try:
            barrier(STEPS[0])
            for uid in others:
                try:
                    self._mapped[uid] = Reader(path_of(run, uid), self._layout, self._uid)
                except PeerFault as fault:
                    logger.warning("no shared memory from node %d: %s", uid, fault)
            barrier(STEPS[1])
        finally:
            if self._board is not None:
                self._board.unlink()
        if self._board is not None:
            self.readers = frozenset(uid for uid in others if self._board.attached(uid))
        self._status.bell = self._bell

    def publish(
        self,
        payload: Payload,
        uids: list[int],
        phase: int,
        timeout_seconds: float,
        header_of: Callable[[int, int, bytes], bytes],
        send_control: Callable[[int, bytes], None],
    ) -> bool:
        """Write a payload into the board and ring at `uids`; header_of(slot, use, totals) makes the doorbell.

        False when a reader still holds an earlier payload after the time-out: the slot must not change under it, so
        everybody gets chunks from then on.
        """
        board, bell = self._board, self._bell
        assert board is not None and bell is not None
        try:
            slot, use = board.publish(phase, payload, uids, time.monotonic() + timeout_seconds, self._gone)
        except TimeoutError as error:
            self.readers = frozenset()
            logger.warning("node %d still reads an earlier payload after %g s: payloads leave as chunks from now on",
                           error.args[0], timeout_seconds)  # fmt: skip
            return False
        totals = b"".join(tensor.numel().to_bytes(8, "little") for tensor in payload.tensors.values())
        header = header_of(slot, use, totals)
        metadata = sum(t.nbytes for name, t in payload.tensors.items() if name in payload.metadata)
        data = sum(t.nbytes for t in payload.tensors.values()) - metadata
        for uid in uids:
            edge = self._counters.edge(uid)
            edge.frames_sent += 1
            edge.metadata_bytes_sent += len(header) + metadata
            edge.data_bytes_sent += data
            if len(header) > MAX_DATAGRAM or not bell.send(uid, header):
                send_control(uid, header)
        return True

    def homes(self) -> list[Tensor]:
        """The slots of phase 0, where a payload of one tensor needs no copy; empty without a board."""
        return [] if self._board is None or not self.readers else [slot[0] for slot in self._board.slots[0]]

    def wait_unread(self, home: int, timeout_seconds: float) -> bool:
        """Blocking until nobody reads slot `home` of phase 0; False after the time-out."""
        assert self._board is not None
        try:
            self._board.wait_released(0, home, time.monotonic() + timeout_seconds, self._gone)
        except TimeoutError:
            return False
        return True

    def _gone(self, uid: int) -> bool:
        """Whether a reader said goodbye. Raises what every wait raises once the run has failed."""
        self._status.raise_if_failed()
        if self._status.regrouping:
            raise TimeoutError(uid)  # others may still read: the slot must stay as it is
        return uid in self._status.departed

    def _on_datagram(self, datagram: bytes) -> None:
        try:
            message = codec.decode(datagram)
            if not isinstance(message, Slot):
                raise PeerFault("wrong_plane", type(message).__name__)
            self._admit(message)
            self.take(message, len(datagram))
        except PeerFault as fault:
            self._refuse(fault)

    def take(self, message: Slot, size: int) -> None:
        """An admitted doorbell of `size` bytes; also called by the I/O thread for one that came over ZeroMQ.

        Raises PeerFault when there is no such payload.
        """
        reader = self._mapped.get(message.source)
        if reader is None:
            raise PeerFault("no_board", f"of {message.source}")
        self._inbox.put_slot(message, reader)
        edge = self._counters.edge(message.source)
        edge.frames_received += 1
        edge.metadata_bytes_received += size
        specs = self._schemas[message.phase].tensors.values()
        totals = [int.from_bytes(message.totals[i : i + 8], "little") for i in range(0, len(message.totals), 8)]
        edge.data_bytes_received += sum(t * s.dtype.itemsize for t, s in zip(totals, specs, strict=True))

    def close(self) -> None:
        """Let go of everything; idempotent."""
        self._status.bell = None
        if self._bell is not None:
            self._bell.close()
        if self._board is not None:
            self._board.unlink()
        self._board = None
        self._mapped.clear()
