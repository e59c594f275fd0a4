"""The rule that gives every edge its way, alone; what the ways deliver is the common contract's."""

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
from tests.communication.contract import connected, flat_schema, gossip, nodes
from tests.communication.receive.test_exchange import reference

TWO_MACHINES = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1}


def rule(memory: bool = True, gpu: dict[int, int] | None = None, **keys: Any) -> Routing:
    same_host = {} if memory else {"same_host": "ipc"}
    config = HybridConfig.model_validate({"name": "hybrid", **same_host, **keys})
    return dataclasses.replace(config.routing(TWO_MACHINES), gpu=gpu or {})


def paths(found: Routing, *pairs: tuple[int, int]) -> list[str]:
    return [found.path(a, b) for a, b in pairs]


PAIRS = ((0, 1), (0, 2), (2, 3), (3, 4), (0, 5))


def test_without_cliques_machines_decide() -> None:
    assert paths(rule(), *PAIRS) == ["shared_memory", "shared_memory", "zeromq", "shared_memory", "zeromq"]
    assert set(paths(rule(memory=False), *PAIRS)) == {"zeromq"}


def test_a_clique_joins_machines_and_yields_to_shared_memory_between_cpus() -> None:
    found = rule(cliques=[[5, 0, 1]])
    assert paths(found, *PAIRS) == ["shared_memory", "shared_memory", "zeromq", "shared_memory", "collective"]
    assert found.joined((0, 1, 5)) == (0, 1, 5)
    assert rule(cliques=[[0, 1]]).joined((0, 1)) == () and not rule(cliques=[[0, 1]]).used("collective")
    without = rule(memory=False, cliques=[[0, 1], [3, 4]])
    assert paths(without, *PAIRS) == ["collective", "zeromq", "zeromq", "collective", "zeromq"]


def test_models_that_faults_strike_go_through_sockets_alone() -> None:
    resolved = FaultyModelLinks([
        Drop(share=0.5, source=(0,), to=(1,)), Drop(share=0.5, source=(3,), plane="control"),
        Cut(sides=((0,), (2,)), at_seconds=1.0, seconds=1.0),
        Break(source=4, to=3, plane="bulk", at_seconds=1.0),
    ])  # fmt: skip
    found = dataclasses.replace(rule(gpu={0: 7, 2: 7}), struck=resolved, together=frozenset((0, 1, 2)))
    assert paths(found, (0, 1), (1, 0), (0, 2), (3, 4), (4, 3)) == ["zeromq"] * 5
    assert paths(found, (1, 2), (3, 5)) == ["same_process", "shared_memory"]


def test_all_nodes_open_the_same_paths_whatever_processes_they_share() -> None:
    found = Routing({0: 0, 1: 0, 2: 1}, memory=True)
    for together in ((0, 1), ()):
        names = dataclasses.replace(found, together=frozenset(together)).names()
        assert [name for name in names if name != "same_process"] == ["shared_memory"]


def test_gpus_prefer_their_clique() -> None:
    found = rule(gpu={0: 7, 1: 8, 2: 9}, cliques=[[0, 1]])
    assert paths(found, *PAIRS) == ["collective", "shared_memory", "zeromq", "shared_memory", "zeromq"]


def test_nodes_on_one_gpu_share_its_memory_whatever_their_clique() -> None:
    found = rule(gpu={0: 7, 1: 7, 2: 8, 5: 7}, cliques=[[0, 1, 2]])
    assert paths(found, *PAIRS) == ["cuda_ipc", "collective", "zeromq", "shared_memory", "zeromq"]
    assert found.joined((0, 1, 2)) == (0, 1, 2)
    assert paths(rule(memory=False, gpu={0: 7, 1: 7}), (0, 1)) == ["zeromq"]
    assert paths(rule(gpu={0: 7, 1: 7}, edges=[{"nodes": [0, 1], "by": "zeromq"}]), (0, 1)) == ["zeromq"]


def test_every_machine_can_be_a_clique() -> None:
    assert rule(memory=False, cliques="machine").cliques == ((0, 1, 2), (3, 4, 5))


def test_the_configuration_overrides_and_the_last_entry_counts() -> None:
    found = rule(cliques=[[0, 1, 2]], edges=[
        {"nodes": [0, 1, 2], "by": "collective"}, {"nodes": [1, 2], "by": "zeromq"}, {"nodes": [3, 4], "by": "zeromq"},
    ])  # fmt: skip
    assert paths(found, *PAIRS, (1, 2)) == ["collective", "collective", "zeromq", "zeromq", "zeromq", "zeromq"]
    assert not list(found.problems())


def test_both_ends_come_to_the_same_answer() -> None:
    draw = random.Random(0)
    for _ in range(200):
        uids = draw.sample(range(6), 6)
        found = rule(
            memory=draw.random() < 0.5, gpu={u: draw.randrange(1, 3) for u in range(6) if draw.random() < 0.6},
            cliques=[uids[:2], uids[2:4]], edges=[{"nodes": draw.sample(range(6), 3), "by": "zeromq"}],
        )  # fmt: skip
        pairs = [(a, b) for a in range(6) for b in range(6) if a != b]
        assert paths(found, *pairs) == paths(found, *[(b, a) for a, b in pairs])
        for path in ("shared_memory", "cuda_ipc", "collective", "zeromq"):
            assert found.used(path) == (path in paths(found, *pairs))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "text"),
    [({"cliques": [[0, 1], [1, 2]]}, "at most one clique, got node 1"),
     ({"cliques": [[0, 9]]}, "nodes of the run, got 9 of 6"),
     ({"edges": [{"nodes": [0, 1], "by": "collective"}]}, "in one clique, got 0 and 1"),
     ({"edges": [{"nodes": [0, 3], "by": "shared_memory"}]}, "one machine, got 0 and 3"),
     ({"edges": [{"nodes": [0, 7], "by": "zeromq"}]}, "nodes of the run, got 7 of 6")],
)  # fmt: skip
def test_contradictions_are_named(keys: dict[str, Any], text: str) -> None:
    found = rule(**keys)
    assert any(text in problem for problem in (*found.unknown(), *found.problems()))


@pytest.mark.parametrize(
    ("keys", "text"),
    [({"cliques": [[0]]}, "two different uids"), ({"cliques": [[1, 1]]}, "two different uids"),
     ({"cliques": "all"}, "machine"), ({"edges": [{"nodes": [0], "by": "zeromq"}]}, "at least 2"),
     ({"edges": [{"nodes": [0, 1], "by": "pigeon"}]}, "zeromq"),
     ({"cliques": [[0, 1]], "keys": "somewhere"}, "unencrypted")],
)  # fmt: skip
def test_wrong_sections_are_refused(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        HybridConfig.model_validate({"name": "hybrid", **keys})


def test_a_transport_with_impossible_edges_is_not_made() -> None:
    with (
        pytest.raises(ValueError, match="one clique"),
        nodes("hybrid", 3, flat_schema(1), edges=[{"nodes": [1, 2], "by": "collective"}]),
    ):
        raise AssertionError("made")


def test_two_gloo_cliques_and_two_other_nodes_give_the_bits_of_zeromq_alone() -> None:
    elements, found = 2 * BLOCK_ELEMENTS + 5, []
    for cliques in ([], [[0, 1], [2, 3]]):
        with nodes("hybrid", 6, flat_schema(elements), same_host="ipc", cliques=cliques, edges=[]) as made:
            found.append(gossip(made, elements, torch.float32, 5))
            assert all(not node.counters.faults for node in made)
            paths = [node.parts.routing.used("collective") for node in made if isinstance(node, ZeroMQ)]
            assert paths == [bool(cliques)] * 6
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_a_neighbor_on_another_way_lacks_does_not_hold_back_the_rest() -> None:
    """H7: node 1 waits for node 0 through the clique and for node 2 over ZeroMQ; 2 is silent."""
    payload = Payload({"x": torch.ones(10)})
    with nodes("hybrid", 3, flat_schema(10)) as made:
        made[0].exchange(0, {1: payload}, ())
        (arrival,) = made[1].exchange(0, {}, (0, 2)).arrivals(0.3)
        assert list(arrival.received) == [0] and arrival.missing == {2}
        made[2].exchange(1, {1: payload}, ())
        (arrival,) = made[1].exchange(1, {}, (0, 2)).arrivals(0.3)
        assert list(arrival.received) == [2] and arrival.missing == {0}


def test_a_machine_with_one_node_starts_beside_one_with_shared_memory() -> None:
    """Publish buffers are made behind barriers of the whole run, which a node without one has to pass too."""
    with tempfile.TemporaryDirectory(prefix="dn") as folder:
        made = [
            Hybrid(HybridConfig(name="auto"), TransportParts(
                uid=u, machine_of={0: 0, 1: 1, 2: 1}, schemas=flat_schema(9), digest="d", bind=BindPlan(Path(folder)),
            ))
            for u in range(3)
        ]  # fmt: skip
        with connected(made):
            models = gossip(made, 9, torch.float32, 2)
    assert all(torch.equal(a, b) for a, b in zip(models, reference(3, 9, torch.float32, 2), strict=True))


def test_a_clique_across_machines_meets_at_the_address_of_its_first_node() -> None:
    """Two loopback addresses stand for two machines; everything over tcp, but for the clique."""
    machine_of, config = {0: 0, 1: 0, 2: 1, 3: 1}, HybridConfig.model_validate(
        {"name": "hybrid", "cliques": [[1, 2, 3]], "edges": [{"nodes": [2, 3], "by": "collective"}]}
    )
    made = [
        Hybrid(config, TransportParts(
            uid=u, machine_of=machine_of, schemas=flat_schema(1000), digest="d",
            bind=BindPlan(host=f"127.0.0.{m + 1}"),
        ))
        for u, m in machine_of.items()
    ]  # fmt: skip
    with connected(made):
        assert [sorted(node.parts.paths.reached["collective"]) for node in made] == [[], [2, 3], [1, 3], [1, 2]]
        models = gossip(made, 1000, torch.float32, 3)
    assert all(torch.equal(a, b) for a, b in zip(models, reference(4, 1000, torch.float32, 3), strict=True))


def test_an_edge_can_take_a_path_of_ones_own() -> None:
    own = "tests.communication.unix_path:UnixSocketPath"
    edges = [{"nodes": [0, 1], "by": own}, {"nodes": [1, 2], "by": "zeromq"}]
    found = rule(edges=edges)
    assert paths(found, (0, 1), (1, 2), (0, 2)) == [own, "zeromq", "shared_memory"]
    assert found.names() == ["shared_memory", own] and not list(found.problems())
    with nodes("hybrid", 3, flat_schema(1000), cliques=[], edges=edges) as made:
        opened = [node.parts.paths.reached for node in made if isinstance(node, ZeroMQ)]
        assert [{name: set(uids) for name, uids in each.items()} for each in opened] == [
            {"shared_memory": {2}, own: {1}}, {"shared_memory": set(), own: {0}}, {"shared_memory": {0}, own: set()},
        ]
        models = gossip(made, 1000, torch.float32, 3)
    assert all(torch.equal(a, b) for a, b in zip(models, reference(3, 1000, torch.float32, 3), strict=True))


def test_a_path_that_there_is_not_is_named() -> None:
    with pytest.raises(ValidationError, match=r"must be shared_memory, collective, zeromq or package\.module:Class"):
        HybridConfig.model_validate({"name": "hybrid", "edges": [{"nodes": [0, 1], "by": "shard_memory"}]})
