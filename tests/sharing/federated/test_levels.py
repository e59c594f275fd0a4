"""Several servers with clients, which gossip among each other; and codecs with the rules for servers."""

from __future__ import annotations

import pytest
import torch

from decentnode.build import build_in_process, step_all
from decentnode.compression import CODECS
from decentnode.errors import GraphError
from decentnode.graph.base import view
from decentnode.sharing import WITH_SERVERS
from tests.graph.contract import make
from tests.sharing.federated.runs import LocalTraining, model_of, star_experiment

ROUNDS = 6
SERVERS = (1, 4, 7)
"""The servers of three groups of three nodes; the middle node of each group is its server."""
NINE = {
    "graph": {"name": "star", "nodes": 9, "server": 1, "servers": {"name": "line", "nodes": 3}},
    "mapping": {"machines": 1, "nodes_per_machine": 9},
}


def test_each_server_has_clients_and_neighbors_among_the_servers() -> None:
    graph = make("star", nodes=9, server=1, servers={"name": "line", "nodes": 3})
    assert dict(graph.servers) == {1: (0, 2), 4: (3, 5), 7: (6, 8)}
    assert [graph.neighbors(uid, 0) for uid in range(9)] == [
        (1,), (0, 2, 4), (1,), (4,), (1, 3, 5, 7), (4,), (7,), (4, 6, 8), (7,),
    ]  # fmt: skip
    line = make("line", nodes=3)
    for at, uid in enumerate(SERVERS):
        row = graph.between(uid, 0)
        assert row == {SERVERS[j]: weight for j, weight in line.weights(at, 0).items()}
        alive = graph.between(uid, 0, {*range(9)} - {7})
        assert (sum(alive.values()) == pytest.approx(1) and 7 not in alive) or uid == 7
    round_view = view(graph, 1, 0)
    assert round_view.servers == graph.servers and round_view.between == graph.between(1, 0)
    assert view(make("ring", nodes=4), 0, 0).servers == {}


def test_invalid_graphs_of_servers_are_refused() -> None:
    with pytest.raises(GraphError, match="servers need an undirected graph"):
        make("star", nodes=8, servers={"name": "exponential", "nodes": 4})
    with pytest.raises(GraphError, match="multiple of 3 servers, got 8"):
        make("star", nodes=8, servers={"name": "ring", "nodes": 3})


@pytest.mark.parametrize("every", [1, 2])
def test_servers_average_their_clients_in_every_round_and_gossip_every_few_rounds(every: int) -> None:
    experiment = star_experiment({"name": "fedavg", "gossip_every": every, "weighted_by": "equal"}, **NINE)
    nodes, local, line = build_in_process(experiment), LocalTraining(experiment), make("line", nodes=3).matrix(0)
    step_all(nodes)
    models = [local.start.double() for _ in SERVERS]
    for r in range(ROUNDS):
        for at, server in enumerate(SERVERS):
            x = models[at].float()
            changes = [local.change(uid, x, r) for uid in (server - 1, server + 1)]
            models[at] = models[at] + sum(changes).double() / 2  # type: ignore[union-attr]
        if (r + 1) % every == 0:
            models = [sum(line[at, j] * models[j] for j in range(3)) for at in range(3)]  # type: ignore[misc]
    for at, server in enumerate(SERVERS):
        torch.testing.assert_close(model_of(nodes[server]).double(), models[at], atol=1e-6, rtol=0)
    assert nodes[0].merged is not None
    mean = torch.stack([model_of(nodes[server]) for server in SERVERS]).double().mean(0)
    torch.testing.assert_close(nodes[0].merged.double(), mean, atol=1e-6, rtol=0)
    rms = torch.stack([(model_of(nodes[server]).double() - mean).square().sum() for server in SERVERS]).mean().sqrt()
    assert nodes[0].evaluation["consensus_rms"] == pytest.approx(float(rms), rel=1e-4), "clients must not count"


@pytest.mark.slow
def test_servers_with_momentum_reach_consensus_on_a_changing_graph() -> None:
    graph = {"name": "star", "nodes": 12, "servers": {"name": "one_peer_exponential", "nodes": 4}}
    for rule in ("fedavgm", "scaffold", "fedstc"):
        nodes = build_in_process(star_experiment(
            {"name": rule, "gossip_every": 2, "clients": 1}, graph=graph,
            mapping={"machines": 1, "nodes_per_machine": 12},
            training={"batch_size": 4, "local_steps": 2, "lr_schedule": {"name": "exponential", "gamma": 0.7}},
            node={"rounds": 24, "evaluate_every": 0},
        ))  # fmt: skip
        step_all(nodes)
        models = torch.stack([model_of(nodes[server]) for server in (0, 3, 6, 9)])
        assert float((models - models.mean(0)).norm()) < 0.05 * float(models.norm()), rule


LOSSLESS = ("zlib", "zstd", "lz4")
DENSE = [name for name in WITH_SERVERS if name != "fedstc"]


@pytest.mark.sampled(one=["codec"])
@pytest.mark.parametrize(("codec", "rule"), [(codec, DENSE[i % len(DENSE)]) for i, codec in enumerate(CODECS)])
def test_server_rules_with_a_codec_train_with_fewer_bytes_or_losslessly(codec: str, rule: str) -> None:
    pytest.importorskip({"zstd": "zstandard", "lz4": "lz4"}.get(codec, "torch"))
    plain, coded = (build_in_process(star_experiment({"name": rule, "clients": 3, **keys}))
                    for keys in ({}, {"compression": {"name": codec}}))  # fmt: skip
    step_all(plain)
    step_all(coded)
    x, y = model_of(plain[0]), model_of(coded[0])
    if codec in LOSSLESS:
        assert torch.equal(x, y)
    else:
        start = model_of(build_in_process(star_experiment({"name": "fedavg"}))[0])
        assert bool(y.isfinite().all()) and not torch.equal(y, start)
        sent, usual = (nodes[0].communication.counters.bytes_sent()["data"] for nodes in (coded, plain))
        assert sent < usual
