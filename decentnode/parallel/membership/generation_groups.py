"""The process group of each generation of ranks: of gloo, or of sockets with keys."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from decentnode import clock
from decentnode.communication.shared_memory.segment import Backoff
from decentnode.parallel.membership.addresses import Address, format_endpoint, parse_endpoint
from decentnode.parallel.membership.control import ConnectionBroken, Control
from decentnode.parallel.membership.socket_group import BACKEND, GroupSockets, use_sockets
from decentnode.parallel.process_group.shutdown import join_threads_without_lock
from decentnode.parallel.process_group.traces import forget_group
from decentnode.wire.generation import FIRST, Generation, Name, proposer_of

FORM_SECONDS = 20.0
"""How long making a process group may take."""
CONNECT_SECONDS = 2.0
DROP_SECONDS = 2.0
"""How long a process that ends waits for the threads of groups of earlier generations."""
MEET_SECONDS = (1e-3, 20e-3)
UNUSED_TAG = 0x6E6F6465
"""A message tag that no rank ever sends."""


class GenerationGroups(abc.ABC):
    """Makes the default process group of one generation after the other."""

    endpoint: str
    """The address at which the other ranks' groups reach this process."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timedelta(seconds=timeout_seconds)
        self._old: list[Any] = []
        """Groups of earlier generations, whose operations may still be needed."""

    def make_founders_group(self, rank: int, endpoints: Sequence[str]) -> None:  # noqa: B027  (with gloo they have one)
        """Makes the group of the founding ranks, if they have none. endpoints: [rank] of each."""

    @abc.abstractmethod
    def make(
        self, generation: Generation, members: Sequence[int], own: int, endpoint_of_member: Callable[[int], str],
        gloo_seconds: float,
    ) -> None:
        """Makes the group of a generation. Blocking. members: [rank] its uid; own: this process's uid.
        endpoint_of_member: returns a member's endpoint, by uid. gloo_seconds: how long gloo may take to connect them.
        Raises ConnectionBroken, RuntimeError."""

    def _leave(self) -> None:
        """Leaves the default group, whose generation is over, and all groups of some of its ranks, and keeps them until
        `drop_old`: torch 2.6 waits for a group's operations when the last reference to it is dropped."""
        if dist.is_initialized():
            join_threads_without_lock()
            self._old.extend(dist.distributed_c10d._world.pg_map)
            dist.destroy_process_group()
            forget_group()

    def drop_old(self) -> None:
        """Drops the groups of earlier generations with their interrupted operations, which no rank needs any more."""
        self._old = []

    def close(self) -> None:  # noqa: B027
        """Makes no groups any more; to be called before the sockets of `Control` are closed. Not blocking."""

    def join_threads(self) -> None:  # noqa: B027
        """Waits for the threads of groups of earlier generations. Blocking for a few seconds at most."""


class GlooGroups(GenerationGroups):
    """Groups of gloo, whose ranks meet at the store of the member that proposed their generation."""

    def __init__(self, control: Control, host: str, port: int, timeout_seconds: float) -> None:
        """port: 0 for any. Raises RuntimeError or OSError if it is taken."""
        super().__init__(timeout_seconds)
        self._control = control
        self._store = dist.TCPStore(host, port, None, True, wait_for_workers=False,
                                    timeout=timedelta(seconds=FORM_SECONDS))  # fmt: skip
        self.endpoint = format_endpoint(host, self._store.port)
        self._dropping: list[threading.Thread] = []

    def make(
        self, generation: Generation, members: Sequence[int], own: int, endpoint_of_member: Callable[[int], str],
        gloo_seconds: float,
    ) -> None:
        self._leave()
        host = proposer_of(generation.origin)
        found = self._store if host == own else self._store_at(endpoint_of_member(host))
        store = dist.PrefixStore(f"generation {generation.number} {generation.origin.hex()}", found)
        rank = members.index(own)
        self._wait_for_members(store, rank, len(members))
        make_group(store, rank, len(members), gloo_seconds)
        dist.distributed_c10d._set_pg_timeout(self._timeout, dist.group.WORLD)

    def _store_at(self, endpoint: str) -> dist.TCPStore:
        """Returns the store of another member. Blocking for FORM_SECONDS at most. Raises ConnectionBroken if its
        process is gone, which torch by itself would only notice after all that time."""
        started, (name, port) = clock.now(), parse_endpoint(endpoint)
        while not Address(endpoint, "").refuses_connection(CONNECT_SECONDS):
            try:
                found = dist.TCPStore(name, port, None, False, timeout=timedelta(seconds=CONNECT_SECONDS))
            except RuntimeError:
                if clock.now() - started > FORM_SECONDS:
                    raise
                self._control.check_generation(started)
            else:
                found.set_timeout(timedelta(seconds=FORM_SECONDS))
                return found
        raise ConnectionBroken(f"nothing listens at {name}:{port} any more")

    def _wait_for_members(self, store: dist.Store, rank: int, world_size: int) -> None:
        """Waits until all members are at the store, so that torch's next wait is in vain only if a rank dies within
        these milliseconds. Blocking. Raises ConnectionBroken."""
        store.set(f"here/{rank}", "1")
        keys = [f"here/{each}" for each in range(world_size)]
        started, backoff = clock.now(), Backoff(MEET_SECONDS)
        while not store.check(keys):
            self._control.check_generation(started)
            backoff.sleep()
        self._control.set_waiting(None)

    def drop_old(self) -> None:
        groups, self._old = self._old, []
        thread = threading.Thread(target=_abort_operations, args=(groups,), name="decentnode-groups", daemon=True)
        thread.start()
        self._dropping.append(thread)
        self._dropping = [each for each in self._dropping if each.is_alive()]

    def join_threads(self) -> None:
        for each in self._dropping:
            each.join(DROP_SECONDS)


class KeyedGroups(GenerationGroups):
    """Groups over sockets that are secured with keys (socket_group.py)."""

    def __init__(self, control: Control, host: str, port: int, timeout_seconds: float) -> None:
        """port: 0 for any. Raises OSError if it is taken."""
        super().__init__(timeout_seconds)
        self._sockets = GroupSockets(control.sockets, host, port)
        self.endpoint = self._sockets.endpoint

    def make_founders_group(self, rank: int, endpoints: Sequence[str]) -> None:
        self._make(FIRST, rank, endpoints)

    def make(
        self, generation: Generation, members: Sequence[int], own: int, endpoint_of_member: Callable[[int], str],
        gloo_seconds: float,  # noqa: ARG002
    ) -> None:
        self._leave()
        self._make(generation.name, members.index(own), [*map(endpoint_of_member, members)])

    def _make(self, name: Name, rank: int, endpoints: Sequence[str]) -> None:
        self._sockets.begin(name, rank, endpoints)
        use_sockets(self._sockets)
        dist.init_process_group(BACKEND, store=dist.HashStore(), world_size=len(endpoints), rank=rank,
                                timeout=self._timeout)  # fmt: skip

    def close(self) -> None:
        self._sockets.close()


def make_group(store: dist.Store, rank: int, world_size: int, seconds: float) -> None:
    """Makes the default process group, over gloo. Blocking for so many seconds at most. Raises RuntimeError."""
    # Ranks find each other by the group's name, which counts the groups that a process has made, failed ones included.
    dist.distributed_c10d._world.group_count = 0
    dist.init_process_group("gloo", store=store, world_size=world_size, rank=rank, timeout=timedelta(seconds=seconds))


def _abort_operations(groups: list[Any]) -> None:
    """Ends pending operations in process groups of gloo, on this rank and, as connections close, on others. Blocking.

    torch has no call for that. But gloo closes all connections of a group when one of its waits times out. The wait
    must be for something that no rank ever sends: gloo ends the process if a message is longer than expected.
    """
    for group in groups:
        if group.size() > 1:
            with suppress(RuntimeError):
                peer = (group.rank() + 1) % group.size()
                group.recv([torch.empty(1, device="cpu")], peer, UNUSED_TAG).wait(timedelta(milliseconds=1))
    groups.clear()
