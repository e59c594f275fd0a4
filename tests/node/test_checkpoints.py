"""A resumed run gives, bit for bit, the results of the same run without an interruption."""

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
from decentnode.sharing.base import Sharing
from decentnode.sharing.compressed import Compressed
from decentnode.sharing.full import Full
from tests.checkpoint.test_state import states_equal
from tests.conftest import scale
from tests.graph.contract import make
from tests.node.fleet import NODES, ROUNDS, TRAINING, Fleet, check_resumed, remove_checkpoints_after
from tests.sharing.contract import RULES, requirement_traits
from tests.training import small

pytestmark = pytest.mark.usefixtures("one_thread")


def choose_schedules(names: Sequence[str]) -> list[tuple[str, str]]:
    """Returns rules with schedules: the first variant of each rule with both schedules if it supports them, further
    variants with one, under --stress with both."""
    cases, seen = [], set[str]()
    for index, name in enumerate(names):
        made = RULES[name]()
        both = ["sequential"] if made.requirements.sequential else ["sequential", "overlapped"]
        chosen = both if type(made).__name__ not in seen or scale(0, 1) else [both[index % len(both)]]
        seen.add(type(made).__name__)
        cases += [(name, schedule) for schedule in chosen]
    return cases


@pytest.mark.sampled(of=requirement_traits)
@pytest.mark.parametrize(("name", "schedule"), choose_schedules([*RULES]))
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, name: str, schedule: str) -> None:
    straight = Fleet(tmp_path / "a", RULES[name], schedule=schedule, rounds=5).run()
    remove_checkpoints_after(tmp_path / "a", 3)
    resumed = Fleet(tmp_path / "b", RULES[name], schedule=schedule, rounds=5).resume(tmp_path / "a").run()
    check_resumed(straight, resumed, 3)
    assert all(record["rule"] == "restored" for record in resumed.records_of_kind("resumed"))
    assert not any("left_out" in record for record in straight.records_of_kind("checkpoint"))


class HasUnsavedTensor(Full):
    """Keeps a tensor that is not part of a checkpoint."""

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        super().mix(model, received, view)
        self.last = model.clone()


@pytest.mark.parametrize("compression", [None, {"name": "int8"}])
def test_the_first_checkpoint_record_names_tensors_that_are_not_saved(tmp_path: Path, compression: Any) -> None:
    config = Full.Config.model_validate({"name": "full", "compression": compression})
    made: Sharing = HasUnsavedTensor(config)
    if compression is not None:
        made = Compressed(made, make_codec(config.compression))
    fleet = Fleet(tmp_path, lambda: copy.deepcopy(made), rounds=5).run()
    naming = [record for record in fleet.records_of_kind("checkpoint") if "left_out" in record]
    assert [record["left_out"] for record in naming] == [["HasUnsavedTensor.last"]] * NODES


@pytest.mark.sampled(of=requirement_traits)
@pytest.mark.parametrize(("name", "schedule"), choose_schedules(
    ["full", "push_sum", "d2", "gradient_tracking", "qg_momentum", "choco", "topk", "elastic", "leader", "slowmo",
     "deepsqueeze", "subsample"]))  # fmt: skip
@pytest.mark.parametrize("round", [3, 4])
def test_a_run_resumed_between_two_exchanges_of_a_fragment_equals_the_uninterrupted_one(
    tmp_path: Path, name: str, schedule: str, round: int
) -> None:
    """A rule sees several rounds as one then, and the checkpoint may be taken in the middle of them."""
    keys: dict[str, Any] = {"fragments": True, "schedule": schedule, "checkpoint": {"every": round}}
    straight = Fleet(tmp_path / "a", RULES[name], **keys).run()
    remove_checkpoints_after(tmp_path / "a", round)
    check_resumed(straight, Fleet(tmp_path / "b", RULES[name], **keys).resume(tmp_path / "a").run(), round)


def test_the_digest_of_a_checkpoint_is_that_of_the_state_and_changes_with_the_model(tmp_path: Path) -> None:
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


TRAINING_STATE: list[dict[str, Any]] = [
    {"amp": "fp16", "accumulate": 2, "clip_norm": 0.5, "ema": {"decay": 0.8, "every": "step"}},
    {"amp": "bf16", "compile": {"backend": "eager"}, "ema": 0.9, "evaluate_train": 4},
]
"""Options of training that keep state beside the optimizer's: loss scales, averages, accumulated gradients, ..."""


@pytest.mark.parametrize("name", ["full", "gradient_tracking", "choco"])
@pytest.mark.parametrize("keys", TRAINING_STATE, ids=str)
@pytest.mark.slow
def test_a_resumed_run_has_all_state_of_its_training(tmp_path: Path, keys: dict[str, Any], name: str) -> None:
    training = {**TRAINING, **keys}
    straight = Fleet(tmp_path / "a", RULES[name], training=training).run()
    remove_checkpoints_after(tmp_path / "a", 3)
    resumed = Fleet(tmp_path / "b", RULES[name], training=training).resume(tmp_path / "a").run()
    check_resumed(straight, resumed, 3)


@pytest.mark.parametrize("buffers", ["average", "local", "recompute"])
def test_a_run_resumed_after_an_evaluation_has_the_buffers_that_it_changed(tmp_path: Path, buffers: str) -> None:
    """Evaluations may change buffers; the changed ones belong to the state after the round."""
    straight = Fleet(tmp_path / "a", buffers=buffers, checkpoint={"every": 4}).run()
    remove_checkpoints_after(tmp_path / "a", 4)
    resumed = Fleet(tmp_path / "b", buffers=buffers, checkpoint={"every": 4}).resume(tmp_path / "a").run()
    check_resumed(straight, resumed, 4)


@pytest.mark.sampled(one=["rounds"])
@pytest.mark.parametrize("rounds", [4, 5, 6])
def test_a_finished_run_resumed_with_more_rounds_equals_a_longer_run(tmp_path: Path, rounds: int) -> None:
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


def test_checkpoints_after_every_round_do_not_change_the_run(tmp_path: Path) -> None:
    straight = Fleet(tmp_path / "a", checkpoint=None).run()
    often = Fleet(tmp_path / "b", checkpoint={"every": 1, "keep": 99}).run()
    assert [states_equal(a, b) for a, b in zip(straight.states(), often.states(), strict=True)] == [True] * NODES
    rounds = {int(place.name.partition("-")[0]) for place in (tmp_path / "b").iterdir()}
    assert rounds == set(range(1, ROUNDS + 1))
    assert {record["round"] for record in often.records_of_kind("checkpoint")} == rounds


# -- files that are missing or damaged ------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
@pytest.mark.parametrize("name", ["full", "push_sum", "choco", "gradient_tracking"])
def test_a_stopped_run_leaves_a_checkpoint_of_its_last_round_and_can_be_resumed(
    tmp_path: Path, name: str, schedule: str
) -> None:
    if schedule == "overlapped" and RULES[name]().requirements.sequential:
        pytest.skip("the rule corrects local steps before it sends")
    no_periodic = {"schedule": schedule, "checkpoint": {"every": 100}}
    straight = Fleet(tmp_path / "a", RULES[name], **no_periodic).run()
    stopped = Fleet(tmp_path / "b", RULES[name], **no_periodic)
    step_all(stopped.nodes, rounds=4)
    (ended,) = {node.round for node in stopped.nodes}
    assert 4 <= ended < ROUNDS
    assert {manifest.cut.round for uid in range(NODES) for manifest in store.scan([tmp_path / "b"], uid)[0]} == {ended}
    resumed = Fleet(tmp_path / "c", RULES[name], **no_periodic).resume(tmp_path / "b").run()
    # an evaluation that the stop interrupted is made again
    check_resumed(straight, resumed, ended, besides="bytes_evaluation")
    evaluated = {record["round"]: record["uid"] for record in resumed.records_of_kind("evaluation")}
    assert evaluated.get(4) == (3 if ended == 4 else None)
    numbers = [[node.early_stopping.numbers() for node in each.nodes] for each in (resumed, straight)]
    assert numbers[0] == numbers[1]


@pytest.mark.slow
def test_nodes_that_stopped_after_different_rounds_resume_from_the_earlier_common_checkpoint(tmp_path: Path) -> None:
    straight = Fleet(tmp_path / "a").run()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    remove_checkpoints_after(tmp_path / "b", 3)
    one = Fleet(tmp_path / "c")
    one.nodes[0].round = 5  # as a node that ended a round after the others
    one.nodes[0].communication.announce_stop()
    assert one.nodes[0].checkpoints is not None
    one.nodes[0].checkpoints.after_the_last()
    one.nodes[0].checkpoints.finish()
    shutil.copytree(tmp_path / "c", tmp_path / "b", dirs_exist_ok=True)
    assert store.scan([tmp_path / "b"], 0)[0][0].cut.round == 5
    check_resumed(straight, Fleet(tmp_path / "d").resume(tmp_path / "b").run(), 3)


def test_damaged_and_partial_checkpoints_are_named_and_an_earlier_one_is_used(tmp_path: Path) -> None:
    straight = Fleet(tmp_path / "a", checkpoint={"every": 2, "keep": 9}).run()
    folders = {int(place.name.partition("-")[0]): place for place in (tmp_path / "a").iterdir()}
    data = bytearray((folders[7] / "002.safetensors").read_bytes())
    data[-1] ^= 1
    (folders[7] / "002.safetensors").write_bytes(data)  # damaged: noticed when the file is read
    (folders[6] / "001.json").unlink()  # partial, as if the process was killed before it wrote the manifest
    resumed = Fleet(tmp_path / "b").resume(tmp_path / "a").run()
    check_resumed(straight, resumed, 4)
    problems = {record["uid"]: record["problems"] for record in resumed.records_of_kind("resumed")}
    assert "damaged" in problems[2][0] and "partial" in problems[1][0] and not problems[0] and not problems[3]


def test_resuming_fails_with_the_reason_if_all_checkpoints_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decentnode.checkpoint.agreement.MAX_CUTS", 1)
    Fleet(tmp_path / "a", checkpoint={"every": 2, "keep": 9}).run()
    for path in (tmp_path / "a").glob("*/*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"(?s)no round has a complete checkpoint on all nodes.*is damaged"):
        Fleet(tmp_path / "b").resume(tmp_path / "a").run()


def test_a_run_does_not_resume_from_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    """A model's code may change while all keys of the experiment stay."""
    Fleet(tmp_path / "a").run()
    changed = Fleet(tmp_path / "b").resume(tmp_path / "a")
    for node in changed.nodes:
        node.training.model.module.register_buffer("further", torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"(?s)of this node: none.*of another model: it differs in further"):
        changed.run()


def test_a_node_without_a_checkpoint_starts_from_the_mean_of_the_others_and_is_recorded(tmp_path: Path) -> None:
    straight = Fleet(tmp_path / "a", rounds=3).run()
    for path in (tmp_path / "a").glob("0*/002.*"):
        path.unlink()
    resumed = Fleet(tmp_path / "b", rounds=3).resume(tmp_path / "a").run()
    assert {tuple(record["without"]) for record in resumed.records_of_kind("resumed")} == {(2,)}
    assert {record["rule"] for record in resumed.records_of_kind("resumed")} == {"anew"}
    before, now = (np.stack([node.training.model.parameters.double().numpy() for node in fleet.nodes])
                   for fleet in (straight, resumed))  # fmt: skip
    np.testing.assert_array_equal(np.delete(now, 2, 0), np.delete(before, 2, 0))
    np.testing.assert_allclose(now[2], np.delete(before, 2, 0).mean(0), atol=1e-6)
    own, others = resumed.nodes[2].training, resumed.nodes[1].training
    assert own.learning_rate == others.learning_rate
    longer = Fleet(tmp_path / "c").resume(tmp_path / "a").run()
    assert all(node.round == ROUNDS for node in longer.nodes) and np.isfinite(longer.nodes[2].figures()["loss"])


def test_resuming_without_a_complete_checkpoint_is_an_error(tmp_path: Path) -> None:
    Fleet(tmp_path / "a").run()
    for place in sorted((tmp_path / "a").iterdir()):
        round = int(place.name.partition("-")[0])
        for uid in range(NODES):
            if uid % 2 != round % 2:  # no round is complete
                store.remove(tmp_path / "a", place.name, uid)
    with pytest.raises(CheckpointError, match="no round has a complete checkpoint on all nodes"):
        Fleet(tmp_path / "b").resume(tmp_path / "a").run()
    with pytest.raises(CheckpointError, match="checkpoints of this node: none"):
        Fleet(tmp_path / "c").resume(tmp_path / "none").run()
    with pytest.raises(CheckpointError, match="checkpoints of this node: none"):
        Fleet(tmp_path / "c").resume(tmp_path / "a", runs=["of another run"]).run()


def test_loading_the_state_of_another_module_is_refused() -> None:
    state = module_state(small.batch_norm_net())
    with pytest.raises(CheckpointError, match="differs in"):
        load_module_state(small.linear_net(), state, "there")
    wider = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 5))
    with pytest.raises(CheckpointError, match=r"1\.weight is \[4, 6\]"):
        load_module_state(wider, module_state(small.linear_net()), "there")


# -- random graphs --------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("graph", ["el_local", "random_regular"])
@pytest.mark.parametrize("name", ["full", "topk"])
def test_a_resumed_run_draws_the_same_neighbors(
    tmp_path: Path, name: str, graph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The neighbors follow from the seed and the round."""
    monkeypatch.setattr("tests.node.fleet.suitable_graph", lambda _rule, nodes: make(graph, nodes=nodes, degree=2))
    straight = Fleet(tmp_path / "a", RULES[name]).run()
    remove_checkpoints_after(tmp_path / "a", 3)
    check_resumed(straight, Fleet(tmp_path / "b", RULES[name]).resume(tmp_path / "a").run(), 3)
    assert len({straight.graph.neighbors(0, round) for round in range(7)}) > 1
