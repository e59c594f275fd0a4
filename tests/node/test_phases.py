"""Rules of several phases per round: every phase has its own exchange, in order, on every transport."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decentnode.build import schemas_of, step_all
from decentnode.communication.base import Communication
from decentnode.config import component
from decentnode.errors import PeerLost, UsageError
from decentnode.graph.base import RoundView
from decentnode.graph.topology import Topology
from decentnode.node.config import NodeConfig
from decentnode.node.node import Node, NodeParts
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing.base import Sharing
from decentnode.sharing.full import Full
from decentnode.sharing.requirements import Requirements
from tests.communication.contract import BATCHED, NETWORKED, open_nodes, run_on_all
from tests.graph.contract import make
from tests.node.fakes import ENDLESS, Quadratic, check_stop_in_round_7, stacked


class Twice(Full):
    """x <- W W x, slice by slice; the second exchange rests in odd rounds."""

    requirements = replace(Full.requirements, phases=2)

    def plan(self, view: RoundView) -> RoundView:
        if view.phase == 1 and view.round % 2:
            return replace(view, neighbors=(), sources=(), weights={view.uid: 1.0}, out_weights={view.uid: 1.0})
        return view


class SendsToOne(Full):
    """Sends to one neighbor only, although its view has two."""

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        return dict(list(super().outgoing(model, view).items())[:1])


class Relay(Sharing):
    """Three phases per round: in each, a node sends its model to its predecessor on a ring and takes that of its
    successor, so that a model travels on by one node per phase."""

    requirements = Requirements(phases=3)

    def __init__(self) -> None:
        self.config = component.Config()
        self.received: list[tuple[int, int, float]] = []

    def plan(self, view: RoundView) -> RoundView:
        n = len(view.members)
        weights = {view.uid: 0.0, (view.uid + 1) % n: 1.0}
        return replace(view, neighbors=((view.uid - 1) % n,), sources=((view.uid + 1) % n,), weights=weights)

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        return {view.neighbors[0]: Payload({"x": model}, {"phase": view.phase})}

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        for payload in received.values():
            self.received.append((view.round, view.phase, float(payload.scalars["phase"])))
            model.copy_(payload.tensors["x"])

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {"x": TensorSpec(dtype, elements)}


def run(
    kind: type[Sharing], graph: Topology, rounds: int = 4, transport: str = "inproc", elements: int = 30,
    lr: float = 0.1, buffers: int = 0, records: list[dict[str, Any]] | None = None, silent: int | None = None,
    **options: object,
) -> list[Node]:
    """Runs nodes that train on quadratics; node `silent` sends only in the first phase of the first round. The others
    begin once it has sent, as their deadline begins then."""
    config = NodeConfig.model_validate({"rounds": rounds, "evaluate_every": 0, **options})
    trainings = [Quadratic(u, elements, lr, buffers=buffers) for u in range(graph.num_nodes)]
    rules = [kind() if kind is Relay else kind(Full.Config()) for _ in trainings]  # type: ignore[call-arg]
    timeout = {} if silent is None else {"timeout_seconds": 1.5}
    with open_nodes(transport, graph.num_nodes, schemas_of(rules[0], trainings[0].model), **timeout) as made:
        record = (lambda r: records.append(r)) if records is not None else (lambda _: None)
        parts = [NodeParts(graph, trainings[u], rules[u], c) for u, c in enumerate(made)]
        built = [Node(u, config, part, seed=1, record=record) for u, part in enumerate(parts)]

        has_sent = threading.Event()

        def work(communication: Communication) -> None:
            node = built[communication.uid]
            if silent is None:
                node.run()
                return
            if node.uid == silent:
                node.begin_round(0)
                has_sent.set()
                return
            assert has_sent.wait(60)
            if config.missing == "fail":
                expected = rf"node {silent} in round 0, waited (?:[3-9]|\d\d+)\.\d s .*: 1.5 for each of 2 phases"
                with pytest.raises(PeerLost, match=expected):
                    node.run()
            else:
                node.begin_round(0)
                node.next_phase(1)
                node.finish_round(0)

        if transport == "inproc":
            step_all(built)
        else:
            run_on_all(made, work)
        return built


def models(built: list[Node]) -> np.ndarray:
    return stacked([node.training for node in built]).double().numpy()  # type: ignore[misc]


@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
@pytest.mark.parametrize("family", ["ring", "directed_one_peer_exponential"])
def test_two_exchanges_per_round_follow_the_formula(schedule: str, family: str) -> None:
    graph = make(family, nodes=6)
    trainings = [Quadratic(u, 30) for u in range(6)]
    x, target = stacked(trainings).double().numpy(), stacked(trainings, "target").double().numpy()
    for r in range(4):
        w = graph.matrix(r) if r % 2 else graph.matrix(r) @ graph.matrix(r)
        delta = -0.1 * (x - target)
        x = w @ x + delta if schedule == "overlapped" else w @ (x + delta)
    np.testing.assert_allclose(models(run(Twice, graph, schedule=schedule)), x, atol=1e-6)


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", [*NETWORKED, BATCHED])
@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
def test_every_transport_gives_the_same_bits_as_one_process(transport: str, schedule: str) -> None:
    graph = make("regular", nodes=6, degree=3)
    in_process = run(Twice, graph, buffers=3, schedule=schedule)
    networked = run(Twice, graph, transport=transport, buffers=3, schedule=schedule)
    assert np.array_equal(models(in_process), models(networked))
    both = [stacked([n.training for n in built], "buffers") for built in (in_process, networked)]  # type: ignore[misc]
    assert torch.equal(*both) and both[0].unique().numel() > 1, "buffers were not mixed once"


@pytest.mark.parametrize("transport", ["inproc", "shared_memory", "tcp"])
def test_a_model_received_in_one_phase_is_sent_in_the_next(transport: str) -> None:
    built = run(Relay, make("ring", nodes=5), 2, transport, lr=0.0)
    start = np.stack([Quadratic(u, 30).initial.numpy() for u in range(5)])
    np.testing.assert_array_equal(models(built), start[[(u + 6) % 5 for u in range(5)]].astype(float))
    for node in built:
        assert node.sharing.received == [(r, p, p) for r in range(2) for p in range(3)]  # type: ignore[attr-defined]


def test_recorded_times_and_bytes_cover_all_phases() -> None:
    records: list[dict[str, Any]] = []
    run(Twice, make("ring", nodes=4), 2, records=records)
    rounds = [r for r in records if r["kind"] == "round"]
    assert len(rounds) == 8 and all(r["mix_seconds"] > 0 and r["send_seconds"] > 0 for r in rounds)
    assert {r["data_bytes_sent"] for r in rounds if r["round"] == 0} == {2 * 2 * 120}


@pytest.mark.parametrize("transport", ["inproc", "ipc", "shared_memory"])
def test_a_stop_request_ends_all_nodes_between_rounds(transport: str) -> None:
    graph = make("complete", nodes=4)
    trainings = [Quadratic(u, 10, buffers=2) for u in range(4)]
    rules = [Twice(Full.Config()) for _ in trainings]
    check_stop_in_round_7(transport, schemas_of(rules[0], trainings[0].model), lambda communication, record: Node(
        (u := communication.uid), ENDLESS, NodeParts(graph, trainings[u], rules[u], communication), seed=1,
        record=record))  # fmt: skip


@pytest.mark.parametrize("missing", ["fail", "return_weight"])
@pytest.mark.slow
def test_a_neighbor_silent_after_the_first_phase_fails_the_run_or_returns_its_weight(missing: str) -> None:
    records: list[dict[str, Any]] = []
    built = run(Twice, make("complete", nodes=3), 1, "ipc", silent=2, missing=missing, records=records)
    if missing == "fail":
        return
    assert [r["missing"] for r in records] == [[2], [2]]
    first = stacked([Quadratic(u, 30) for u in range(3)]).double()
    target = stacked([Quadratic(u, 30) for u in range(3)], "target").double()
    mean = (first - 0.1 * (first - target)).mean(0)
    for node in built[:2]:
        torch.testing.assert_close(node.training.model.parameters.double(), mean, atol=1e-6, rtol=0)


def test_a_rule_that_omits_a_neighbor_is_an_error_before_any_node_waits() -> None:
    with pytest.raises(UsageError, match=r"SendsToOne.outgoing must return .* neighbors \[1, 3\], got those for \[1\]"):
        run(SendsToOne, make("ring", nodes=4))
