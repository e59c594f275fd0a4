"""The choice of a path for every edge. What the paths deliver is tested by the common contract of transports."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from decentnode.communication.hybrid.config import HybridConfig
from decentnode.communication.hybrid.transport import Hybrid
from decentnode.communication.parts import BindPlan, TransportParts
from decentnode.communication.routing import Routing
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.faults import Break, Cut, Drop, FaultyModelLinks
from decentnode.payload import Payload
from decentnode.tensors import BLOCK_ELEMENTS
from tests.communication.contract import connected, flat_schema, gossip, open_nodes
from tests.communication.receive.test_exchange import reference_models

MACHINE_OF = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1}


def make_routing(memory: bool = True, gpu: dict[int, int] | None = None, **keys: Any) -> Routing:
    """Returns the routing of six nodes on two machines. memory: nodes of one machine may use shared memory. gpu: uid ->
    number of its GPU."""
    same_host = {} if memory else {"same_host": "ipc"}
    config = HybridConfig.model_validate({"name": "hybrid", **same_host, **keys})
    return dataclasses.replace(config.routing(MACHINE_OF), gpu=gpu or {})


def paths_of(routing: Routing, *pairs: tuple[int, int]) -> list[str]:
    return [routing.path(a, b) for a, b in pairs]


PAIRS = ((0, 1), (0, 2), (2, 3), (3, 4), (0, 5))


def test_without_cliques_nodes_of_one_machine_use_shared_memory() -> None:
    assert paths_of(make_routing(), *PAIRS) == ["shared_memory", "shared_memory", "zeromq", "shared_memory", "zeromq"]
    assert set(paths_of(make_routing(memory=False), *PAIRS)) == {"zeromq"}


def test_cliques_are_used_between_machines_and_shared_memory_within_a_machine() -> None:
    routing = make_routing(cliques=[[5, 0, 1]])
    assert paths_of(routing, *PAIRS) == ["shared_memory", "shared_memory", "zeromq", "shared_memory", "collective"]
    assert routing.joined((0, 1, 5)) == (0, 1, 5)
    assert make_routing(cliques=[[0, 1]]).joined((0, 1)) == () and not make_routing(cliques=[[0, 1]]).used("collective")
    without = make_routing(memory=False, cliques=[[0, 1], [3, 4]])
    assert paths_of(without, *PAIRS) == ["collective", "zeromq", "zeromq", "collective", "zeromq"]


def test_edges_whose_models_are_hit_by_faults_use_zeromq() -> None:
    resolved = FaultyModelLinks([
        Drop(share=0.5, source=(0,), to=(1,)), Drop(share=0.5, source=(3,), plane="control"),
        Cut(sides=((0,), (2,)), at_seconds=1.0, seconds=1.0),
        Break(source=4, to=3, plane="bulk", at_seconds=1.0),
    ])  # fmt: skip
    routing = dataclasses.replace(make_routing(gpu={0: 7, 2: 7}), has_faults=resolved, together=frozenset((0, 1, 2)))
    assert paths_of(routing, (0, 1), (1, 0), (0, 2), (3, 4), (4, 3)) == ["zeromq"] * 5
    assert paths_of(routing, (1, 2), (3, 5)) == ["same_process", "shared_memory"]


def test_nodes_open_the_same_paths_however_they_are_grouped_into_processes() -> None:
    routing = Routing({0: 0, 1: 0, 2: 1}, memory=True)
    for together in ((0, 1), ()):
        names = dataclasses.replace(routing, together=frozenset(together)).names()
        assert [name for name in names if name != "same_process"] == ["shared_memory"]


def test_nodes_on_gpus_of_one_machine_use_their_clique() -> None:
    routing = make_routing(gpu={0: 7, 1: 8, 2: 9}, cliques=[[0, 1]])
    assert paths_of(routing, *PAIRS) == ["collective", "shared_memory", "zeromq", "shared_memory", "zeromq"]


def test_nodes_on_one_gpu_share_its_memory_even_within_a_clique() -> None:
    routing = make_routing(gpu={0: 7, 1: 7, 2: 8, 5: 7}, cliques=[[0, 1, 2]])
    assert paths_of(routing, *PAIRS) == ["cuda_ipc", "collective", "zeromq", "shared_memory", "zeromq"]
    assert routing.joined((0, 1, 2)) == (0, 1, 2)
    assert paths_of(make_routing(memory=False, gpu={0: 7, 1: 7}), (0, 1)) == ["zeromq"]
    assert paths_of(make_routing(gpu={0: 7, 1: 7}, edges=[{"nodes": [0, 1], "by": "zeromq"}]), (0, 1)) == ["zeromq"]


def test_cliques_machine_makes_every_machine_a_clique() -> None:
    assert make_routing(memory=False, cliques="machine").cliques == ((0, 1, 2), (3, 4, 5))


def test_configured_edges_take_precedence_and_the_last_entry_wins() -> None:
    routing = make_routing(cliques=[[0, 1, 2]], edges=[
        {"nodes": [0, 1, 2], "by": "collective"}, {"nodes": [1, 2], "by": "zeromq"}, {"nodes": [3, 4], "by": "zeromq"},
    ])  # fmt: skip
    assert paths_of(routing, *PAIRS, (1, 2)) == ["collective", "collective", "zeromq", "zeromq", "zeromq", "zeromq"]
    assert not list(routing.problems())


def test_both_ends_of_an_edge_choose_the_same_path() -> None:
    draw = random.Random(0)
    for _ in range(200):
        uids = draw.sample(range(6), 6)
        routing = make_routing(
            memory=draw.random() < 0.5, gpu={u: draw.randrange(1, 3) for u in range(6) if draw.random() < 0.6},
            cliques=[uids[:2], uids[2:4]], edges=[{"nodes": draw.sample(range(6), 3), "by": "zeromq"}],
        )  # fmt: skip
        pairs = [(a, b) for a in range(6) for b in range(6) if a != b]
        assert paths_of(routing, *pairs) == paths_of(routing, *[(b, a) for a, b in pairs])
        for path in ("shared_memory", "cuda_ipc", "collective", "zeromq"):
            assert routing.used(path) == (path in paths_of(routing, *pairs))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "text"),
    [({"cliques": [[0, 1], [1, 2]]}, "at most one clique, got node 1"),
     ({"cliques": [[0, 9]]}, "nodes of the run, got 9 of 6"),
     ({"edges": [{"nodes": [0, 1], "by": "collective"}]}, "in one clique, got 0 and 1"),
     ({"edges": [{"nodes": [0, 3], "by": "shared_memory"}]}, "one machine, got 0 and 3"),
     ({"edges": [{"nodes": [0, 7], "by": "zeromq"}]}, "nodes of the run, got 7 of 6")],
)  # fmt: skip
def test_contradictions_in_the_config_are_reported(keys: dict[str, Any], text: str) -> None:
    routing = make_routing(**keys)
    assert any(text in problem for problem in (*routing.unknown(), *routing.problems()))


@pytest.mark.parametrize(
    ("keys", "text"),
    [({"cliques": [[0]]}, "two different uids"), ({"cliques": [[1, 1]]}, "two different uids"),
     ({"cliques": "all"}, "machine"), ({"edges": [{"nodes": [0], "by": "zeromq"}]}, "at least 2"),
     ({"edges": [{"nodes": [0, 1], "by": "pigeon"}]}, "zeromq"),
     ({"cliques": [[0, 1]], "keys": "somewhere"}, "unencrypted")],
)  # fmt: skip
def test_invalid_sections_are_refused(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        HybridConfig.model_validate({"name": "hybrid", **keys})


def test_a_transport_with_impossible_edges_is_not_created() -> None:
    with (
        pytest.raises(ValueError, match="one clique"),
        open_nodes("hybrid", 3, flat_schema(1), edges=[{"nodes": [1, 2], "by": "collective"}]),
    ):
        raise AssertionError("the nodes were created")


def test_gossip_with_cliques_and_without_gives_the_same_bits() -> None:
    elements, models = 2 * BLOCK_ELEMENTS + 5, []
    for cliques in ([], [[0, 1], [2, 3]]):
        with open_nodes("hybrid", 6, flat_schema(elements), same_host="ipc", cliques=cliques, edges=[]) as nodes:
            models.append(gossip(nodes, elements, torch.float32, 5))
            assert all(not node.counters.faults for node in nodes)
            uses_cliques = [node.parts.routing.used("collective") for node in nodes if isinstance(node, ZeroMQ)]
            assert uses_cliques == [bool(cliques)] * 6
    assert all(torch.equal(a, b) for a, b in zip(*models, strict=True))


def test_a_silent_neighbor_on_one_path_does_not_delay_payloads_on_another() -> None:
    """H7 of the rules against deadlock: node 1 waits for node 0 through the clique and for node 2 over ZeroMQ. First
    node 2 is silent, then node 0."""
    payload = Payload({"x": torch.ones(10)})
    with open_nodes("hybrid", 3, flat_schema(10)) as nodes:
        nodes[0].exchange(0, {1: payload}, ())
        (arrival,) = nodes[1].exchange(0, {}, (0, 2)).arrivals(0.3)
        assert list(arrival.received) == [0] and arrival.missing == {2}
        nodes[2].exchange(1, {1: payload}, ())
        (arrival,) = nodes[1].exchange(1, {}, (0, 2)).arrivals(0.3)
        assert list(arrival.received) == [2] and arrival.missing == {0}


def test_a_machine_with_one_node_starts_beside_one_with_shared_memory() -> None:
    """Publish buffers are created between barriers of the whole run, which a node without a buffer has to pass, too."""
    with tempfile.TemporaryDirectory(prefix="dn") as folder:
        nodes = [
            Hybrid(HybridConfig(name="auto"), TransportParts(
                uid=u, machine_of={0: 0, 1: 1, 2: 1}, schemas=flat_schema(9), digest="d", bind=BindPlan(Path(folder)),
            ))
            for u in range(3)
        ]  # fmt: skip
        with connected(nodes):
            models = gossip(nodes, 9, torch.float32, 2)
    assert all(torch.equal(a, b) for a, b in zip(models, reference_models(3, 9, torch.float32, 2), strict=True))


def test_a_clique_across_machines_meets_at_the_address_of_its_first_node() -> None:
    """Two loopback addresses stand for two machines. Everything but the clique uses TCP."""
    machine_of, config = {0: 0, 1: 0, 2: 1, 3: 1}, HybridConfig.model_validate(
        {"name": "hybrid", "cliques": [[1, 2, 3]], "edges": [{"nodes": [2, 3], "by": "collective"}]}
    )
    nodes = [
        Hybrid(config, TransportParts(
            uid=u, machine_of=machine_of, schemas=flat_schema(1000), digest="d",
            bind=BindPlan(host=f"127.0.0.{m + 1}"),
        ))
        for u, m in machine_of.items()
    ]  # fmt: skip
    with connected(nodes):
        assert [sorted(node.parts.paths.reached["collective"]) for node in nodes] == [[], [2, 3], [1, 3], [1, 2]]
        models = gossip(nodes, 1000, torch.float32, 3)
    assert all(torch.equal(a, b) for a, b in zip(models, reference_models(4, 1000, torch.float32, 3), strict=True))


def test_an_edge_can_use_a_user_defined_path() -> None:
    own = "tests.communication.unix_path:UnixSocketPath"
    edges = [{"nodes": [0, 1], "by": own}, {"nodes": [1, 2], "by": "zeromq"}]
    routing = make_routing(edges=edges)
    assert paths_of(routing, (0, 1), (1, 2), (0, 2)) == [own, "zeromq", "shared_memory"]
    assert routing.names() == ["shared_memory", own] and not list(routing.problems())
    with open_nodes("hybrid", 3, flat_schema(1000), cliques=[], edges=edges) as nodes:
        opened = [node.parts.paths.reached for node in nodes if isinstance(node, ZeroMQ)]
        assert [{name: set(uids) for name, uids in reached.items()} for reached in opened] == [
            {"shared_memory": {2}, own: {1}}, {"shared_memory": set(), own: {0}}, {"shared_memory": {0}, own: set()},
        ]
        models = gossip(nodes, 1000, torch.float32, 3)
    assert all(torch.equal(a, b) for a, b in zip(models, reference_models(3, 1000, torch.float32, 3), strict=True))


def test_an_unknown_path_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValidationError, match=r"must be shared_memory, collective, zeromq or package\.module:Class"):
        HybridConfig.model_validate({"name": "hybrid", "edges": [{"nodes": [0, 1], "by": "shard_memory"}]})
