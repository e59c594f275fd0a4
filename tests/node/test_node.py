from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from decentnode.build import schemas_of, step_all
from decentnode.communication.base import Communication
from decentnode.errors import Diverged, PeerLost
from decentnode.graph.spectrum import contraction
from decentnode.graph.topology import Topology
from decentnode.node.config import NodeConfig
from decentnode.node.node import Node, NodeParts
from decentnode.sharing.full import Full
from decentnode.tensors import BLOCK_ELEMENTS
from tests.communication.contract import NETWORKED, open_nodes, run_on_all
from tests.graph.contract import make
from tests.node.fakes import Quadratic, stacked


def run(
    graph: Topology, rounds: int = 8, transport: str = "inproc", elements: int = 40, records: list[Any] | None = None,
    lr: float = 0.1, poison: dict[int, int] | None = None, buffer_elements: int = 0, **options: object,
) -> list[Node]:  # fmt: skip
    """Runs nodes that train on quadratics, and returns them. poison: in which round the model of a node becomes NaN."""
    num_nodes = graph.num_nodes
    config = NodeConfig.model_validate({"rounds": rounds, "evaluate_every": 3, **options})
    trainings = [Quadratic(u, elements, lr, (poison or {}).get(u, -1), buffer_elements) for u in range(num_nodes)]
    schemas = schemas_of(Full(Full.Config()), trainings[0].model)
    with open_nodes(transport, num_nodes, schemas) as made:

        def build(uid: int, communication: Communication) -> Node:
            record = (lambda r: records.append({"uid": uid, **r})) if records is not None else (lambda _: None)
            sharing = Full(Full.Config())
            return Node(uid, config, NodeParts(graph, trainings[uid], sharing, communication), seed=1, record=record)

        built = [build(uid, communication) for uid, communication in enumerate(made)]
        if transport == "inproc":
            step_all(built)
        else:
            run_on_all(made, lambda communication: built[communication.uid].run())
        return built


def models(built: list[Node]) -> np.ndarray:
    return stacked([node.training for node in built]).double().numpy()  # type: ignore[misc]


def reference(graph: Topology, rounds: int, lr: float, elements: int = 40, overlapped: bool = False) -> np.ndarray:
    trainings = [Quadratic(u, elements) for u in range(graph.num_nodes)]
    x, target = stacked(trainings).double().numpy(), stacked(trainings, "target").double().numpy()
    for r in range(rounds):
        delta = -lr * (x - target)
        x = graph.matrix(r) @ x + delta if overlapped else graph.matrix(r) @ (x + delta)
    return x


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
@pytest.mark.parametrize("family", ["ring", "regular", "one_peer_exponential", "exponential", "random_matching",
                                    "d_equistatic", "od_equidyn"])
def test_rounds_follow_the_formula_of_their_schedule(schedule: str, family: str) -> None:
    graph = make(family, nodes=8)
    built = run(graph, 8, schedule=schedule)
    expected = reference(graph, 8, 0.1, overlapped=schedule == "overlapped")
    np.testing.assert_allclose(models(built), expected, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("transport", NETWORKED)
@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
def test_every_transport_gives_the_same_bits_as_one_process(transport: str, schedule: str) -> None:
    elements = BLOCK_ELEMENTS + 77
    graph = make("regular", nodes=5, degree=2)
    in_process = run(graph, 3, elements=elements, schedule=schedule)
    networked = run(graph, 3, transport, elements=elements, schedule=schedule)
    assert np.array_equal(models(in_process), models(networked))
    assert all(torch.equal(a.merged, b.merged) for a, b in zip(in_process, networked, strict=True))  # type: ignore[arg-type]


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", NETWORKED)
def test_mixing_in_the_background_gives_the_same_bits(transport: str) -> None:
    elements = 2 * BLOCK_ELEMENTS + 77
    graph = make("regular", nodes=6, degree=3)
    in_process = run(graph, 4, elements=elements, schedule="overlapped")
    assert not any(node.schedule._uses_background_mixing for node in in_process)  # type: ignore[attr-defined]
    in_background = run(graph, 4, transport, elements=elements, schedule="overlapped", mix_in_background=True)
    assert all(node.schedule._uses_background_mixing for node in in_background)  # type: ignore[attr-defined]
    assert np.array_equal(models(in_process), models(in_background))


def test_two_runs_give_the_same_bits() -> None:
    graph = make("random_regular", nodes=6, degree=3)
    assert np.array_equal(models(run(graph, transport="ipc")), models(run(graph, transport="ipc")))


def test_nodes_on_a_complete_graph_make_centralized_gradient_descent() -> None:
    built = run(make("complete", nodes=5), 20)
    trainings = [node.training for node in built]
    assert all(isinstance(t, Quadratic) for t in trainings)
    x, target = stacked([Quadratic(u, 40) for u in range(5)]).mean(0), stacked(trainings, "target").mean(0)  # type: ignore[arg-type]
    for _ in range(20):
        x = x - 0.1 * (x - target)
    for model in models(built):
        np.testing.assert_allclose(model, x.numpy(), atol=1e-5)


def test_without_training_the_mean_stays_and_the_distance_to_it_shrinks_at_the_rate_of_the_spectral_gap() -> None:
    graph = make("ring", nodes=8)
    before = stacked([Quadratic(u, 400) for u in range(8)]).double().numpy()
    distances = []
    for rounds in (10, 11):
        after = models(run(graph, rounds, elements=400, lr=0.0))
        np.testing.assert_allclose(after.mean(0), before.mean(0), atol=1e-6)
        distances.append(np.linalg.norm(after - after.mean(0)))
    assert distances[1] / distances[0] <= contraction(graph) + 1e-4
    assert distances[1] / distances[0] == pytest.approx(contraction(graph), abs=0.03)


def test_records_and_figures() -> None:
    records: list[dict[str, Any]] = []
    built = run(make("ring", nodes=4), 7, records=records)
    rounds = [r for r in records if r["kind"] == "round" and r["uid"] == 2]
    assert [r["round"] for r in rounds] == list(range(7))
    assert {"seconds", "train_seconds", "wait_seconds", "mix_seconds", "loss", "data_bytes_sent"} <= rounds[0].keys()
    evaluated = [r["round"] for r in records if r["kind"] == "evaluation" and r["uid"] == 2]
    assert evaluated == [0, 3, 6, 7]
    x = models(built)
    distance = math.sqrt(((x - x.mean(0)) ** 2).sum(1).mean()) / np.linalg.norm(x.mean(0))
    figures = built[0].figures()
    assert figures["consensus_distance"] == pytest.approx(distance, rel=1e-4)
    assert figures["rounds"] == figures["evaluated_round"] == 7 and figures["bytes_data"] == 7 * 2 * 160
    assert list(built[0].reports) == [0, 1, 2, 3] and not built[1].reports


@pytest.mark.parametrize("transport", ["inproc", "ipc", "shared_memory"])
def test_float_buffers_are_averaged_or_stay_local(transport: str) -> None:
    averaged = run(make("complete", nodes=4), 2, transport, buffer_elements=3)
    assert stacked([n.training for n in averaged], "buffers").unique().tolist() == [1.5]  # type: ignore[misc]
    local = run(make("complete", nodes=4), 2, transport, buffer_elements=3, buffers="local")
    assert stacked([n.training for n in local], "buffers")[:, 0].tolist() == [0, 1, 2, 3]  # type: ignore[misc]


def test_nan_names_node_and_round() -> None:
    with pytest.raises(Diverged, match=r"node 2: .*NaN or infinity.* round 4"):
        run(make("ring", nodes=4), poison={2: 4})


@pytest.mark.parametrize("transport", ["inproc", "ipc", "shared_memory"])
def test_a_stop_ends_all_nodes_with_a_closing_evaluation(transport: str) -> None:
    records: list[dict[str, Any]] = []

    graph = make("ring", nodes=5)
    n, rounds = 5, 100_000
    config = NodeConfig.model_validate({"rounds": rounds, "evaluate_every": 4})
    trainings = [Quadratic(u, 10) for u in range(n)]
    schemas = schemas_of(Full(Full.Config()), trainings[0].model)
    with open_nodes(transport, n, schemas) as made:
        built: list[Node] = []
        for uid, communication in enumerate(made):

            def record(r: dict[str, Any], uid: int = uid) -> None:
                records.append({"uid": uid, **r})
                if uid == 3 and r["kind"] == "round" and r["round"] == 17:
                    built[3].ask_stop()

            built.append(
                Node(uid, config, NodeParts(graph, trainings[uid], Full(Full.Config()), communication), seed=1,
                     record=record)
            )
        if transport == "inproc":
            step_all(built)
        else:
            run_on_all(made, lambda communication: built[communication.uid].run())
    assert all(17 <= node.round <= 26 for node in built)  # node 0 is no neighbor of node 3 and may lag by two rounds
    last = {r["uid"]: r for r in records if r["kind"] == "evaluation"}
    assert all(last[uid]["round"] == built[uid].round and last[uid]["contributors"] == n for uid in range(n))


@pytest.mark.sampled
@pytest.mark.parametrize("transport", ["ipc", "shared_memory"])
@pytest.mark.parametrize("missing", ["fail", "return_weight"])
def test_a_silent_neighbor_fails_the_run_or_returns_its_weight(transport: str, missing: str) -> None:
    graph = make("complete", nodes=3)
    config = NodeConfig.model_validate({"rounds": 3, "evaluate_every": 0, "missing": missing})
    trainings = [Quadratic(u, 10) for u in range(3)]
    schemas = schemas_of(Full(Full.Config()), trainings[0].model)
    with open_nodes(transport, 3, schemas, timeout_seconds=1.5) as made:
        parts = [NodeParts(graph, trainings[u], Full(Full.Config()), c) for u, c in enumerate(made)]
        built = [Node(u, config, part, seed=1) for u, part in enumerate(parts)]

        def work(communication: Communication) -> None:
            node = built[communication.uid]
            if node.uid == 2:
                return
            if missing == "fail":
                with pytest.raises(PeerLost, match=r"nothing from node 2 in round 0, waited 1\.[5-9] s") as caught:
                    node.run()
                assert caught.value.missing == (2,)
                return
            node.begin_round(0)
            own = node.training.model.parameters.clone()
            node.finish_round(0)
            other = built[1 - node.uid]
            weights = {node.uid: 2 / 3, other.uid: 1 / 3}
            stepped = Quadratic(other.uid, 10)
            stepped.local_update(0)
            expected = weights[node.uid] * own + weights[other.uid] * stepped.model.parameters
            torch.testing.assert_close(node.training.model.parameters, expected)

        run_on_all(made, work)


@pytest.mark.parametrize("transport", ["ipc", "shared_memory"])
def test_nodes_continue_without_a_silent_neighbor_when_weights_return(transport: str) -> None:
    """Node 2 takes part in round 0 and then falls silent while it still holds the payloads that it received."""
    graph = make("complete", nodes=3)
    config = NodeConfig.model_validate({"rounds": 5, "evaluate_every": 0, "missing": "return_weight"})
    trainings = [Quadratic(u, 10) for u in range(3)]
    schemas = schemas_of(Full(Full.Config()), trainings[0].model)
    with open_nodes(transport, 3, schemas, timeout_seconds=0.3) as made:
        parts = [NodeParts(graph, trainings[u], Full(Full.Config()), c) for u, c in enumerate(made)]
        built = [Node(u, config, part, seed=1) for u, part in enumerate(parts)]

        def work(communication: Communication) -> None:
            node = built[communication.uid]
            for r in range(1 if node.uid == 2 else 5):
                node.begin_round(r)
                node.finish_round(r)
            if node.uid == 2:
                node.begin_round(1)

        run_on_all(made, work)
    for node in built[:2]:
        assert (node.figures()["rounds_without"], node.figures()["without"]) == (3, "2:3")
    x = [t.model.parameters for t in trainings]
    assert torch.isfinite(torch.stack(x)).all() and not torch.equal(x[0], x[1])
    target = stacked(trainings, "target")[:2].mean(0)
    before = (stacked([Quadratic(u, 10) for u in range(2)]).mean(0) - target).norm()
    assert (torch.stack(x[:2]).mean(0) - target).norm() < before
