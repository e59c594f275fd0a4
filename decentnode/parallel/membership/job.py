"""A process's place in a job whose ranks come and go, and the process group of each generation of them."""

from __future__ import annotations

import hashlib
import json
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from decentnode import clock, entropy
from decentnode.communication.shared_memory.segment import Backoff
from decentnode.errors import AssemblyError, PeerLost
from decentnode.parallel.membership.addresses import (
    Address,
    Admission,
    Listening,
    Terms,
    ask_to_join,
    endpoint_of,
    own_address,
    parsed,
)
from decentnode.parallel.membership.control import ConnectionBroken, Control
from decentnode.parallel.membership.generation_groups import (
    CONNECT_SECONDS,
    FORM_SECONDS,
    GenerationGroups,
    GlooGroups,
    KeyedGroups,
)
from decentnode.parallel.membership.keys import Access
from decentnode.parallel.process_group.collectives import gather_texts, reason_of, wait_with
from decentnode.parallel.process_group.shutdown import close_at_exit
from decentnode.tensors import own_fault
from decentnode.wire.generation import Generation
from decentnode.wire.messages import MAX_SEATS

logger = logging.getLogger(__name__)

GLOO_SECONDS = 5.0
"""How long gloo may take to connect ranks that have all met, which it does in milliseconds: for who dies meanwhile it
waits in vain. Twice as long at each further attempt, as a machine may be busy."""
JOIN_SECONDS = 30.0
"""How long a process asks members to let it in, before it says that none does."""
KNOCK_AGAIN_SECONDS = 3.0
POLL_SECONDS = (20e-6, 1e-3)
MAX_ATTEMPTS = 16
"""Generations that may fail one after the other before this process gives up."""
SUSPECT_SECONDS = 10.0


class Participant(Protocol):
    """What a job regroups: a wrapper, in the steps of one regrouping. Each may block and raise PeerLost, RuntimeError
    or OSError where a rank is lost meanwhile; then all begin again with the next generation."""

    def report(self) -> Mapping[str, Any]:
        """What the others have to know of this rank, as JSON has it; the same until the regrouping is over."""

    def settle(self, reports: Mapping[int, Mapping[str, Any]]) -> None:
        """Bring exchanges of the old generation to an end, by uid what the members of the new one reported."""

    def release(self) -> None:
        """Nobody needs anything of this rank's old exchange any more."""

    def rebuild(self, rank: int, world_size: int, reports: Mapping[int, Mapping[str, Any]]) -> None:
        """Make the new exchange, and give those that are new the model."""


class Job:
    """One per process. Made by `initialize_dist(missing="regroup")`."""

    def __init__(self, control: Control, groups: GenerationGroups, own: Address, timeout_seconds: float) -> None:
        self.control, self.timeout_seconds = control, timeout_seconds
        self._groups, self._own = groups, own
        self._terms: Terms | None = None
        self.admission: Admission | None = None
        """Of a process that came from outside and is no member yet."""
        self._participant: weakref.ref[Any] | None = None
        self.members: tuple[int, ...] = ()
        """[rank] its uid."""
        self.meeting_place: dist.Store | None = None
        """Where ranks with keys met: kept, as with its owner's process the others may not have read all."""
        self._asked: list[str] = []
        """Where this process asked for a place."""
        self._as: tuple[Sequence[str], str] = ((), "")
        """What `attach` compared, and its digest."""

    @classmethod
    def listening(cls, listen: str | None, toward: str, timeout_seconds: float, keys: str | Path | None) -> Job:
        """A process that listens where the others reach it. toward: a host of theirs. keys: as `initialize_dist`.
        Raises OSError, ValueError, UsageError, EnvironmentFault."""
        given, access = Listening.given(listen), Access.given(keys)
        host = own_address(given.host or toward)
        access.check(host)
        control = Control(host, given.port, access)
        second = given.port + 1 if given.port else 0
        try:
            if access.closed:
                groups: GenerationGroups = KeyedGroups(control, host, second, timeout_seconds)
            else:
                groups = GlooGroups(control, host, second, timeout_seconds)
        except (RuntimeError, OSError) as error:
            control.close()
            raise OSError(f"cannot listen at {endpoint_of(host, second)}: {error}") from error
        return cls(control, groups, Address(control.endpoint, groups.endpoint), timeout_seconds)

    @property
    def closed(self) -> bool:
        """Whether the job has keys, without which nobody is heard."""
        return self.control.sockets.access.closed

    @property
    def address(self) -> str:
        """HOST:PORT by which others join."""
        return self._own.control.removeprefix("tcp://")

    @property
    def host(self) -> str:
        """The address of this machine that the others reach."""
        return parsed(self._own.control)[0]

    @property
    def terms(self) -> Terms:
        """What all members have alike."""
        assert self._terms is not None
        return self._terms

    # -- the beginning ----------------------------------------------------------------------------------------

    def found(self, rank: int, world: int, tell: Callable[[str], list[str]], min_ranks: int | None,
              newcomers: int) -> None:  # fmt: skip
        """Blocking: `world` ranks found the job. tell: gives all of them this one's text; [rank] each one's. Raises
        ValueError for numbers out of range."""
        least = world // 2 + 1 if min_ranks is None else min_ranks
        if not 1 <= least <= world:
            raise ValueError(f"min_ranks must be in [1, {world}], got {min_ranks}")
        if not 0 <= newcomers <= MAX_SEATS:
            raise ValueError(f"newcomers must be in [0, {MAX_SEATS}], got {newcomers}")
        told = json.dumps([self._own.control, self._own.store, entropy.word(8), clock.wall()])
        found = [json.loads(text) for text in tell(told)]
        founders = tuple(Address(str(control), str(store)) for control, store, *_ in found)
        self._terms = Terms(bytes.fromhex(found[0][2]), founders, world + newcomers, least, SUSPECT_SECONDS,
                            float(found[0][3]))  # fmt: skip
        self.members = tuple(range(world))
        self._groups.make_first(rank, [each.store for each in founders])
        logger.info("new processes can join this job at %s", self.address)

    def knock(self, addresses: Sequence[str], seconds: float = JOIN_SECONDS) -> None:
        """Blocking: ask members of a job for a place in it. Raises AssemblyError, UsageError."""
        self._asked = list(addresses)
        seconds = min(seconds, self.timeout_seconds)
        self.admission = ask_to_join(addresses, self._own, seconds, self.control.sockets.access)
        self._terms = self.admission.terms
        logger.info("rank %d of the job at %s", self.admission.uid, self.admission.by)

    def attach(self, participant: Participant, lines: Sequence[str]) -> None:
        """Be a member with this wrapper from now on; a process that comes from outside asks to be (`regroup`).

        lines: what all members must have alike. Raises ValueError for a second wrapper, AssemblyError where a newcomer
        differs from the members.
        """
        if self._participant is not None:
            raise ValueError('missing="regroup" allows one wrapper per process, for the life of the process')
        self._participant = weakref.ref(participant)
        admission = self.admission
        if admission is not None and admission.lines:
            for number in range(max(len(lines), len(admission.lines))):
                mine, theirs = (each[number] if number < len(each) else "nothing" for each in (lines, admission.lines))
                if mine != theirs:
                    raise AssemblyError(f"this process differs from the job at {admission.by}: {mine!r}, there "
                                        f"{theirs!r}")  # fmt: skip
        digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
        uid = dist.get_rank() if admission is None else admission.uid
        self._as = lines, digest
        self.control.begin(uid, self.terms, lines, digest, self.timeout_seconds, admission)
        wait_with(self._wait)

    def _knock_again(self) -> None:
        """Blocking: asks for another place, as no member knows of the one that was granted: who granted it may be
        gone. Raises AssemblyError where all are."""
        known = [*dict.fromkeys([*self._asked, *(each.removeprefix("tcp://") for each in self.control.addresses())])]
        try:
            self.knock(known, KNOCK_AGAIN_SECONDS)
        except AssemblyError:
            if all(Address(endpoint_of(*parsed(each)), "").refuses(CONNECT_SECONDS) for each in known):
                raise AssemblyError(f"the job is over: nothing listens at {', '.join(known)} any more") from None
            return  # there is another time
        assert self.admission is not None
        self.control.begin(self.admission.uid, self.terms, *self._as, self.timeout_seconds, self.admission)

    def leave(self) -> None:
        """Tell the others that this process takes no more steps. Idempotent; blocking for less than a second."""
        wait_with(None)
        self._groups.close()
        self.control.close()
        self._groups.join_threads()

    def close(self) -> None:
        """As `leave`: of a process that ends without a wrapper, too."""
        self.leave()

    # -- another generation -----------------------------------------------------------------------------------

    def regroup(self, error: PeerLost | None) -> None:
        """Blocking: take part in the next generation, and make ready what is wrapped.

        error: why this one is over, where this rank found so. Raises it where nobody is missed, PeerLost where no
        generation comes about in time, AssemblyError where this process is let into none.
        """
        participant = self._participant() if self._participant is not None else None
        assert participant is not None
        leaves, until = isinstance(error, ConnectionBroken), clock.now() + self.timeout_seconds + FORM_SECONDS
        if error is not None:
            _forget_frames(error)
        for attempt in range(MAX_ATTEMPTS):
            left = min(self.timeout_seconds, until - clock.now())
            if left <= 0:
                break
            again = None if self.admission is None else self._knock_again
            generation = self.control.next_generation(error, left, leaves, again)
            try:
                self._form(generation, min(FORM_SECONDS, GLOO_SECONDS * 2**attempt))
                told = gather_texts(json.dumps(participant.report()), torch.device("cpu"), "report")
                reports = {uid: json.loads(text) for uid, text in zip(self.members, told, strict=True)}
                participant.settle(reports)
                self.barrier()
                participant.release()
                self._groups.drop_old()
                participant.rebuild(self.members.index(self.control.uid), len(self.members), reports)
                self.barrier()
                self.admission = None
                return
            except (PeerLost, RuntimeError, OSError) as failure:
                if own_fault(failure):
                    raise
                error, leaves = ConnectionBroken(f"regrouping failed: {reason_of(failure)}"), True
                _forget_frames(failure)
                logger.info("a generation of ranks ended while it began: %s", failure)
        assert error is not None
        raise error

    def _form(self, generation: Generation, gloo_seconds: float) -> None:
        """Blocking: makes the default process group of this generation's members. gloo_seconds: how long gloo may take
        to connect them."""
        self.members = tuple(sorted(generation.members))
        self._groups.make(generation, self.members, self.control.uid, self._store_of, gloo_seconds)

    def _store_of(self, uid: int) -> str:
        """Where a member is found by who makes a process group with it."""
        return self._own.store if uid == self.control.uid else self.control.address_of(uid).store

    def barrier(self) -> None:
        """Blocking until all members are here."""
        gather_texts("", torch.device("cpu"), "barrier")

    def _wait(self, work: Any) -> None:
        """Waits for an operation of all ranks. Raises ConnectionBroken where this generation ends, or the
        operation fails. It may go on alone then: its tensors are nobody else's."""
        started, backoff = clock.now(), Backoff(POLL_SECONDS)
        while not work.is_completed():
            self.control.look(started)
            backoff.sleep()
        self.control.waits(None)
        try:
            work.wait()
        except RuntimeError as error:
            if own_fault(error):
                raise
            raise ConnectionBroken(f"an operation of all ranks failed: {reason_of(error)}") from error


def _forget_frames(error: BaseException) -> None:
    """Lets go of the operations, and so of the connections, that the frames of an error hold: the other ends wait for
    these to be closed."""
    error.__traceback__ = error.__cause__ = error.__context__ = None


_job: Job | None = None


def current() -> Job | None:
    """The job of this process; None where ranks do not come and go."""
    return _job


def job_address() -> str | None:
    """HOST:PORT at which others join this process's job; None where ranks do not come and go."""
    return None if _job is None else _job.address


def become(job: Job) -> None:
    """Makes it the job of this process."""
    global _job
    close_at_exit(job)
    _job = job
