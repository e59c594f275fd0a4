"""A pipe does not block its writer while the reader does not read."""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing.connection import Connection

import pytest

from decentnode.launch.children.messages import ChildMessage, Finished, NodesAbsent, PeerFailure, Progress
from decentnode.launch.children.pipe import KEPT_MESSAGES, KEPT_PER_NODE, PROGRESS_SHARE, Pipe


def flush_and_read(writer: Pipe, reader: Pipe, count: int) -> list[ChildMessage]:
    """Returns the `count` messages that a thread reads while `writer` flushes."""
    found: list[ChildMessage] = []
    thread = threading.Thread(target=lambda: found.extend(reader.receive() for _ in range(count)))
    thread.start()
    assert writer.flush(None)
    thread.join(200)
    return found


@pytest.fixture
def ends() -> tuple[Pipe, Pipe]:
    ours, theirs = multiprocessing.Pipe()
    return Pipe(ours), Pipe(theirs)


def fill(channel: Pipe) -> int:
    """Sends evaluations until one is dropped; returns how many were accepted."""
    record = {"kind": "evaluation", "text": "x" * 2000}
    for sent in range(10_000):
        channel.send(Progress(1, record))
        if channel.dropped:
            return sent
    raise AssertionError("nothing was dropped")


def test_a_full_pipe_drops_progress_and_keeps_all_other_messages(ends: tuple[Pipe, Pipe]) -> None:
    writer, reader = ends
    sent = fill(writer)
    generation = Progress(1, {"kind": "generation", "generation": 2})
    kept: list[ChildMessage] = [PeerFailure(3, "gone"), generation, Finished(1, {"text": "y" * 300_000}, False)]
    for message in kept:
        writer.send(message)
    dropped = writer.dropped
    writer.send(NodesAbsent([4], {}))
    writer.send(Progress(1, {"kind": "round"}))
    assert writer.dropped == dropped + 2 and writer.waiting and not writer.flush(0.0)
    found = flush_and_read(writer, reader, sent + 3)
    assert found[sent:] == kept


@pytest.mark.parametrize("nodes", [1, 200, 1000])
def test_no_record_of_an_evaluation_of_all_nodes_of_a_process_is_dropped(ends: tuple[Pipe, Pipe], nodes: int) -> None:
    """The reader reads only after the last record was sent."""
    writer, reader = ends
    writer.reserve_for(nodes)
    record = {"text": "x" * 600}
    said = [Progress(uid, {"kind": kind, **record}) for kind in ("round", "evaluation") for uid in range(nodes)]
    for message in said:
        writer.send(message)
    assert not writer.dropped
    found = flush_and_read(writer, reader, len(said))
    assert found == said


def test_waiting_messages_are_bounded_and_the_newest_are_kept(ends: tuple[Pipe, Pipe]) -> None:
    writer, reader = ends
    sent = fill(writer) - KEPT_MESSAGES // PROGRESS_SHARE
    for number in range(KEPT_MESSAGES + 10):
        writer.send(PeerFailure(number, ""))
    found = flush_and_read(writer, reader, sent + KEPT_MESSAGES)
    assert found[sent:] == [PeerFailure(number, "") for number in range(10, KEPT_MESSAGES + 10)]


def test_reserved_space_keeps_the_messages_of_thousands_of_nodes_in_one_process(ends: tuple[Pipe, Pipe]) -> None:
    writer, reader = ends
    writer.reserve_for(2000)
    sent = fill(writer) - KEPT_PER_NODE * 2000 // PROGRESS_SHARE
    for number in range(KEPT_PER_NODE * 2000):
        writer.send(PeerFailure(number, ""))
    found = flush_and_read(writer, reader, sent + KEPT_PER_NODE * 2000)
    assert found[sent:] == [PeerFailure(number, "") for number in range(KEPT_PER_NODE * 2000)]


def test_after_the_reader_has_closed_flush_returns_and_send_raises() -> None:
    ours, theirs = multiprocessing.Pipe()
    writer = Pipe(ours)
    fill(writer)
    writer.send(PeerFailure(1, ""))
    theirs.close()
    assert not writer.flush(None)
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        writer.send(PeerFailure(2, ""))
    assert isinstance(ours, Connection)


def test_send_all_delivers_its_message_without_a_later_one(ends: tuple[Pipe, Pipe]) -> None:
    """Hundreds of nodes of a process report their addresses, and then wait for an answer."""
    writer, reader = ends
    said: list[ChildMessage] = [PeerFailure(number, "x" * 1000) for number in range(KEPT_MESSAGES)]
    for message in said:
        writer.send(message)
    assert writer.waiting, "the pipe took all messages at once: this test shows nothing"
    found: list[ChildMessage] = []
    thread = threading.Thread(target=lambda: found.extend(reader.receive() for _ in range(KEPT_MESSAGES + 1)))
    thread.start()
    writer.send_all([PeerFailure(-1, "")], 200.0)
    assert not writer.waiting
    thread.join(200)
    assert found == [*said, PeerFailure(-1, "")]
