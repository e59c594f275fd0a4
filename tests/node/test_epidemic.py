"""The epidemic schedule, whose rounds expect no particular sender, and samplers, by which nodes find neighbors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decentnode.build import build_in_process, schemas_of, step_all
from decentnode.errors import ConfigError
from decentnode.experiment import Experiment, load
from decentnode.faults import Faults, Kill, Link
from decentnode.metrics.history import History
from decentnode.node.config import NodeConfig
from decentnode.node.node import Node, NodeParts
from decentnode.node.sampling import MAILBOX_CAPACITY, Sampling, Sketch, sampler_schema
from decentnode.node.schedules.asynchronous.epidemic import Epidemic
from decentnode.payload import Payload
from decentnode.samplers.base import Surroundings
from decentnode.samplers.cyclon import Cyclon, CyclonConfig
from decentnode.sharing.full import Full
from decentnode.simulate.world.records import ProcessRecord, check_payloads
from decentnode.simulate.world.world import World
from decentnode.wire.generation import Limits
from tests.communication.contract import open_nodes as nodes_over
from tests.communication.contract import run_on_all
from tests.graph.contract import make
from tests.node.fakes import Quadratic, stacked
from tests.simulate.world.runs import NodeRun

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
EL_LOCAL = "graph={name: el_local, nodes: 6, degree: 2}"


def experiment(*overrides: str, rounds: int = 6) -> Experiment:
    return load(QUICKSTART, [
        EL_LOCAL, "weights=null", "mapping={name: linear, nodes_per_machine: 6, threads: 1}",
        "training={name: supervised, batch_size: 8, local_steps: 2, optimizer: {name: sgd, lr: 0.05}}",
        f"node={{rounds: {rounds}, evaluate_every: 0}}", "model={name: mlp, hidden: [12]}", *overrides,
    ])  # fmt: skip


def make_nodes(*overrides: str, rounds: int = 6) -> tuple[list[Node], list[dict[str, Any]]]:
    """Returns the nodes of a run, which has not begun, and the list of its round records."""
    records: list[dict[str, Any]] = []

    def take_record(uid: int, record: dict[str, Any]) -> None:
        if record["kind"] == "round":
            records.append({"uid": uid, **record})

    return build_in_process(experiment(*overrides, rounds=rounds), take_record), records


def run_in_lockstep(nodes: list[Node], rounds: int) -> None:
    """All nodes finish a round before any node begins the next one."""
    for r in range(rounds):
        for node in nodes:
            node.begin_round(r)
        for node in nodes:
            node.finish_round(r)
            node.round += 1


def test_in_lockstep_epidemic_nodes_mix_the_same_models_as_sequential_ones() -> None:
    (sequential, _), (epidemic, rounds) = make_nodes(), make_nodes("node.schedule=epidemic")
    for nodes in (sequential, epidemic):
        run_in_lockstep(nodes, 6)
    for one, other in zip(sequential, epidemic, strict=True):
        assert torch.equal(one.training.model.parameters, other.training.model.parameters)
    graph = epidemic[0].graph
    assert {(record["uid"], record["round"]): record["mixed_copies"] for record in rounds} == {
        (uid, r): len(graph.sources(uid, r)) for uid in range(6) for r in range(6)
    }


def test_a_node_sends_its_model_to_the_neighbors_it_drew_and_nothing_to_others() -> None:
    nodes, rounds = make_nodes("node.schedule=epidemic")
    step_all(nodes)
    size = nodes[0].training.model.parameters.nbytes
    sent_until = {(record["round"], record["data_bytes_sent"]) for record in rounds}
    assert sent_until == {(round, (round + 1) * 2 * size) for round in range(6)}
    for record in rounds:
        sent = {int(uid) for uid, edge in record["edges"].items() if edge[0]}
        assert sent == {*nodes[0].graph.neighbors(record["uid"], record["round"])}


def test_a_node_without_arrivals_waits_for_the_first_one_and_mixes_its_newest_model() -> None:
    nodes, _ = make_nodes("node.schedule=epidemic", "node.asynchronous={arrivals: 1, deadline_seconds: 5}")
    nodes[0].begin_round(0)
    own = nodes[0].training.model.parameters.clone()
    other = torch.ones_like(own)
    steps = nodes[0]._finish_round(0)
    assert next(steps) is None
    nodes[3].communication.publish(7, {0: Payload({"x": 0 * other})}, 0)
    nodes[3].communication.publish(8, {0: Payload({"x": other})}, 0)
    assert next(steps, "over") == "over"
    torch.testing.assert_close(nodes[0].training.model.parameters, (own + other) / 2, atol=1e-6, rtol=0)


def test_the_longest_wait_equals_the_time_of_the_local_steps_within_bounds() -> None:
    nodes, rounds = make_nodes("node.schedule=epidemic", "node.asynchronous={arrivals: 0}")
    nodes[0].begin_round(0)
    assert next(nodes[0]._finish_round(0), "over") == "over"
    assert rounds[0]["mixed_copies"] == 0
    schedule = nodes[0].schedule
    assert isinstance(schedule, Epidemic)
    schedule.times.train = 0.25
    assert schedule._longest_wait() == 1
    schedule.times.train = 2.5
    assert schedule._longest_wait() == 2.5
    schedule.times.train = 1e6
    assert schedule._longest_wait() == nodes[0].communication.config.timeout_seconds


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", ["ipc", "shared_memory"])
def test_nodes_that_start_with_two_neighbors_meet_others_and_contract_over_every_transport(transport: str) -> None:
    count = 6
    config = NodeConfig.model_validate({
        "rounds": 40, "evaluate_every": 0, "schedule": "epidemic", "sampler": "cyclon",
        "asynchronous": {"deadline_seconds": 0.2},
    })  # fmt: skip
    graph = make("ring", nodes=count)
    trainings = [Quadratic(uid, 10, 0.0, -1, 3) for uid in range(count)]
    samplers = [Cyclon(CyclonConfig(name="cyclon", view=4, exchange=2, degree=2),
                       Surroundings(uid, count, graph.neighbors(uid, 0), 1)) for uid in range(count)]  # fmt: skip
    schemas = schemas_of(Full(Full.Config()), trainings[0].model, (), "epidemic")
    start, lives = stacked(trainings), dict[int, list[ProcessRecord]]()  # type: ignore[arg-type]
    with nodes_over(transport, count, (*schemas, sampler_schema(samplers[0]))) as ends:
        nodes = []
        for uid, end in enumerate(ends):
            sampling = Sampling(samplers[uid], end, len(schemas))
            parts = NodeParts(graph, trainings[uid], Full(Full.Config()), end, sampling=sampling)
            lives[uid] = [ProcessRecord(uid, 0, Path(f"{uid:03d}") / "events.jsonl")]
            end.history = History(lives[uid][0].add)
            nodes.append(Node(uid, config, parts, seed=1))
        run_on_all(ends, lambda end: nodes[end.uid].run())
        edges = {(uid, other) for uid, end in enumerate(ends) for other, edge in end.counters.known()
                 if edge.payload_bytes_received}  # fmt: skip
    assert len({(a, b) for a, b in edges if (a - b) % count not in (1, count - 1)}) > 2
    assert check_payloads(lives) > 40
    # The deviation that remains depends on the scheduling of threads: the first node to finish ends the run
    assert stacked(trainings).std(0).mean() < 0.4 * start.std(0).mean()  # type: ignore[arg-type]
    assert stacked(trainings, "buffers").std(0).max() < 1  # type: ignore[arg-type]


@pytest.mark.sampled(one=["sampler"])
@pytest.mark.parametrize("sampler", [
    "{name: cyclon, view: 4, exchange: 2, degree: 2}", "{name: knn, view: 4, exchange: 2, degree: 2, refresh: 2}",
    "{name: knn, view: 4, exchange: 2, degree: 2, by: model, sketch: 4, measure: distance, prefer: dissimilar}",
])  # fmt: skip
def test_nodes_of_a_ring_meet_others_and_repeat_bit_for_bit(sampler: str) -> None:
    keys = ["graph={name: ring, nodes: 6}", "node.schedule=epidemic", f"node.sampler={sampler}"]
    nodes, rounds = make_nodes(*keys, rounds=12)
    step_all(nodes)
    far = {(record["uid"], int(uid)) for record in rounds for uid, edge in record["edges"].items() if edge[0] > 2000}
    assert len({(a, b) for a, b in far if (a - b) % 6 not in (1, 5)}) > 8
    assert all(node.rounds.sampling is not None and len(node.rounds.sampling.sampler.known()) > 1 for node in nodes)
    again, _ = make_nodes(*keys, rounds=12)
    step_all(again)
    for one, other in zip(nodes, again, strict=True):
        assert torch.equal(one.training.model.parameters, other.training.model.parameters)


def _world(faults: Faults, *, slow: int | None = None, graph: str = "el_local", limits: Limits | None = None,
           **node: Any) -> tuple[NodeRun, World]:  # fmt: skip
    """Runs eight nodes in a world in which a round takes .1 s, and 1 s for the node `slow`."""
    options = {} if graph == "ring" else {"degree": 4}
    made = NodeRun(make(graph, nodes=8, **options), lambda: Full(Full.Config()), schedule="epidemic", evaluate_every=0,
                **node)  # fmt: skip
    world = made.world(faults=faults, limits=limits, compute_seconds=lambda uid, _: 1.0 if uid == slow else 0.1)
    assert world.run(1e4), {process.uid: process.node.doing for process in world.processes.values()}
    return made, world


@pytest.mark.slow
def test_a_slow_node_does_not_slow_the_others_and_no_node_runs_ahead() -> None:
    made, world = _world(Faults(), slow=2, rounds=60)
    assert not any(process.error for process in world.lives)
    rounds = {uid: node.round for uid, node in made.nodes.items()}
    assert rounds.pop(2) < 12 and min(rounds.values()) > 45
    times = [record["time"] for record in made.records if record["kind"] == "round" and record["uid"] == 0]
    assert max(times) - min(times) < 1.15 * 0.1 * 60
    assert all(record["wait_seconds"] < 1.01 for record in made.records if record["kind"] == "round")


@pytest.mark.slow
def test_samplers_forget_a_dead_node_over_lossy_links() -> None:
    lossy = Link(latency_seconds=0.01, jitter_seconds=0.02, queue_messages=20, loss=0.1, duplication=0.1)
    faults = Faults(links=lossy, lossy_seconds=4.0, plan=(Kill(nodes=(5,), at_round=10),))
    made, world = _world(faults, graph="ring", rounds=60, lr=0.0, missing="regroup", limits=Limits(1.0, 20.0, 4, 60),
                         sampler={"name": "cyclon", "view": 5, "exchange": 3, "degree": 3})  # fmt: skip
    assert world.happened["kill"] == 1 and world.network.happened["lost"]
    alive = {uid: node for uid, node in made.nodes.items() if uid != 5}
    samplings = {uid: node.rounds.sampling for uid, node in alive.items()}
    known = {uid: set(sampling.sampler.known()) for uid, sampling in samplings.items() if sampling is not None}
    assert len(known) == 7 and not any(5 in uids for uids in known.values())
    assert len({(a, b) for a, uids in known.items() for b in uids if (a - b) % 8 not in (1, 7)}) > 7
    models = torch.stack([node.training.model.parameters for node in alive.values()])
    start = torch.stack([node.training.initial for node in alive.values()])  # type: ignore[attr-defined]
    assert models.std(0).max() < 0.1 * start.std(0).mean()


def test_malformed_shuffles_are_counted_and_dropped() -> None:
    nodes, _ = make_nodes("graph={name: ring, nodes: 6}", "node.schedule=epidemic", "node.sampler=cyclon")
    sampling, transport = nodes[0].rounds.sampling, nodes[1].communication
    assert sampling is not None
    channel = sampling._channel
    wrong = {"uids": torch.tensor([3, 3]), "ages": torch.tensor([0, 0])}
    transport.publish(1, {0: Payload(wrong, {"kind": 0})}, channel)
    transport.publish(2, {0: Payload({name: tensor[:1] for name, tensor in wrong.items()}, {"kind": 7})}, channel)
    list(sampling.round(0))
    assert nodes[0].communication.counters.faults["malformed_shuffle"] == 2
    assert transport.schemas[channel].mailbox == MAILBOX_CAPACITY  # type: ignore[attr-defined]


def test_a_node_that_comes_back_between_two_sketches_makes_one_at_once() -> None:
    """Once it had no sketch until the next one was due, and could not send its first message."""
    sampler = "node.sampler={name: knn, by: model, view: 3, exchange: 2, degree: 2, sketch: 8, refresh: 10}"
    nodes, _ = make_nodes("graph={name: ring, nodes: 6}", "node.schedule=epidemic", sampler)
    back, other = nodes[0].rounds.sampling, nodes[1].rounds.sampling
    assert back is not None and other is not None
    for node in nodes[1:]:
        assert node.rounds.sampling is not None
        list(node.rounds.sampling.round(0))
    list(back.round(3))
    first = back.sampler.profile
    assert first.shape == (8,) and first.any()
    list(other.round(3))
    assert not other._communication.counters.faults
    list(back.round(4))
    assert back.sampler.profile is first, "a second sketch was made before it was due"


def test_sketches_keep_distances_and_cosines() -> None:
    sketch = Sketch(1, 20_000, 256)
    draws = torch.Generator().manual_seed(1)
    base = torch.randn(20_000, generator=draws)
    near, far = base + 0.3 * torch.randn(20_000, generator=draws), torch.randn(20_000, generator=draws)
    sketches = [sketch(model) for model in (base, near, far)]
    for a, b in ((0, 1), (0, 2)):
        x, y = (base, near, far)[a], (base, near, far)[b]
        assert np.linalg.norm(sketches[a] - sketches[b]) == pytest.approx(float((x - y).norm()), rel=0.25)
        cosine = sketches[a] @ sketches[b] / np.linalg.norm(sketches[a]) / np.linalg.norm(sketches[b])
        assert cosine == pytest.approx(float(torch.nn.functional.cosine_similarity(x, y, dim=0)), abs=0.2)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["node.sampler=cyclon"], "sampler needs schedule: epidemic"),
        (["node.schedule=epidemic", "node.sampler=cyclo"], "did you mean 'cyclon'"),
        (["node.schedule=epidemic", "sharing=push_sum"], "plain mean of received models"),
        (["node.schedule=epidemic", "node.sampler=cyclon", "graph={name: erdos_renyi, nodes: 6, probability: 1}",
          "node.sampler.exchange=30"], "exchange must be at most view"),
    ],
)  # fmt: skip
def test_combinations_that_cannot_work_are_refused(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        experiment(*overrides)
