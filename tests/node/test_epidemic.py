"""Rounds in which nodes expect nobody, and neighbors that they find by what they tell each other."""

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


def made(*overrides: str, rounds: int = 6) -> tuple[list[Node], list[dict[str, Any]]]:
    """The nodes of a run, and the records of their rounds."""
    records: list[dict[str, Any]] = []

    def record(uid: int, each: dict[str, Any]) -> None:
        if each["kind"] == "round":
            records.append({"uid": uid, **each})

    return build_in_process(experiment(*overrides, rounds=rounds), record), records


def in_step(nodes: list[Node], rounds: int) -> None:
    """All nodes finish a round before any begins the next."""
    for r in range(rounds):
        for node in nodes:
            node.begin_round(r)
        for node in nodes:
            node.finish_round(r)
            node.round += 1


def test_nodes_in_step_mix_what_those_mix_that_know_who_sends() -> None:
    (waits, _), (goes, rounds) = made(), made("node.schedule=epidemic")
    for nodes in (waits, goes):
        in_step(nodes, 6)
    for one, other in zip(waits, goes, strict=True):
        assert torch.equal(one.training.model.parameters, other.training.model.parameters)
    graph = goes[0].graph
    assert {(each["uid"], each["round"]): each["mixed_copies"] for each in rounds} == {
        (uid, r): len(graph.sources(uid, r)) for uid in range(6) for r in range(6)
    }


def test_a_node_sends_as_many_models_as_it_drew_and_nothing_to_others() -> None:
    nodes, rounds = made("node.schedule=epidemic")
    step_all(nodes)
    size = nodes[0].training.model.parameters.nbytes
    assert {(each["round"], each["data_bytes_sent"]) for each in rounds} == {(r, (r + 1) * 2 * size) for r in range(6)}
    for each in rounds:
        sent = {int(uid) for uid, edge in each["edges"].items() if edge[0]}
        assert sent == {*nodes[0].graph.neighbors(each["uid"], each["round"])}


def test_who_gets_nothing_waits_for_the_first_to_come() -> None:
    nodes, _ = made("node.schedule=epidemic", "node.asynchronous={arrivals: 1, deadline_seconds: 5}")
    nodes[0].begin_round(0)
    own = nodes[0].training.model.parameters.clone()
    other = torch.ones_like(own)
    steps = nodes[0]._finish_round(0)
    assert next(steps) is None
    nodes[3].communication.publish(7, {0: Payload({"x": 0 * other})}, 0)
    nodes[3].communication.publish(8, {0: Payload({"x": other})}, 0)
    assert next(steps, "over") == "over"
    torch.testing.assert_close(nodes[0].training.model.parameters, (own + other) / 2, atol=1e-6, rtol=0)


def test_the_longest_wait_is_that_of_the_local_steps_within_bounds() -> None:
    nodes, rounds = made("node.schedule=epidemic", "node.asynchronous={arrivals: 0}")
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
def test_nodes_that_know_two_others_come_together_over_every_transport(transport: str) -> None:
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
    assert check_payloads(lives) > 40, "and what they mixed is what others sent"
    # how near they come depends on how the machine lets them run: the first that has made all rounds ends the run
    assert stacked(trainings).std(0).mean() < 0.4 * start.std(0).mean()  # type: ignore[arg-type]
    assert stacked(trainings, "buffers").std(0).max() < 1  # type: ignore[arg-type]


@pytest.mark.sampled(one=["sampler"])
@pytest.mark.parametrize("sampler", [
    "{name: cyclon, view: 4, exchange: 2, degree: 2}", "{name: knn, view: 4, exchange: 2, degree: 2, refresh: 2}",
    "{name: knn, view: 4, exchange: 2, degree: 2, by: model, sketch: 4, measure: distance, prefer: dissimilar}",
])  # fmt: skip
def test_nodes_of_a_ring_meet_others_and_learn(sampler: str) -> None:
    keys = ["graph={name: ring, nodes: 6}", "node.schedule=epidemic", f"node.sampler={sampler}"]
    nodes, rounds = made(*keys, rounds=12)
    step_all(nodes)
    far = {(each["uid"], int(uid)) for each in rounds for uid, edge in each["edges"].items() if edge[0] > 2000}
    assert len({(a, b) for a, b in far if (a - b) % 6 not in (1, 5)}) > 8
    assert all(node.rounds.sampling is not None and len(node.rounds.sampling.sampler.known()) > 1 for node in nodes)
    again, _ = made(*keys, rounds=12)
    step_all(again)
    for one, other in zip(nodes, again, strict=True):
        assert torch.equal(one.training.model.parameters, other.training.model.parameters)


def _world(faults: Faults, *, slow: int | None = None, graph: str = "el_local", limits: Limits | None = None,
           **node: Any) -> tuple[NodeRun, World]:  # fmt: skip
    """A run of eight nodes in a world in which a round takes .1 s, and ten times as long for one."""
    options = {} if graph == "ring" else {"degree": 4}
    made = NodeRun(make(graph, nodes=8, **options), lambda: Full(Full.Config()), schedule="epidemic", evaluate_every=0,
                **node)  # fmt: skip
    world = made.world(faults=faults, limits=limits, compute_seconds=lambda uid, _: 1.0 if uid == slow else 0.1)
    assert world.run(1e4), {each.uid: each.node.doing for each in world.processes.values()}
    return made, world


@pytest.mark.slow
def test_a_slow_node_slows_nobody_and_no_node_runs_away() -> None:
    made, world = _world(Faults(), slow=2, rounds=60)
    assert not any(process.error for process in world.lives)
    rounds = {uid: node.round for uid, node in made.nodes.items()}
    assert rounds.pop(2) < 12 and min(rounds.values()) > 45
    last = max(each["time"] for each in made.records if each["kind"] == "round" and each["uid"] == 0)
    first = min(each["time"] for each in made.records if each["kind"] == "round" and each["uid"] == 0)
    assert last - first < 1.15 * 0.1 * 60
    assert all(each["wait_seconds"] < 1.01 for each in made.records if each["kind"] == "round")


@pytest.mark.slow
def test_who_dies_is_forgotten_by_those_who_shuffle_over_lossy_links() -> None:
    lossy = Link(latency_seconds=0.01, jitter_seconds=0.02, queue_messages=20, loss=0.1, duplication=0.1)
    faults = Faults(links=lossy, lossy_seconds=4.0, plan=(Kill(nodes=(5,), at_round=10),))
    made, world = _world(faults, graph="ring", rounds=60, lr=0.0, missing="regroup", limits=Limits(1.0, 20.0, 4, 60),
                         sampler={"name": "cyclon", "view": 5, "exchange": 3, "degree": 3})  # fmt: skip
    assert world.happened["kill"] == 1 and world.network.happened["lost"]
    alive = {uid: node for uid, node in made.nodes.items() if uid != 5}
    samplings = {uid: node.rounds.sampling for uid, node in alive.items()}
    known = {uid: set(each.sampler.known()) for uid, each in samplings.items() if each is not None}
    assert len(known) == 7 and not any(5 in each for each in known.values())
    assert len({(a, b) for a, each in known.items() for b in each if (a - b) % 8 not in (1, 7)}) > 7
    models = torch.stack([node.training.model.parameters for node in alive.values()])
    start = torch.stack([node.training.initial for node in alive.values()])  # type: ignore[attr-defined]
    assert models.std(0).max() < 0.1 * start.std(0).mean()


def test_what_no_sampler_sends_is_counted_and_dropped() -> None:
    nodes, _ = made("graph={name: ring, nodes: 6}", "node.schedule=epidemic", "node.sampler=cyclon")
    sampling, transport = nodes[0].rounds.sampling, nodes[1].communication
    assert sampling is not None
    channel = sampling._channel
    wrong = {"uids": torch.tensor([3, 3]), "ages": torch.tensor([0, 0])}
    transport.publish(1, {0: Payload(wrong, {"kind": 0})}, channel)
    transport.publish(2, {0: Payload({name: each[:1] for name, each in wrong.items()}, {"kind": 7})}, channel)
    list(sampling.round(0))
    assert nodes[0].communication.counters.faults["malformed_shuffle"] == 2
    assert transport.schemas[channel].mailbox == MAILBOX_CAPACITY  # type: ignore[attr-defined]


def test_who_comes_back_between_two_sketches_tells_of_its_model() -> None:
    """It had nothing to tell of until the next one was due, and could not send its first message."""
    sampler = "node.sampler={name: knn, by: model, view: 3, exchange: 2, degree: 2, sketch: 8, refresh: 10}"
    nodes, _ = made("graph={name: ring, nodes: 6}", "node.schedule=epidemic", sampler)
    back, other = nodes[0].rounds.sampling, nodes[1].rounds.sampling
    assert back is not None and other is not None
    for each in nodes[1:]:
        assert each.rounds.sampling is not None
        list(each.rounds.sampling.round(0))
    list(back.round(3))
    first = back.sampler.profile
    assert first.shape == (8,) and first.any()
    list(other.round(3))
    assert not other._communication.counters.faults
    list(back.round(4))
    assert back.sampler.profile is first, "the next is told when it is due"


def test_sketches_keep_distances_and_cosines() -> None:
    sketch = Sketch(1, 20_000, 256)
    draws = torch.Generator().manual_seed(1)
    base = torch.randn(20_000, generator=draws)
    near, far = base + 0.3 * torch.randn(20_000, generator=draws), torch.randn(20_000, generator=draws)
    said = [sketch(model) for model in (base, near, far)]
    for a, b in ((0, 1), (0, 2)):
        x, y = (base, near, far)[a], (base, near, far)[b]
        assert np.linalg.norm(said[a] - said[b]) == pytest.approx(float((x - y).norm()), rel=0.25)
        cosine = said[a] @ said[b] / np.linalg.norm(said[a]) / np.linalg.norm(said[b])
        assert cosine == pytest.approx(float(torch.nn.functional.cosine_similarity(x, y, dim=0)), abs=0.2)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["node.sampler=cyclon"], "sampler needs schedule: epidemic"),
        (["node.schedule=epidemic", "node.sampler=cyclo"], "did you mean 'cyclon'"),
        (["node.schedule=epidemic", "sharing=push_sum"], "plain mean of received models"),
        (["node.schedule=epidemic", "node.sampler=cyclon", "graph={name: erdos_renyi, nodes: 6, probability: 1}",
          "node.sampler.exchange=30"], "exchange must be at most view"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        experiment(*overrides)
