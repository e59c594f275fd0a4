"""Mixing in the background of the local steps: windows, deadlines, recorded waits and failures."""

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
"""The smallest window, which holds at least four chunks of CHUNK_BYTES."""


class CallsBack(Quadratic):
    """Calls `meanwhile` in its local steps."""

    meanwhile: Callable[[int], None]

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        self.meanwhile(round)
        return super().local_update(round, direction)


@pytest.mark.parametrize("transport", ["ipc", "tcp", "shared_memory", "hybrid", "inproc"])
def test_background_mixing_is_supported_for_large_models_on_transports_between_processes(transport: str) -> None:
    schemas = (Schema(8, {"x": TensorSpec(torch.float32, 8)}, True),)
    with open_nodes(transport, 2, schemas, start=False) as made:
        for node in made:
            assert is_supported(node, torch.empty(LEAST_ELEMENTS)) == (transport != "inproc")
            assert not is_supported(node, torch.empty(LEAST_ELEMENTS - 1)), "a thread would cost more than it saves"


def run_two_nodes(
    transport: str, elements: int, meanwhile: Callable[[Communication, int], None], rounds: int = 3,
    rule: str = "full", behind: bool | None = None, buffer_elements: int = 0, **options: object,
) -> tuple[list[Node], list[dict[str, Any]]]:  # fmt: skip
    """Runs two nodes; returns them and their records. meanwhile: called in the local steps. behind: whether models are
    mixed in the background."""
    config = NodeConfig.model_validate(
        {"rounds": rounds, "evaluate_every": 0, "schedule": "overlapped", "mix_in_background": behind})  # fmt: skip
    trainings = [CallsBack(uid, elements, buffers=buffer_elements) for uid in range(2)]
    rules = [RULES[rule]() for _ in range(2)]
    for sharing in rules:
        sharing.set_machines([[0, 1]])
        sharing.set_parameter_shapes([(elements,)])
    records: list[dict[str, Any]] = []
    with open_nodes(transport, 2, schemas_of(rules[0], trainings[0].model), **options) as made:
        built = []
        for training, sharing, communication in zip(trainings, rules, made, strict=True):
            training.meanwhile = lambda round, communication=communication: meanwhile(communication, round)
            parts = NodeParts(make("complete", nodes=2), training, sharing, communication)
            built.append(Node(training.uid, config, parts, seed=1, record=records.append))
        run_on_all(made, lambda communication: built[communication.uid].run())
    return built, records


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", ["ipc", "tcp", "tcp+aes-gcm"])
def test_models_larger_than_the_window_arrive_whole_during_the_local_steps(transport: str) -> None:
    elements = 12 * BLOCK_ELEMENTS + 5
    are_mixed_in_background: list[bool] = []

    def wait_until_all_arrived(communication: Communication, round: int) -> None:
        too_large = 4 * elements > communication.prefetch_bytes
        are_mixed_in_background.append(too_large and is_worthwhile(communication, torch.empty(elements)))
        deadline = time.monotonic() + 30
        while communication.counters.edge(1 - communication.uid).payload_bytes_received < 4 * elements * (round + 1):
            assert time.monotonic() < deadline, "the rest of the model waits for the window"
            time.sleep(0.005)

    built, records = run_two_nodes(transport, elements, wait_until_all_arrived, chunk_bytes=CHUNK_BYTES,
                                   window_bytes=SMALLEST_WINDOW)  # fmt: skip
    assert are_mixed_in_background == [True] * 6
    assert all(record["overlap"] > 0 for record in records if record["kind"] == "round")
    models = [node.training.model.parameters.numpy() for node in built]
    assert not np.array_equal(*models) and np.isfinite(models).all()


@pytest.mark.sampled(one=["rule"])
@pytest.mark.parametrize("rule", ["full+bfloat16", "push_sum", "topk", "choco", "qsgd", "local_sgd", "fft+float16"])
def test_every_rule_gives_the_same_bits_when_mixed_in_the_background(rule: str) -> None:
    found = []
    for behind in (False, True):
        built, _ = run_two_nodes("ipc", BLOCK_ELEMENTS + 11, lambda communication, round: None, 4, rule, behind)
        assert all(node.schedule._uses_background_mixing == behind for node in built)  # type: ignore[attr-defined]
        found.append([node.training.model.parameters for node in built])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", ["collective", "hybrid", "shared_memory", "tcp"])
def test_float_buffers_are_averaged_while_the_model_is_mixed_in_the_background(transport: str) -> None:
    def delay_node_1(communication: Communication, round: int) -> None:
        if communication.uid == 1:
            time.sleep(0.05 * (round % 2))

    found = []
    for behind in (False, True):
        built, _ = run_two_nodes(transport, 3 * BLOCK_ELEMENTS, delay_node_1, 6, behind=behind, buffer_elements=7)
        found.append([torch.cat([node.training.model.parameters, node.training.model.buffers]) for node in built])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][0][-7:].tolist() == [0.5] * 7


def test_shared_memory_has_no_limit_of_prefetched_bytes() -> None:
    limits = []

    def record_limit(communication: Communication, round: int) -> None:
        limits.append(communication.prefetch_bytes)

    run_two_nodes("shared_memory", 2 * BLOCK_ELEMENTS, record_limit, 1)
    assert limits == [math.inf] * 2


@pytest.mark.slow
def test_a_failure_in_the_local_steps_leaves_no_running_thread() -> None:
    failed = threading.Event()

    def fail(communication: Communication, round: int) -> None:
        if communication.uid == 1:
            assert failed.wait(60)
        elif round == 1:  # before the failure, the payload of node 1 for this round cannot arrive
            assert any(thread.name == "mixing" for thread in threading.enumerate())
            communication.fail(0, "it broke")
            failed.set()
            raise NodeFailed("it broke")

    with pytest.raises((NodeFailed, PeerLost), match="it broke"):
        run_two_nodes("tcp", 12 * BLOCK_ELEMENTS, fail, chunk_bytes=CHUNK_BYTES, window_bytes=SMALLEST_WINDOW)
    for thread in threading.enumerate():
        if thread.name == "mixing":
            thread.join(60)
            assert not thread.is_alive()


class ObservedRunState(RunState):
    """`waits` is set when a thread waits for the first time, `waited` when it still waits after twice `DEADLINE`."""

    DEADLINE = 0.05

    def set_up(self) -> ObservedRunState:
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


def make_inbox(status: RunState) -> Inbox:
    schema = Schema(10, {"x": TensorSpec(torch.float32, 10)}, True)
    return Inbox((schema,), CHUNK_BYTES, status, Counters(), lambda _uid, _size: None)


def test_a_deadline_starts_when_the_training_thread_waits_too() -> None:
    status = ObservedRunState(blocked_since=math.inf).set_up()
    inbox = make_inbox(status)
    found: list[object] = []
    waiter = threading.Thread(target=lambda: found.append(inbox.wait((0, 0), 0, [3], status.DEADLINE)))
    waiter.start()
    assert status.waited.wait(60), "it stopped waiting at its deadline, although the training thread did not wait"
    assert waiter.is_alive() and status.waiting is None, "the status names a node for which no training waits"
    status.blocked_since = exposed = time.monotonic()
    waiter.join(60)
    assert found == [{}]
    assert 0 < inbox.state.counters.edge(3).wait_seconds <= time.monotonic() - exposed


def test_waits_during_the_local_steps_are_not_recorded() -> None:
    status = ObservedRunState(blocked_since=math.inf).set_up()
    inbox = make_inbox(status)
    waiter = threading.Thread(target=lambda: inbox.wait((0, 0), 0, [3], 20))
    waiter.start()
    assert status.waits.wait(60)
    inbox.put(Chunk(bytes(8), 0, 3, 0, 0, 0, 0, 10, {}), memoryview(bytearray(40)), time.monotonic())
    waiter.join(60)
    assert not waiter.is_alive() and inbox.state.counters.edge(3).wait_seconds == 0


def test_the_background_mixer_uses_one_thread_and_raises_its_errors_in_join() -> None:
    seen = []
    BackgroundMixer(lambda: seen.append(native.threads())).join()
    assert seen == [1] and native.threads() == torch.get_num_threads()

    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        BackgroundMixer(fail).join()


def test_mix_in_background_needs_an_overlapped_schedule() -> None:
    with pytest.raises(ValueError, match="needs schedule: overlapped"):
        NodeConfig.model_validate({"mix_in_background": True})
