"""The path of payloads between nodes of one host: publish buffers in shared memory, and doorbells that say what lies
there.

A node on a GPU has a second publish buffer, in the memory of the GPU, for the others on it (lending.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from torch import Tensor

from decentnode.communication.base import Counters, Schema
from decentnode.communication.receive.inbox import Inbox
from decentnode.communication.receive.staging import Leases
from decentnode.communication.run_state import RunState
from decentnode.communication.shared_memory.device_slots import DeviceMemory
from decentnode.communication.shared_memory.doorbell import DatagramDoorbell
from decentnode.communication.shared_memory.layout import Layout
from decentnode.communication.shared_memory.publish_buffer import LEASED, BufferReader, PublishBuffer, path_of, run_of
from decentnode.errors import DecentnodeError, EnvironmentFault, PeerFault
from decentnode.payload import Payload
from decentnode.wire.doorbell import MAX_BYTES, Doorbells
from decentnode.wire.generation import Name
from decentnode.wire.messages import Message, Scalars, Slot

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 2.0
"""Longest wait, when closing, for readers of lent memory."""
STEPS = ("boards made", "boards mapped")
"""Barriers of `SharedMemoryPath.open`: nodes without a publish buffer pass them too."""


class SharedMemoryPath:
    """One node's publish buffer, its mappings of the others' publish buffers, and its doorbell. Used from the training
    thread."""

    def __init__(
        self,
        uid: int,
        schemas: tuple[Schema, ...],
        num_nodes: int,
        inbox: Inbox,
        status: RunState,
        counters: Counters,
        admit: Callable[[Message], object],
        refuse: Callable[[PeerFault], None],
        device_memory: DeviceMemory | None = None,
    ) -> None:
        """admit: raises PeerFault for a message that may not be said now. refuse: counts a fault.

        lending: of the GPU that this node is on.
        """
        self.readers: frozenset[int] = frozenset()
        """Neighbors that read this node's publish buffer."""
        self.leases = Leases()
        """Of messages that are sent from where the model lives."""
        self._uid, self._device_memory = uid, device_memory
        self._layouts = {lent: Layout(schemas, num_nodes, lent) for lent in (False, True)}
        self._inbox, self._status, self._counters = inbox, status, counters
        self._admit, self._refuse = admit, refuse
        self._run = ""
        self._wanted: dict[bool, Collection[int]] = {}
        self._buffers: dict[bool, PublishBuffer] = {}
        """In the host's memory, and lent (True)."""
        self._read_by: dict[bool, frozenset[int]] = {}
        self._mapped: dict[int, BufferReader] = {}
        self._doorbell: DatagramDoorbell | None = None
        self._doorbells: Doorbells | None = None

    def open(
        self, folder: Path, run_id: bytes, generation: Name, others: Collection[int], required: bool,
        barrier: Callable[[str], None], near: Collection[int] = (),
    ) -> None:
        """Make this node's publish buffers, map those of `others`, and take the names away when everybody has them.
        Blocking.

        near: nodes on this node's GPU. A publish buffer's name comes from the run's id and the uid, its size from the
        local schema. Raises EnvironmentFault when there is no room for a publish buffer and it is `required`.
        """
        self.make(folder, run_id, generation, {False: others, True: near}, required)
        try:
            barrier(STEPS[0])
            self.map()
            barrier(STEPS[1])
        finally:
            self.hide()
        self.begin()

    def make(
        self, folder: Path, run_id: bytes, generation: Name, wanted: Mapping[bool, Collection[int]], required: bool
    ) -> None:
        """First step of `open`: this node's publish buffers, and its doorbell. wanted: neighbors by whether the memory
        is lent."""
        self._run = run_of(folder, generation)
        self._wanted = {lent: uids for lent, uids in wanted.items() if uids}
        self._doorbells = Doorbells(self._uid, run_id, generation, self._admit)
        self._doorbell = DatagramDoorbell(folder, self._uid, self._on_datagram)
        for lent, uids in self._wanted.items():
            try:
                self._buffers[lent] = self._made(self._run, lent, uids)
            except EnvironmentFault as error:
                if required:
                    raise
                logger.warning("payloads leave over ipc: %s", error)

    def map(self) -> None:
        """Second step, once everybody has made theirs: the others' publish buffers."""
        for lent, uids in self._wanted.items():
            self._map(self._run, lent, uids)

    def hide(self) -> None:
        """Third step, once everybody has mapped them: a crash from here on leaves no file behind."""
        for buffer in self._buffers.values():
            buffer.unlink()

    def begin(self) -> None:
        """Last step: who could map this node's publish buffers is sent payloads through them."""
        for lent, buffer in self._buffers.items():
            self._read_by[lent] = frozenset(uid for uid in self._wanted[lent] if buffer.attached(uid))
        self.readers = frozenset().union(*self._read_by.values())
        self._status.doorbell = self._doorbell

    def _made(self, run: str, lent: bool, readers: Collection[int]) -> PublishBuffer:
        layout = self._layouts[lent]
        if not lent:
            return PublishBuffer(path_of(run, self._uid), layout, leases=self.leases)
        assert self._device_memory is not None, "only nodes on one GPU are near"
        return PublishBuffer(path_of(run, self._uid, lent), layout, self._device_memory.export_slots(layout, readers))

    def _map(self, run: str, lent: bool, uids: Collection[int]) -> None:
        for uid in uids:
            try:
                device_memory = self._device_memory if lent else None
                self._mapped[uid] = BufferReader(path_of(run, uid, lent), self._layouts[lent], self._uid, device_memory)
            except PeerFault as fault:
                logger.warning("no shared memory from node %d: %s", uid, fault)

    def publish(
        self, payload: Payload, uids: list[int], round: int, phase: int, timeout_seconds: float,
        send_control: Callable[[int, int, int, bytes], None],
    ) -> list[int]:
        """Write a payload into the publish buffers and ring at `uids`; send_control(uid, slot, use, totals) where the
        doorbell's queue is full. Those that were told of it: the others have to get chunks.

        Readers that still hold an earlier payload after the time-out are not waited for again, nor told of anything,
        until they have released all that they were told of. While they hold every slot, nobody is told.
        """
        deadline, told = time.monotonic() + self._status.patience(timeout_seconds), []
        for lent, buffer in self._buffers.items():
            read_by = self._read_by[lent]
            mine = uids if read_by.issuperset(uids) else [uid for uid in uids if uid in read_by]
            if buffer.late or self._status.silent:
                buffer.judge(self._status.silent)
                mine = [uid for uid in mine if uid not in buffer.late]
            late = buffer.late
            try:
                if mine:
                    told.append((mine, *buffer.publish(phase, payload, mine, deadline, self._gone)))
            except TimeoutError as error:
                if buffer.late != late:
                    self._warn_of(error.args[0], timeout_seconds)
        if not told:
            return []
        totals = b"".join([tensor.numel().to_bytes(8, "little") for tensor in payload.tensors.values()])
        for mine, slot, use in told:
            self._ring(payload, mine, round, phase, slot, use, totals, send_control)
        return told[0][0] if len(told) == 1 else [uid for mine, _, _ in told for uid in mine]

    @staticmethod
    def _warn_of(holder: int, timeout_seconds: float) -> None:
        who = "a message is still sent from" if holder == LEASED else f"node {holder} still reads"
        logger.warning("%s an earlier payload after %g s: payloads leave as chunks until it is released", who,
                       timeout_seconds)  # fmt: skip

    def _ring(
        self, payload: Payload, uids: list[int], round: int, phase: int, slot: int, use: int, totals: bytes,
        send_control: Callable[[int, int, int, bytes], None],
    ) -> None:
        doorbell, doorbells = self._doorbell, self._doorbells
        assert doorbell is not None and doorbells is not None
        datagram = doorbells.make(round, phase, slot, use, totals, payload.scalars)
        for uid in uids:
            self._counters.edge(uid).frames_sent += 1
        for uid in uids:
            if len(datagram) > MAX_BYTES or not doorbell.send(uid, datagram):
                send_control(uid, slot, use, totals)
            else:
                self._counters.edge(uid).announced_bytes_sent += len(datagram)

    @property
    def mapped(self) -> Collection[int]:
        """Whose payloads this node reads where they lie."""
        return self._mapped.keys()

    def model_slots(self) -> list[Tensor]:
        """The slots of phase 0, where a payload of one tensor needs no copy; empty without a publish buffer."""
        return [] if not self.readers or False not in self._buffers else [s[0] for s in self._buffers[False].slots[0]]

    def acquire_slot(self, current: Tensor, timeout_seconds: float) -> int | None:
        """Blocking: the slot among `model_slots` that the model may go to from `current`; None after the time-out."""
        buffer = self._buffers[False]
        buffer.judge(self._status.silent)
        deadline = time.monotonic() + self._status.patience(timeout_seconds)
        return buffer.acquire_slot(current.data_ptr(), deadline, self._gone)

    def _gone(self, uid: int) -> bool:
        """Whether a reader said goodbye. Raises what every wait raises once the run has failed."""
        self._status.raise_if_failed()
        if self._status.regrouping:
            raise TimeoutError(uid)  # others may still read: the slot must stay as it is
        return uid in self._status.departed

    def _on_datagram(self, datagram: bytes) -> None:
        assert self._doorbells is not None
        try:
            source, round, phase, slot, use, totals, scalars = self._doorbells.open(datagram)
            self._take(source, (round, phase), slot, use, totals, scalars)
        except PeerFault as fault:
            self._refuse(fault)

    def take(self, message: Slot) -> None:
        """I/O thread: an admitted doorbell that came over ZeroMQ.

        Raises PeerFault when there is no such payload.
        """
        key = (message.round, message.phase)
        self._take(message.source, key, message.slot, message.use, message.totals, message.scalars)

    def _take(
        self, source: int, key: tuple[int, int], slot: int, use: int, totals: bytes, scalars: Scalars
    ) -> None:
        reader = self._mapped.get(source)
        if reader is None:
            raise PeerFault("no_board", f"of {source}")
        size = self._inbox.put_slot(source, key, slot, use, totals, scalars, reader)
        edge = self._counters.edge(source)
        edge.frames_received += 1
        edge.payload_bytes_received += size

    def close(self) -> None:
        """Let go of everything; idempotent."""
        self._status.doorbell = None
        if True in self._buffers:
            self._drain(self._buffers[True])
        if self._doorbell is not None:
            self._doorbell.close()
        self.hide()
        self._buffers = {}
        self._mapped.clear()

    def _drain(self, buffer: PublishBuffer) -> None:
        """Lent memory ends with this process: others have to be done with it."""
        try:
            buffer.drain(time.monotonic() + DRAIN_SECONDS, self._gone)
        except (TimeoutError, DecentnodeError, RuntimeError) as error:  # a reader that died takes its events along
            logger.debug("lent memory is still read: %s", error)
