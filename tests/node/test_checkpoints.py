"""A run that is interrupted and resumed gives, bit for bit, what the same run gives without an interruption."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decentnode import clock
from decentnode.build import schemas_of, step_all
from decentnode.checkpoint import store
from decentnode.checkpoint.config import CheckpointConfig
from decentnode.communication.inproc import Hub, Inproc
from decentnode.communication.parts import CommunicationConfig
from decentnode.errors import CheckpointError, UsageError
from decentnode.graph.topology import Topology
from decentnode.node.checkpoints import Checkpoints
from decentnode.node.config import NodeConfig
from decentnode.node.node import Node, NodeParts
from decentnode.node.resume_agreement import ResumeFrom
from decentnode.node.snapshot import load_module_state, module_state
from decentnode.sharing.base import Sharing
from decentnode.sharing.fragments import Fragment
from tests.checkpoint.test_state import same
from tests.conftest import scale
from tests.sharing.contract import RULES, suited
from tests.training import small

NODES, ROUNDS = 4, 7
TRAINING = {"local_steps": 2, "batch_size": 5, "optimizer": {"name": "adam", "lr": 0.01},
            "lr_schedule": {"name": "cosine", "T_max": 20, "every": "step", "warmup": 3}}  # fmt: skip


class Fleet:
    """The nodes of a run in one process: dropout, statistics, a schedule of the learning rate, unequal data."""

    def __init__(
        self, folder: Path, rule: Callable[[], Sharing] = RULES["full"], *, fragments: bool = False,
        training: Mapping[str, Any] = TRAINING, **node: Any,
    ) -> None:
        """fragments: exchange two parts of the model in rounds of their own, and leave the rest to every node. node:
        keys of the section."""
        self.fragments, self.training = fragments, training
        every = {"rounds": ROUNDS, "evaluate_every": 4, "checkpoint": {"every": 3}}
        self.config = NodeConfig.model_validate({**every, **node})
        self.folder, self.rule = folder, rule
        self.graph: Topology = suited(rule(), NODES)
        self.hub = Hub(NODES)
        self.hub.run_id = b"\x07" * 8
        self.records: list[dict[str, Any]] = []
        self.nodes = [self.make(uid) for uid in range(NODES)]

    def make(self, uid: int) -> Node:
        training = small.make(uid, small.noisy, small.samples(20 + uid, uid), **self.training)

        def make_rule() -> Sharing:
            made = self.rule()
            made.set_machines([range(NODES // 2), range(NODES // 2, NODES)])
            made.set_parameter_shapes(training.model.shapes if not self.fragments else [(30,)])
            return made

        parts = (Fragment(0, 30, self.graph, 3, 1, 0), Fragment(30, 60, self.graph, 2, 0, 1)) if self.fragments else ()

        def make_rules() -> list[Sharing]:
            return [make_rule() for _ in parts or (None,)]

        rules = make_rules()
        schemas = schemas_of(rules, training.model, parts)
        transport = Inproc(CommunicationConfig(name="inproc"), uid=uid, hub=self.hub, schemas=schemas)
        made = NodeParts(self.graph, training, rules, transport, make_rules, parts)
        node = Node(uid, self.config, made, seed=1, record=lambda record: self.records.append({"uid": uid, **record}))
        node.checkpoints = Checkpoints(node, self.folder, {})
        return node

    def resume(self, *folders: Path, runs: Iterable[str] | None = None) -> Fleet:
        chosen = ResumeFrom(folders, None if runs is None else frozenset(runs))
        for node in self.nodes:
            node.checkpoints = Checkpoints(node, self.folder, {}, chosen)
        return self

    def run(self) -> Fleet:
        step_all(self.nodes)
        return self

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]

    def states(self) -> list[Any]:
        """All that a node is, but for what depends on the machine's speed."""
        found = []
        for node in self.nodes:
            figures = {key: value for key, value in node.figures().items() if not any(
                word in key for word in ("seconds", "overlap", "waited", "control", "checkpoint"))}  # fmt: skip
            found.append([module_state(node.training.model.module), node.training.state_dict(),
                          node.sharing_state(), figures])  # fmt: skip
        return found

    def later(self, round: int) -> list[dict[str, Any]]:
        """Records of what came after a round, without times."""
        kept = ("uid", "kind", "round", "loss", "lr", "accuracy", "accuracy_merged", "consensus_distance",
                "data_bytes_sent")  # fmt: skip
        found = [record for record in self.records if record["kind"] in ("round", "evaluation")]
        found = [each for each in found if each["round"] >= round + (each["kind"] == "evaluation")]
        return [{key: record[key] for key in kept if key in record} for record in found]


def whole_until(folder: Path, round: int) -> None:
    """Remove the checkpoints after a round, as a run leaves them that is killed then."""
    for place in folder.glob("0*"):
        if int(place.name.partition("-")[0]) > round:
            shutil.rmtree(place)


def check_resumed(straight: Fleet, resumed: Fleet, round: int) -> None:
    assert {record["round"] for record in resumed.of_kind("resumed")} == {round}
    assert resumed.later(round) == straight.later(round) and resumed.later(round)
    for uid, (one, other) in enumerate(zip(straight.states(), resumed.states(), strict=True)):
        for part, before, after in zip(("model", "training", "rule", "figures"), one, other, strict=True):
            assert same(before, after), f"{part} of node {uid} differs"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


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


@pytest.mark.parametrize(("name", "schedule"), on_schedules([*RULES]))
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, name: str, schedule: str) -> None:
    straight = Fleet(tmp_path / "a", RULES[name], schedule=schedule).run()
    whole_until(tmp_path / "a", 3)
    resumed = Fleet(tmp_path / "b", RULES[name], schedule=schedule).resume(tmp_path / "a").run()
    check_resumed(straight, resumed, 3)
    assert all(record["rule"] == "restored" for record in resumed.of_kind("resumed"))


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


MORE: list[dict[str, Any]] = [
    {"amp": "fp16", "accumulate": 2, "clip_norm": 0.5, "ema": {"decay": 0.8, "every": "step"}},
    {"amp": "bf16", "compile": {"backend": "eager"}, "ema": 0.9, "evaluate_train": 4},
]
"""What training may keep beside the optimizer's state, in products."""


@pytest.mark.parametrize("name", ["full", "gradient_tracking", "choco"])
@pytest.mark.parametrize("keys", MORE, ids=str)
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


@pytest.mark.parametrize("rounds", [4, 5, 6])
def test_a_finished_run_goes_on_with_more_rounds(tmp_path: Path, rounds: int) -> None:
    straight = Fleet(tmp_path / "a").run()
    Fleet(tmp_path / "b", rounds=rounds).run()
    resumed = Fleet(tmp_path / "c").resume(tmp_path / "b").run()
    check_resumed(straight, resumed, rounds) if rounds != 4 else None
    assert [same(a, b) for a, b in zip(straight.states(), resumed.states(), strict=True)] == [True] * NODES


def test_a_run_may_be_resumed_again_and_again(tmp_path: Path) -> None:
    straight = Fleet(tmp_path / "0", checkpoint=None).run()
    Fleet(tmp_path / "1", rounds=2, checkpoint={"every": 1}).run()
    for rounds in range(3, ROUNDS + 1):
        last = Fleet(tmp_path / str(rounds - 1), rounds=rounds, checkpoint={"every": 1})
        last.resume(tmp_path / str(rounds - 2)).run()
    assert [same(a, b) for a, b in zip(straight.states(), last.states(), strict=True)] == [True] * NODES


def test_a_checkpoint_may_be_taken_at_any_round_and_changes_nothing(tmp_path: Path) -> None:
    straight = Fleet(tmp_path / "a", checkpoint=None).run()
    often = Fleet(tmp_path / "b", checkpoint={"every": 1, "keep": 99}).run()
    assert [same(a, b) for a, b in zip(straight.states(), often.states(), strict=True)] == [True] * NODES
    rounds = {int(place.name.partition("-")[0]) for place in (tmp_path / "b").iterdir()}
    assert rounds == set(range(1, ROUNDS + 1))
    assert {record["round"] for record in often.of_kind("checkpoint")} == rounds


# -- files that are missing or damaged ------------------------------------------------------------------------


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
    check_resumed(straight, resumed, ended)


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
    with pytest.raises(CheckpointError, match="no round that all nodes have a whole checkpoint of"):
        Fleet(tmp_path / "b").resume(tmp_path / "a").run()
    with pytest.raises(CheckpointError, match="its own: none"):
        Fleet(tmp_path / "c").resume(tmp_path / "none").run()
    with pytest.raises(CheckpointError, match="its own: none"):
        Fleet(tmp_path / "c").resume(tmp_path / "a", runs=["of another run"]).run()


def test_a_checkpoint_of_another_model_is_refused() -> None:
    state = module_state(small.noisy())
    with pytest.raises(CheckpointError, match="differs in"):
        load_module_state(small.linear(), state, "there")
    wider = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 5))
    with pytest.raises(CheckpointError, match=r"1\.weight is \[4, 6\]"):
        load_module_state(wider, module_state(small.linear()), "there")


# -- which are kept ---------------------------------------------------------------------------------------------


def on_disk(folder: Path) -> list[int]:
    return sorted(int(place.name.partition("-")[0]) for place in folder.glob("0*"))


def test_old_ones_are_removed_once_all_nodes_have_newer_ones(tmp_path: Path) -> None:
    Fleet(tmp_path / "a", rounds=9, checkpoint={"every": 1, "keep": 2}).run()
    assert on_disk(tmp_path / "a") in ([7, 8, 9], [6, 7, 8, 9])
    Fleet(tmp_path / "b", rounds=9, checkpoint={"every": 1, "keep": 5}).run()
    assert on_disk(tmp_path / "b") == [5, 6, 7, 8, 9]


def test_while_one_node_cannot_write_the_others_keep_what_it_has(tmp_path: Path) -> None:
    """The newest that all have is there whatever happens, and the others' newer ones have a bound."""
    fleet = Fleet(tmp_path / "a", rounds=15, checkpoint={"every": 1, "keep": 1})
    for node in fleet.nodes:
        while_healthy = node.training.local_update

        def update(round: int, direction: Any = None, node: Node = node, local: Any = while_healthy) -> Any:
            if node.uid == 1 and round == 4:  # from now on its disk refuses
                assert node.checkpoints is not None
                (tmp_path / "broken").write_text("")
                node.checkpoints._writer._folder = tmp_path / "broken"
            return local(round, direction)

        node.training.local_update = update  # type: ignore[method-assign]
    fleet.run()
    own = [each.cut.round for each in store.scan([tmp_path / "a"], 1)[0]]
    others = [each.cut.round for each in store.scan([tmp_path / "a"], 0)[0]]
    assert own[0] in (3, 4) and own[0] in others and len(others) <= 7
    resumed = Fleet(tmp_path / "b", rounds=15).resume(tmp_path / "a").run()
    assert {record["round"] for record in resumed.of_kind("resumed")} == {own[0]}


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    keys = {"every": 2, "keep": 1, "best": {"figure": "loss_mean", "better": "higher"}}
    fleet = Fleet(tmp_path / "a", rounds=8, evaluate_every=1, checkpoint=keys).run()
    losses = {record["round"]: record["loss_mean"] for record in fleet.of_kind("evaluation")}
    worst = max((round for round in losses if round), key=lambda round: losses[round])
    marks = [store.json.loads((tmp_path / "a" / f"best-{uid:03d}.json").read_text()) for uid in range(NODES)]
    assert {mark["round"] for mark in marks} == {worst} and {mark["value"] for mark in marks} == {losses[worst]}
    assert worst in on_disk(tmp_path / "a") and 8 in on_disk(tmp_path / "a")
    with pytest.raises(UsageError, match=r"node\.checkpoint\.best must be a figure of the evaluations .*accuracy_mean"):
        Fleet(tmp_path / "b", checkpoint={"best": "bleu_mean"}).run()


@pytest.mark.parametrize(("figure", "better", "values", "best"), [
    ("accuracy_merged", None, [0.1, 0.4, 0.3, 0.4], [0, 1]), ("accuracy_mean", "lower", [0.3, 0.4, 0.2], [0, 2]),
    ("loss_merged", None, [3.0, 2.0, 2.5, float("nan")], [0, 1]), ("loss_mean", "higher", [3.0, 4.0], [0, 1]),
    ("consensus_distance", None, [0.5, 0.6], [0]), ("consensus_rms", "higher", [float("nan"), 0.6], [1]),
])  # fmt: skip
def test_which_value_is_better(
    tmp_path: Path, figure: str, better: str | None, values: list[float], best: list[int]
) -> None:
    """As the task's metric says, unless the config does."""
    node = Fleet(tmp_path, checkpoint={"best": {"figure": figure, "better": better}}).nodes[0]
    found = []
    assert node.checkpoints is not None
    for index, value in enumerate(values):
        node.round = node.evaluated = index
        node.evaluation = {figure: value}
        if node.checkpoints._is_best():
            found.append(index)
    assert found == best


def test_the_best_must_be_a_figure_that_all_nodes_have_alike() -> None:
    with pytest.raises(ValueError, match="which all nodes have alike"):
        CheckpointConfig.model_validate({"best": "accuracy"})


# -- by minutes -------------------------------------------------------------------------------------------------


def timed(folder: Path, per_round: Callable[[int, int], float], rounds: int = 60, **keys: Any) -> Fleet:
    """A run on virtual time in which a local update of (uid, round) takes so many seconds."""
    with clock.use(clock.VirtualClock()):
        fleet = Fleet(folder, rounds=rounds, evaluate_every=0, checkpoint={"keep": 99, **keys})
        for node in fleet.nodes:
            local = node.training.local_update

            def update(round: int, direction: Any = None, node: Node = node, local: Any = local) -> Any:
                clock.sleep(per_round(node.uid, round))
                return local(round, direction)

            node.training.local_update = update  # type: ignore[method-assign]
        return fleet.run()


def test_by_minutes_all_nodes_cut_after_the_same_rounds(tmp_path: Path) -> None:
    fleet = timed(tmp_path / "a", lambda uid, round: 1.0 + uid, minutes=2)  # 10 s per round: 12 rounds
    rounds = on_disk(tmp_path / "a")
    for uid in range(NODES):
        assert sorted(each.cut.round for each in store.scan([tmp_path / "a"], uid)[0]) == rounds
    gaps = np.diff([0, *rounds])
    assert rounds[-1] == 60 and all(12 <= gap <= 16 for gap in gaps[:-1]), rounds
    assert len({record["round"] for record in fleet.of_kind("checkpoint")}) == len(rounds)


def test_by_minutes_where_a_round_takes_longer(tmp_path: Path) -> None:
    timed(tmp_path / "a", lambda uid, round: 200.0, rounds=8, minutes=1)  # a word after every other round
    assert on_disk(tmp_path / "a") in ([2, 4, 6, 8], [3, 5, 7, 8])


def test_by_minutes_nodes_ask_seldom(tmp_path: Path) -> None:
    """Rounds of a millisecond: not every one may cost a mean over all nodes."""
    every = scale(250, 1000)
    fleet = timed(tmp_path / "a", lambda uid, round: 0.00025, rounds=3 * every, minutes=every / 60_000)
    assert [0.9 * every < gap < 1.2 * every for gap in np.diff([0, *on_disk(tmp_path / "a")])[:2]] == [True, True]
    control = fleet.nodes[1].communication.counters.bytes_sent()["control"]
    assert control < 16 * scale(50, 200)


def test_rounds_and_minutes_together(tmp_path: Path) -> None:
    timed(tmp_path / "a", lambda uid, round: 2.5 if round < 20 else 15.0, every=10, minutes=5)
    rounds = on_disk(tmp_path / "a")
    assert set(range(10, 61, 10)) <= set(rounds) and len(rounds) > 8


@pytest.mark.parametrize("name", ["push_sum", "gradient_tracking", "choco"])
def test_a_run_by_minutes_is_resumed_bit_for_bit(tmp_path: Path, name: str) -> None:
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
    middle = on_disk(tmp_path / "a")[1]
    assert middle < 20
    whole_until(tmp_path / "a", middle)
    check_resumed(straight, run(tmp_path / "b", tmp_path / "a"), middle)


# -- generations of members -------------------------------------------------------------------------------------


class Going:
    """A fleet that is stepped by hand, and loses nodes and gets them back."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.runs = {node.uid: node.steps() for node in fleet.nodes}

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1000):
            if condition() or not self.runs:
                return
            for uid, steps in sorted(self.runs.items()):
                try:
                    next(steps)
                except StopIteration:
                    del self.runs[uid]
        pytest.fail(f"still at {[node.doing for node in self.fleet.nodes]}")

    def to_round(self, round: int) -> None:
        self.until(lambda: all(self.fleet.nodes[uid].round >= round for uid in self.runs))

    def lose(self, uid: int) -> None:
        """A process that is killed: what it had copied by then may be on the disk."""
        before = self.fleet.nodes[uid].checkpoints
        assert before is not None
        before.close(10)
        del self.runs[uid]
        self.fleet.hub.lose(uid)

    def restart(self, uid: int) -> Node:
        node = self.fleet.nodes[uid] = self.fleet.make(uid)
        node.communication.join()
        self.runs[uid] = node.steps()
        return node

    def end(self) -> None:
        self.until(lambda: not self.runs)


def taken_over(node: Node) -> list[Any]:
    """What a node that comes back begins with: (round, model, steps of its optimizer), noted when it has it."""
    found: list[Any] = []
    skip = node.training.skip_to

    def noted(round: int) -> None:
        state = node.training.state_dict()["optimizer"]["state"]
        found.extend([round, node.training.model.parameters.clone(), int(state[0]["step"]) if state else 0])
        skip(round)

    node.training.skip_to = noted  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("recent", [20, 0])
def test_who_comes_back_takes_its_own_checkpoint_if_it_is_recent_enough(tmp_path: Path, recent: int) -> None:
    keys = {"every": 2, "recent": recent, "keep": 9}
    going = Going(Fleet(tmp_path / "a", rounds=20, evaluate_every=0, missing="regroup", checkpoint=keys))
    going.to_round(5)
    going.lose(2)
    going.to_round(8)
    node = going.restart(2)
    found = taken_over(node)
    going.until(lambda: bool(found))
    (own,) = (each for each in store.scan([tmp_path / "a"], 2)[0] if each.cut.round == 4)
    parts = [own.load()[f"model.p/{name}"].flatten() for name, _ in node.training.model.module.named_parameters()]
    assert 8 <= found[0] <= 11
    assert torch.equal(found[1], torch.cat(parts)) == bool(recent)
    assert found[2] == (8 if recent else 0)
    assert node.training.learning_rate == going.fleet.nodes[1].training.learning_rate
    going.end()
    assert all(each.round == 20 for each in going.fleet.nodes)
    assert 20 in on_disk(tmp_path / "a") and len(node.generation.members) == NODES


@pytest.mark.parametrize("name", ["full", "push_sum", "choco"])
def test_a_generation_of_all_nodes_is_resumed_bit_for_bit(tmp_path: Path, name: str) -> None:
    keys: dict[str, Any] = {"rounds": 20, "evaluate_every": 5, "missing": "regroup"}
    going = Going(Fleet(tmp_path / "a", RULES[name], checkpoint={"every": 2, "keep": 99}, **keys))
    going.to_round(4)
    going.lose(0)
    going.to_round(7)
    going.restart(0)
    going.end()
    straight = going.fleet
    assert straight.nodes[0].generation.number == 2
    whole_until(tmp_path / "a", 14)
    resumed = Fleet(tmp_path / "b", RULES[name], **keys).resume(tmp_path / "a").run()
    assert {record["round"] for record in resumed.of_kind("resumed")} == {14}
    for one, other in zip(straight.states(), resumed.states(), strict=True):
        assert same(one[:3], other[:3])


def test_after_a_generation_of_some_nodes_all_go_on(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"rounds": 12, "evaluate_every": 5, "missing": "regroup"}
    going = Going(Fleet(tmp_path / "a", checkpoint={"every": 2, "keep": 99}, **keys))
    going.to_round(5)
    going.lose(3)
    going.end()
    whole_until(tmp_path / "a", 10)
    resumed = Fleet(tmp_path / "b", **keys).resume(tmp_path / "a")
    resumed.run()
    assert {(record["round"], *record["without"]) for record in resumed.of_kind("resumed")} == {(10, 3)}
    assert all(node.round == 12 and len(node.generation.members) == NODES for node in resumed.nodes)


def test_a_node_that_dies_while_the_others_read_their_checkpoints(tmp_path: Path) -> None:
    """They agree again without it."""
    keys: dict[str, Any] = {"rounds": 9, "missing": "regroup"}
    Fleet(tmp_path / "a", **{**keys, "rounds": 6}).run()
    for steps in range(1, 12):
        going = Going(Fleet(tmp_path / f"b{steps}", **keys).resume(tmp_path / "a"))
        for _ in range(steps):
            for _, each in sorted(going.runs.items()):
                next(each)
        del going.runs[1]
        going.fleet.hub.lose(1)
        going.end()
        assert [node.round for node in going.fleet.nodes if node.uid != 1] == [9] * 3, steps
        first = [record["round"] for record in going.fleet.of_kind("round") if record["uid"] == 0]
        assert first == [6, 7, 8], steps
