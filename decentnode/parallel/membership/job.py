"""A process's part in a job whose membership may change, and the process group of each generation."""

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
    JobTerms,
    ListenAddress,
    ask_to_join,
    format_endpoint,
    own_address,
    parse_endpoint,
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
from decentnode.parallel.process_group.collectives import failure_reason, gather_texts, set_wait_function
from decentnode.parallel.process_group.shutdown import close_at_exit
from decentnode.tensors import is_own_fault
from decentnode.wire.generation import Generation
from decentnode.wire.messages import MAX_SEATS

logger = logging.getLogger(__name__)

GLOO_SECONDS = 5.0
"""How long gloo may take to connect ranks that have all met, which normally takes milliseconds: if a rank dies
meanwhile, gloo waits in vain. Doubled at each further attempt, as a machine may be busy."""
JOIN_SECONDS = 30.0
"""How long a process asks members to let it in before it raises."""
KNOCK_AGAIN_SECONDS = 3.0
POLL_SECONDS = (20e-6, 1e-3)
MAX_ATTEMPTS = 16
"""How many generations may fail in a row before this process gives up."""
SUSPECT_SECONDS = 10.0


class Participant(Protocol):
    """What a job regroups, such as a wrapper; the methods are the stages of a regrouping. Each may block, and raise
    PeerLost, RuntimeError or OSError if a rank is lost meanwhile; then all start again with the next generation."""

    def report(self) -> Mapping[str, Any]:
        """Returns what the others have to know of this rank, JSON-serializable; constant during the regrouping."""

    def settle(self, reports: Mapping[int, Mapping[str, Any]]) -> None:
        """Completes the exchanges of the old generation. reports: those of the new generation's members, by uid."""

    def release(self) -> None:
        """Drops this rank's old exchange, which no other rank needs any more."""

    def rebuild(self, rank: int, world_size: int, reports: Mapping[int, Mapping[str, Any]]) -> None:
        """Makes the new exchange, and gives newcomers the model."""


class Job:
    """A process's job, at most one per process. Made by `initialize_dist(missing="regroup")`."""

    def __init__(self, control: Control, groups: GenerationGroups, own: Address, timeout_seconds: float) -> None:
        self.control, self.timeout_seconds = control, timeout_seconds
        self._groups, self._own = groups, own
        self._terms: JobTerms | None = None
        self.admission: Admission | None = None
        """Set while this process has been admitted by a member but is not a member yet."""
        self._participant: weakref.ref[Any] | None = None
        self.members: tuple[int, ...] = ()
        """[rank] its uid."""
        self.founders_store: dist.Store | None = None
        """The store at which ranks with keys met. Kept, because it ends with its owner's process and the others may not
        have read everything yet."""
        self._join_addresses: list[str] = []
        """The addresses at which this process asked for a place."""
        self._attached: tuple[Sequence[str], str] = ((), "")
        """The lines that `attach` compared, and their digest."""

    @classmethod
    def create(cls, listen: str | None, toward: str, timeout_seconds: float, keys: str | Path | None) -> Job:
        """Makes a job that listens at an address that the others can reach. toward: a host of theirs. keys: as of
        `initialize_dist`. Raises OSError, ValueError, UsageError, EnvironmentFault."""
        given, access = ListenAddress.parse(listen), Access.load(keys)
        host = own_address(given.host or toward)
        access.check(host)
        control = Control(host, given.port, access)
        second = given.port + 1 if given.port else 0
        try:
            if access.has_keys:
                groups: GenerationGroups = KeyedGroups(control, host, second, timeout_seconds)
            else:
                groups = GlooGroups(control, host, second, timeout_seconds)
        except (RuntimeError, OSError) as error:
            control.close()
            raise OSError(f"cannot listen at {format_endpoint(host, second)}: {error}") from error
        return cls(control, groups, Address(control.endpoint, groups.endpoint), timeout_seconds)

    @property
    def has_keys(self) -> bool:
        """Whether the job has keys, without which no process can connect."""
        return self.control.sockets.access.has_keys

    @property
    def address(self) -> str:
        """HOST:PORT by which others join."""
        return self._own.control.removeprefix("tcp://")

    @property
    def host(self) -> str:
        """The address of this machine that the others can reach."""
        return parse_endpoint(self._own.control)[0]

    @property
    def terms(self) -> JobTerms:
        """The settings that all members share."""
        assert self._terms is not None
        return self._terms

    # -- the beginning ----------------------------------------------------------------------------------------

    def found(self, rank: int, world: int, gather: Callable[[str], list[str]], min_ranks: int | None,
              newcomers: int) -> None:  # fmt: skip
        """Founds the job with `world` ranks. Blocking. gather: sends this rank's text to all and returns [rank] each
        one's. Raises ValueError for numbers out of range."""
        least = world // 2 + 1 if min_ranks is None else min_ranks
        if not 1 <= least <= world:
            raise ValueError(f"min_ranks must be in [1, {world}], got {min_ranks}")
        if not 0 <= newcomers <= MAX_SEATS:
            raise ValueError(f"newcomers must be in [0, {MAX_SEATS}], got {newcomers}")
        own = json.dumps([self._own.control, self._own.store, entropy.word(8), clock.wall()])
        found = [json.loads(text) for text in gather(own)]
        founders = tuple(Address(str(control), str(store)) for control, store, *_ in found)
        self._terms = JobTerms(bytes.fromhex(found[0][2]), founders, world + newcomers, least, SUSPECT_SECONDS,
                               float(found[0][3]))  # fmt: skip
        self.members = tuple(range(world))
        self._groups.make_founders_group(rank, [each.store for each in founders])
        logger.info("new processes can join this job at %s", self.address)

    def knock(self, addresses: Sequence[str], seconds: float = JOIN_SECONDS) -> None:
        """Asks members of a job for a place in it. Blocking. Raises AssemblyError, UsageError."""
        self._join_addresses = list(addresses)
        seconds = min(seconds, self.timeout_seconds)
        self.admission = ask_to_join(addresses, self._own, seconds, self.control.sockets.access)
        self._terms = self.admission.terms
        logger.info("rank %d of the job at %s", self.admission.uid, self.admission.by)

    def attach(self, participant: Participant, lines: Sequence[str]) -> None:
        """Makes this process a member with this wrapper; a newcomer only asks to be one, and
        becomes one in `regroup`.

        lines: what must be the same on all members. Raises ValueError for a second wrapper, AssemblyError if a newcomer
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
        self._attached = lines, digest
        self.control.begin(uid, self.terms, lines, digest, self.timeout_seconds, admission)
        set_wait_function(self._wait)

    def _knock_again(self) -> None:
        """Asks for another place, because no member knows of the one that was granted: the member that granted it may
        be gone. Blocking. Raises AssemblyError if all members are."""
        members = (each.removeprefix("tcp://") for each in self.control.addresses())
        known = [*dict.fromkeys([*self._join_addresses, *members])]
        try:
            self.knock(known, KNOCK_AGAIN_SECONDS)
        except AssemblyError:
            listeners = [Address(format_endpoint(*parse_endpoint(each)), "") for each in known]
            if all(each.refuses_connection(CONNECT_SECONDS) for each in listeners):
                raise AssemblyError(f"the job is over: nothing listens at {', '.join(known)} any more") from None
            return  # the caller tries again later
        assert self.admission is not None
        self.control.begin(self.admission.uid, self.terms, *self._attached, self.timeout_seconds, self.admission)

    def leave(self) -> None:
        """Tells the others that this process takes no more steps. Idempotent. Blocking: mostly for less than a
        second, for a few seconds if threads do not end."""
        set_wait_function(None)
        self._groups.close()
        self.control.close()
        self._groups.join_threads()

    def close(self) -> None:
        """Calls `leave`; also for a process that ends without a wrapper."""
        self.leave()

    # -- another generation -----------------------------------------------------------------------------------

    def regroup(self, error: PeerLost | None) -> None:
        """Takes part in the next generation, and prepares the wrapper for it. Blocking.

        error: why the current generation is over, if this rank found so. Raises it if no member is lost; PeerLost if no
        generation is formed in time, AssemblyError if this process is refused.
        """
        participant = self._participant() if self._participant is not None else None
        assert participant is not None
        must_renew, until = isinstance(error, ConnectionBroken), clock.now() + self.timeout_seconds + FORM_SECONDS
        if error is not None:
            _drop_frames(error)
        for attempt in range(MAX_ATTEMPTS):
            left = min(self.timeout_seconds, until - clock.now())
            if left <= 0:
                break
            again = None if self.admission is None else self._knock_again
            generation = self.control.next_generation(error, left, must_renew, again)
            try:
                self._make_group(generation, min(FORM_SECONDS, GLOO_SECONDS * 2**attempt))
                texts = gather_texts(json.dumps(participant.report()), torch.device("cpu"), "report")
                reports = {uid: json.loads(text) for uid, text in zip(self.members, texts, strict=True)}
                participant.settle(reports)
                self.barrier()
                participant.release()
                self._groups.drop_old()
                participant.rebuild(self.members.index(self.control.uid), len(self.members), reports)
                self.barrier()
                self.admission = None
                return
            except (PeerLost, RuntimeError, OSError) as failure:
                if is_own_fault(failure):
                    raise
                error, must_renew = ConnectionBroken(f"regrouping failed: {failure_reason(failure)}"), True
                _drop_frames(failure)
                logger.info("a generation of ranks ended while it began: %s", failure)
        assert error is not None
        raise error

    def _make_group(self, generation: Generation, gloo_seconds: float) -> None:
        """Makes the default process group of this generation's members. Blocking. gloo_seconds: how long gloo may take
        to connect them."""
        self.members = tuple(sorted(generation.members))
        self._groups.make(generation, self.members, self.control.uid, self._store_of, gloo_seconds)

    def _store_of(self, uid: int) -> str:
        """Returns the endpoint at which a member is reached to make a process group with it."""
        return self._own.store if uid == self.control.uid else self.control.address_of(uid).store

    def barrier(self) -> None:
        """Waits until all members have called this. Blocking."""
        gather_texts("", torch.device("cpu"), "barrier")

    def _wait(self, work: Any) -> None:
        """Waits for a collective. Raises ConnectionBroken if this generation ends, or the operation fails. The
        operation may then continue unwatched, because nothing else uses its tensors."""
        started, backoff = clock.now(), Backoff(POLL_SECONDS)
        while not work.is_completed():
            self.control.check_generation(started)
            backoff.sleep()
        self.control.set_waiting(None)
        try:
            work.wait()
        except RuntimeError as error:
            if is_own_fault(error):
                raise
            raise ConnectionBroken(f"an operation of all ranks failed: {failure_reason(error)}") from error


def _drop_frames(error: BaseException) -> None:
    """Drops references to operations, and so to connections, that the frames of an error hold: the other ends wait for
    the connections to be closed."""
    error.__traceback__ = error.__cause__ = error.__context__ = None


_job: Job | None = None


def current_job() -> Job | None:
    """Returns the job of this process; None unless missing="regroup"."""
    return _job


def job_address() -> str | None:
    """Returns HOST:PORT at which others join this process's job; None unless missing="regroup"."""
    return None if _job is None else _job.address


def set_current_job(job: Job) -> None:
    """Makes the job that of this process, and closes it at exit."""
    global _job
    close_at_exit(job)
    _job = job
