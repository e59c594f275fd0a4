"""Rounds without local steps (`node.training_rounds`): nodes only mix, and schedules of learning rates, privacy and
virtual time count the rounds with steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from decentnode.build import build_in_process
from decentnode.errors import ConfigError
from decentnode.experiment import Experiment, load
from decentnode.launch.reporting.notices import privacy_notice
from decentnode.node.node import Node
from decentnode.node.training_rounds import TrainingRoundsConfig
from decentnode.simulate.timeline.rounds import time_line
from decentnode.simulate.virtual import make_clock, recorded_step_seconds

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SMALL = ["graph.nodes=4", "graph.degree=2", "mapping.nodes_per_machine=4", "model.hidden=[6]", "node.rounds=7",
         "node.evaluate_every=0", "training.local_steps=2"]  # fmt: skip
TWO_OF_THREE = "node.training_rounds={train: 2, mix: 1}"


def experiment(*sets: str) -> Experiment:
    return load(QUICKSTART, [*SMALL, *sets])


def make_round(nodes: list[Node], round: int) -> list[int]:
    """Makes a round of all nodes. Returns the number of local steps of each."""
    steps = [node.begin_round(round).steps for node in nodes]
    for node in nodes:
        node.finish_round(round)
    return steps


def models_of(nodes: list[Node]) -> torch.Tensor:
    """Returns the models [N, P] as float64."""
    return torch.stack([node.training.model.parameters.detach().double() for node in nodes])


@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
def test_nodes_only_mix_in_rounds_without_local_steps(schedule: str) -> None:
    chosen = experiment(TWO_OF_THREE, f"node.schedule={schedule}")
    nodes = build_in_process(chosen)
    graph = chosen.make_graph()
    for round in range(7):
        before = models_of(nodes)
        steps = make_round(nodes, round)
        matrix = torch.zeros(4, 4, dtype=torch.float64)
        for uid in range(4):
            for other, weight in graph.weights(uid, round).items():
                matrix[uid, other] = weight
        matrix += torch.diag(1 - matrix.sum(1))
        only_mixed = torch.allclose(models_of(nodes), matrix @ before, atol=1e-6, rtol=0)
        assert only_mixed is (round % 3 == 2)
        assert steps == [0 if round % 3 == 2 else 2] * 4


def test_each_node_draws_the_rounds_in_which_it_trains() -> None:
    rounds = TrainingRoundsConfig(train=3, mix=2, probability=0.25)
    chosen = experiment("node.training_rounds={train: 3, mix: 2, probability: .25}", "node.rounds=20")
    nodes = build_in_process(chosen)
    trained = [[steps > 0 for steps in make_round(nodes, round)] for round in range(20)]
    assert trained == [[rounds.trains(chosen.seed, uid, round) for uid in range(4)] for round in range(20)]
    assert not any(any(trained[round]) for round in range(20) if round % 5 > 2)
    assert len({*map(tuple, zip(*trained, strict=True))}) == 4, "all nodes have the same draws"
    assert [rounds.count_of(chosen.seed, uid, 20) for uid in range(4)] == list(map(sum, zip(*trained, strict=True)))
    assert sum(rounds.trains(1, 0, round) for round in range(0, 5000, 5)) == pytest.approx(250, abs=45)


@pytest.mark.parametrize("rounds", range(9))
def test_the_number_of_rounds_with_local_steps_is_counted(rounds: int) -> None:
    pattern = TrainingRoundsConfig(train=2, mix=3)
    assert pattern.count(rounds) == sum(map(pattern.is_due, range(rounds))) == pattern.count_of(1, 0, rounds)


@pytest.mark.parametrize("sharing", ["d2", "gradient_tracking", "qg_momentum", "slowmo", "diloco"])
def test_rules_that_use_the_local_steps_are_refused(sharing: str) -> None:
    with pytest.raises(ConfigError, match=f"training_rounds: {sharing} needs local steps in every round"):
        experiment(TWO_OF_THREE, f"sharing={sharing}", "graph={name: ring, nodes: 4}")


def test_schedules_in_which_nodes_are_in_different_rounds_are_refused() -> None:
    with pytest.raises(ConfigError, match="training_rounds needs a schedule in which all nodes are in the same round"):
        experiment(TWO_OF_THREE, "node.schedule=gossip_async")


def test_a_schedule_of_learning_rates_by_steps_counts_rounds_with_local_steps() -> None:
    """7 rounds have 5 with two local steps each."""
    one_cycle = "training.lr_schedule={name: one_cycle, max_lr: .1, total_steps: 10, every: step}"
    experiment(TWO_OF_THREE, one_cycle)
    with pytest.raises(ConfigError, match="ends after 10 steps but the run has 14"):
        experiment(one_cycle)


def test_the_check_of_a_schedule_of_learning_rates_by_rounds_draws_no_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 nodes and 10,000 rounds took 11 s."""
    monkeypatch.delattr(TrainingRoundsConfig, "count_of")
    experiment("node.training_rounds={probability: .5}", "node.rounds=7",
               "training.lr_schedule={name: one_cycle, max_lr: .1, total_steps: 7}")  # fmt: skip


@pytest.mark.parametrize("newcomers", [0, 3])
def test_a_schedule_of_learning_rates_by_steps_covers_the_rounds_that_nodes_draw(newcomers: int) -> None:
    drawn = ["node.training_rounds={train: 3, mix: 2, probability: .25}", "node.rounds=40", "node.missing=regroup",
             f"node.newcomers={newcomers}", "mapping.base_port=23000"]  # fmt: skip
    pattern, seed = TrainingRoundsConfig(train=3, mix=2, probability=0.25), experiment().seed
    most = 2 * max(pattern.count_of(seed, uid, 40) for uid in range(4 + newcomers))
    assert most < 2 * pattern.count(40)
    one_cycle = "training.lr_schedule={{name: one_cycle, max_lr: .1, total_steps: {}, every: step}}"
    chosen = experiment(*drawn, one_cycle.format(most))
    with pytest.raises(ConfigError, match=f"ends after {most - 1} steps but the run has {most}"):
        experiment(*drawn, one_cycle.format(most - 1))
    if not newcomers:
        nodes = build_in_process(chosen)
        for round in range(40):
            make_round(nodes, round)


def test_virtual_time_has_no_local_steps_in_the_other_rounds() -> None:
    chosen = experiment(TWO_OF_THREE, "simulate.compute={step_seconds: 1}")
    found = time_line(make_clock(chosen), 6)
    assert (found.computed - found.steps_began).round(3).tolist() == [[2.0] * 4] * 2 + [[0.0] * 4] + [[2.0] * 4] * 2 + [
        [0.0] * 4
    ]


def test_the_virtual_duration_of_a_round_is_the_mean_over_whole_cycles() -> None:
    chosen = experiment(TWO_OF_THREE, "simulate.compute={step_seconds: 1}")
    seconds = [time_line(make_clock(chosen), rounds).steady_seconds() for rounds in (2, 3, 6, 7, 15, 100)]
    assert seconds == pytest.approx([2, *[4 / 3] * 5])
    longer = experiment("node.training_rounds={train: 4, mix: 20}", "simulate.compute={step_seconds: 1}")
    assert time_line(make_clock(longer), 16).steady_seconds() == pytest.approx(8 / 16)


def test_the_step_seconds_of_a_run_are_those_of_rounds_with_local_steps(tmp_path: Path) -> None:
    for uid, steps in enumerate([[2, 0, 0, 0, 4], [0] * 5]):
        file = tmp_path / "nodes" / str(uid) / "metrics.jsonl"
        file.parent.mkdir(parents=True)
        records = ({"kind": "round", "round": round, "steps": made, "train_seconds": 0.3 * made + 0.001 * (not made)}
                   for round, made in enumerate(steps))  # fmt: skip
        file.write_text("".join(f"{json.dumps(each)}\n" for each in records))
    assert recorded_step_seconds(tmp_path) == (5, pytest.approx(0.3))


def test_the_announced_epsilon_counts_rounds_with_local_steps() -> None:
    pytest.importorskip("opacus")
    chosen = experiment(TWO_OF_THREE, "training={privacy: {noise: 1}, batch_size: 16, local_steps: 2}")
    assert "after 10 steps of node" in privacy_notice(chosen)
