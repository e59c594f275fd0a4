"""A run that is interrupted and resumed gives, bit for bit, what the same run gives without an interruption."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decentnode.build import step_all
from decentnode.checkpoint import store
from decentnode.compression.base import make_codec
from decentnode.errors import CheckpointError
from decentnode.graph.base import RoundView
from decentnode.node.checkpoints.resuming import MODEL_PARTS
from decentnode.node.checkpoints.snapshot import Restored, capture, load_module_state, module_state
from decentnode.payload import Payload
from decentnode.sharing.compressed import Compressed
from decentnode.sharing.full import Full
from tests.checkpoint.test_state import states_equal
from tests.conftest import scale
from tests.graph.contract import make
from tests.node.fleet import NODES, ROUNDS, TRAINING, Fleet, check_resumed, whole_until
from tests.sharing.contract import RULES, requirement_traits
from tests.training import small

pytestmark = pytest.mark.usefixtures("one_thread")


def on_schedules(names: Sequence[str]) -> list[tuple[str, str]]:
    """Every rule with a schedule; each rule's first options, and under --stress all, with both where it has both."""
    found, seen = [], set[str]()
    for index, name in enumerate(names):
        made = RULES[name]()
        both = ["sequential"] if made.requirements.sequential else ["sequential", "overlapped"]
        chosen = both if type(made).__name__ not in seen or scale(0, 1) else [both[index % len(both)]]
        seen.add(type(made).__name__)
        found += [(name, schedule) for schedule in chosen]
    return found


@pytest.mark.sampled(of=requirement_traits)
@pytest.mark.parametrize(("name", "schedule"), on_schedules([*RULES]))
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, name: str, schedule: str) -> None:
    straight = Fleet(tmp_path / "a", RULES[name], schedule=schedule, rounds=5).run()
    whole_until(tmp_path / "a", 3)
    resumed = Fleet(tmp_path / "b", RULES[name], schedule=schedule, rounds=5).resume(tmp_path / "a").run()
    check_resumed(straight, resumed, 3)
    assert all(record["rule"] == "restored" for record in resumed.of_kind("resumed"))
    assert not any("left_out" in record for record in straight.of_kind("checkpoint"))


class Forgetful(Full):
    """Keeps a tensor that no checkpoint has."""

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        super().mix(model, received, view)
        self.last = model.clone()


@pytest.mark.parametrize("compression", [None, {"name": "int8"}])
def test_tensors_that_no_checkpoint_has_are_told_with_the_first(tmp_path: Path, compression: Any) -> None:
    config = Full.Config.model_validate({"name": "full", "compression": compression})
    made = Forgetful(config) if compression is None else Compressed(Forgetful(config), make_codec(config.compression))
    fleet = Fleet(tmp_path, lambda: copy.deepcopy(made), rounds=5).run()
    told = [record for record in fleet.of_kind("checkpoint") if "left_out" in record]
    assert [record["left_out"] for record in told] == [["Forgetful.last"]] * NODES


@pytest.mark.sampled(of=requirement_traits)
@pytest.mark.parametrize(("name", "schedule"), on_schedules(
    ["full", "push_sum", "d2", "gradient_tracking", "qg_momentum", "choco", "topk", "elastic", "leader", "slowmo",
     "deepsqueeze", "subsample"]))  # fmt: skip
@pytest.mark.parametrize("round", [3, 4])
def test_also_between_two_exchanges_of_a_fragment(tmp_path: Path, name: str, schedule: str, round: int) -> None:
    """A rule's turn has several rounds then, and may be cut in its middle."""
    keys: dict[str, Any] = {"fragments": True, "schedule": schedule, "checkpoint": {"every": round}}
    straight = Fleet(tmp_path / "a", RULES[name], **keys).run()
    whole_until(tmp_path / "a", round)
    check_resumed(straight, Fleet(tmp_path / "b", RULES[name], **keys).resume(tmp_path / "a").run(), round)


def test_a_file_has_the_digest_of_what_was_written(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, RULES["choco"]).run()
    for node in fleet.nodes:
        manifest, *_ = store.scan([tmp_path], node.uid)[0]
        now = capture(node, manifest.cut, {})
        assert manifest.cut.round == ROUNDS
        assert Restored.read(manifest).digest(*MODEL_PARTS) == Restored(now.tree, now.tensors, "").digest(*MODEL_PARTS)
        node.training.model.parameters[0] += 1
        changed = capture(node, manifest.cut, {})
        other = Restored(changed.tree, changed.tensors, "")
        assert other.digest(*MODEL_PARTS) != Restored.read(manifest).digest(*MODEL_PARTS)


MORE: list[dict[str, Any]] = [
    {"amp": "fp16", "accumulate": 2, "clip_norm": 0.5, "ema": {"decay": 0.8, "every": "step"}},
    {"amp": "bf16", "compile": {"backend": "eager"}, "ema": 0.9, "evaluate_train": 4},
]
"""What training may keep beside the optimizer's state, in products."""


@pytest.mark.parametrize("name", ["full", "gradient_tracking", "choco"])
@pytest.mark.parametrize("keys", MORE, ids=str)
@pytest.mark.slow
def test_with_all_that_training_keeps(tmp_path: Path, keys: dict[str, Any], name: str) -> None:
    training = {**TRAINING, **keys}
    straight = Fleet(tmp_path / "a", RULES[name], training=training).run()
    whole_until(tmp_path / "a", 3)
    resumed = Fleet(tmp_path / "b", RULES[name], training=training).resume(tmp_path / "a").run()
    check_resumed(straight, resumed, 3)


@pytest.mark.parametrize("buffers", ["average", "local", "recompute"])
def test_from_the_round_of_an_evaluation(tmp_path: Path, buffers: str) -> None:
    """Evaluations may change the buffers: they belong to the state of the round that they follow."""
    straight = Fleet(tmp_path / "a", buffers=buffers, checkpoint={"every": 4}).run()
    whole_until(tmp_path / "a", 4)
    resumed = Fleet(tmp_path / "b", buffers=buffers, checkpoint={"every": 4}).resume(tmp_path / "a").run()
    check_resumed(straight, resumed, 4)


@pytest.mark.sampled(one=["rounds"])
@pytest.mark.parametrize("rounds", [4, 5, 6])
def test_a_finished_run_goes_on_with_more_rounds(tmp_path: Path, rounds: int) -> None:
    straight = Fleet(tmp_path / "a").run()
    Fleet(tmp_path / "b", rounds=rounds).run()
    resumed = Fleet(tmp_path / "c").resume(tmp_path / "b").run()
    check_resumed(straight, resumed, rounds) if rounds != 4 else None
    assert [states_equal(a, b) for a, b in zip(straight.states(), resumed.states(), strict=True)] == [True] * NODES


@pytest.mark.slow
def test_a_run_may_be_resumed_again_and_again(tmp_path: Path) -> None:
    straight = Fleet(tmp_path / "0", checkpoint=None).run()
    Fleet(tmp_path / "1", rounds=2, checkpoint={"every": 1}).run()
    for rounds in range(3, ROUNDS + 1):
        last = Fleet(tmp_path / str(rounds - 1), rounds=rounds, checkpoint={"every": 1})
        last.resume(tmp_path / str(rounds - 2)).run()
    assert [states_equal(a, b) for a, b in zip(straight.states(), last.states(), strict=True)] == [True] * NODES


def test_a_checkpoint_may_be_taken_at_any_round_and_changes_nothing(tmp_path: Path) -> None:
    straight = Fleet(tmp_path / "a", checkpoint=None).run()
    often = Fleet(tmp_path / "b", checkpoint={"every": 1, "keep": 99}).run()
    assert [states_equal(a, b) for a, b in zip(straight.states(), often.states(), strict=True)] == [True] * NODES
    rounds = {int(place.name.partition("-")[0]) for place in (tmp_path / "b").iterdir()}
    assert rounds == set(range(1, ROUNDS + 1))
    assert {record["round"] for record in often.of_kind("checkpoint")} == rounds


# -- files that are missing or damaged ------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
@pytest.mark.parametrize("name", ["full", "push_sum", "choco", "gradient_tracking"])
def test_a_stop_leaves_a_checkpoint_of_the_round_after_which_all_ended(
    tmp_path: Path, name: str, schedule: str
) -> None:
    if schedule == "overlapped" and RULES[name]().requirements.sequential:
        pytest.skip("the rule corrects local steps before it sends")
    never = {"schedule": schedule, "checkpoint": {"every": 100}}
    straight = Fleet(tmp_path / "a", RULES[name], **never).run()
    stopped = Fleet(tmp_path / "b", RULES[name], **never)
    step_all(stopped.nodes, rounds=4)
    (ended,) = {node.round for node in stopped.nodes}
    assert 4 <= ended < ROUNDS
    assert {manifest.cut.round for uid in range(NODES) for manifest in store.scan([tmp_path / "b"], uid)[0]} == {ended}
    resumed = Fleet(tmp_path / "c", RULES[name], **never).resume(tmp_path / "b").run()
    check_resumed(straight, resumed, ended, besides="bytes_evaluation")  # one that the stop cut short is made again
    assert {each["round"]: each["uid"] for each in resumed.of_kind("evaluation")}.get(4) == (3 if ended == 4 else None)
    assert [node.course.numbers() for node in resumed.nodes] == [node.course.numbers() for node in straight.nodes]


@pytest.mark.slow
def test_a_stop_after_different_rounds_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    straight = Fleet(tmp_path / "a").run()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    whole_until(tmp_path / "b", 3)
    one = Fleet(tmp_path / "c")
    one.nodes[0].round = 5  # as a node that ended a round after the others
    one.nodes[0].communication.announce_stop()
    assert one.nodes[0].checkpoints is not None
    one.nodes[0].checkpoints.after_the_last()
    one.nodes[0].checkpoints.finish()
    shutil.copytree(tmp_path / "c", tmp_path / "b", dirs_exist_ok=True)
    assert store.scan([tmp_path / "b"], 0)[0][0].cut.round == 5
    check_resumed(straight, Fleet(tmp_path / "d").resume(tmp_path / "b").run(), 3)


def test_damaged_and_partial_ones_are_named_and_the_one_before_is_taken(tmp_path: Path) -> None:
    straight = Fleet(tmp_path / "a", checkpoint={"every": 2, "keep": 9}).run()
    folders = {int(place.name.partition("-")[0]): place for place in (tmp_path / "a").iterdir()}
    data = bytearray((folders[7] / "002.safetensors").read_bytes())
    data[-1] ^= 1
    (folders[7] / "002.safetensors").write_bytes(data)  # damaged: found out when it is read
    (folders[6] / "001.json").unlink()  # the process was killed before its manifest was there
    resumed = Fleet(tmp_path / "b").resume(tmp_path / "a").run()
    check_resumed(straight, resumed, 4)
    told = {record["uid"]: record["problems"] for record in resumed.of_kind("resumed")}
    assert "damaged" in told[2][0] and "partial" in told[1][0] and not told[0] and not told[3]


def test_where_all_that_is_tried_is_damaged_on_all_nodes_the_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decentnode.checkpoint.agreement.MOST_CUTS", 1)
    Fleet(tmp_path / "a", checkpoint={"every": 2, "keep": 9}).run()
    for path in (tmp_path / "a").glob("*/*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"(?s)no round has a complete checkpoint on all nodes.*is damaged"):
        Fleet(tmp_path / "b").resume(tmp_path / "a").run()


def test_a_checkpoint_of_another_model_is_not_gone_on_from(tmp_path: Path) -> None:
    """A model's code may change while all keys of the experiment stay."""
    Fleet(tmp_path / "a").run()
    changed = Fleet(tmp_path / "b").resume(tmp_path / "a")
    for node in changed.nodes:
        node.training.model.module.register_buffer("further", torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"(?s)of this node: none.*of another model: it differs in further"):
        changed.run()


def test_nodes_without_files_take_the_mean_of_the_others_and_say_so(tmp_path: Path) -> None:
    straight = Fleet(tmp_path / "a", rounds=3).run()
    for path in (tmp_path / "a").glob("0*/002.*"):
        path.unlink()
    resumed = Fleet(tmp_path / "b", rounds=3).resume(tmp_path / "a").run()
    assert {tuple(record["without"]) for record in resumed.of_kind("resumed")} == {(2,)}
    assert {record["rule"] for record in resumed.of_kind("resumed")} == {"anew"}
    before, now = (np.stack([node.training.model.parameters.double().numpy() for node in fleet.nodes])
                   for fleet in (straight, resumed))  # fmt: skip
    np.testing.assert_array_equal(np.delete(now, 2, 0), np.delete(before, 2, 0))
    np.testing.assert_allclose(now[2], np.delete(before, 2, 0).mean(0), atol=1e-6)
    own, others = resumed.nodes[2].training, resumed.nodes[1].training
    assert own.learning_rate == others.learning_rate
    more = Fleet(tmp_path / "c").resume(tmp_path / "a").run()
    assert all(node.round == ROUNDS for node in more.nodes) and np.isfinite(more.nodes[2].figures()["loss"])


def test_without_any_checkpoint_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    Fleet(tmp_path / "a").run()
    for place in sorted((tmp_path / "a").iterdir()):
        round = int(place.name.partition("-")[0])
        for uid in range(NODES):
            if uid % 2 != round % 2:  # no round is whole
                store.remove(tmp_path / "a", place.name, uid)
    with pytest.raises(CheckpointError, match="no round has a complete checkpoint on all nodes"):
        Fleet(tmp_path / "b").resume(tmp_path / "a").run()
    with pytest.raises(CheckpointError, match="checkpoints of this node: none"):
        Fleet(tmp_path / "c").resume(tmp_path / "none").run()
    with pytest.raises(CheckpointError, match="checkpoints of this node: none"):
        Fleet(tmp_path / "c").resume(tmp_path / "a", runs=["of another run"]).run()


def test_a_checkpoint_of_another_model_is_refused() -> None:
    state = module_state(small.noisy())
    with pytest.raises(CheckpointError, match="differs in"):
        load_module_state(small.linear(), state, "there")
    wider = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 5))
    with pytest.raises(CheckpointError, match=r"1\.weight is \[4, 6\]"):
        load_module_state(wider, module_state(small.linear()), "there")


# -- neighbors that are drawn ---------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("graph", ["el_local", "random_regular"])
@pytest.mark.parametrize("name", ["full", "topk"])
def test_draws_of_a_resumed_run_are_those_of_the_run(
    tmp_path: Path, name: str, graph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They follow from the seed and the round, and so does who sends to whom."""
    monkeypatch.setattr("tests.node.fleet.suited", lambda _rule, nodes: make(graph, nodes=nodes, degree=2))
    straight = Fleet(tmp_path / "a", RULES[name]).run()
    whole_until(tmp_path / "a", 3)
    check_resumed(straight, Fleet(tmp_path / "b", RULES[name]).resume(tmp_path / "a").run(), 3)
    assert len({straight.graph.neighbors(0, round) for round in range(7)}) > 1
