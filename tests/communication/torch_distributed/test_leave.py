"""What still arrives over a communicator that was given up is not taken for a payload of the next generation."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from decentnode.communication.base import AveragingGroup
from decentnode.communication.counters import Counters
from decentnode.communication.parts import Schema
from decentnode.communication.receive.absences import SUM
from decentnode.communication.receive.inbox import Inbox
from decentnode.communication.run_state import RunState
from decentnode.communication.torch_distributed.batched_p2p import BatchedPath
from decentnode.communication.torch_distributed.clique_path import CliquePath, NodeSide
from decentnode.communication.torch_distributed.communicator import GlooCommunicator
from decentnode.communication.torch_distributed.gloo import GlooClique, file_store
from decentnode.communication.torch_distributed.tagged_p2p import TaggedPath
from decentnode.payload import Payload, TensorSpec
from tests.communication.contract import flat_schema
from tests.conftest import wait_until

ELEMENTS, KEY, MEMBERS = 100, (0, 0), (0, 1)
LISTS = Schema(ELEMENTS, {"at": TensorSpec(torch.float32, ELEMENTS, False)}, False)
"""Payloads whose headers say how long they are."""


@dataclass
class Member:
    inbox: Inbox
    path: CliquePath
    finished: list[tuple[object, ...]]
    """The arguments of the path's announcements, after they were made."""


def make_members(folder: Path, batched: bool, schema: Schema) -> list[Member]:
    """Returns the two ends of a communicator."""

    def make(uid: int) -> Member:
        store, state, counters = file_store(folder / "store", len(MEMBERS), 30), RunState(), Counters()
        inbox = Inbox((schema,), 1 << 20, state, counters, lambda uid, size: None)
        node = NodeSide(inbox, state, counters, 30.0, lambda tensor: None)
        path: CliquePath
        if batched:
            path = BatchedPath(GlooCommunicator(store, uid, MEMBERS, "127.0.0.1", 30), node, start_seconds=30)
        else:
            path = TaggedPath(GlooClique(store, uid, MEMBERS, "127.0.0.1", 30), node)
        finished: list[tuple[object, ...]] = []
        for name in ("_chunk_received", "_launch_completed"):
            setattr(path, name, recorded(getattr(path, name), finished))
        return Member(inbox, path, finished)

    def recorded(announce: Callable[..., None], finished: list[tuple[object, ...]]) -> Callable[..., None]:
        def announce_and_record(*args: object, **kwargs: object) -> None:
            announce(*args, **kwargs)
            finished.append(args)

        return announce_and_record

    with ThreadPoolExecutor(len(MEMBERS)) as pool:
        return [*pool.map(make, MEMBERS)]


@pytest.mark.parametrize("batched", [False, True], ids=["tagged", "batched"])
@pytest.mark.parametrize("what", ["model", "list", "sum"])
def test_a_late_payload_completes_nothing_in_the_next_generation(tmp_path: Path, batched: bool, what: str) -> None:
    schema = LISTS if what == "list" else flat_schema(ELEMENTS)[0]
    (name,) = schema.tensors
    first, second = make_members(tmp_path, batched, schema)
    payload = Payload({name: torch.ones(ELEMENTS)})

    def begin(member: Member, other: int) -> None:
        if what == "sum":
            member.path.begin_collective("all_reduce", KEY, AveragingGroup(MEMBERS, payload), {other: payload})
        else:
            member.path.begin(KEY, [(payload, [other])], [other])

    begin(first, 1)
    first.path.leave(clean=False)
    first.inbox.reset(KEY[0])
    tensors = [torch.zeros(ELEMENTS)]
    source = SUM if what == "sum" else 1
    assert first.inbox.start_receive(KEY, source, tensors, {}, lambda: None), "something of the old payload is left"
    begin(second, 0)
    wait_until(lambda: bool(first.finished) and bool(second.finished))
    (incoming,) = first.inbox.state.incoming[KEY].values()
    assert not incoming.complete and not incoming.has(0, 0)
    second.path.leave(clean=True)
