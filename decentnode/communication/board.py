"""A node's publish buffer in shared memory: neighbors on the same host mix straight from it.

One file per node: a header of release counters, then two slots per phase. A payload is written into one slot while
neighbors may still read the other; a slot is written again only when every reader of its last use has released it.
The file is unlinked as soon as everybody who needs it has it mapped, so that nothing is left after a crash.
"""

from __future__ import annotations

import mmap
import os
import time
import warnings
from collections.abc import Callable, Collection
from pathlib import Path

from decentnode.communication.layout import SLOTS, Layout
from decentnode.communication.lending import Borrowed, Lending, Lent
from decentnode.errors import EnvironmentFault, PeerFault
from decentnode.payload import Payload
from decentnode.wire.generation import Name

FOLDER = Path("/dev/shm")
MAGIC = 0x6465636E6F6465
POLL_SECONDS = (20e-6, 1e-3)
"""Shortest and longest sleep while a slot is still being read; it hardly ever is."""


def path_of(run: str, uid: int, lent: bool = False) -> Path:
    """Where node `uid` publishes, before the file is unlinked; never taken from a message.

    run: the name of the run's private folder on this host and the generation of members, as `run_of` makes it.
    """
    return FOLDER / f"decentnode-{run}-{uid}{'-lent' if lent else ''}"


def run_of(folder: Path, generation: Name) -> str:
    """launch/sockets.py removes by this name what nodes leave behind that are killed before all have mapped it."""
    number, origin = generation
    return f"{folder.name.removeprefix('decentnode-')}-{number}-{origin.hex()}"


class Board:
    """The owner's end."""

    def __init__(self, path: Path, layout: Layout, lent: Lent | None = None) -> None:
        """lent: the slots, where the layout says that they are not in the file.

        Raises EnvironmentFault when there is no room or no right to make the file.
        """
        self.path, self.layout, self._lent = path, layout, lent
        self._linked = False
        if lent is not None and len(lent.offer) + 8 > layout.size - layout.header_bytes:
            raise EnvironmentFault(f"an offer must fit in {layout.size - layout.header_bytes} bytes")
        try:
            free = os.statvfs(path.parent)
            if free.f_bavail * free.f_frsize < layout.size + (16 << 20):
                raise EnvironmentFault(
                    f"{path.parent} has {free.f_bavail * free.f_frsize >> 20} MiB left, "
                    f"shared memory needs {layout.size >> 20} MiB"
                )
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except OSError as error:
            raise EnvironmentFault(f"{path}: {error.strerror}") from error
        self._linked = True
        try:
            os.posix_fallocate(handle, 0, layout.size)
            self._memory = mmap.mmap(handle, layout.size)
        except OSError as error:
            self.unlink()
            raise EnvironmentFault(f"{path}: {error.strerror}") from error
        finally:
            os.close(handle)
        self._words = memoryview(self._memory)[: 8 * (1 + layout.num_nodes * layout.phases)].cast("q")
        """MAGIC, then [uid, phase] as `Layout.counter` says: 0 not attached, else 1 + uses of the phase's slots that
        the reader has done with."""
        self._words[0] = MAGIC
        if lent is not None:
            offer = len(lent.offer).to_bytes(8, "little") + lent.offer
            self._memory[layout.header_bytes : layout.header_bytes + len(offer)] = offer
        self.slots = layout.views(self._memory) if lent is None else lent.slots
        for phase in self.slots:
            for slot in phase:
                for tensor in slot:
                    tensor.zero_()  # every page is there before the first round
        self._addresses = [[slot[0].data_ptr() for slot in phase] for phase in self.slots]
        self._uses = [0] * layout.phases
        self._readers: list[list[tuple[int, frozenset[int]]]] = [[(0, frozenset())] * SLOTS for _ in self.slots]

    def unlink(self) -> None:
        """Take the name away; the memory lives on in those who have it mapped."""
        if self._linked:
            self._linked = False
            self.path.unlink(missing_ok=True)

    def attached(self, uid: int) -> bool:
        """Whether `uid` has this board mapped."""
        return all(self._words[self.layout.counter(uid, phase)] for phase in range(self.layout.phases))

    def publish(
        self, phase: int, payload: Payload, readers: Collection[int], deadline: float, gone: Callable[[int], bool]
    ) -> tuple[int, int]:
        """Write a payload for `readers`; (slot, use) to tell them. One that lies in a slot already is not copied.

        Blocking while a reader that is not `gone` still has the slot's last use. `gone` may raise meanwhile. Raises
        TimeoutError with the uid of a reader that did not release it by `deadline` (monotonic seconds); nothing is
        written then.
        """
        use = self._uses[phase] + 1
        first = next(iter(payload.tensors.values()))
        addresses, lies_at = self._addresses[phase], first.data_ptr()
        own = lies_at in addresses and first.numel() > 0
        slot = addresses.index(lies_at) if own else use % SLOTS
        self.wait_released(phase, slot, deadline, gone)
        self._uses[phase] = use
        if self._lent is not None:
            self._lent.may_write(phase, slot, self._readers[phase][slot][1])
        if not own:
            for home, tensor in zip(self.slots[phase][slot], payload.tensors.values(), strict=True):
                home[: tensor.numel()].copy_(tensor)
        if self._lent is not None:
            self._lent.written(phase, slot)
        self._readers[phase][slot] = (use, frozenset(readers))
        return slot, use

    def drain(self, deadline: float, gone: Callable[[int], bool]) -> None:
        """Blocking until nobody needs lent slots any more, which end with this process. Raises TimeoutError."""
        for phase, slots in enumerate(self.slots if self._lent is not None else []):
            for slot in range(len(slots)):
                self.wait_released(phase, slot, deadline, gone)
        while self._lent is not None and not self._lent.idle():
            if time.monotonic() > deadline:
                raise TimeoutError(-1)
            time.sleep(POLL_SECONDS[1])

    def wait_released(self, phase: int, slot: int, deadline: float, gone: Callable[[int], bool]) -> None:
        """Blocking until nobody reads a slot any more. Raises TimeoutError as `publish` does."""
        before, last_readers = self._readers[phase][slot]
        pause = POLL_SECONDS[0]
        words, counter = self._words, self.layout.counter
        for uid in last_readers:
            at = counter(uid, phase)
            while words[at] <= before and not gone(uid):
                if time.monotonic() > deadline:
                    raise TimeoutError(uid)
                time.sleep(pause)
                pause = min(2 * pause, POLL_SECONDS[1])


class Reader:
    """A neighbor's end of a board."""

    def __init__(self, path: Path, layout: Layout, uid: int, lending: Lending | None = None) -> None:
        """uid: the reading node. lending: where the layout is of lent slots.

        Raises PeerFault when the file is not what the run's schemas say.
        """
        try:
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise PeerFault("no_board", f"{path}: {error.strerror}") from error
        try:
            status = os.fstat(handle)
            if status.st_size != layout.size or status.st_uid != os.geteuid():
                raise PeerFault("wrong_board", f"{path}: {status.st_size} bytes of user {status.st_uid}")
            self._header = mmap.mmap(handle, layout.header_bytes)
            self._memory = mmap.mmap(
                handle, layout.size - layout.header_bytes, prot=mmap.PROT_READ, offset=layout.header_bytes
            )
        finally:
            os.close(handle)
        words = memoryview(self._header)[: 8 * (1 + layout.num_nodes * layout.phases)].cast("q")
        if words[0] != MAGIC:
            raise PeerFault("wrong_board", str(path))
        self._released = words[layout.counter(uid, 0) : layout.counter(uid + 1, 0)]
        """[phase]: what this reader says in the board's header."""
        self._borrowed: Borrowed | None = None
        self.borrows = lending is not None
        """Whether slots have to be entered."""
        self._inside: set[tuple[int, int]] = set()
        if lending is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a neighbor's mapping is read-only, and nobody writes to it
                self.slots = layout.views(self._memory, layout.header_bytes)
        else:
            length = min(int.from_bytes(self._memory[:8], "little"), layout.size)
            self._borrowed = lending.borrow(self._memory[8 : 8 + length], layout, uid)
            self.slots = self._borrowed.slots
        for phase in range(layout.phases):
            self._released[phase] = 1

    def enter(self, phase: int, slot: int) -> None:
        """Training thread, before a slot is read."""
        if self._borrowed is not None:
            self._borrowed.enter(phase, slot)
            self._inside.add((phase, slot))

    def release(self, phase: int, slot: int, use: int) -> None:
        """The owner may write this slot again. The training thread after `enter`, any thread without."""
        if self._borrowed is not None and (phase, slot) in self._inside:
            self._inside.discard((phase, slot))
            self._borrowed.leave(phase, slot)
        if self._released[phase] <= use:
            self._released[phase] = use + 1
