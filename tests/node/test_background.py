"""Mixing behind the local steps: what becomes of windows, deadlines, waits and failures."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from decentnode import native
from decentnode.build import schemas_of
from decentnode.communication.base import Communication
from decentnode.communication.counters import Counters
from decentnode.communication.parts import Schema
from decentnode.communication.receive.inbox import Inbox
from decentnode.communication.run_state import RunState
from decentnode.errors import NodeFailed, PeerLost
from decentnode.node.config import NodeConfig
from decentnode.node.node import Node, NodeParts
from decentnode.node.schedules.background import LEAST_ELEMENTS, BackgroundMixer, is_supported, is_worthwhile
from decentnode.payload import TensorSpec
from decentnode.tensors import BLOCK_ELEMENTS
from decentnode.training.base import Direction, Update
from decentnode.wire.messages import Chunk
from tests.communication.contract import open_nodes, run_on_all
from tests.graph.contract import make
from tests.node.fakes import Quadratic
from tests.sharing.contract import RULES

CHUNK_BYTES = 4 * BLOCK_ELEMENTS
SMALLEST_WINDOW = 1 << 20
"""Of which a window is at least four chunks."""


class Meanwhile(Quadratic):
    """Does something in its local steps."""

    meanwhile: Callable[[int], None]

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        self.meanwhile(round)
        return super().local_update(round, direction)


@pytest.mark.parametrize("transport", ["ipc", "tcp", "shared_memory", "hybrid", "inproc"])
def test_a_large_model_can_be_mixed_in_the_background_where_nodes_are_processes(transport: str) -> None:
    schemas = (Schema(8, {"x": TensorSpec(torch.float32, 8)}, True),)
    with open_nodes(transport, 2, schemas, start=False) as made:
        for node in made:
            assert is_supported(node, torch.empty(LEAST_ELEMENTS)) == (transport != "inproc")
            assert not is_supported(node, torch.empty(LEAST_ELEMENTS - 1)), "a thread would cost more than it saves"


def turn(
    transport: str, elements: int, meanwhile: Callable[[Communication, int], None], rounds: int = 3,
    rule: str = "full", behind: bool | None = None, buffer_elements: int = 0, **options: object,
) -> tuple[list[Node], list[dict[str, Any]]]:  # fmt: skip
    """Two nodes of a whole run; they and what they recorded."""
    config = NodeConfig.model_validate(
        {"rounds": rounds, "evaluate_every": 0, "schedule": "overlapped", "mix_in_background": behind})  # fmt: skip
    trainings = [Meanwhile(uid, elements, buffers=buffer_elements) for uid in range(2)]
    rules = [RULES[rule]() for _ in range(2)]
    for each in rules:
        each.set_machines([[0, 1]])
        each.set_parameter_shapes([(elements,)])
    records: list[dict[str, Any]] = []
    with open_nodes(transport, 2, schemas_of(rules[0], trainings[0].model), **options) as made:
        built = []
        for training, each, communication in zip(trainings, rules, made, strict=True):
            training.meanwhile = lambda round, communication=communication: meanwhile(communication, round)
            parts = NodeParts(make("complete", nodes=2), training, each, communication)
            built.append(Node(training.uid, config, parts, seed=1, record=records.append))
        run_on_all(made, lambda communication: built[communication.uid].run())
    return built, records


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", ["ipc", "tcp", "tcp+aes-gcm"])
def test_models_larger_than_the_window_come_whole_while_local_steps_run(transport: str) -> None:
    elements = 12 * BLOCK_ELEMENTS + 5
    behind: list[bool] = []

    def until_all_came(communication: Communication, round: int) -> None:
        too_large = 4 * elements > communication.prefetch_bytes
        behind.append(too_large and is_worthwhile(communication, torch.empty(elements)))
        deadline = time.monotonic() + 30
        while communication.counters.edge(1 - communication.uid).payload_bytes_received < 4 * elements * (round + 1):
            assert time.monotonic() < deadline, "the rest waits for the window"
            time.sleep(0.005)

    built, records = turn(transport, elements, until_all_came, chunk_bytes=CHUNK_BYTES, window_bytes=SMALLEST_WINDOW)
    assert behind == [True] * 6
    assert all(record["overlap"] > 0 for record in records if record["kind"] == "round")
    models = [node.training.model.parameters.numpy() for node in built]
    assert not np.array_equal(*models) and np.isfinite(models).all()


@pytest.mark.sampled(one=["rule"])
@pytest.mark.parametrize("rule", ["full+bfloat16", "push_sum", "topk", "choco", "qsgd", "local_sgd", "fft+float16"])
def test_every_rule_gives_the_same_bits_whoever_mixes(rule: str) -> None:
    found = []
    for behind in (False, True):
        built, _ = turn("ipc", BLOCK_ELEMENTS + 11, lambda communication, round: None, 4, rule, behind)
        assert all(node.schedule._uses_background_mixing == behind for node in built)  # type: ignore[attr-defined]
        found.append([node.training.model.parameters for node in built])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", ["collective", "hybrid", "shared_memory", "tcp"])
def test_float_buffers_leave_while_the_model_is_still_being_mixed(transport: str) -> None:
    def late(communication: Communication, round: int) -> None:
        if communication.uid == 1:
            time.sleep(0.05 * (round % 2))

    found = []
    for behind in (False, True):
        built, _ = turn(transport, 3 * BLOCK_ELEMENTS, late, 6, behind=behind, buffer_elements=7)
        found.append([torch.cat([node.training.model.parameters, node.training.model.buffers]) for node in built])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][0][-7:].tolist() == [0.5] * 7


def test_shared_memory_brings_all_at_once() -> None:
    seen = []
    turn("shared_memory", 2 * BLOCK_ELEMENTS, lambda communication, _: seen.append(communication.prefetch_bytes), 1)
    assert seen == [math.inf] * 2


@pytest.mark.slow
def test_a_failure_in_the_local_steps_leaves_no_thread_behind() -> None:
    failed = threading.Event()

    def fail(communication: Communication, round: int) -> None:
        if communication.uid == 1:
            assert failed.wait(60)
        elif round == 1:  # whose payload from node 1 cannot come before
            assert any(thread.name == "mixing" for thread in threading.enumerate())
            communication.fail(0, "it broke")
            failed.set()
            raise NodeFailed("it broke")

    with pytest.raises((NodeFailed, PeerLost), match="it broke"):
        turn("tcp", 12 * BLOCK_ELEMENTS, fail, chunk_bytes=CHUNK_BYTES, window_bytes=SMALLEST_WINDOW)
    for thread in threading.enumerate():
        if thread.name == "mixing":
            thread.join(60)
            assert not thread.is_alive()


class Watched(RunState):
    """Says when somebody waits for the first time, and when a wait of longer than `DEADLINE` was looked at again."""

    DEADLINE = 0.05

    def watch(self) -> Watched:
        self.waits, self.waited = threading.Event(), threading.Event()
        self._began = 0.0
        return self

    def wait(self, timeout_seconds: float) -> None:
        if not self.waits.is_set():
            self._began = time.monotonic()
        elif time.monotonic() - self._began > 2 * self.DEADLINE:
            self.waited.set()
        self.waits.set()
        super().wait(min(timeout_seconds, self.DEADLINE))


def inbox_of(status: RunState) -> Inbox:
    schema = Schema(10, {"x": TensorSpec(torch.float32, 10)}, True)
    return Inbox((schema,), CHUNK_BYTES, status, Counters(), lambda _uid, _size: None)


def test_a_deadline_runs_once_the_training_thread_waits_too() -> None:
    status = Watched(blocked_since=math.inf).watch()
    inbox = inbox_of(status)
    found: list[object] = []
    waiter = threading.Thread(target=lambda: found.append(inbox.wait((0, 0), 0, [3], status.DEADLINE)))
    waiter.start()
    assert status.waited.wait(60), "it goes on waiting after the deadline"
    assert waiter.is_alive() and status.waiting is None, "whom nobody waits for is not told as waited for"
    status.blocked_since = exposed = time.monotonic()
    waiter.join(60)
    assert found == [{}]
    assert 0 < inbox.state.counters.edge(3).wait_seconds <= time.monotonic() - exposed


def test_waits_behind_the_local_steps_are_not_counted() -> None:
    status = Watched(blocked_since=math.inf).watch()
    inbox = inbox_of(status)
    waiter = threading.Thread(target=lambda: inbox.wait((0, 0), 0, [3], 20))
    waiter.start()
    assert status.waits.wait(60)
    inbox.put(Chunk(bytes(8), 0, 3, 0, 0, 0, 0, 10, {}), memoryview(bytearray(40)), time.monotonic())
    waiter.join(60)
    assert not waiter.is_alive() and inbox.state.counters.edge(3).wait_seconds == 0


def test_work_behind_has_one_thread_and_its_errors_come_out() -> None:
    seen = []
    BackgroundMixer(lambda: seen.append(native.threads())).join()
    assert seen == [1] and native.threads() == torch.get_num_threads()

    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        BackgroundMixer(fail).join()


def test_only_an_overlapped_schedule_has_something_to_mix_behind() -> None:
    with pytest.raises(ValueError, match="needs schedule: overlapped"):
        NodeConfig.model_validate({"mix_in_background": True})
