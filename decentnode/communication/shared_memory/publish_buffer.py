"""A node's publish buffer in shared memory: neighbors on the same host mix straight from it.

There is one file per node: a header of sequence numbers and release counters, then two slots per phase. A payload is
written into one slot while neighbors may still read the other. The file is unlinked as soon as every node that needs it
has mapped it, so that a crash leaves nothing behind.

A slot is in one of three states (docs/slots.rst has them with all transitions):

free       no node may read it, and no message is sent from it
taken      it is being written, by `publish` or because the model lives there (`acquire_slot`); its sequence number is 0
published  its sequence number is that of the payload in it; free again once every reader has released it or is gone,
           and no lease on it is held

Two rules keep a reader from mixing a payload other than the announced one. The owner writes free slots only: a late
reader keeps its slot for as long as it likes, and is sent chunks meanwhile. And the reader checks the sequence number
again after it has read the payload and before it keeps the result (`BufferReader.is_intact`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Set
from pathlib import Path

from decentnode import clock
from decentnode.communication.receive.partial_payload import SLOTS
from decentnode.communication.receive.staging import Leases
from decentnode.communication.shared_memory.device_slots import DeviceMemory, ExportedSlots, ImportedSlots
from decentnode.communication.shared_memory.layout import Layout
from decentnode.communication.shared_memory.segment import FOLDER, Backoff, Segment
from decentnode.errors import EnvironmentFault, PeerFault
from decentnode.payload import Payload
from decentnode.wire.generation import Name

MAGIC = 0x6465636E6F6465
POLL_SECONDS = (20e-6, 1e-3)
"""Shortest and longest sleep while a slot is still being read, which is rare."""
LEASED = -1
"""In place of a reader's uid: messages are still sent from the slot."""


def buffer_path(run: str, uid: int, on_device: bool = False) -> Path:
    """Returns the file of node `uid`'s publish buffer, until it is unlinked. Never taken from a message.

    run: the name of the run's private folder on this host and of the membership generation, as `buffer_run_name`
    returns it.
    """
    return FOLDER / f"decentnode-{run}-{uid}{'-lent' if on_device else ''}"


def buffer_run_name(folder: Path, generation: Name) -> str:
    """Returns the part of file names that identifies the run and generation. launch/children/sockets.py uses it to
    remove the files of nodes that were killed before all nodes had mapped them."""
    number, origin = generation
    return f"{folder.name.removeprefix('decentnode-')}-{number}-{origin.hex()}"


class PublishBuffer:
    """The owner's end of a publish buffer. Used from the training thread."""

    def __init__(
        self, path: Path, layout: Layout, exported: ExportedSlots | None = None, leases: Leases | None = None
    ) -> None:
        """exported: the slots, if the layout places them in device memory. leases: of messages sent from slots.

        Raises EnvironmentFault if there is no room or no permission to create the file.
        """
        self.layout, self._exported = layout, exported
        self._leases = leases or Leases()
        if exported is not None and len(exported.offer) + 8 > layout.size - layout.header_bytes:
            raise EnvironmentFault(f"an offer must fit in {layout.size - layout.header_bytes} bytes")
        try:
            self._segment = Segment.create(path, layout.size, layout.header_bytes)
        except OSError as error:
            raise EnvironmentFault(f"{path}: {error.strerror}") from error
        self._header = self._segment.words(0, layout.words)
        """The header: MAGIC; at `Layout.sequence`, the use number of the payload in a slot, 0 while the slot is taken;
        at `Layout.counter`, 0 while the reader has not attached, else 1 + the last use of the slot that it has
        released."""
        self._header[0] = MAGIC
        if exported is not None:
            self._segment.write(layout.header_bytes, len(exported.offer).to_bytes(8, "little") + exported.offer)
        self.slots = layout.views(self._segment) if exported is None else exported.slots
        for phase in self.slots:
            for slot in phase:
                for tensor in slot:
                    tensor.zero_()  # allocates every page before the first round
        self._addresses = [[slot[0].data_ptr() for slot in phase] for phase in self.slots]
        self._uses = [0] * layout.phases
        """By phase: how many payloads were published. Each use of a slot has its own number within the phase."""
        self._readers: list[list[tuple[int, frozenset[int]]]] = [[(0, frozenset())] * SLOTS for _ in self.slots]
        """[phase][slot]: the last use, and the readers it was published for."""
        self._model_slot: int | None = None
        """The slot of phase 0 in which the model lives."""
        self.late: Set[int] = frozenset()
        """Readers that exceeded a wait and have not released everything since: no later wait includes them."""
        self.on_wait: Callable[[float, Collection[int]], None] = lambda _since, _holders: None
        """Called after a wait for a slot with (when it began, by clock.now; the last holders of the slot: uids, or
        LEASED)."""

    def unlink(self) -> None:
        """Removes the file's name; the memory lives on in the processes that have mapped it."""
        self._segment.unlink()

    def attached(self, uid: int) -> bool:
        """Returns whether `uid` has mapped this publish buffer."""
        counter, phases = self.layout.counter, range(self.layout.phases)
        return all(self._header[counter(uid, phase, slot)] for phase in phases for slot in range(SLOTS))

    # -- slots ------------------------------------------------------------------------------------------------

    def publish(
        self, phase: int, payload: Payload, readers: Collection[int], deadline: float,
        has_departed: Callable[[int], bool],
    ) -> tuple[int, int]:
        """Writes a payload for `readers`. Returns (slot, use) for the doorbell. A payload that already lies in a slot
        is not copied.

        Blocks while no slot is free and at least one is held by somebody who is not late. `has_departed` may raise
        meanwhile. Raises TimeoutError if that lasts beyond `deadline` (monotonic seconds), or at once if all holders
        are late, and writes nothing then; its argument is the holder of a slot: the uid of a reader, which is late from
        then on, or LEASED.
        """
        first = next(iter(payload.tensors.values()))
        addresses, address = self._addresses[phase], first.data_ptr()
        lies_in_slot = address in addresses and first.numel() > 0
        if lies_in_slot:
            slot = addresses.index(address)
            self.wait_released(phase, slot, deadline, has_departed)
        else:
            slot = self._wait_for_free_slot(phase, self._least_recently_used(phase), deadline, has_departed)
        use = self._uses[phase] = self._uses[phase] + 1
        sequence = self.layout.sequence(phase, slot)
        if not lies_in_slot:
            self._header[sequence] = 0
        if self._exported is not None:
            self._exported.may_write(phase, slot, self._readers[phase][slot][1])
        if not lies_in_slot:
            for home, tensor in zip(self.slots[phase][slot], payload.tensors.values(), strict=True):
                home[: tensor.numel()].copy_(tensor)
        if self._exported is not None:
            self._exported.written(phase, slot)
        self._header[sequence] = use
        self._readers[phase][slot] = (use, frozenset(readers))
        return slot, use

    def is_held(self, phase: int, payload: Payload, has_departed: Callable[[int], bool]) -> bool:
        """Returns whether `publish` would have to wait for readers. Does not block."""
        addresses, address = self._addresses[phase], next(iter(payload.tensors.values())).data_ptr()
        lies_in_slot = address in addresses
        slots = [addresses.index(address)] if lies_in_slot else self._least_recently_used(phase)
        return all(self._holder(phase, slot, has_departed, not lies_in_slot) is not None for slot in slots)

    def acquire_slot(self, current: int, deadline: float, has_departed: Callable[[int], bool]) -> int | None:
        """Blocks until a slot of phase 0 is free for the model to move to from address `current`. Returns None if none
        becomes free in time. The model may write the slot until it is published. No reader becomes late because of this
        wait: it has time until the next payload needs a slot."""
        slots = [slot for slot, address in enumerate(self._addresses[0]) if address != current]
        try:
            self._model_slot = self._wait_for_free_slot(0, slots, deadline, has_departed, marks_late=False)
        except TimeoutError:
            self._model_slot = None
            return None
        self._header[self.layout.sequence(0, self._model_slot)] = 0
        return self._model_slot

    def _least_recently_used(self, phase: int) -> list[int]:
        """Returns the slots that a payload may be copied to, the least recently used first."""
        first = self._uses[phase] + 1
        slots = [(first + i) % SLOTS for i in range(SLOTS)]
        return [slot for slot in slots if slot != self._model_slot] if phase == 0 else slots

    def wait_released(self, phase: int, slot: int, deadline: float, has_departed: Callable[[int], bool]) -> None:
        """Blocks until no reader reads a slot any more. Raises TimeoutError as `publish` does."""
        self._wait_for_free_slot(phase, [slot], deadline, has_departed, leases=False)

    def drain(self, deadline: float, has_departed: Callable[[int], bool]) -> None:
        """Blocks until no reader needs the slots in device memory, which end with this process. Raises TimeoutError."""
        self.late = frozenset()  # waits for late readers once more
        for phase, slots in enumerate(self.slots if self._exported is not None else []):
            for slot in range(len(slots)):
                self.wait_released(phase, slot, deadline, has_departed)
        while self._exported is not None and not self._exported.idle():
            if clock.now() > deadline:
                raise TimeoutError(LEASED)
            clock.sleep(POLL_SECONDS[1])

    def _wait_for_free_slot(
        self, phase: int, slots: list[int], deadline: float, has_departed: Callable[[int], bool], leases: bool = True,
        marks_late: bool = True,
    ) -> int:
        """Blocks as `publish` says, and returns the first of `slots` that is free. leases: whether leases on a slot
        count. marks_late: whether those that hold the slots for too long are late from then on."""
        for slot in slots:  # usually one is free
            if self._holder(phase, slot, has_departed, leases) is None:
                return slot
        backoff = Backoff(POLL_SECONDS)
        last: list[int] = []
        began: float | None = None
        try:
            while True:
                holders = []
                for slot in slots:
                    holder = self._holder(phase, slot, has_departed, leases)
                    if holder is None:
                        return slot
                    holders.append(holder)
                if self.late >= set(holders) or clock.now() > deadline:
                    self.late = self.late | set(holders) if marks_late else self.late
                    raise TimeoutError(holders[0])
                if began is None:
                    began = clock.now()
                    if LEASED in holders:
                        self._leases.request_acks()
                last = holders
                backoff.sleep()
        finally:
            if began is not None:
                self.on_wait(began, set(last))

    def _holder(self, phase: int, slot: int, has_departed: Callable[[int], bool], leases: bool) -> int | None:
        """Returns who holds a slot, late holders first; None if the slot is free."""
        use, readers = self._readers[phase][slot]
        words, counter, holder = self._header, self.layout.counter, None
        for uid in readers:
            if words[counter(uid, phase, slot)] <= use and not has_departed(uid):
                if uid in self.late:
                    return uid
                holder = uid
        if holder is None and leases and self._leases.held(self._addresses[phase][slot]) and not has_departed(LEASED):
            return LEASED
        return holder

    def update_late(self, silent: Set[int] = frozenset()) -> None:
        """Updates `late`: a reader that has released everything is no longer late. silent: readers that are late if
        they hold anything."""
        if self.late or silent:
            slots = [(phase, slot) for phase in range(self.layout.phases) for slot in range(SLOTS)]
            holders = {uid for phase, slot in slots for uid in self._readers_holding(phase, slot)}
            if any(self._leases.held(address) for address in self._addresses[0]):
                holders.add(LEASED)
            self.late = holders & (self.late | silent)

    def _readers_holding(self, phase: int, slot: int) -> list[int]:
        use, readers = self._readers[phase][slot]
        return [uid for uid in readers if self._header[self.layout.counter(uid, phase, slot)] <= use]


class BufferReader:
    """A neighbor's end of a publish buffer."""

    def __init__(self, path: Path, layout: Layout, uid: int, device_memory: DeviceMemory | None = None) -> None:
        """uid: the reading node. device_memory: given if the slots lie in a device's memory.

        Raises PeerFault if the file does not fit the run's schemas.
        """
        try:
            segment = Segment.attach(path, layout.size, layout.header_bytes)
        except OSError as error:
            raise PeerFault("no_board", f"{path}: {error.strerror}") from error
        except ValueError as error:
            raise PeerFault("wrong_board", str(error)) from error
        words = segment.words(0, layout.words)
        if words[0] != MAGIC:
            raise PeerFault("wrong_board", str(path))
        self._sequence_words = words[layout.sequence(0, 0) : layout.sequence(layout.phases, 0)]
        """[SLOTS * phase + slot]: the use number of the payload in the slot, written by the owner."""
        self._release_words = words[layout.counter(uid, 0, 0) : layout.counter(uid + 1, 0, 0)]
        """[SLOTS * phase + slot]: the release counter, written by this reader."""
        self._device_slots: ImportedSlots | None = None
        self.on_device = device_memory is not None
        """Whether the slots lie in device memory: they have to be entered, and the device may read them later than the
        host."""
        self._entered_slots: set[tuple[int, int]] = set()
        if device_memory is None:
            self.slots = layout.views(segment)
        else:
            offer = layout.header_bytes
            length = min(int.from_bytes(segment.read(offer, 8), "little"), layout.size)
            self._device_slots = device_memory.import_slots(segment.read(offer + 8, length), layout, uid)
            self.slots = self._device_slots.slots
        for place in range(len(self._release_words)):
            self._release_words[place] = 1

    def enter(self, phase: int, slot: int) -> None:
        """Prepares to read a slot. Training thread."""
        if self._device_slots is not None:
            self._device_slots.enter(phase, slot)
            self._entered_slots.add((phase, slot))

    def is_intact(self, phase: int, slot: int, use: int) -> bool:
        """Returns whether the slot still holds the payload of this use. Called after the payload was read and before
        the result is kept: the owner sets the number to 0 before it changes a byte. Between the last read of a payload
        and this check, a lock was released and taken or a call returned, so that no processor reorders them."""
        return self._sequence_words[SLOTS * phase + slot] == use

    def release(self, phase: int, slot: int, use: int) -> None:
        """Allows the owner to write this slot again. Called on the training thread after `enter`, on any thread
        without."""
        if self._device_slots is not None and (phase, slot) in self._entered_slots:
            self._entered_slots.discard((phase, slot))
            self._device_slots.leave(phase, slot)
        place = SLOTS * phase + slot
        if self._release_words[place] <= use:
            self._release_words[place] = use + 1
