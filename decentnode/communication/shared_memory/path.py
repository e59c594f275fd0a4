"""The path of payloads between nodes of one host: publish buffers in shared memory, and doorbells that announce new
payloads.

A node on a GPU has a second publish buffer, in the memory of the GPU, for the other nodes on it (device_slots.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import ClassVar

from torch import Tensor

from decentnode import clock
from decentnode.communication.parts import ExchangeKey
from decentnode.communication.path import ALL_SENT, Path, PathContext, Sent
from decentnode.communication.receive.partial_payload import SlotPayload
from decentnode.communication.shared_memory.cuda_ipc import CudaMemory
from decentnode.communication.shared_memory.device_slots import DeviceMemory
from decentnode.communication.shared_memory.doorbell import DatagramDoorbell
from decentnode.communication.shared_memory.layout import Layout
from decentnode.communication.shared_memory.publish_buffer import (
    LEASED,
    BufferReader,
    PublishBuffer,
    buffer_path,
    buffer_run_name,
)
from decentnode.errors import DecentnodeError, EnvironmentFault, PeerFault
from decentnode.payload import Payload
from decentnode.wire.doorbell import MAX_BYTES, Doorbells
from decentnode.wire.messages import Slot

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 2.0
"""Longest wait, when closing, for readers of device memory."""
BARRIERS = ("boards made", "boards mapped")
"""Barriers of `SharedMemoryPath.open`, in which nodes without a publish buffer take part, too."""


def device_memory_of(context: PathContext) -> DeviceMemory | None:
    """Returns how this node's device shares memory with other nodes on it; None on the CPU."""
    return CudaMemory(context.device) if context.device.type == "cuda" else None


class SharedMemoryPath(Path):
    """One node's publish buffers, the mappings of its neighbors' buffers, and its doorbell.

    The buffers' names follow from the run's id and the uid, their sizes from the local schema.
    """

    leaves_chunks: ClassVar[bool] = True

    def __init__(self, context: PathContext) -> None:
        super().__init__(context)
        self.readers: frozenset[int] = frozenset()
        """Neighbors that read this node's publish buffers."""
        num_nodes = len(context.machine_of)
        self._layouts = {on_device: Layout(context.schemas, num_nodes, on_device) for on_device in (False, True)}
        self._inbox, self._run_state, self._counters = context.inbox, context.state, context.counters
        self._device_memory = device_memory_of(context)
        self._run = ""
        self._peers_by_memory: dict[bool, Collection[int]] = {}
        self._buffers: dict[bool, PublishBuffer] = {}
        """The buffer in the host's memory (False), and the one in a device's memory (True)."""
        self._readers_by_memory: dict[bool, frozenset[int]] = {}
        self._buffer_readers: dict[int, BufferReader] = {}
        self._doorbell: DatagramDoorbell | None = None
        self._doorbells: Doorbells | None = None

    def open(self, peers: frozenset[int], timeout_seconds: float) -> frozenset[int]:
        """Creates this node's publish buffers, maps those of `peers`, and unlinks the files once all nodes have mapped
        them.

        Raises EnvironmentFault if there is no room for a buffer and the config requires shared memory.
        """
        context = self.context
        wanted = peers if context.partners is None else peers & context.partners
        same_gpu = {uid for uid in wanted if context.routing.path(context.uid, uid) == "cuda_ipc"}
        if not wanted or context.folder is None:
            for barrier in BARRIERS:
                context.barrier(barrier, timeout_seconds)
            drain_kept(context.uid)
            return frozenset()
        try:
            by_memory = {False: sorted(wanted - same_gpu), True: sorted(same_gpu)}
            self.create_buffers(by_memory, context.config.shared_memory is True)
            context.barrier(BARRIERS[0], timeout_seconds)
            self.map_buffers()
            context.barrier(BARRIERS[1], timeout_seconds)
        finally:
            self.unlink_buffers()
        drain_kept(context.uid)
        return self.finish_open()

    def create_buffers(self, wanted: Mapping[bool, Collection[int]], required: bool) -> None:
        """First step of `open`: creates this node's publish buffers and its doorbell. wanted: neighbors, by whether
        they read device memory."""
        context = self.context
        assert context.folder is not None
        self._run = buffer_run_name(context.folder, context.generation)
        self._peers_by_memory = {on_device: uids for on_device, uids in wanted.items() if uids}
        self._doorbells = Doorbells(context.uid, context.run_id, context.generation, context.admit)
        self._doorbell = DatagramDoorbell(context.folder, context.uid, self._on_datagram)
        for on_device, uids in self._peers_by_memory.items():
            try:
                self._buffers[on_device] = self._create_buffer(self._run, on_device, uids)
            except EnvironmentFault as error:
                if required:
                    raise
                logger.warning("payloads leave over ipc: %s", error)

    def map_buffers(self) -> None:
        """Second step of `open`, once all nodes have created their buffers: maps those of the neighbors."""
        for on_device, uids in self._peers_by_memory.items():
            self._map(self._run, on_device, uids)

    def unlink_buffers(self) -> None:
        """Third step of `open`, once all nodes have mapped the buffers: unlinks the files, so that a crash leaves none
        behind."""
        for buffer in self._buffers.values():
            buffer.unlink()

    def finish_open(self) -> frozenset[int]:
        """Last step of `open`. Returns the neighbors that have mapped this node's publish buffers, which get their
        payloads through them."""
        for on_device, buffer in self._buffers.items():
            peers = self._peers_by_memory[on_device]
            self._readers_by_memory[on_device] = frozenset(uid for uid in peers if buffer.attached(uid))
        self.readers = frozenset().union(*self._readers_by_memory.values())
        process, doorbell = self.context.process, self._doorbell
        if process is None:
            self._run_state.doorbell = doorbell
        elif doorbell is not None:
            process.watch(doorbell.descriptor, doorbell.take_in)
        return self.readers

    def send(self, key: ExchangeKey, outgoing: Mapping[int, Payload], sources: Collection[int]) -> Sent:  # noqa: ARG002
        """Writes a payload once if all neighbors get the same one; different payloads have to leave as chunks. Blocks
        only briefly (`RunState.remaining_send_delay`) while slots are held, so that no neighbor waits because of
        another."""
        uids = [uid for uid in outgoing if uid in self.readers and uid not in self._run_state.departed]
        if len({id(outgoing[uid]) for uid in uids}) != 1:
            return Sent(left=outgoing.keys())
        with self._run_state.waits_for(uids):
            reached = self.publish(outgoing[uids[0]], uids, key, self.context.config.timeout_seconds)
        return ALL_SENT if len(reached) == len(outgoing) else Sent(left=outgoing.keys() - reached)

    def _create_buffer(self, run: str, on_device: bool, readers: Collection[int]) -> PublishBuffer:
        layout, uid = self._layouts[on_device], self.context.uid
        if not on_device:
            buffer = PublishBuffer(buffer_path(run, uid), layout, leases=self.context.leases)
            buffer.on_wait = self._count_wait
            return buffer
        assert self._device_memory is not None, "only nodes on one GPU are near"
        slots = self._device_memory.export_slots(layout, readers)
        buffer = PublishBuffer(buffer_path(run, uid, on_device), layout, slots)
        buffer.on_wait = self._count_wait
        return buffer

    def _count_wait(self, since: float, holders: Collection[int]) -> None:
        """Counts a wait for a slot on the edges of the nodes that held the slot."""
        uids = set(holders) - {LEASED} | (self.context.leases.holders() if LEASED in holders else set())
        self._run_state.record_send_delay(clock.now() - since, uids, self._counters)

    def _map(self, run: str, on_device: bool, uids: Collection[int]) -> None:
        for uid in uids:
            try:
                device_memory = self._device_memory if on_device else None
                file, layout = buffer_path(run, uid, on_device), self._layouts[on_device]
                self._buffer_readers[uid] = BufferReader(file, layout, self.context.uid, device_memory)
            except PeerFault as fault:
                logger.warning("no shared memory from node %d: %s", uid, fault)

    def publish(self, payload: Payload, uids: list[int], key: ExchangeKey, timeout_seconds: float) -> list[int]:
        """Writes a payload into the publish buffers and rings the doorbells of `uids`. Returns the neighbors that were
        notified; the others must get chunks.

        Waits briefly (`RunState.remaining_send_delay`) for readers that still hold an earlier payload. Those that hold
        it after that wait are neither waited for nor sent anything until they have released everything they were
        notified of. While they hold every slot, no neighbor is sent anything.
        """
        deadline = clock.now() + self._run_state.remaining_send_delay(timeout_seconds)
        notified: list[int] = []
        totals = b"".join([tensor.numel().to_bytes(8, "little") for tensor in payload.tensors.values()])
        buffers = list(self._buffers.items())
        if len(buffers) > 1:  # a free buffer first, so that its readers do not wait for those of the other
            buffers.sort(key=lambda item: item[1].is_held(key[1], payload, self._has_departed))
        for on_device, buffer in buffers:
            read_by = self._readers_by_memory[on_device]
            mine = uids if read_by.issuperset(uids) else [uid for uid in uids if uid in read_by]
            if buffer.late or self._run_state.silent:
                buffer.update_late(self._run_state.silent)
                mine = [uid for uid in mine if uid not in buffer.late]
            late = buffer.late
            try:
                if mine:
                    slot, use = buffer.publish(key[1], payload, mine, deadline, self._has_departed)
                    self._ring(payload, mine, key, slot, use, totals)
                    notified += mine
            except TimeoutError as error:
                if buffer.late != late:
                    self._log_late_reader(error.args[0])
        return notified

    @staticmethod
    def _log_late_reader(holder: int) -> None:
        who = "a message is still sent from" if holder == LEASED else f"node {holder} still reads"
        logger.info("%s an earlier payload: payloads leave as chunks until it is released", who)

    def _ring(self, payload: Payload, uids: list[int], key: ExchangeKey, slot: int, use: int, totals: bytes) -> None:
        """Sends one datagram per neighbor, or a control message if the doorbell's queue is full or the scalars are too
        long."""
        doorbell, doorbells = self._doorbell, self._doorbells
        assert doorbell is not None and doorbells is not None
        datagram = doorbells.make(*key, slot, use, totals, payload.scalars)
        for uid in uids:
            edge = self._counters.edge(uid)
            edge.frames_sent += 1
            if len(datagram) > MAX_BYTES or not doorbell.send(uid, datagram):
                self.context.send(uid, Slot, *key, slot, use, totals, dict(payload.scalars))
            else:
                edge.announced_bytes_sent += len(datagram)

    def receives(self, uid: int) -> bool:
        return uid in self._buffer_readers

    @property
    def model_slots(self) -> list[Tensor]:
        """The slots of phase 0, from which a payload of one tensor needs no copy; empty without a publish buffer."""
        return [] if not self.readers or False not in self._buffers else [s[0] for s in self._buffers[False].slots[0]]

    def acquire_slot(self, current: Tensor, deadline: float) -> int | None:
        buffer = self._buffers[False]
        buffer.update_late(self._run_state.silent)
        return buffer.acquire_slot(current.data_ptr(), deadline, self._has_departed)

    def _has_departed(self, uid: int) -> bool:
        """Returns whether a reader has departed. Raises the run's failure if the run has failed."""
        self._run_state.raise_if_failed()
        if self._run_state.regrouping:
            raise TimeoutError(uid)  # others may still read the slot, so it must not be written
        return uid in self._run_state.departed

    def _on_datagram(self, datagram: bytes) -> None:
        assert self._doorbells is not None
        try:
            source, round, phase, slot, use, totals, scalars = self._doorbells.open(datagram)
            reader = self._reader_of(source)
            self._put(source, round, totals, SlotPayload(reader, phase, slot, use, scalars))
        except PeerFault as fault:
            self.context.refuse(fault)

    def take(self, message: Slot) -> None:
        """I/O thread: takes an admitted doorbell message that arrived over ZeroMQ.

        Raises PeerFault if the payload that it announces does not exist.
        """
        reader = self._reader_of(message.source)
        payload = SlotPayload(reader, message.phase, message.slot, message.use, message.scalars)
        self._put(message.source, message.round, message.totals, payload)

    def _reader_of(self, source: int) -> BufferReader:
        reader = self._buffer_readers.get(source)
        if reader is None:
            raise PeerFault("no_board", f"of {source}")
        return reader

    def _put(self, source: int, round: int, totals: bytes, payload: SlotPayload) -> None:
        size = self._inbox.put_slot(source, round, totals, payload)
        edge = self._counters.edge(source)
        edge.frames_received += 1
        edge.received(size, payload.scalars)

    def close(self, broken: bool) -> None:  # noqa: ARG002
        self._run_state.doorbell = None
        if True in self._buffers:
            drain_or_keep(self.context.uid, self._buffers[True], clock.now() + DRAIN_SECONDS, self._has_departed)
        if self._doorbell is not None:
            if self.context.process is not None:
                self.context.process.forget(self._doorbell.descriptor)
            self._doorbell.close()
        self.unlink_buffers()
        self._buffers = {}
        self._buffer_readers.clear()


_unreleased_buffers: dict[int, list[PublishBuffer]] = {}
"""By node of this process: its buffers in device memory that others may still read, until `drain_kept` or the end of
the process."""


def drain_or_keep(uid: int, buffer: PublishBuffer, deadline: float, has_departed: Callable[[int], bool]) -> None:
    """Blocks until no reader uses the device memory of node `uid` any more, but not beyond `deadline` (monotonic
    seconds); the memory is then kept and not reused."""
    try:
        buffer.drain(deadline, has_departed)
    except (TimeoutError, DecentnodeError, RuntimeError) as error:  # the events of a reader that died are invalid
        logger.debug("lent memory is still read: %s", error)
        _unreleased_buffers.setdefault(uid, []).append(buffer)


def drain_kept(uid: int) -> None:
    """Frees the buffers of earlier generations that node `uid` had to keep. To be called when all members have entered
    the new generation, so that none reads these buffers any more, except in operations that its device has queued:
    blocks until they are done, for DRAIN_SECONDS at most. Former members are taken for gone."""
    deadline = clock.now() + DRAIN_SECONDS
    for buffer in _unreleased_buffers.pop(uid, []):
        drain_or_keep(uid, buffer, deadline, lambda _reader: True)
