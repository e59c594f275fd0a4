"""Operations of torch.distributed in virtual time, compared with loops, formulas, and the bytes that runs send."""

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


def make_network(machines: list[int], **links: Any) -> Network:
    return Network(LinksConfig.model_validate(links), machines)


def three_rounds(network: Network, transfers: Transfers, *, seconds: list[float], **options: Any) -> TimeLine:
    config = ComputeConfig.model_validate({"step_seconds": 1.0, "factors": seconds})
    compute = Compute(config, network.machine_of.tolist(), step_seconds=1.0)
    return time_line(Clock(compute, network, lambda _: [transfers], **options), 3)


def three_rounds_ends(network: Network, transfers: Transfers, seconds: list[float]) -> list[float]:
    """Returns when the nodes end the first of three rounds."""
    ends: list[float] = three_rounds(network, transfers, seconds=seconds).end[0].tolist()
    return ends


def joined(edges: list[tuple[int, int]], size: float, join: int, seconds: float = 0.0, **more: Any) -> Transfers:
    """Returns the transfers of one phase. join: how they depend on each other (MESSAGE, RENDEZVOUS or BATCH)."""
    phase = PhaseBuilder()
    phase.add(edges, [size] * len(edges), [join] * len(edges), [seconds] * len(edges), **more)
    return phase.transfers()


# -- one call


@pytest.mark.parametrize("nodes", [2, 3, 5, 8])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_ring_collective_takes_as_long_as_its_steps_in_a_loop(nodes: int, kind: Any) -> None:
    size, rate, hop, latency = 3e6, 100 * MBIT, 0.004, 0.002
    network = make_network([0] * nodes, same_machine={"mbit_per_second": 100, "latency_seconds": latency})
    calls = Calls(CallCosts(0.01, 0.5, hop, 9.0), network)
    part = size / nodes if kind == "all_reduce" else size
    now = [0.01] * nodes
    for _ in range((2 if kind == "all_reduce" else 1) * (nodes - 1)):
        now = [max(now[i], now[i - 1] + part / rate + latency + hop) for i in range(nodes)]
    flows = calls.average(range(nodes), size, kind)
    phase = PhaseBuilder()
    phase.add_call(flows, size)
    assert network.arrivals(phase.transfers(), np.zeros(nodes), 0) == pytest.approx(now[0])


def test_every_chunk_is_a_call_of_its_own() -> None:
    network = make_network([0, 0, 0])
    costs = CallCosts(0.1, 0.0, 0.01, 0.0)
    one, four = Calls(costs, network).average(range(3), 4e6), Calls(costs, network, 1e6).average(range(3), 4e6)
    assert four.seconds == pytest.approx(4 * one.seconds) and four.edges == one.edges
    assert [Calls(costs, network, 1e6).num_calls(size) for size in (0, 1, 1e6, 1e6 + 1)] == [1, 1, 1, 2]


def test_all_reduce_between_machines_takes_the_faster_of_ring_and_trees() -> None:
    """Two machines send a model once in each direction."""
    def crossing(machines: list[int], size: float, costs: CallCosts) -> float:
        network = make_network(machines, uplink_mbit_per_second=100)
        call = Calls(costs, network).average(range(len(machines)), size)
        return sum(bytes for i, j, bytes in call.edges if machines[i] == 0 != machines[j])

    quick, slow = CallCosts(0.0, 0.0, 0.0, 1e-9, trees=True), CallCosts(0.0, 0.0, 0.0, 1.0, trees=True)
    eight = [0, 0, 1, 1, 2, 2, 3, 3]
    assert crossing([0, 0, 1, 1], 8.0, quick) == 8
    assert crossing([0, 0, 1, 1], 8.0, FREE) == pytest.approx(2 * 3 / 4 * 8), "gloo has rings alone"
    assert crossing(eight, 8e6, quick) == pytest.approx(2 * 7 / 8 * 8e6)
    assert crossing(eight, 8e6, slow) == pytest.approx(TREE_BYTES * 8e6), "four hops instead of 14 in a row"


def test_the_cost_of_a_batch_of_sends_grows_with_the_number_of_neighbors() -> None:
    calls = Calls(CallCosts(0.1, 0.01, 0.001, 0.002), make_network([0, 0, 1]), 1e6)
    modes, seconds = calls.point_to_point([(0, 1), (1, 0), (0, 2)], [1e6, 1e6, 3e6], batched=True)
    assert modes == [BATCH] * 3
    assert seconds == pytest.approx([0.1 + 0.02 + 0.001, 0.1 + 0.02 + 0.001, 3 * (0.1 + 0.02 + 0.002)])
    assert calls.point_to_point([(0, 1)], [0.0], batched=False)[0] == [RENDEZVOUS]


# -- when transfers begin and end


def test_messages_leave_at_once_a_rendezvous_needs_both_ends_and_a_batch_ends_as_a_whole() -> None:
    edges = [(0, 1), (1, 0), (1, 2), (2, 1)]
    network = make_network([0, 1, 2], between_machines={"latency_seconds": 0.25})
    seconds = [1.0, 2.0, 4.0]
    sent = three_rounds(network, joined(edges, 0.0, MESSAGE), seconds=seconds)
    assert sent.end[0].tolist() == [2.25, 4.25, 4.0]
    assert sent.waits_for[0].tolist() == [1, 2, -1]
    # node 2 receives nothing before it has begun to receive
    assert three_rounds_ends(network, joined(edges, 0.0, RENDEZVOUS), seconds) == [2.25, 4.25, 4.25]
    assert three_rounds_ends(network, joined(edges, 0.0, BATCH), seconds) == [2.25, 4.25, 4.25]
    # node 1 receives in the batch that has its own sends, too
    assert three_rounds_ends(network, joined([(0, 1), (1, 2)], 0.0, BATCH), seconds) == [1.0, 4.25, 4.25]
    assert three_rounds_ends(network, joined([(0, 1), (1, 2)], 0.0, RENDEZVOUS), seconds) == [1.0, 2.25, 4.25]


def test_a_collective_call_waits_for_its_slowest_member_and_waits_for_names_it() -> None:
    network = make_network([0, 1, 2, 3, 4], between_machines={"mbit_per_second": 8})
    calls = Calls(FREE, network)
    found = three_rounds(network, group_averages(calls, [[0, 1, 2, 3]], 1e6), seconds=[1.0, 1.0, 3.0, 1.0, 1.0])
    assert found.end[0].tolist() == pytest.approx([4.5, 4.5, 4.5, 4.5, 1.0])  # 1.5 MB over each link of 1 MB/s
    assert found.waits_for[0].tolist() == [2, 2, 1, 2, -1]
    assert group_averages(calls, [[0]], 1e6).sizes.size == 0


@given(seconds=st.lists(st.floats(0.5, 2), min_size=6, max_size=6), modes=st.lists(
    st.sampled_from([MESSAGE, RENDEZVOUS, BATCH, 0]), min_size=30, max_size=30))  # fmt: skip
def test_transfers_other_than_messages_begin_when_both_ends_are_ready(seconds: list[float], modes: list[int]) -> None:
    edges = [(i, j) for i in range(6) for j in range(6) if i != j]
    phase = PhaseBuilder()
    phase.add(edges, [1e5] * 30, modes, [0.01] * 30)
    transfers, network = phase.transfers(), make_network([0, 0, 0, 1, 1, 1], uplink_mbit_per_second=100)
    ready = np.array(seconds)
    begins = transfers.begins(ready)
    arrived = network.arrivals(transfers, begins, 0)
    meets = transfers.dependencies.modes != MESSAGE
    assert (begins >= ready[transfers.source]).all() and (arrived > begins).all()
    assert (begins[meets] >= ready[transfers.target][meets]).all()
    alone = network.arrivals(Transfers(transfers.source, transfers.target, transfers.sizes), ready[transfers.source], 0)
    assert arrived.max() >= alone.max() - 1e-9, "dependencies must not make a transfer faster"


def test_an_overlapped_exchange_slows_computation_down_by_its_busy_share() -> None:
    network = make_network([0, 1], between_machines={"mbit_per_second": 8})
    edges = [(0, 1), (1, 0)]
    found = three_rounds(network, joined(edges, 0.5e6, BATCH, busy_share=0.1), seconds=[1.0, 1.0], overlapped=True)
    assert found.computed[0].tolist() == pytest.approx([1.05, 1.05]), "a tenth of half a second"
    longer = three_rounds(network, joined(edges, 4e6, BATCH, busy_share=0.1), seconds=[1.0, 1.0], overlapped=True)
    assert longer.computed[0].tolist() == pytest.approx([1 / 0.9] * 2)
    waits = three_rounds(network, joined(edges, 0.5e6, BATCH, busy_share=0.1), seconds=[1.0, 1.0])
    assert waits.computed[0].tolist() == [1.0, 1.0] and waits.end[0].tolist() == pytest.approx([1.5, 1.5])


def test_an_exchange_does_not_slow_down_nodes_that_are_not_in_it() -> None:
    network = make_network([0, 1, 2, 3], between_machines={"mbit_per_second": 8})
    phase = PhaseBuilder()
    phase.add([(0, 1), (1, 0)], [0.5e6] * 2, [BATCH] * 2, [0.0] * 2, busy_share=0.2)
    phase.add([(2, 3), (3, 2)], [0.5e6] * 2, [RENDEZVOUS] * 2, [0.0] * 2)
    found = three_rounds(network, phase.transfers(), seconds=[1.0] * 4, overlapped=True)
    assert found.computed[0].tolist() == pytest.approx([1.1, 1.1, 1.0, 1.0])


# -- which operation each payload is


def overrides_for(nodes: int, machines: int = 1) -> list[str]:
    hosts = f", addresses: [{', '.join(f'host{m}' for m in range(machines))}]" if machines > 1 else ""
    return [f"mapping={{name: linear, machines: {machines}, nodes_per_machine: {nodes // machines}{hosts}}}",
            f"graph={{name: complete, nodes: {nodes}}}"]  # fmt: skip


def experiment(*overrides: str, nodes: int = 4, machines: int = 1) -> Experiment:
    return load(QUICKSTART, [*overrides_for(nodes, machines), *overrides], check=False)


def modes_of(config: Experiment) -> list[set[int]]:
    """Returns, for every phase of round 0, how its transfers depend on each other; 0 is a collective call."""
    clock = make_clock(config, step_seconds=1.0)
    assert isinstance(clock.transfers, CliqueTransfers)
    dependencies = [transfers.dependencies for transfers in clock.transfers(0)]
    return [{MESSAGE} if of_phase is None else set(of_phase.modes.tolist()) for of_phase in dependencies]


CLIQUE = "communication={name: collective, backend: gloo}"
CASES_BY_NAME = {
    "one call": ([CLIQUE], [{0}]),
    "without calls": (["communication={name: collective, backend: gloo, use_collectives: false}"], [{RENDEZVOUS}]),
    "by NCCL": (["communication={name: collective, backend: nccl, use_collectives: false}"], [{BATCH}]),
    "a graph with fewer edges": ([CLIQUE, "graph={name: ring, nodes: 4}"], [{RENDEZVOUS}]),
    "coded payloads in one call": ([CLIQUE, "sharing={name: full, compression: {name: int8}}"], [{0}]),
    "payloads of unknown length": ([CLIQUE, "sharing={name: choco, fraction: 0.1, step_size: 0.1}"], [{RENDEZVOUS}]),
    "payloads with scalars": ([CLIQUE, "sharing={name: push_sum}"], [{RENDEZVOUS}]),
    "payloads that may be missing": ([CLIQUE, "node.missing=return_weight"], [{RENDEZVOUS}]),
    "payloads checked one by one": ([CLIQUE, "communication.non_finite=reject"], [{RENDEZVOUS}]),
    "three phases by NCCL": (["communication={name: collective, backend: nccl}",
                              "sharing={name: hierarchical, groups: [[0, 1, 2, 3]]}"], [{0}, {MESSAGE}, {0}]),
    "rounds that skip nodes that are away": ([CLIQUE, "simulate.compute={step_seconds: 1, when_away: skip, "
                                     "churn: {up_seconds: 9, away_seconds: 9}}"], [{RENDEZVOUS}]),
    "no clique": (["communication=auto"], [{MESSAGE}]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES_BY_NAME)
def test_virtual_time_assumes_the_operations_that_the_transport_chooses(name: str) -> None:
    overrides, expected = CASES_BY_NAME[name]
    assert modes_of(experiment(*overrides)) == expected


def test_with_a_clique_per_machine_nodes_use_batches_inside_and_messages_between_machines() -> None:
    config = experiment("communication={name: auto, backend: nccl, cliques: machine}", nodes=6, machines=2)
    transfers = make_clock(config, step_seconds=1.0).transfers(0)[0]
    between = transfers.source // 3 != transfers.target // 3
    assert transfers.dependencies is not None and (transfers.dependencies.modes[between] == MESSAGE).all()
    assert (transfers.dependencies.modes[~between] == BATCH).all() and (~between).sum() == 12
    assert not transfers.dependencies.seconds[between].any() and (transfers.dependencies.seconds[~between] > 0).all()
    on_one = experiment("mapping.device=cuda:0", "communication={name: auto, cliques: machine}")
    assert modes_of(on_one) == [{MESSAGE}], "nodes on one GPU read each other's memory"


def test_the_backend_of_a_clique_follows_from_the_devices_of_its_members() -> None:
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
def test_predicted_bytes_of_collectives_are_those_that_a_run_sends(sharing: str, tmp_path: Path) -> None:
    """A run reports the bytes of its payloads, and how many of them its collectives saved."""
    overrides = [CLIQUE, f"sharing={sharing}", "node.rounds=3", "node.evaluate_every=0"]
    text = "\n".join(key.replace("=", ": ", 1) for key in [*overrides_for(4), CLIQUE, f"sharing={sharing}"])
    (tmp_path / "clique.yaml").write_text(f"extends: {QUICKSTART}\nname: clique\n{text}\n"
                                          "node: {rounds: 3, evaluate_every: 0}\n")  # fmt: skip
    summary = run_experiment(tmp_path / "clique.yaml", run_dir=tmp_path, progress=False).summary
    sent = float(summary["bytes_sent_total"]) - float(summary["bytes_saved_total"])
    clock = make_clock(experiment(*overrides), step_seconds=1.0)
    predicted = sum(float(each.sizes.sum()) for each in clock.transfers(0))
    assert predicted * 3 == pytest.approx(sent, rel=1e-3)
    assert (summary["bytes_saved_total"] > 0) == (sharing == "full")


# -- plans


def plan(*overrides: str) -> dict[str, Any]:
    """Returns what `decentnode plan --json` prints for 8 nodes on 2 machines."""
    common = [*overrides_for(8, 2), "mapping.device=cuda", "node.schedule=overlapped", "training.local_steps=1",
              "simulate.links={node_mbit_per_second: 1000, uplink_mbit_per_second: 100}"]  # fmt: skip
    sets = [word for override in (*common, *overrides) for word in ("--set", override)]
    words = ("plan", str(QUICKSTART), "--graph", "complete", "--step-seconds", "0.001", "--json", *sets)
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    printed: dict[str, Any] = json.loads(result.stdout)
    return printed


def test_a_plan_predicts_what_nccl_collectives_save_and_the_time_of_data_parallel_training() -> None:
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


def test_rounds_take_longer_with_more_neighbors_and_with_smaller_chunks() -> None:
    def seconds(degree: int, chunk: int) -> float:
        found = experiment(f"communication={{name: collective, backend: nccl, chunk_bytes: {chunk}}}",
                           f"graph={{name: regular, nodes: 8, degree: {degree}}}", "mapping.nodes_per_machine=8",
                           "model={name: mlp, hidden: [2000]}", nodes=8)  # fmt: skip
        links = LinksConfig.model_validate({"calls": {"call_seconds": 1e-3, "peer_seconds": 1e-3, "hop_seconds": 0}})
        return time_line(make_clock(found, step_seconds=0.01, links=links), 2).steady_seconds() - 0.01 * 5

    times = [seconds(degree, 1 << 20) for degree in (2, 3, 4)]
    assert [b - a for a, b in pairwise(times)] == pytest.approx([1e-3] * 2), "one chunk"
    assert seconds(2, 1 << 17) == pytest.approx(5 * times[0]), "600 kB in chunks of 128 KiB"


def test_a_plan_shows_data_parallel_training_only_if_the_number_of_local_steps_is_known() -> None:
    def output_of_plan(*words: str) -> str:
        words = ("plan", str(QUICKSTART), "--graph", "own", "--step-seconds", "0.01", *words)
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output
        return result.stdout

    line = "all-reduce of gradients in every step (PyTorch DDP): "
    by_epochs = "training={name: supervised, batch_size: 16, local_epochs: 1, optimizer: sgd}"
    assert line in output_of_plan()
    assert line not in output_of_plan("--set", by_epochs)


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["ring", "complete", "one_peer_exponential", "star", "random_matching"])
@pytest.mark.parametrize("rule", sorted(SHARINGS))
def test_rounds_of_every_rule_have_finite_times_in_cliques(rule: str, graph: str) -> None:
    for clique in ("{name: collective, backend: nccl}", "{name: auto, cliques: machine, backend: gloo}"):
        for schedule in ("sequential", "overlapped"):
            keys = [f"sharing={rule}", f"graph={{name: {graph}, nodes: 8}}", "weights=null",
                    f"communication={clique}", f"node.schedule={schedule}"]  # fmt: skip
            try:
                found = load(QUICKSTART, [*overrides_for(8, 2), *keys])
            except ConfigError:  # not every rule goes with every graph and schedule
                continue
            times = time_line(make_clock(found, step_seconds=0.01), 8)
            assert np.isfinite(times.end).all() and (np.diff(times.end, axis=0) > 0).all()
