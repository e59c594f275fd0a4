"""Early stop: all nodes end after the same round, also when nodes die, come back or resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from decentnode.checkpoint import store
from decentnode.errors import ConfigError
from decentnode.experiment import load
from decentnode.node.checkpoints.handover import agree_on_early_stopping
from decentnode.node.config import NodeConfig
from decentnode.node.measuring.early_stopping import EarlyStopping, reason_for_early_end
from tests.checkpoint.test_state import states_equal
from tests.graph.contract import make
from tests.node.fleet import NODES, Fleet, check_resumed, remove_checkpoints_after
from tests.node.test_generations import Run
from tests.training import small

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
FIGURE = "accuracy_merged"
STOP: dict[str, Any] = {"evaluate_every": 1, "rounds": 60}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_course(**keys: Any) -> EarlyStopping:
    config = NodeConfig.model_validate({"early_stop": {"figure": FIGURE, **keys}})
    return EarlyStopping(config, small.make())


@pytest.mark.parametrize(("keys", "values", "ends", "best"), [
    ({"patience": 2}, [0.1, 0.3, 0.2, 0.3], 3, (0.3, 1)),
    ({"patience": 1}, [0.1, 0.1], 1, (0.1, 0)),
    ({"patience": 2, "min_delta": 0.15}, [0.1, 0.2, 0.26, 0.3, 0.31], 4, (0.31, 4)),
    ({"patience": 2, "after": 4}, [0.5, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4], 6, (0.5, 0)),
    ({"patience": 1, "figure": "loss_mean"}, [3.0, 2.0, 2.5], 2, (2.0, 1)),
    ({"patience": 1, "figure": "loss_mean", "better": "higher"}, [3.0, 4.0, 2.5], 2, (4.0, 1)),
    ({"patience": 2, "figure": "consensus_rms"}, [0.5, float("nan"), float("nan")], 2, (0.5, 0)),
    ({"patience": 1, "figure": "own_accuracy_mean", "better": "higher"}, [0.1, 0.2, 0.1], 2, (0.2, 1)),
    ({"patience": 1, "figure": "ema_accuracy_merged"}, [0.1, 0.2, 0.1], 2, (0.2, 1)),
    ({"patience": 3}, [0.1, 0.2, 0.3, 0.4, 0.5], None, (0.5, 4)),
], ids=str)  # fmt: skip
def test_the_values_decide_after_which_evaluation_a_run_ends(
    keys: dict[str, Any], values: list[float], ends: int | None, best: tuple[float, int]
) -> None:
    followed = make_course(**keys)
    found = None
    for round, value in enumerate(values):
        for _ in range(2):  # an evaluation that is made again counts once
            followed.take({keys.get("figure", FIGURE): value}, round)
        again = make_course(**keys)
        again.load_state_dict(followed.state_dict())
        assert again.figures() == followed.figures() and again.over == followed.over
        if followed.over:
            found = round
            break
    assert found == ends
    figures = followed.figures()
    assert (figures["best_value"], figures["best_round"]) == best and figures["stopped_early"] == (ends is not None)


def test_without_early_stop_the_best_value_is_known_and_the_run_does_not_end() -> None:
    for config, figure in (({}, "accuracy_merged"), ({"checkpoint": {"best": "loss_mean"}}, "loss_mean")):
        followed = EarlyStopping(NodeConfig.model_validate(config), small.make())
        for round in range(9):
            followed.take({"accuracy_merged": 0.5, "loss_mean": 1.0}, round)
        assert not followed.over and followed.figures() == {
            "best_figure": figure, "best_value": 0.5 if figure == "accuracy_merged" else 1.0, "best_round": 0}
        followed.load_state_dict({"figure": "another", "numbers": []})
        assert followed.best.round == 0


def rounds_of(fleet: Fleet) -> int:
    """Returns after how many rounds the nodes ended: all after the same."""
    assert len({node.round for node in fleet.nodes}) == 1
    return fleet.nodes[0].round


def expected(fleet: Fleet, patience: int) -> int:
    """Returns after which round the run has to end according to its evaluations."""
    values = {record["round"]: record[FIGURE] for record in fleet.records_of_kind("evaluation") if record["uid"] == 0}
    best, since = -1.0, 0
    for round in sorted(values):
        best, since = (values[round], 0) if values[round] > best else (best, since + 1)
        if since == patience:
            return round
    return fleet.config.rounds


@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
@pytest.mark.parametrize("patience", [1, 3])
def test_all_nodes_end_after_the_same_round(tmp_path: Path, patience: int, schedule: str) -> None:
    fleet = Fleet(tmp_path, **STOP, schedule=schedule, early_stop={"figure": FIGURE, "patience": patience}).run()
    ended = rounds_of(fleet)
    assert ended == expected(fleet, patience) < 60
    assert {record["round"] for record in fleet.records_of_kind("early_stop")} == {ended}
    assert {record["uid"] for record in fleet.records_of_kind("early_stop")} == {*range(NODES)}
    assert all(node.figures()["stopped_early"] == 1 for node in fleet.nodes)
    assert ended in {int(folder.name.partition("-")[0]) for folder in tmp_path.glob("0*")}


@pytest.mark.slow
def test_an_early_stop_that_is_never_reached_changes_no_bit(tmp_path: Path) -> None:
    one = Fleet(tmp_path / "a", evaluate_every=1).run()
    other = Fleet(tmp_path / "b", evaluate_every=1, early_stop={"figure": FIGURE, "patience": 50}).run()
    for before, after in zip(one.states(), other.states(), strict=True):
        assert all(states_equal(x, y) for x, y in zip(before[:3], after[:3], strict=True))


def test_a_resumed_run_stops_early_after_the_same_round_as_the_uninterrupted_one(tmp_path: Path) -> None:
    keys = {**STOP, "early_stop": {"figure": FIGURE, "patience": 3}, "checkpoint": {"every": 1, "keep": 99}}
    straight = Fleet(tmp_path / "a", **keys).run()
    ended = rounds_of(straight)
    remove_checkpoints_after(tmp_path / "a", ended - 1)  # in the middle of the patience
    resumed = Fleet(tmp_path / "b", **keys).resume(tmp_path / "a").run()
    assert rounds_of(resumed) == ended
    check_resumed(straight, resumed, ended - 1)


@pytest.mark.slow
def test_an_early_stopped_run_continues_when_resumed_only_with_more_patience(tmp_path: Path) -> None:
    patience = {"figure": FIGURE, "patience": 1}
    first = Fleet(tmp_path / "a", **STOP, early_stop=patience).run()
    again = Fleet(tmp_path / "b", **STOP, early_stop=patience).resume(tmp_path / "a").run()
    assert rounds_of(again) == rounds_of(first) and not again.records_of_kind("round")
    more = {"figure": FIGURE, "patience": 3}
    straight = Fleet(tmp_path / "c", **STOP, early_stop=more).run()
    longer = Fleet(tmp_path / "d", **STOP, early_stop=more).resume(tmp_path / "a").run()
    assert rounds_of(longer) == rounds_of(straight) > rounds_of(first)
    check_resumed(straight, longer, rounds_of(first))
    best = {"figure": FIGURE, "round": 2, "value": 0.5, "evaluations_since": 2}
    config = NodeConfig.model_validate({"early_stop": {"figure": FIGURE, "patience": 2}}).early_stop
    assert config is not None
    assert "best after round 2 (0.5) and not better in 2 evaluations" in reason_for_early_end(config, best)
    assert not reason_for_early_end(config.model_copy(update={"patience": 3}), best)
    assert not reason_for_early_end(config.model_copy(update={"figure": "loss_mean"}), best)
    assert not reason_for_early_end(config, {})


@pytest.mark.parametrize("without", [(), (0,), (1, 3)])
def test_members_adopt_the_evaluation_history_of_a_member_that_has_seen_all(
    tmp_path: Path, without: tuple[int, ...]
) -> None:
    """A node that joins a generation or has no checkpoint has seen no evaluation; another one may have missed the last
    one. without: the nodes that have seen none."""
    fleet = Fleet(tmp_path, **STOP, early_stop={"figure": FIGURE, "patience": 2})
    for node in fleet.nodes:
        for round in range(1, 4 if node.uid == 2 else 5):
            if node.uid not in without:
                node.early_stopping.take({FIGURE: 0.1 + round / 3}, round)
    giver = min({*range(NODES)} - {*without})
    before = fleet.nodes[giver].early_stopping.numbers()
    steps = [agree_on_early_stopping(node, frozenset(without), "test/course") for node in fleet.nodes]
    for _ in range(4):
        for agreement in steps:
            next(agreement, None)
    found = [node.early_stopping.numbers() for node in fleet.nodes]
    assert found == [found[0]] * NODES and found[0] == pytest.approx(before, rel=1e-14)
    assert found[0][4:] == [4.0, 0.0, 4.0]


@pytest.mark.sampled(one=["lost"])
@pytest.mark.parametrize("lost", range(4, 12))
@pytest.mark.parametrize("back", [3, 6])
def test_a_node_that_dies_and_comes_back_stops_early_with_the_others(lost: int, back: int) -> None:
    """Without training the distance to consensus only falls: no evaluation is better than the first."""
    stop = {"figure": "consensus_rms", "better": "higher", "patience": 7}
    run = Run(make("regular", nodes=8), rounds=40, early_stop=stop, evaluate_every=1)
    run.step(5 + lost)
    run.lose(3)
    run.step(back)
    run.restart(3)
    run.end()
    ended = {node.round for node in run.nodes.values()}
    assert len(ended) == 1 and ended < {*range(7, 12)}, ended
    assert {*run.nodes} == {*range(8)} and all(node.early_stopping.over for node in run.nodes.values())
    assert len({str(node.early_stopping.numbers()) for node in run.nodes.values()}) == 1


def test_a_node_without_a_checkpoint_stops_early_with_the_others(tmp_path: Path) -> None:
    keys = {**STOP, "early_stop": {"figure": FIGURE, "patience": 3, "after": 4}}
    Fleet(tmp_path / "a", **{**keys, "rounds": 4}).run()
    for path in (tmp_path / "a").glob("0*/000.*"):
        path.unlink()
    fleet = Fleet(tmp_path / "b", **keys).resume(tmp_path / "a").run()
    assert {tuple(record["without"]) for record in fleet.records_of_kind("resumed")} == {(0,)}
    assert 4 < rounds_of(fleet) < 60 and len({str(node.early_stopping.numbers()) for node in fleet.nodes}) == 1


def test_a_resumed_run_keeps_the_best_checkpoint_until_a_better_one(tmp_path: Path) -> None:
    """A later checkpoint must be better than the best one before the resumption."""
    best = {"figure": "loss_mean", "better": "higher"}  # an early checkpoint is the best, as training lowers the loss
    keys = {"every": 2, "keep": 1, "best": best}
    Fleet(tmp_path / "a", rounds=6, evaluate_every=1, checkpoint=keys).run()
    before = store.read_best(tmp_path / "a", 1)
    resumed = Fleet(tmp_path / "b", rounds=8, evaluate_every=1, checkpoint=keys).resume(tmp_path / "a").run()
    assert before is not None and before["round"] < 6 and store.read_best(tmp_path / "b", 1) == before
    assert (tmp_path / "b" / before["cut"] / "001.json").exists()
    assert all(node.checkpoints is not None and node.checkpoints._best is not None
               and node.checkpoints._best.value == before["value"] for node in resumed.nodes)  # fmt: skip
    (tmp_path / "a" / "best-001.json").write_text("{}")
    assert store.read_best(tmp_path / "a", 1) is None


@pytest.mark.parametrize(("change", "reason"), [
    ("node.early_stop=accuracy", "which all nodes have alike"),
    ("node.early_stop=bleu_mean", "early_stop must be one of accuracy_mean, accuracy_merged"),
    ("node={early_stop: accuracy_mean, evaluate_every: 0}", "early_stop needs evaluate_every of at least 1"),
    ("node.early_stop={figure: loss_mean, patience: 0}", "patience"),
    ("node.early_stop=ema_accuracy_merged", "early_stop must be one of accuracy_mean"),
])  # fmt: skip
def test_figures_that_cannot_be_monitored_are_refused(change: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(QUICKSTART, [change], {})
    assert reason in "\n".join(caught.value.problems)


def test_a_figure_of_a_model_variant_can_be_monitored() -> None:
    sets = ["training.ema=0.9", "node.early_stop=ema_accuracy_merged", "node.checkpoint={best: ema_loss_mean}"]
    assert load(QUICKSTART, sets, {}).node.early_stop is not None
