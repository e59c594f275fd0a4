"""Slots of a publish buffer in the memory of a device: the interface between the owner of the slots and their readers.

The counters of the publish buffer are still in shared memory of the host (publish_buffer.py), and say when the host has
finished with a slot. The device may be behind, because work is only queued there. Therefore the owner has one event per
slot, `written`, and one per slot and reader, `left`, and each side makes its own queue wait for the other side's event:

owner   waits for the counters, then `may_write` (its queue waits for the readers' reads), copies, `written`, doorbell
reader  doorbell, `enter` (its queue waits for `written`), mixes, `leave` (marks its reads), counter

A queue waits for the state that an event had when the wait was queued. An event is recorded again only after the other
side has queued its wait for the previous recording: the counters ensure that.
"""

from __future__ import annotations

import abc
from collections.abc import Collection

from decentnode.communication.shared_memory.layout import Layout, Slots


class ExportedSlots(abc.ABC):
    """The owner's slots. Called on the thread whose queue writes them. Does not block."""

    slots: Slots
    offer: bytes
    """What readers need to map the slots."""

    @abc.abstractmethod
    def may_write(self, phase: int, slot: int, readers: Collection[int]) -> None:
        """Makes work queued from now on run after what `readers` queued before they left the slot."""

    @abc.abstractmethod
    def written(self, phase: int, slot: int) -> None:
        """Marks the end of the writes: readers wait for what was queued up to now."""

    @abc.abstractmethod
    def idle(self) -> bool:
        """Returns whether all queued work, and all work waited for, is done."""


class ImportedSlots(abc.ABC):
    """A reader's view of the slots. Called on the thread whose queue reads them. Does not block."""

    slots: Slots

    @abc.abstractmethod
    def enter(self, phase: int, slot: int) -> None:
        """Makes work queued from now on see what was written."""

    @abc.abstractmethod
    def leave(self, phase: int, slot: int) -> None:
        """Marks the end of the reads: only what was queued up to now reads the slot."""


class DeviceMemory(abc.ABC):
    """One kind of device memory that processes can share."""

    @abc.abstractmethod
    def export_slots(self, layout: Layout, readers: Collection[int]) -> ExportedSlots:
        """Allocates the owner's slots. Raises EnvironmentFault if there is no room."""

    @abc.abstractmethod
    def import_slots(self, offer: bytes, layout: Layout, uid: int) -> ImportedSlots:
        """Maps another node's slots. uid: the reading node. Raises PeerFault if the offer does not fit the layout or
        cannot be mapped."""
