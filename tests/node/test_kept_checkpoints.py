"""When checkpoints are taken, by rounds and by minutes, and which of them are kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decentnode import clock
from decentnode.checkpoint import store
from decentnode.checkpoint.config import CheckpointConfig
from decentnode.errors import UsageError
from decentnode.node.node import Node
from tests.conftest import scale
from tests.node.fleet import NODES, Fleet, check_resumed, checkpoint_rounds, remove_checkpoints_after
from tests.sharing.contract import RULES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_old_checkpoints_are_removed_once_all_nodes_have_newer_ones(tmp_path: Path) -> None:
    Fleet(tmp_path / "a", rounds=9, checkpoint={"every": 1, "keep": 2}).run()
    assert checkpoint_rounds(tmp_path / "a") in ([7, 8, 9], [6, 7, 8, 9])
    Fleet(tmp_path / "b", rounds=9, checkpoint={"every": 1, "keep": 5}).run()
    assert checkpoint_rounds(tmp_path / "b") == [5, 6, 7, 8, 9]


@pytest.mark.slow
def test_nodes_keep_the_newest_checkpoint_of_a_node_that_can_write_no_more(tmp_path: Path) -> None:
    """The newest common checkpoint stays, and the number of newer ones that the others keep is bounded."""
    fleet = Fleet(tmp_path / "a", rounds=15, checkpoint={"every": 1, "keep": 1})
    for node in fleet.nodes:
        while_healthy = node.training.local_update

        def update(round: int, direction: Any = None, node: Node = node, local: Any = while_healthy) -> Any:
            if node.uid == 1 and round == 4:  # from now on it cannot write
                assert node.checkpoints is not None
                (tmp_path / "broken").write_text("")
                node.checkpoints._writer._folder = tmp_path / "broken"
            return local(round, direction)

        node.training.local_update = update  # type: ignore[method-assign]
    fleet.run()
    own = [manifest.cut.round for manifest in store.scan([tmp_path / "a"], 1)[0]]
    others = [manifest.cut.round for manifest in store.scan([tmp_path / "a"], 0)[0]]
    assert own[0] in (3, 4) and own[0] in others and len(others) <= 7
    resumed = Fleet(tmp_path / "b", rounds=15).resume(tmp_path / "a").run()
    assert {record["round"] for record in resumed.records_of_kind("resumed")} == {own[0]}
    checkpoints = fleet.nodes[1].checkpoints
    assert checkpoints is not None
    figures = checkpoints.closing_figures()
    assert figures["checkpoints_missed"] == 15 - own[0] and "broken" in str(figures["checkpoint_problem"])
    assert "checkpoints_missed" not in fleet.nodes[0].figures()


def test_the_figures_of_a_node_that_wrote_no_checkpoint_count_the_missed_ones(tmp_path: Path) -> None:
    """A node without such figures would be left out of the figures of the run."""
    fleet = Fleet(tmp_path / "a", rounds=3, checkpoint={"every": 1})
    (tmp_path / "broken").write_text("")
    checkpoints = fleet.nodes[1].checkpoints
    assert checkpoints is not None
    checkpoints._writer._folder = tmp_path / "broken"  # type: ignore[attr-defined]
    figures = fleet.run().nodes[1].figures()
    assert (figures["checkpoints"], figures["checkpoints_kept"], figures["checkpoints_missed"]) == (0, 0, 3)


@pytest.mark.slow
def test_checkpoints_of_an_earlier_process_count_as_kept(tmp_path: Path) -> None:
    Fleet(tmp_path / "a", rounds=3, checkpoint={"every": 1, "keep": 9}).run()
    checkpoints = Fleet(tmp_path / "a", rounds=2, checkpoint={"every": 1, "keep": 9}).nodes[0].checkpoints
    assert checkpoints is not None
    checkpoints.figures.count = 1  # type: ignore[attr-defined]
    assert checkpoints.closing_figures()["checkpoints_kept"] == 3


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path: Path) -> None:
    keys = {"every": 2, "keep": 1, "best": {"figure": "loss_mean", "better": "higher"}}
    fleet = Fleet(tmp_path / "a", rounds=8, evaluate_every=1, checkpoint=keys).run()
    losses = {record["round"]: record["loss_mean"] for record in fleet.records_of_kind("evaluation")}
    worst = max((round for round in losses if round), key=lambda round: losses[round])
    marks = [store.json.loads((tmp_path / "a" / f"best-{uid:03d}.json").read_text()) for uid in range(NODES)]
    assert {mark["round"] for mark in marks} == {worst} and {mark["value"] for mark in marks} == {losses[worst]}
    assert worst in checkpoint_rounds(tmp_path / "a") and 8 in checkpoint_rounds(tmp_path / "a")
    with pytest.raises(UsageError, match=r"node\.checkpoint\.best must be a figure of the evaluations .*accuracy_mean"):
        Fleet(tmp_path / "b", checkpoint={"best": "bleu_mean"}).run()


@pytest.mark.parametrize(("figure", "better", "values", "best"), [
    ("accuracy_merged", None, [0.1, 0.4, 0.3, 0.4], [0, 1]), ("accuracy_mean", "lower", [0.3, 0.4, 0.2], [0, 2]),
    ("loss_merged", None, [3.0, 2.0, 2.5, float("nan")], [0, 1]), ("loss_mean", "higher", [3.0, 4.0], [0, 1]),
    ("consensus_distance", None, [0.5, 0.6], [0]), ("consensus_rms", "higher", [float("nan"), 0.6], [1]),
])  # fmt: skip
def test_the_metric_or_the_config_decides_which_value_is_the_best(
    tmp_path: Path, figure: str, better: str | None, values: list[float], best: list[int]
) -> None:
    """The metric of the task decides if a higher value is better, unless the config does."""
    node = Fleet(tmp_path, checkpoint={"best": {"figure": figure, "better": better}}).nodes[0]
    best_indices = []
    assert node.checkpoints is not None
    for index, value in enumerate(values):
        node.round = node.evaluated = index
        node.evaluation = {figure: value}
        if node.checkpoints._is_best():
            best_indices.append(index)
    assert best_indices == best


def test_checkpoint_best_must_be_a_figure_that_is_equal_on_all_nodes() -> None:
    with pytest.raises(ValueError, match="which all nodes have alike"):
        CheckpointConfig.model_validate({"best": "accuracy"})


def run_on_virtual_time(folder: Path, per_round: Callable[[int, int], float], rounds: int = 60, **keys: Any) -> Fleet:
    """Runs nodes on virtual time. per_round: how many seconds a local update of (uid, round) takes."""
    with clock.use(clock.VirtualClock()):
        fleet = Fleet(folder, rounds=rounds, evaluate_every=0, checkpoint={"keep": 99, **keys})
        for node in fleet.nodes:
            local = node.training.local_update

            def update(round: int, direction: Any = None, node: Node = node, local: Any = local) -> Any:
                clock.sleep(per_round(node.uid, round))
                return local(round, direction)

            node.training.local_update = update  # type: ignore[method-assign]
        return fleet.run()


@pytest.mark.slow
def test_checkpoints_by_minutes_are_taken_after_the_same_rounds_on_all_nodes(tmp_path: Path) -> None:
    fleet = run_on_virtual_time(tmp_path / "a", lambda uid, round: 1.0 + uid, minutes=2)  # 10 s per round: 12 rounds
    rounds = checkpoint_rounds(tmp_path / "a")
    for uid in range(NODES):
        assert sorted(manifest.cut.round for manifest in store.scan([tmp_path / "a"], uid)[0]) == rounds
    gaps = np.diff([0, *rounds])
    assert rounds[-1] == 60 and all(12 <= gap <= 16 for gap in gaps[:-1]), rounds
    assert len({record["round"] for record in fleet.records_of_kind("checkpoint")}) == len(rounds)


def test_checkpoints_by_minutes_are_taken_every_few_rounds_if_rounds_take_longer(tmp_path: Path) -> None:
    # nodes agree on the time only every other round
    run_on_virtual_time(tmp_path / "a", lambda uid, round: 200.0, rounds=8, minutes=1)
    assert checkpoint_rounds(tmp_path / "a") in ([2, 4, 6, 8], [3, 5, 7, 8])


@pytest.mark.slow
def test_checkpoints_by_minutes_cost_few_control_messages(tmp_path: Path) -> None:
    """Rounds take a millisecond: not every one may compute a mean over all nodes."""
    every = scale(250, 1000)
    fleet = run_on_virtual_time(tmp_path / "a", lambda uid, round: 0.00025, rounds=3 * every, minutes=every / 60_000)
    gaps = np.diff([0, *checkpoint_rounds(tmp_path / "a")])[:2]
    assert [0.9 * every < gap < 1.2 * every for gap in gaps] == [True, True]
    control = fleet.nodes[1].communication.counters.bytes_sent()["control"]
    assert control < 16 * scale(50, 200)


@pytest.mark.slow
def test_checkpoints_are_taken_by_rounds_and_by_minutes_together(tmp_path: Path) -> None:
    run_on_virtual_time(tmp_path / "a", lambda uid, round: 2.5 if round < 20 else 15.0, every=10, minutes=5)
    rounds = checkpoint_rounds(tmp_path / "a")
    assert set(range(10, 61, 10)) <= set(rounds) and len(rounds) > 8


@pytest.mark.sampled(one=["name"])
@pytest.mark.parametrize("name", ["push_sum", "gradient_tracking", "choco"])
def test_a_run_with_checkpoints_by_minutes_is_resumed_bit_for_bit(tmp_path: Path, name: str) -> None:
    def run(folder: Path, resume: Path | None = None) -> Fleet:
        with clock.use(clock.VirtualClock()):
            fleet = Fleet(folder, RULES[name], rounds=20, checkpoint={"minutes": 1 / 60, "keep": 9})
            if resume is not None:
                fleet.resume(resume)
            for node in fleet.nodes:
                local = node.training.local_update
                node.training.local_update = (  # type: ignore[method-assign]
                    lambda round, direction=None, local=local: (clock.sleep(0.05), local(round, direction))[1])
            return fleet.run()

    straight = run(tmp_path / "a")
    middle = checkpoint_rounds(tmp_path / "a")[1]
    assert middle < 20
    remove_checkpoints_after(tmp_path / "a", middle)
    check_resumed(straight, run(tmp_path / "b", tmp_path / "a"), middle)
