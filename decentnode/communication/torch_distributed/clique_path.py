"""The path of payloads inside a clique: what every use of a torch.distributed communicator has in common."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from decentnode import clock
from decentnode.communication.base import AveragingGroup
from decentnode.communication.counters import Counters
from decentnode.communication.parts import ExchangeKey
from decentnode.communication.receive.absences import SUM
from decentnode.communication.receive.inbox import Inbox
from decentnode.communication.run_state import BROKEN_SECONDS, Breakage, RunState
from decentnode.communication.torch_distributed.buffers import HEADER_BYTES, Pool
from decentnode.communication.torch_distributed.calls import Calls
from decentnode.communication.torch_distributed.group_collective import CollectiveCall, CollectiveKind
from decentnode.payload import Payload
from decentnode.tensors import is_own_fault
from decentnode.wire.bounds import Scalars

SEND_WINDOW = 4
"""Payloads that may be in flight to one peer; the next one waits. If a round has more than two exchanges, the window is
the payloads of two rounds (`CliquePath.window`)."""
CLOSE_SECONDS = 2.0
"""Longest wait, when closing, for peers to take what was sent to them."""


@dataclass(frozen=True)
class NodeSide:
    """What a clique's path uses of its node."""

    inbox: Inbox
    """Where arrived payloads are put."""
    state: RunState
    counters: Counters
    timeout_seconds: float
    """Longest wait for room in a peer's window."""
    lease_of: Callable[[Tensor], object]
    """Returns an object to hold while a tensor is sent from its own memory; None if the tensor has to be copied
    first."""


class CliquePath(abc.ABC):
    """One node's end of a communicator. The training thread calls `begin` and `close`.

    Arrived payloads go into the inbox, where exchanges find them beside those of the other paths. Every receive has
    buffers of its own, so that a failed round changes no model. Control messages never take this path (H1): it has no
    barriers, no means, and no messages about which nodes are alive.
    """

    def __init__(self, calls: Calls, pool: Pool, node: NodeSide) -> None:
        """calls: the collective calls of this node's communicator. pool: of buffers on its device."""
        self.window = max(SEND_WINDOW, 2 * len(node.inbox.plans))  # fragments of one round are sent together
        self.peers: frozenset[int] = frozenset()
        """The members that this path reaches."""
        self._calls, self._pool = calls, pool
        self._inbox, self._run_state, self._counters = node.inbox, node.state, node.counters
        self._timeout_seconds, self._lease_of = node.timeout_seconds, node.lease_of
        self._in_flight: dict[int, int] = {}
        """By peer: payloads in flight to it."""
        self._num_blocked = 0
        """Number of waits for payloads in flight; if 0, completed operations need not wake anybody."""
        self._receives_in_flight = 0
        """Receives in flight, including collective calls."""
        self._outstanding: dict[int, int] = {}
        """By peer: payloads that have not arrived yet."""
        self._is_closed = False
        """Whether the communicator was given up; errors from then on are ignored."""

    @abc.abstractmethod
    def begin(
        self, key: ExchangeKey, outgoing: Sequence[tuple[Payload, list[int]]], sources: Sequence[int]
    ) -> frozenset[int]:
        """Starts to send and receive the payloads of one (round, phase). Returns the neighbors to which nothing was
        sent.

        The caller may change payload tensors as soon as this returns, except those with a lease. Blocks only while
        `window` payloads are in flight to a peer.
        """

    def begin_collective(
        self, kind: CollectiveKind, key: ExchangeKey, group: AveragingGroup, outgoing: Mapping[int, Payload]
    ) -> None:
        """Does the work of `begin` with a collective call that all members make for this (round, phase). Arrivals go to
        the inbox as usual.

        If a member is known to have departed, nothing is launched, because nothing arrives from the others either. Nor
        is anything launched after a call has failed.
        """
        self._inbox.served_together[key] = self.peers
        if SUM in self._run_state.broken:
            return
        if any(self._run_state.departed.get(uid, key[0] + 1) <= key[0] for uid in group.members):
            return
        self._count_receives(1)
        self._launch_call(CollectiveCall(kind, key, self._calls, self._inbox, self._pool).prepare(group, outgoing))

    @property
    def scatters(self) -> bool:
        return self._calls.scatters

    @abc.abstractmethod
    def _launch_call(self, call: CollectiveCall) -> None:
        """Launches the call, and calls `_launch_completed` for every launch that has completed. Does not block."""

    def _launch_completed(self, call: CollectiveCall) -> None:
        """Records that the next launch of a call has completed. Called on a waiting thread."""
        with self._run_state.lock:
            if self._is_closed:
                return  # as in `_chunk_received`
            if call.is_last_launch:
                for uid in self.peers:
                    call.count(self._counters.edge(uid))
                self._count_receives(-1)
            call.launch_completed()

    def _start_receive(
        self, key: ExchangeKey, uid: int, tensors: list[Tensor], scalars: Scalars, release: Callable[[], None]
    ) -> None:
        """Any thread: announces a payload to the inbox as `InboxState.start_receive` says, unless the communicator was
        given up."""
        with self._run_state.lock:
            if not self._is_closed:
                self._inbox.start_receive(key, uid, tensors, scalars, release)

    def _chunk_received(self, key: ExchangeKey, uid: int, last: bool) -> None:
        """Any thread: announces a chunk to the inbox as `InboxState.chunk_received` says, unless the communicator was
        given up. Operations may complete after that (gloo's, when a late peer sends; NCCL's, because they are aborted),
        and the inbox may already expect the same round's payload over the next generation's communicator."""
        with self._run_state.lock:
            if not self._is_closed:
                self._inbox.chunk_received(key, uid, last)

    def _mark_broken(self, uids: Collection[int], operation: str, error: RuntimeError | MemoryError) -> None:
        """Any thread: records that an operation failed, so that nothing more arrives from these peers on this path.
        `SUM` among them stands for collective calls.

        operation: the failed operation and its peers, for messages. If this node's device failed, or its host has no
        memory, no peer is blamed: the node's waits raise the error.
        """
        if is_own_fault(error):
            self._run_state.fail(error)
            return
        reason = f"{operation} failed: {str(error).partition('. ')[0]}"  # the library's further sentences are advice
        with self._run_state.changed:
            new = set(uids) - self._run_state.broken.keys()
            if self._is_closed or not new:
                return
            self._run_state.broken.update(dict.fromkeys(new, Breakage(reason, clock.now())))
            self._run_state.notify()
        self._counters.fault("communicator_broken", min(uids) if len(uids) == 1 else None, reason)

    def leave(self, clean: bool) -> None:
        """Gives the communicator up. clean: whether nothing is in flight."""
        with self._run_state.changed:
            self._is_closed = True
            self._run_state.broken.clear()
        self._end(clean)

    @abc.abstractmethod
    def _end(self, clean: bool) -> None:
        """Closes the communicator and its threads, for `leave`."""

    def close(self) -> None:
        """Blocks until everything has been sent, for CLOSE_SECONDS at most. Does not block if the run has failed or the
        generation has ended."""
        run_state = self._run_state
        deadline = clock.now() + (0.0 if run_state.failure is not None or run_state.regrouping else CLOSE_SECONDS)
        with run_state.changed:
            self._num_blocked += 1
            while self._sends_under_way() and (remaining := deadline - clock.now()) > 0:
                run_state.wait(min(remaining, 0.5))
            self._num_blocked -= 1
            clean = not any(self._in_flight.values()) and not self._receives_in_flight
        self.leave(clean)

    def _sends_under_way(self) -> bool:
        return any(count and uid not in self._run_state.departed for uid, count in self._in_flight.items())

    def _has_room(self, uid: int) -> bool:
        """Returns whether the peer's window has room, so that `_may_send` does not block for it."""
        return self._in_flight.get(uid, 0) < self.window

    def _may_send(self, uid: int, round: int) -> bool:
        """Reserves a place in the peer's window, and blocks while it is full. Returns False if the peer is gone, took
        nothing in time or cannot be reached."""
        began = clock.now()
        deadline = began + self._room_wait_seconds()
        waited = False
        with self._run_state.changed:
            while True:
                self._run_state.raise_if_failed()
                if self._run_state.departed.get(uid, round + 1) <= round:
                    return False
                breakage = self._run_state.broken.get(uid)
                if breakage is None and self._has_room(uid):
                    self._in_flight[uid] = self._in_flight.get(uid, 0) + 1
                    if waited:
                        self._run_state.record_send_delay(clock.now() - began, [uid], self._counters)
                    return True
                until = deadline if breakage is None else min(deadline, breakage.since + BROKEN_SECONDS)
                remaining = until - clock.now()
                if remaining <= 0:
                    self._run_state.record_send_delay(clock.now() - began, [uid], self._counters)
                    if breakage is None:
                        self._counters.fault("send_window", uid, f"round {round}")
                    return False
                waited = True
                if self._run_state.regrouping:
                    return False
                self._num_blocked += 1
                with self._run_state.waits_for([uid]):
                    self._run_state.wait(min(remaining, 1.0))
                self._num_blocked -= 1

    def _room_wait_seconds(self) -> float:
        """Returns how long a wait for room in a peer's window that begins now may last."""
        return self._run_state.room_wait_seconds(self._timeout_seconds)

    def peers_in_flight(self) -> list[int]:
        """Returns the peers that have not taken everything that was sent to them."""
        return [uid for uid, count in self._in_flight.items() if count]

    def _send_completed(self, uid: int) -> None:
        """Any thread: records that a payload to `uid` has been sent."""
        with self._run_state.changed:
            self._in_flight[uid] -= 1
            if self._num_blocked:
                self._run_state.notify()

    def _count_receives(self, count: int, uid: int | None = None) -> None:
        """Any thread: adds `count` to the receives in flight, and to those from `uid` if it is given."""
        with self._run_state.changed:
            self._receives_in_flight += count
            if uid is not None:
                self._outstanding[uid] = self._outstanding.get(uid, 0) + count
            if self._num_blocked:
                self._run_state.notify()

    def _has_header(self, phase: int) -> bool:
        """Returns whether payloads of this phase have a header, for sizes or scalars that the schema does not
        determine. Slices have neither."""
        return not (self._inbox.schemas[phase].elementwise and self._is_exact(phase))

    def _is_exact(self, phase: int) -> bool:
        """Returns whether every size is known before a payload arrives."""
        return all(plan.spec.exact for plan in self._inbox.plans[phase])

    def _count_sent(self, uid: int, phase: int, pieces: int) -> None:
        edge, headers = self._counters.edge(uid), int(self._has_header(phase))
        edge.frames_sent += pieces + headers
        edge.announced_bytes_sent += HEADER_BYTES * headers

    def _count_received(self, uid: int, phase: int, totals: list[int], pieces: int) -> None:
        edge, plans, headers = self._counters.edge(uid), self._inbox.plans[phase], int(self._has_header(phase))
        edge.frames_received += pieces + headers
        edge.received(sum(t * p.spec.dtype.itemsize for p, t in zip(plans, totals, strict=True)))
