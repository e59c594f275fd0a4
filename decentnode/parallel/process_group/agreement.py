"""Makes sure that all ranks have the same values, or that all of them do something together or none does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from decentnode.errors import AssemblyError, PeerLost
from decentnode.formatting import names
from decentnode.parallel.process_group.collectives import failure_reason, gather_texts
from decentnode.parallel.process_group.default_group import device_of_group, num_ranks
from decentnode.parallel.process_group.rank_status import dead_ranks, enter_operation, lagging_ranks
from decentnode.tensors import is_own_fault

MAX_REASON = 2000


@contextlib.contextmanager
def collective_operation(what: str) -> Iterator[None]:
    """Wraps collectives of all ranks and nothing else. Raises PeerLost if one fails, with a message that names ranks:
    torch names only the address that is gone.

    what: their purpose, a verb and its object.
    """
    enter_operation()
    try:
        yield
    except RuntimeError as error:
        if is_own_fault(error):
            raise
        raise _peer_lost(what, error) from error


def _peer_lost(what: str, error: RuntimeError) -> PeerLost:
    """Returns a PeerLost for a failed operation. It names the ranks whose processes are gone, if any, since the others
    may only be slow; otherwise those that have not reached the operation."""
    ended = dead_ranks()
    reason = failure_reason(error, ended)
    absent = [] if ended else lagging_ranks()
    word = "rank" if len(absent) == 1 else "ranks"
    has_not_come = f"; {word} {names(absent)} had not come to it" if absent else ""
    return PeerLost(f"ranks cannot {what} together, for example because one has ended: {reason}{has_not_come}",
                    ended or absent)  # fmt: skip


@contextlib.contextmanager
def succeed_on_all_ranks(what: str) -> Iterator[None]:
    """Wraps a body that must succeed on all ranks. It must not wait for other ranks; leaving the context blocks.

    what: the body's purpose, a verb and its object, for messages. Raises what the body raised on this rank; if it
    raised on other ranks only, AssemblyError naming the first of them and its error; PeerLost if a rank has ended. So
    no rank waits in vain.
    Without a process group this process is the only rank.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    own_failure = "" if failed is None else f"{type(failed).__name__}: {failed}"[:MAX_REASON]
    try:
        enter_operation()
        failures = gather_texts(own_failure, device_of_group(), what) if num_ranks() > 1 else [own_failure]
    except RuntimeError as error:
        if failed is not None:
            raise failed from None
        if is_own_fault(error):
            raise
        raise _peer_lost(what, error) from error
    if failed is not None:
        raise failed
    for rank, reason in enumerate(failures):
        if reason:
            raise AssemblyError(f"rank {rank} could not {what}: {reason}", [rank])


def check_same_on_all_ranks(what: str, lines: Iterable[str], device: torch.device) -> None:
    """Raises AssemblyError on every rank, naming a rank and its first differing line, if lines differ. Blocking."""
    all_lines = [text.split("\n") for text in gather_texts("\n".join(lines), device, what)]
    for rank, theirs in enumerate(all_lines):
        if theirs == all_lines[0]:
            continue
        for number, line in enumerate(theirs):
            first = all_lines[0][number] if number < len(all_lines[0]) else "nothing"
            if line != first:
                raise AssemblyError(f"rank {rank} has another {what} than rank 0: {line!r}, rank 0 has {first!r}")
        raise AssemblyError(f"rank {rank} has another {what} than rank 0: nothing where it has "
                            f"{all_lines[0][len(theirs)]!r}")  # fmt: skip
