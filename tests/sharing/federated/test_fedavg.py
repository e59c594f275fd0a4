"""Rounds of a server and its clients, compared with a loop over the clients' local steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decentnode.build import build_in_process, step_all
from decentnode.errors import ConfigError
from decentnode.node.checkpoints.handover import skip_training
from decentnode.sharing.federated.sampling import count_of, sampled
from tests.sharing.federated.runs import CLIENTS, LocalTraining, clients_of_round, model_of, star_experiment

ROUNDS = 6


@pytest.mark.sampled(one=["clients"])
@pytest.mark.parametrize(("clients", "server_lr"), [(4, 1.0), (3, 0.5), (CLIENTS, 1.0)])
def test_fedavg_equals_a_loop_over_the_clients_bit_for_bit(clients: int, server_lr: float) -> None:
    experiment = star_experiment({"name": "fedavg", "clients": clients, "server_lr": server_lr, "weighted_by": "equal"})
    nodes = build_in_process(experiment)
    step_all(nodes)
    local = LocalTraining(experiment)
    x = local.start
    for r in range(ROUNDS):
        total = torch.zeros_like(x)
        chosen = clients_of_round(r, clients) if clients < CLIENTS else range(1, CLIENTS + 1)
        for uid in chosen:
            total += local.change(uid, x, r)
        x = x + server_lr * (total / clients)
    assert torch.equal(model_of(nodes[0]), x) and not torch.equal(x, local.start)
    assert nodes[0].merged is not None and torch.equal(nodes[0].merged, x), "the merged model is not the server's"


def test_the_weight_of_a_client_is_proportional_to_its_samples() -> None:
    parts = [0.1, 0.3, 0.05, 0.15, 0.2, 0.2]
    data = {"name": "synthetic", "input_shape": [5], "num_classes": 3, "train_samples": 60, "test_samples": 30,
            "partition": {"name": "fractions", "fractions": parts}}  # fmt: skip
    experiment = star_experiment({"name": "fedavg"}, data=data)
    nodes = build_in_process(experiment)
    assert [node.training.num_samples for node in nodes] == [0, 6, 18, 3, 9, 12, 12], "the server holds none"
    step_all(nodes)
    local = LocalTraining(experiment)
    x = local.start
    for r in range(ROUNDS):
        x = x + sum(part * local.change(uid, x, r).double() for uid, part in enumerate(parts, 1)).float()  # type: ignore[attr-defined]
    torch.testing.assert_close(model_of(nodes[0]), x, atol=1e-6, rtol=0)


def test_clients_that_are_not_chosen_in_a_round_neither_train_nor_send() -> None:
    experiment = star_experiment({"name": "fedavg", "clients": 2})
    records: list[tuple[int, dict[str, Any]]] = []
    nodes = build_in_process(experiment, lambda uid, record: records.append((uid, record)))
    size = 4 * nodes[0].training.model.num_parameters
    step_all(nodes)
    rounds = {(uid, each["round"]): each for uid, each in records if each["kind"] == "round"}
    for r in range(ROUNDS):
        chosen = clients_of_round(r, 2)
        for uid in range(CLIENTS + 1):
            record = rounds[uid, r]
            assert record["steps"] == (3 if uid in chosen else 0), (uid, r)
            sent = {int(to): edge[0] for to, edge in record["edges"].items() if edge[0]}
            if uid == 0:
                assert {to for to, count in sent.items() if count >= size} == set(chosen)
            else:
                assert set(sent) == ({0} if uid in chosen else set())
    counters = nodes[0].communication.counters
    assert counters.bytes_sent()["data"] == ROUNDS * 2 * size


def test_the_clients_of_a_round_are_drawn_uniformly_and_depend_on_the_seed_alone() -> None:
    clients = tuple(range(1, 11))
    draws = [sampled(clients, 4, 7, 0, "clients of a round", r) for r in range(200)]
    sampled.cache_clear()
    assert draws == [sampled(clients, 4, 7, 0, "clients of a round", r) for r in range(200)]
    assert draws != [sampled(clients, 4, 8, 0, "clients of a round", r) for r in range(200)]
    assert all(len(each) == 4 and each <= set(clients) for each in draws)
    times_drawn = [sum(uid in drawn for drawn in draws) for uid in clients]
    assert min(times_drawn) > 50 and max(times_drawn) < 110, "each should be drawn in about two fifths of 200 rounds"
    assert sampled(clients, 20, 7, 0, "", 0) == frozenset(clients)
    assert [count_of(10, 0.25, None), count_of(10, 0.01, None)] == [2, 1]
    assert [count_of(10, None, 3), count_of(2, None, 3), count_of(5, None, None)] == [3, 2, 5]


def test_the_learning_rate_schedule_advances_also_on_clients_that_are_not_chosen() -> None:
    training = {"batch_size": 4, "local_steps": 1, "optimizer": {"name": "sgd", "lr": 0.2},
                "lr_schedule": {"name": "exponential", "gamma": 0.5}}  # fmt: skip
    nodes = build_in_process(star_experiment({"name": "fedavg", "clients": 2}, training=training))
    step_all(nodes)
    assert {node.training.learning_rate for node in nodes} == {0.2 * 0.5**ROUNDS}


@pytest.mark.parametrize("sharing", [{"name": "fedavg", "clients": 2}, {"name": "fedavgm", "compression": "int8"}])
@pytest.mark.parametrize("every", ["step", "round"])
def test_a_client_that_comes_back_has_the_samples_and_the_learning_rate_of_its_own_rounds(
    sharing: dict[str, Any], every: str
) -> None:
    training = {"batch_size": 4, "local_steps": 3, "optimizer": {"name": "sgd", "lr": 0.2},
                "lr_schedule": {"name": "exponential", "gamma": 0.9, "every": every}}  # fmt: skip
    experiment = star_experiment(sharing, training=training)
    nodes, restarted = build_in_process(experiment), build_in_process(experiment)
    step_all(nodes)
    for before, node in zip(nodes, restarted, strict=True):
        skip_training(node, ROUNDS)
        for name in ("ticks", "epoch", "cursor") if before.uid else ("ticks",):
            assert node.training.state_dict()[name] == before.training.state_dict()[name], (node.uid, name)
        assert node.training.learning_rate == before.training.learning_rate


def test_a_schedule_of_learning_rates_by_steps_covers_the_rounds_in_which_clients_take_part() -> None:
    chosen = [uid for round in range(ROUNDS) for uid in clients_of_round(round, 2)]
    most = 3 * max(map(chosen.count, chosen))

    def with_schedule_of(steps: int) -> None:
        schedule = {"name": "one_cycle", "max_lr": 0.1, "total_steps": steps, "every": "step"}
        training = {"batch_size": 4, "local_steps": 3, "optimizer": {"name": "sgd", "lr": 0.2}, "lr_schedule": schedule}
        step_all(build_in_process(star_experiment({"name": "fedavg", "clients": 2}, training=training)))

    assert most < 3 * ROUNDS
    with_schedule_of(most)
    with pytest.raises(ConfigError, match=f"ends after {most - 1} steps but the run has {most}"):
        with_schedule_of(most - 1)
