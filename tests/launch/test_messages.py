from __future__ import annotations

import multiprocessing

import pytest

from decentnode.launch.children.messages import (
    Bound,
    ChildMessage,
    Failed,
    Header,
    LeaveAnswer,
    LeaveRun,
    NodeJoined,
    NodesAbsent,
    PeerFailure,
    Peers,
    Progress,
    StopRun,
)
from decentnode.launch.children.pipe import Pipe
from tests.launch.facts import FACTS, FINISHED

MESSAGES: list[ChildMessage] = [
    FACTS, Header([["graph", "ring"]]), Bound(1, "ipc://a", "ipc://b"), NodeJoined(1), NodesAbsent([2], {"2": "late"}),
    Progress(1, {"kind": "round", "loss": None}), FINISHED, Failed(1, 8, "title", "text", True),
    Peers({"0": ["a", "b"]}), StopRun(), LeaveRun(1, [2]), LeaveAnswer(1, "too few"), PeerFailure(1, "gone"),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_arrive_as_they_were_sent(message: ChildMessage) -> None:
    ours, theirs = multiprocessing.Pipe()
    Pipe(ours).send(message)
    assert Pipe(theirs).receive() == message
    ours.close()
    with pytest.raises(EOFError):
        Pipe(theirs).receive()
    theirs.close()
