"""Operations of torch.distributed in virtual time: beside step-by-step loops, formulas, and what runs send."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from decentnode import run as run_experiment
from decentnode.cli import main
from decentnode.errors import ConfigError
from decentnode.experiment import Experiment, load
from decentnode.experiment.virtual_time import CallCostsConfig, ComputeConfig, LinksConfig
from decentnode.sharing import SHARINGS
from decentnode.simulate.cliques import COSTS, CliqueTransfers, backend_of, costs_of, gpus_of
from decentnode.simulate.timeline.collectives import TREE_BYTES, CallCosts, Calls, PhaseBuilder, group_averages
from decentnode.simulate.timeline.compute import Compute
from decentnode.simulate.timeline.network import BATCH, MESSAGE, RENDEZVOUS, Network, Transfers
from decentnode.simulate.timeline.rounds import Clock, TimeLine, time_line
from decentnode.simulate.virtual import make_clock

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
MBIT = 1e6 / 8
FREE = CallCosts(0.0, 0.0, 0.0, 0.0)


def network(machines: list[int], **links: Any) -> Network:
    return Network(LinksConfig.model_validate(links), machines)


def clock(made: Network, transfers: Transfers, *, seconds: list[float], **options: Any) -> TimeLine:
    config = ComputeConfig.model_validate({"step_seconds": 1.0, "factors": seconds})
    compute = Compute(config, made.machine_of.tolist(), step_seconds=1.0)
    return time_line(Clock(compute, made, lambda _: [transfers], **options), 3)


def joined(edges: list[tuple[int, int]], size: float, join: int, seconds: float = 0.0, **more: Any) -> Transfers:
    phase = PhaseBuilder()
    phase.add(edges, [size] * len(edges), [join] * len(edges), [seconds] * len(edges), **more)
    return phase.transfers()


# -- one call


@pytest.mark.parametrize("nodes", [2, 3, 5, 8])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_ring_takes_as_long_as_its_steps_one_by_one(nodes: int, kind: Any) -> None:
    size, rate, hop, latency = 3e6, 100 * MBIT, 0.004, 0.002
    made = network([0] * nodes, same_machine={"mbit_per_second": 100, "latency_seconds": latency})
    calls = Calls(CallCosts(0.01, 0.5, hop, 9.0), made)
    part = size / nodes if kind == "all_reduce" else size
    now = [0.01] * nodes
    for _ in range((2 if kind == "all_reduce" else 1) * (nodes - 1)):
        now = [max(now[i], now[i - 1] + part / rate + latency + hop) for i in range(nodes)]
    flows = calls.average(range(nodes), size, kind)
    phase = PhaseBuilder()
    phase.add_call(flows, size)
    assert made.arrivals(phase.transfers(), np.zeros(nodes), 0) == pytest.approx(now[0])


def test_chunks_are_calls_one_after_the_other() -> None:
    made = network([0, 0, 0])
    costs = CallCosts(0.1, 0.0, 0.01, 0.0)
    one, four = Calls(costs, made).average(range(3), 4e6), Calls(costs, made, 1e6).average(range(3), 4e6)
    assert four.seconds == pytest.approx(4 * one.seconds) and four.edges == one.edges
    assert [Calls(costs, made, 1e6).num_calls(size) for size in (0, 1, 1e6, 1e6 + 1)] == [1, 1, 1, 2]


def test_two_machines_send_a_model_once_and_more_of_them_take_the_faster_of_ring_and_trees() -> None:
    def crossing(machines: list[int], size: float, costs: CallCosts) -> float:
        made = network(machines, uplink_mbit_per_second=100)
        found = Calls(costs, made).average(range(len(machines)), size)
        return sum(bytes for i, j, bytes in found.edges if machines[i] == 0 != machines[j])

    quick, slow = CallCosts(0.0, 0.0, 0.0, 1e-9, trees=True), CallCosts(0.0, 0.0, 0.0, 1.0, trees=True)
    eight = [0, 0, 1, 1, 2, 2, 3, 3]
    assert crossing([0, 0, 1, 1], 8.0, quick) == 8
    assert crossing([0, 0, 1, 1], 8.0, FREE) == pytest.approx(2 * 3 / 4 * 8), "gloo has rings alone"
    assert crossing(eight, 8e6, quick) == pytest.approx(2 * 7 / 8 * 8e6)
    assert crossing(eight, 8e6, slow) == pytest.approx(TREE_BYTES * 8e6), "four hops instead of 14 in a row"


def test_a_batch_costs_more_with_every_neighbor_and_nothing_else() -> None:
    calls = Calls(CallCosts(0.1, 0.01, 0.001, 0.002), network([0, 0, 1]), 1e6)
    modes, seconds = calls.point_to_point([(0, 1), (1, 0), (0, 2)], [1e6, 1e6, 3e6], batched=True)
    assert modes == [BATCH] * 3
    assert seconds == pytest.approx([0.1 + 0.02 + 0.001, 0.1 + 0.02 + 0.001, 3 * (0.1 + 0.02 + 0.002)])
    assert calls.point_to_point([(0, 1)], [0.0], batched=False)[0] == [RENDEZVOUS]


# -- when transfers begin and end


def test_a_message_leaves_alone_a_meeting_needs_both_and_a_batch_ends_as_one() -> None:
    edges = [(0, 1), (1, 0), (1, 2), (2, 1)]
    made = network([0, 1, 2], between_machines={"latency_seconds": 0.25})
    seconds = [1.0, 2.0, 4.0]
    sent = clock(made, joined(edges, 0.0, MESSAGE), seconds=seconds)
    assert sent.end[0].tolist() == [2.25, 4.25, 4.0]
    assert sent.waits_for[0].tolist() == [1, 2, -1]
    met = clock(made, joined(edges, 0.0, RENDEZVOUS), seconds=seconds)
    assert met.end[0].tolist() == [2.25, 4.25, 4.25], "node 2 gets nothing before it has begun to receive"
    batch = clock(made, joined(edges, 0.0, BATCH), seconds=seconds)
    assert batch.end[0].tolist() == [2.25, 4.25, 4.25]
    one_way = clock(made, joined([(0, 1), (1, 2)], 0.0, BATCH), seconds=seconds)
    assert one_way.end[0].tolist() == [1.0, 4.25, 4.25], "node 1 has its own sends in the batch in which it receives"
    assert clock(made, joined([(0, 1), (1, 2)], 0.0, RENDEZVOUS), seconds=seconds).end[0].tolist() == [1.0, 2.25, 4.25]


def test_a_collective_call_waits_for_its_slowest_member_and_names_it() -> None:
    made = network([0, 1, 2, 3, 4], between_machines={"mbit_per_second": 8})
    calls = Calls(FREE, made)
    found = clock(made, group_averages(calls, [[0, 1, 2, 3]], 1e6), seconds=[1.0, 1.0, 3.0, 1.0, 1.0])
    assert found.end[0].tolist() == pytest.approx([4.5, 4.5, 4.5, 4.5, 1.0])  # 1.5 MB over each link of 1 MB/s
    assert found.waits_for[0].tolist() == [2, 2, 1, 2, -1]
    assert group_averages(calls, [[0]], 1e6).sizes.size == 0


@given(seconds=st.lists(st.floats(0.5, 2), min_size=6, max_size=6), modes=st.lists(
    st.sampled_from([MESSAGE, RENDEZVOUS, BATCH, 0]), min_size=30, max_size=30))  # fmt: skip
def test_nobody_has_anything_before_both_ends_were_ready_but_messages(seconds: list[float], modes: list[int]) -> None:
    edges = [(i, j) for i in range(6) for j in range(6) if i != j]
    phase = PhaseBuilder()
    phase.add(edges, [1e5] * 30, modes, [0.01] * 30)
    transfers, made = phase.transfers(), network([0, 0, 0, 1, 1, 1], uplink_mbit_per_second=100)
    ready = np.array(seconds)
    begins = transfers.begins(ready)
    arrived = made.arrivals(transfers, begins, 0)
    meets = transfers.dependencies.modes != MESSAGE
    assert (begins >= ready[transfers.source]).all() and (arrived > begins).all()
    assert (begins[meets] >= ready[transfers.target][meets]).all()
    alone = made.arrivals(Transfers(transfers.source, transfers.target, transfers.sizes), ready[transfers.source], 0)
    assert arrived.max() >= alone.max() - 1e-9, "nothing is faster for being joined"


def test_an_exchange_takes_its_share_of_the_compute_beside_it() -> None:
    made = network([0, 1], between_machines={"mbit_per_second": 8})
    edges = [(0, 1), (1, 0)]
    found = clock(made, joined(edges, 0.5e6, BATCH, busy_share=0.1), seconds=[1.0, 1.0], overlapped=True)
    assert found.computed[0].tolist() == pytest.approx([1.05, 1.05]), "a tenth of half a second"
    longer = clock(made, joined(edges, 4e6, BATCH, busy_share=0.1), seconds=[1.0, 1.0], overlapped=True)
    assert longer.computed[0].tolist() == pytest.approx([1 / 0.9] * 2)
    waits = clock(made, joined(edges, 0.5e6, BATCH, busy_share=0.1), seconds=[1.0, 1.0])
    assert waits.computed[0].tolist() == [1.0, 1.0] and waits.end[0].tolist() == pytest.approx([1.5, 1.5])


def test_an_exchange_takes_nothing_of_nodes_that_are_not_in_it() -> None:
    made = network([0, 1, 2, 3], between_machines={"mbit_per_second": 8})
    phase = PhaseBuilder()
    phase.add([(0, 1), (1, 0)], [0.5e6] * 2, [BATCH] * 2, [0.0] * 2, busy_share=0.2)
    phase.add([(2, 3), (3, 2)], [0.5e6] * 2, [RENDEZVOUS] * 2, [0.0] * 2)
    found = clock(made, phase.transfers(), seconds=[1.0] * 4, overlapped=True)
    assert found.computed[0].tolist() == pytest.approx([1.1, 1.1, 1.0, 1.0])


# -- which payloads are which operations


def placed(nodes: int, machines: int = 1) -> list[str]:
    hosts = f", addresses: [{', '.join(f'host{m}' for m in range(machines))}]" if machines > 1 else ""
    return [f"mapping={{name: linear, machines: {machines}, nodes_per_machine: {nodes // machines}{hosts}}}",
            f"graph={{name: complete, nodes: {nodes}}}"]  # fmt: skip


def experiment(*overrides: str, nodes: int = 4, machines: int = 1) -> Experiment:
    return load(QUICKSTART, [*placed(nodes, machines), *overrides], check=False)


def modes_of(found: Experiment) -> list[set[int]]:
    made = make_clock(found, step_seconds=1.0)
    assert isinstance(made.transfers, CliqueTransfers)
    phases = [each.dependencies for each in made.transfers(0)]
    return [{MESSAGE} if each is None else set(each.modes.tolist()) for each in phases]


CLIQUE = "communication={name: collective, backend: gloo}"
KINDS = {
    "one call": ([CLIQUE], [{0}]),
    "without calls": (["communication={name: collective, backend: gloo, use_collectives: false}"], [{RENDEZVOUS}]),
    "by NCCL": (["communication={name: collective, backend: nccl, use_collectives: false}"], [{BATCH}]),
    "a graph with fewer edges": ([CLIQUE, "graph={name: ring, nodes: 4}"], [{RENDEZVOUS}]),
    "codes are gathered": ([CLIQUE, "sharing={name: full, compression: {name: int8}}"], [{0}]),
    "of unknown length": ([CLIQUE, "sharing={name: choco, fraction: 0.1, step_size: 0.1}"], [{RENDEZVOUS}]),
    "with numbers beside": ([CLIQUE, "sharing={name: push_sum}"], [{RENDEZVOUS}]),
    "who may be missed": ([CLIQUE, "node.missing=return_weight"], [{RENDEZVOUS}]),
    "looked at one by one": ([CLIQUE, "communication.non_finite=reject"], [{RENDEZVOUS}]),
    "three phases by NCCL": (["communication={name: collective, backend: nccl}",
                              "sharing={name: hierarchical, groups: [[0, 1, 2, 3]]}"], [{0}, {MESSAGE}, {0}]),
    "rounds that skip who is away": ([CLIQUE, "simulate.compute={step_seconds: 1, when_away: skip, "
                                     "churn: {up_seconds: 9, away_seconds: 9}}"], [{RENDEZVOUS}]),
    "no clique": (["communication=auto"], [{MESSAGE}]),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_operations_are_those_that_the_transport_chooses(name: str) -> None:
    overrides, expected = KINDS[name]
    assert modes_of(experiment(*overrides)) == expected


def test_cliques_of_machines_call_inside_and_send_messages_between() -> None:
    found = experiment("communication={name: auto, backend: nccl, cliques: machine}", nodes=6, machines=2)
    made = make_clock(found, step_seconds=1.0).transfers(0)[0]
    between = made.source // 3 != made.target // 3
    assert made.dependencies is not None and (made.dependencies.modes[between] == MESSAGE).all()
    assert (made.dependencies.modes[~between] == BATCH).all() and (~between).sum() == 12
    assert not made.dependencies.seconds[between].any() and (made.dependencies.seconds[~between] > 0).all()
    on_one = experiment("mapping.device=cuda:0", "communication={name: auto, cliques: machine}")
    assert modes_of(on_one) == [{MESSAGE}], "nodes on one GPU read each other's memory"


def test_the_backend_is_that_of_the_devices() -> None:
    cuda = experiment("mapping.device=cuda", "communication={name: auto, cliques: machine}", nodes=4, machines=2)
    assert gpus_of(cuda) == {0: 1, 1: 2, 2: 3, 3: 4} and backend_of(cuda, [0, 1]) == "nccl"
    mixed = experiment("mapping.device=[cuda, cpu]", "communication={name: auto, cliques: machine}")
    assert gpus_of(mixed).keys() == {0, 2}
    assert [backend_of(mixed, members) for members in ([0, 2], [0, 1])] == ["nccl", "gloo"]
    assert backend_of(experiment(CLIQUE, "mapping.device=cuda"), [0, 1]) == "gloo"
    shared = experiment("mapping.device=cuda:0", "communication=collective", nodes=4, machines=2)
    assert [backend_of(shared, members) for members in ([0, 2], [0, 1])] == ["nccl", "gloo"], "NCCL takes one per GPU"
    given = costs_of("nccl", CallCostsConfig.model_validate({"call_seconds": 1e-3, "busy_share": 0}))
    assert (given.call_seconds, given.busy_share) == (1e-3, 0) and given.hop_seconds == COSTS["nccl"].hop_seconds


@pytest.mark.slow
@pytest.mark.parametrize("sharing", ["full", "{name: full, compression: {name: int8}}"])
def test_bytes_of_a_call_are_those_that_a_run_did_not_save(sharing: str, tmp_path: Path) -> None:
    overrides = [CLIQUE, f"sharing={sharing}", "node.rounds=3", "node.evaluate_every=0"]
    text = "\n".join(key.replace("=", ": ", 1) for key in [*placed(4), CLIQUE, f"sharing={sharing}"])
    (tmp_path / "clique.yaml").write_text(f"extends: {QUICKSTART}\nname: clique\n{text}\n"
                                          "node: {rounds: 3, evaluate_every: 0}\n")  # fmt: skip
    told = run_experiment(tmp_path / "clique.yaml", run_dir=tmp_path, progress=False).summary
    sent = float(told["bytes_sent_total"]) - float(told["bytes_saved_total"])
    made = make_clock(experiment(*overrides), step_seconds=1.0)
    predicted = sum(float(each.sizes.sum()) for each in made.transfers(0))
    assert predicted * 3 == pytest.approx(sent, rel=1e-3)
    assert (told["bytes_saved_total"] > 0) == (sharing == "full")


# -- plans


def plan(*words: str) -> dict[str, Any]:
    sets = [part for key in (*placed(8, 2), "mapping.device=cuda", "node.schedule=overlapped", "training.local_steps=1",
                             "simulate.links={node_mbit_per_second: 1000, uplink_mbit_per_second: 100}", *words)
            for part in ("--set", key)]  # fmt: skip
    words = ("plan", str(QUICKSTART), "--graph", "complete", "--step-seconds", "0.001", "--json", *sets)
    found = CliRunner().invoke(main, words)
    assert found.exit_code == 0, found.output
    told: dict[str, Any] = json.loads(found.stdout)
    return told


def test_a_plan_knows_what_nccl_saves_and_stands_beside_data_parallel_training() -> None:
    message, call = plan("communication=auto"), plan("communication={name: collective, backend: nccl}")
    apart, together = message["candidates"][0], call["candidates"][0]
    model = apart["bytes_per_node"] / 7
    assert together["bytes_per_node"] < 2 * model and together["round_seconds"] < apart["round_seconds"]
    assert together["memory_bytes"] < apart["memory_bytes"]
    reduced = call["all_reduce"]
    assert reduced["compute_seconds"] < reduced["step_seconds"] and reduced["bytes_per_node"] < 2 * model
    assert reduced["samples_per_second"] == pytest.approx(8 * 16 / reduced["step_seconds"])
    crossing = 8 * model / 100e6  # seconds in which each machine sends its sum along a tree; it begins after a third
    assert reduced["step_seconds"] == pytest.approx(0.001 / 3 + crossing, rel=0.1)


def test_more_neighbors_and_smaller_chunks_take_longer() -> None:
    def seconds(degree: int, chunk: int) -> float:
        found = experiment(f"communication={{name: collective, backend: nccl, chunk_bytes: {chunk}}}",
                           f"graph={{name: regular, nodes: 8, degree: {degree}}}", "mapping.nodes_per_machine=8",
                           "model={name: mlp, hidden: [2000]}", nodes=8)  # fmt: skip
        links = LinksConfig.model_validate({"calls": {"call_seconds": 1e-3, "peer_seconds": 1e-3, "hop_seconds": 0}})
        return time_line(make_clock(found, step_seconds=0.01, links=links), 2).steady_seconds() - 0.01 * 5

    times = [seconds(degree, 1 << 20) for degree in (2, 3, 4)]
    assert [b - a for a, b in pairwise(times)] == pytest.approx([1e-3] * 2), "one chunk"
    assert seconds(2, 1 << 17) == pytest.approx(5 * times[0]), "600 kB in chunks of 128 KiB"


def test_all_reduce_stands_beside_rounds_of_given_steps() -> None:
    def said(*words: str) -> str:
        words = ("plan", str(QUICKSTART), "--graph", "own", "--step-seconds", "0.01", *words)
        found = CliRunner().invoke(main, words)
        assert found.exit_code == 0, found.output
        return found.stdout

    beside = "all-reduce of gradients in every step (PyTorch DDP): "
    assert beside in said()
    assert beside not in said("--set", "training={name: supervised, batch_size: 16, local_epochs: 1, optimizer: sgd}")


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["ring", "complete", "one_peer_exponential", "star", "random_matching"])
@pytest.mark.parametrize("rule", sorted(SHARINGS))
def test_rounds_of_every_rule_have_a_time_in_cliques(rule: str, graph: str) -> None:
    for clique in ("{name: collective, backend: nccl}", "{name: auto, cliques: machine, backend: gloo}"):
        for schedule in ("sequential", "overlapped"):
            keys = [f"sharing={rule}", f"graph={{name: {graph}, nodes: 8}}", "weights=null",
                    f"communication={clique}", f"node.schedule={schedule}"]  # fmt: skip
            try:
                found = load(QUICKSTART, [*placed(8, 2), *keys])
            except ConfigError:  # not every rule goes with every graph and schedule
                continue
            times = time_line(make_clock(found, step_seconds=0.01), 8)
            assert np.isfinite(times.end).all() and (np.diff(times.end, axis=0) > 0).all()
