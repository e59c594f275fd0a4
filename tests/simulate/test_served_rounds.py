"""Virtual time of rounds with a server: when clients and server begin and end, and the bytes of their transfers."""

from __future__ import annotations

from typing import Any

import pytest

from decentnode.build import build_in_process, step_all
from decentnode.experiment import Experiment
from decentnode.simulate.traffic import Traffic
from decentnode.simulate.virtual import time_line_of
from tests.sharing.federated.runs import CLIENTS, clients_of_round, star_experiment

LATENCY, STEP, STEPS, FACTOR, SLOW, ROUNDS = 0.25, 0.1, 3, 4, 2, 6
LINKS: dict[str, Any] = {"same_machine": {"latency_seconds": LATENCY}}
COMPUTE = {"step_seconds": STEP, "stragglers": [{"nodes": [SLOW], "factor": FACTOR}]}


def served_experiment(sharing: dict[str, Any], links: dict[str, Any] = LINKS, **sections: Any) -> Experiment:
    return star_experiment(sharing, simulate={"compute": COMPUTE, "links": links}, **sections)


def test_clients_train_when_the_model_has_arrived_and_the_server_waits_for_the_chosen_ones() -> None:
    time_line, _ = time_line_of(served_experiment({"name": "fedavg", "clients": 3}), ROUNDS)
    now = [0.0] * (CLIENTS + 1)
    for round in range(ROUNDS):
        chosen = clients_of_round(round, 3)
        has_model = [max(now[uid], now[0] + LATENCY) for uid in range(CLIENTS + 1)]
        done = {uid: has_model[uid] + STEP * STEPS * (FACTOR if uid == SLOW else 1) for uid in chosen}
        ends = [max(done.values()) + LATENCY, *(done.get(uid, has_model[uid]) for uid in range(1, CLIENTS + 1))]
        assert time_line.end[round].tolist() == pytest.approx(ends)
        assert time_line.begin[round].tolist() == pytest.approx(now)
        last = max(sorted(done), key=lambda uid: done[uid])
        assert done[time_line.waits_for[round, 0]] == done[last], "the server must wait for the slowest client"
        now = ends


def test_the_servers_bandwidth_is_shared_by_the_models_that_it_sends_and_receives() -> None:
    """k models of B bytes take k B / rate in each direction."""
    mbit = 0.01
    experiment = star_experiment({"name": "fedavg", "clients": 4},
                  simulate={"compute": {"step_seconds": STEP}, "links": {"node_mbit_per_second": mbit}})  # fmt: skip
    traffic = Traffic(experiment)
    down, up = traffic(0)
    size, rate = max(down.sizes), mbit * 1e6 / 8
    assert sorted(down.sizes)[-4:] == [size] * 4 and sorted(set(up.source.tolist())) == clients_of_round(0, 4)
    rest = sum(down.sizes) - 4 * size
    time_line, _ = time_line_of(experiment, 1)
    assert time_line.end[0, 0] == pytest.approx((4 * size + rest) / rate + STEP * STEPS + 4 * size / rate, rel=0.02)


@pytest.mark.parametrize("sharing", [
    {"name": "fedavg"}, {"name": "fedavg", "clients": 2}, {"name": "scaffold", "fraction": 0.5},
    {"name": "fedavg", "clients": 3, "compression": {"name": "int8"}}, {"name": "fedstc", "clients": 3, "entries": 0.2},
], ids=str)  # fmt: skip
def test_predicted_bytes_are_those_that_nodes_send(sharing: dict[str, Any]) -> None:
    """In a run of all nodes in this process, from the second round on, as in the first fedstc sends whole models."""
    data = {"name": "synthetic", "input_shape": [400], "num_classes": 3, "train_samples": 10 * CLIENTS,
            "test_samples": 10, "partition": {"name": "iid"}}  # fmt: skip
    # models of about 5 kB, beside which the scalars of payloads, which are not predicted, hardly count
    experiment, sent = served_experiment(sharing, data=data), []
    for rounds in (1, ROUNDS):
        node = experiment.node.model_copy(update={"rounds": rounds})
        nodes = build_in_process(experiment.model_copy(update={"node": node}))
        step_all(nodes)
        sent.append([sum(edge.payload_bytes_sent for _, edge in node.communication.counters.known())
                     for node in nodes])  # fmt: skip
    traffic, predicted = Traffic(experiment), [0.0] * (CLIENTS + 1)
    for round in range(1, ROUNDS):
        for transfers in traffic(round):
            for source, size in zip(transfers.source.tolist(), transfers.sizes.tolist(), strict=True):
                predicted[source] += size
    assert predicted[0] == pytest.approx(sent[1][0] - sent[0][0], rel=0.02)
    assert sum(predicted[1:]) == pytest.approx(sum(sent[1][1:]) - sum(sent[0][1:]), rel=0.02)
