"""Messages from the supervisor to the process of a node."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from decentnode.launch.children.messages import PeerFailure, Peers
from decentnode.launch.children.pipe import Pipe
from decentnode.launch.nodes.node_process import Commands
from tests.conftest import wait_until


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_restarted_node_ignores_peer_failures_from_before_it_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)  # the listening thread calls it when its supervisor is gone
    before = set(threading.enumerate())
    ours, theirs = multiprocessing.Pipe()
    supervisor, failed = Pipe(ours), list[tuple[int, str]]()
    commands = Commands(Pipe(theirs), join=True)
    for message in (PeerFailure(3, "gone"), Peers({"0": ["a", "b"]})):
        supervisor.send(message)
    assert commands.peers() == {"0": ["a", "b"]}
    communication = SimpleNamespace(fail=lambda uid, why, ends_run: failed.append((uid, why)))
    node: Any = SimpleNamespace(uid=0, communication=communication)
    commands.attach(node)
    assert not failed
    supervisor.send(PeerFailure(4, "gone, too"))
    wait_until(lambda: failed == [(4, "gone, too")])
    ours.close()
    wait_until(lambda: set(threading.enumerate()) <= before)
    theirs.close()
