"""Slots of a publish buffer in memory that is no file: what a GPU's owner of a publish buffer and its readers need of
each other.

The counters of a publish buffer lie in shared memory of the host all the same (publish_buffer.py), and say when the
host is done with a slot. The device may be behind: work is only queued there. So the owner has one event per slot,
`written`, and one per slot and reader, `left`, and whoever takes a slot up makes its own queue wait for them:

owner   waits for the counters, then `may_write` (its queue waits for the readers' reads), copies, `written`, doorbell
reader  doorbell, `enter` (its queue waits for `written`), mixes, `leave` (marks its reads), counter

A queue waits for what an event stood for when it was told to wait. An event is set again only when the other side has
told its queue to wait for the time before: the counters see to that.
"""

from __future__ import annotations

import abc
from collections.abc import Collection

from decentnode.communication.shared_memory.layout import Layout, Slots


class ExportedSlots(abc.ABC):
    """The owner's slots. Called on the thread whose queue writes them; not blocking."""

    slots: Slots
    offer: bytes
    """What readers need to find them."""

    @abc.abstractmethod
    def may_write(self, phase: int, slot: int, readers: Collection[int]) -> None:
        """What is queued from now on comes after what `readers` queued before they left the slot."""

    @abc.abstractmethod
    def written(self, phase: int, slot: int) -> None:
        """What was queued up to now is what readers wait for."""

    @abc.abstractmethod
    def idle(self) -> bool:
        """Whether all that was queued, and waited for, is over."""


class ImportedSlots(abc.ABC):
    """A reader's view of them. Called on the thread whose queue reads them; not blocking."""

    slots: Slots

    @abc.abstractmethod
    def enter(self, phase: int, slot: int) -> None:
        """What is queued from now on sees what was written."""

    @abc.abstractmethod
    def leave(self, phase: int, slot: int) -> None:
        """What was queued up to now is all that reads the slot."""


class DeviceMemory(abc.ABC):
    """One kind of such memory."""

    @abc.abstractmethod
    def export_slots(self, layout: Layout, readers: Collection[int]) -> ExportedSlots:
        """Raises EnvironmentFault where there is no room."""

    @abc.abstractmethod
    def import_slots(self, offer: bytes, layout: Layout, uid: int) -> ImportedSlots:
        """uid: the reading node. Raises PeerFault when the offer is not what the layout says, or cannot be reached."""
