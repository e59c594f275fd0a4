"""The thread that agrees on generations with the other ranks' threads, and answers the training's questions.

The protocol is that of wire/membership; this thread has the sockets: one that the others send to, and one for each
other rank. No single message needs to arrive: whatever matters is repeated until it is answered.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from decentnode import clock, entropy
from decentnode.communication.waker import Waker
from decentnode.errors import AssemblyError, PeerFault, PeerLost
from decentnode.parallel.membership.addresses import (
    Address,
    Admission,
    JobTerms,
    packed_frame,
    unpacked_frame,
)
from decentnode.parallel.membership.keys import Access, Sockets
from decentnode.wire.generation import (
    Broken,
    Caller,
    Generation,
    GenerationEvent,
    Going,
    Install,
    JoinRefused,
    Limits,
    Outside,
    Seated,
)
from decentnode.wire.membership import Membership
from decentnode.wire.messages import SEAT_TOKEN_BYTES, Bye, Declined, Granted, Knock, Message

logger = logging.getLogger(__name__)

MAX_PAUSE_SECONDS = 0.25
"""Longest time between two checks of the thread's deadlines."""
MAX_AT_ONCE = 256
"""Largest number of messages received between two checks of the deadlines."""
QUEUE = 1000
"""Messages that a socket queues; others are dropped, and repeated later if they matter."""
CHECK_SECONDS = 0.02
PROBE_EVERY_SECONDS, PROBE_SECONDS = 0.2, 0.5
RENEW_SECONDS = 1.0
"""If a connection broke and no process is found to be gone for so long, all ranks make new connections."""
CLOSE_SECONDS = 5.0
MAX_CONTROL_BYTES = 1 << 20
LINGER_MILLISECONDS = 300
UNANSWERED_SECONDS = 3.0
"""A newcomer that gets no answer for so long asks for a place again."""
DELIVERY_SECONDS = 0.5
"""How long data that a rank sent before its goodbye may still be in flight."""
PROBE_AFTER_SECONDS = 0.3
"""After waiting so long for a member, this rank checks whether it is alive."""


class ConnectionBroken(PeerLost):
    """A connection to a rank broke, although the rank may live: another generation makes new connections."""


class Control:
    """One process's part in the membership. The training thread may call every method; only those that say so block."""

    def __init__(self, host: str, port: int, access: Access | None = None) -> None:
        """host: an address of this machine that the others can reach. port: 0 for any. access: None admits anybody.
        Raises OSError if the port is taken."""
        self.sockets = Sockets(access or Access())
        try:
            self._listener = self.sockets.listener(zmq.ROUTER, host, port, MAX_CONTROL_BYTES, QUEUE)
        except OSError:
            self.sockets.close(0)
            raise
        self._listener.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        self.endpoint: str = self._listener.getsockopt_string(zmq.LAST_ENDPOINT)
        self._senders: dict[int, zmq.Socket[bytes]] = {}
        self._connected_endpoints: dict[int, str] = {}
        self._addresses: dict[int, Address] = {}
        self._lock = threading.RLock()
        """Guards everything below, and the membership."""
        self._changed = threading.Condition(self._lock)
        self._waker = Waker()
        self._membership: Membership | None = None
        self._terms: JobTerms | None = None
        self._encoded_terms = b""
        self._installing: Generation | None = None
        self._broken = ""
        self._refused = ""
        self._departed: set[int] = set()
        self._waiting_since: float | None = None
        self._last_probe = 0.0
        self.generation = Generation(0, ())
        """The generation in force, or the last one that was."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="decentnode-members", daemon=True)
        self._thread.start()

    # -- the beginning and the end ----------------------------------------------------------------------------

    def begin(self, uid: int, terms: JobTerms, lines: Sequence[str], digest: str, ready_seconds: float,
              admission: Admission | None = None) -> None:  # fmt: skip
        """Starts as a founding member, or (with an admission) asks to be part of the next generation. lines, digest: of
        what is wrapped here. ready_seconds: how long the others' training may take to reach a generation."""
        with self._lock:
            founders = len(terms.founders)
            below_half = 2 * terms.min_ranks <= founders
            limits = Limits(terms.suspect_seconds, ready_seconds, terms.min_ranks,
                            newcomers_count=below_half, setting="ranks (min_ranks)")  # fmt: skip
            self._terms, self._encoded_terms = terms, terms.encoded(lines)
            state = self._membership = Membership(
                uid, terms.capacity, limits, draw=entropy.draw, digest=digest, run=terms.run,
                describe=lambda who: f"rank {who}" if who < founders else f"newcomer {who}", founders=founders,
                seat=admission.seat if admission is not None and uid >= founders else b"",
            )  # fmt: skip
            self._addresses = dict(enumerate(terms.founders))
            self._addresses.pop(uid, None)
            if admission is None:
                self.generation = state.generation
            else:
                state.learn_seats(admission.seats)
                self._handle_events(state.leave(clock.now(), "it asks to join"))
        self._waker.wake()

    def close(self) -> None:
        """Tells the others that this process leaves, and closes all of its sockets. Blocking until what was sent has
        left, a few seconds at most. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            membership = self._membership
            if membership is not None:
                for uid in self.generation.members:
                    if uid != membership.uid:
                        membership.say(uid, Bye)
        self._waker.wake()
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self.sockets.close(LINGER_MILLISECONDS)
            self._waker.close()

    # -- what the training asks -------------------------------------------------------------------------------

    @property
    def uid(self) -> int:
        assert self._membership is not None
        return self._membership.uid

    @property
    def broken(self) -> str:
        """Why the generation in force has ended, or is about to; empty while it continues."""
        return self._broken

    @property
    def fresh(self) -> bool:
        """Whether this process does not have the job's model yet."""
        return self._membership is not None and self._membership.fresh

    def address_of(self, uid: int) -> Address:
        with self._lock:
            return self._addresses[uid]

    def set_waiting(self, since: float | None) -> None:
        """Records that the training has been waiting for other ranks since then, or (None) is not waiting."""
        if (since is None) != (self._waiting_since is None):
            self._waiting_since = since
            if since is not None:
                self._waker.wake()

    def check_generation(self, started: float) -> None:
        """Raises ConnectionBroken if waiting for other members is in vain; to be called periodically while waiting.
        Blocking as `report_dead_members`, once the wait has lasted PROBE_AFTER_SECONDS."""
        if self.broken:
            raise ConnectionBroken(f"the generation is over: {self.broken}")
        if clock.now() - started > PROBE_AFTER_SECONDS:
            self.set_waiting(started)
            self.report_dead_members()

    def has_left(self, uid: int, waited: float) -> bool:
        """Returns whether a rank said goodbye and what it had sent has had the time to arrive."""
        return uid in self._departed and waited > DELIVERY_SECONDS

    def is_gone(self, uid: int) -> bool:
        """Returns whether the machine of a rank refuses connections to its port, as its process is gone. Blocking for
        PROBE_SECONDS at most. Probes once in PROBE_EVERY_SECONDS; False in between."""
        now = clock.now()
        if now - self._last_probe < PROBE_EVERY_SECONDS:
            return False
        self._last_probe = now
        return self.address_of(uid).refuses_connection(PROBE_SECONDS)

    def addresses(self) -> list[str]:
        """Returns the control endpoints of all known ranks."""
        with self._lock:
            return [each.control for each in self._addresses.values()]

    def _is_join_unanswered(self) -> bool:
        """Returns whether this process asks to join and has got no answer."""
        with self._lock:
            state = self._membership
            return state is not None and state.stage == "outside" and not state.joining.answered

    def report_dead_members(self) -> None:
        """Reports members whose process is gone, so that the generation ends. Blocking for PROBE_SECONDS per rank whose
        machine does not answer. Probes once in PROBE_EVERY_SECONDS."""
        now = clock.now()
        if now - self._last_probe >= PROBE_EVERY_SECONDS:
            self._last_probe = now
            self._probe()

    def set_model_ready(self, position: int) -> None:
        """Records that this process has the job's model now, after `position` steps."""
        with self._lock:
            assert self._membership is not None
            self._membership.fresh, self._membership.position = False, position

    def next_generation(self, error: PeerLost | None, seconds: float, must_renew: bool,
                        knock_again: Callable[[], None] | None = None) -> Generation:  # fmt: skip
        """Returns the next generation, in force, once all of its members have called this. Blocking.

        error: why the current generation is over for the training, if the training found so itself; then the processes
        are probed to find out which is gone. must_renew: whether a new generation is needed although everybody lives,
        as after a broken connection. knock_again: called if no member knows of the place that this process was granted.
        Raises `error` if no member is lost and nothing else ends the generation; PeerLost after `seconds`, naming the
        ranks that are missing; AssemblyError if this process is refused.
        """
        started = asked = clock.now()
        probed = 0.0
        assert self._membership is not None
        patience = self._membership.limits.suspect_seconds + 2 * PROBE_SECONDS
        self.set_waiting(started)
        try:
            while True:
                found = self._poll_generation(started, seconds)
                if found is not None:
                    return found
                now = clock.now()
                if knock_again is not None and now - asked > UNANSWERED_SECONDS:
                    if self._is_join_unanswered():
                        knock_again()
                    asked = clock.now()
                if now - probed > PROBE_EVERY_SECONDS * (3 if self._broken else 1):
                    probed = now
                    self._probe()
                if error is not None and now - started > (RENEW_SECONDS if must_renew else patience):
                    if self._is_generation_in_force() and not must_renew:
                        raise error
                    self._renew(str(error))
                    error = None
        finally:
            self.set_waiting(None)

    def _poll_generation(self, started: float, seconds: float) -> Generation | None:
        """Reports that the training is ready for the agreed generation; returns it once it is in force, else None."""
        with self._changed:
            assert self._membership is not None
            if self._refused:
                raise AssemblyError(self._refused)
            if self._installing is not None:
                generation, self._installing = self._installing, None
                self._handle_events(self._membership.installed(generation, clock.now()))
                self._waker.wake()
            if not self._broken and self._new_generation is not None:
                found, self._new_generation = self._new_generation, None
                return found
            if clock.now() - started > seconds:
                raise PeerLost(f"no generation of ranks was formed within {seconds:g} s: {self._describe_missing()}")
            self._changed.wait(CHECK_SECONDS)
        return None

    _new_generation: Generation | None = None
    """A generation that came into force since the training last asked."""

    def _describe_missing(self) -> str:
        """Returns which ranks the agreement waits for, as text."""
        state = self._membership
        assert state is not None
        if state.stage == "short":
            return state.reason
        if state.proposal is not None:
            late = state.proposal.members - state.proposal.ready - {state.uid}
            return f"{state.names(set(late))} did not come to it"
        return f"waiting for {state.describe(state.coordinator)} ({state.stage}: {state.reason})"

    def _probe(self) -> None:
        """Reports members whose process is gone. Blocking for PROBE_SECONDS per rank whose machine does not answer."""
        with self._lock:
            assert self._membership is not None
            proposal = self._membership.proposal
            asked = {*self.generation.members, *(proposal.members if proposal is not None else ())}
            others = {uid: self._addresses[uid] for uid in asked if uid in self._addresses}
            left = self._departed & others.keys()
        gone = left | {uid for uid, address in others.items() if address.refuses_connection(PROBE_SECONDS)}
        if gone - self._membership.failed:
            with self._lock:
                words = f"the process of {self._membership.names(gone)} is gone"
                self._handle_events(self._membership.suspect(gone, clock.now(), words, dead=True))
            self._waker.wake()

    def _is_generation_in_force(self) -> bool:
        """Returns whether the generation that the training was in is still in force."""
        with self._lock:
            return not self._broken and self._new_generation is None

    def _renew(self, reason: str) -> None:
        with self._lock:
            assert self._membership is not None
            if self._is_generation_in_force():
                self._handle_events(self._membership.renew(clock.now(), reason))
        self._waker.wake()

    # -- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._listener, zmq.POLLIN)
        poller.register(self._waker.descriptor, zmq.POLLIN)
        self.sockets.watch(self._listener, lambda each: poller.register(each, zmq.POLLIN))
        try:
            while not self._closing:
                ready = dict(poller.poll(math.ceil(1000 * self._pause())))
                if self._waker.descriptor in ready:
                    self._waker.clear()
                self.sockets.serve_authentication()
                if self._listener in ready:
                    self._receive()
                self._tick()
            self._send()
        except Exception:
            logger.exception("the thread that agrees on members ended")
            with self._changed:
                self._refused = "the thread that agrees on members ended, see the log"
                self._broken = self._refused

    def _pause(self) -> float:
        with self._lock:
            if self._membership is None:
                return MAX_PAUSE_SECONDS
            deadline = self._membership.next_deadline(self._waiting_since)
        return min(max(deadline - clock.now(), 0.0), MAX_PAUSE_SECONDS)

    def _tick(self) -> None:
        with self._lock:
            if self._membership is not None:
                now, since = clock.now(), self._waiting_since
                if since is None:
                    self._handle_events(self._membership.tick(now))
                else:
                    others = [uid for uid in self.generation.members if uid != self._membership.uid]
                    self._handle_events(self._membership.tick(now, others, since))
            self._send()

    def _receive(self) -> None:
        for _ in range(MAX_AT_ONCE):
            try:
                who, *frames = self._listener.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            with self._lock, suppress(PeerFault):
                message = unpacked_frame(frames)
                if isinstance(message, Knock):
                    self._answer_join_request(who, message)
                elif self._membership is not None:
                    if isinstance(message, Bye) and message.run == self._membership.run:
                        self._departed.add(message.source)  # the generation ends only when a rank waits for this one
                    else:
                        self._handle_events(self._membership.receive(message, clock.now()))

    def _answer_join_request(self, who: bytes, knock: Knock) -> None:
        """Answers a process that is not a member and asks to become one."""
        state, terms = self._membership, self._terms
        now = clock.now()
        if state is None or terms is None:
            reply: Message = Declined(bytes(8), 0, 0, "the job has not begun to train", 0, 0, "")
        else:
            caller = Address(knock.control, knock.bulk)
            found: tuple[int, bytes] | Declined
            if caller in terms.founders:  # a rank that was restarted
                found = terms.founders.index(caller), b""
            else:
                granted = state.newcomers.knock(knock, Caller(), now)
                found = granted if isinstance(granted, Declined) else (granted[1], granted[0].token)
            if isinstance(found, Declined):
                at = self._addresses[found.uid].control if found.uid != state.uid and not found.final else ""
                reply = Declined(found.run, 0, state.uid, found.reason, found.final, found.uid, at)
            else:
                uid, token = found
                token = token or bytes(SEAT_TOKEN_BYTES)
                reply = Granted(state.run, 0, state.uid, uid, token, state.seats.encoded(), self._encoded_terms, 0)
            self._handle_events(state.take_events(now))
        with suppress(zmq.ZMQError):
            self._listener.send_multipart([who, packed_frame(reply)], zmq.NOBLOCK)

    def _handle_events(self, events: list[GenerationEvent]) -> None:
        for event in events:
            if isinstance(event, Broken | Outside):
                self._broken = event.reason or "it ended"
                self._installing = self._new_generation = None
                logger.info("the generation of ranks is over: %s", event.reason)
            elif isinstance(event, Install):
                self._broken = self._broken or "another generation"
                self._installing = event.generation
            elif isinstance(event, Going):
                self.generation, self._new_generation, self._broken = event.generation, event.generation, ""
                self._departed.clear()
                logger.info("a generation of ranks is in force: %s", ", ".join(map(str, event.generation.members)))
            elif isinstance(event, Seated):
                self._addresses[event.uid] = Address(event.control, event.bulk)
            elif isinstance(event, JoinRefused):
                self._refused = event.reason
        if events:
            self._changed.notify_all()

    def _send(self) -> None:
        state = self._membership
        if state is None:
            return
        for uid, address in self._addresses.items():  # connect before anything needs to be sent
            if self._connected_endpoints.get(uid) != address.control:
                self._connect(uid, address.control)
        outbox, state.outbox = state.outbox, []
        for to, message in outbox:
            if to in self._senders:
                with suppress(zmq.Again):
                    self._senders[to].send(packed_frame(message), zmq.NOBLOCK)

    def _connect(self, uid: int, endpoint: str) -> None:
        if uid in self._senders:
            self._senders[uid].close(0)
        self._senders[uid] = self.sockets.sender(zmq.DEALER, endpoint, QUEUE, LINGER_MILLISECONDS)
        self._connected_endpoints[uid] = endpoint
