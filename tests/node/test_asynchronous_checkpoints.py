"""Checkpoints of nodes that are in different rounds form a consistent cut, whenever the run is killed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decentnode.checkpoint import store
from decentnode.checkpoint.state import decode
from decentnode.checkpoint.store import Snapshot
from decentnode.checkpoint.writer import Writer
from decentnode.communication.base import Communication
from decentnode.communication.parts import Collected, Schema
from decentnode.communication.run_state import Steps, at_once, run_without_waits
from decentnode.errors import CheckpointError
from decentnode.faults import Faults, Kill, Restart
from decentnode.node.checkpoints import due_by_minutes
from decentnode.node.checkpoints.due_asynchronously import MAX_UNASKED
from decentnode.node.checkpoints.manager import Checkpoints
from decentnode.node.checkpoints.resume_agreement import ResumeFrom
from decentnode.node.node import Node
from decentnode.node.schedules.asynchronous.cuts import MAX_LEAD, MAX_NUMBER, NUMBER_SCALAR, Cuts
from decentnode.node.schedules.asynchronous.push_sum import AsynchronousPushSum
from decentnode.payload import Payload
from decentnode.simulate.world.world import World
from decentnode.wire.generation import Limits
from tests.graph.contract import make
from tests.node.test_asynchronous import FAULTY, LIMIT, NODES, ad_psgd_schedules, initial_sum, rms_deviation, total_mass
from tests.sharing.contract import RULES
from tests.simulate.world.runs import CONFIG, NodeRun

SLOW = {2: 10.0, 4: 3.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "push_sum": {"rule": "push_sum"}, "gossip": {"rule": "full", "buffers": 2}, "int8": {"rule": "full+int8"},
    "pairs": {"rule": "full", "schedule": "ad_psgd", "buffers": 2},
    "epidemic": {"rule": "full", "schedule": "epidemic"},
    "cyclon": {"rule": "full", "schedule": "epidemic",
               "sampler": {"name": "cyclon", "view": 4, "exchange": 2, "degree": 2}},
}  # fmt: skip


class WriterInVirtualTime(Writer):
    """Writing takes no virtual time, whatever the disk needs: after a stop, a node only waits a second for it."""

    def give(self, snapshot: Snapshot) -> None:
        super().give(snapshot)
        assert self.wait(60.0)


class CheckpointedRun(NodeRun):
    """A run whose nodes write checkpoints to `folder`, and start from those in `resume`."""

    def __init__(
        self, folder: Path, resume: Path | None = None, *, rule: str = "push_sum", graph: Any = None, **node: Any
    ) -> None:
        defaults = {"schedule": "gossip_async", "rounds": 120, "lr": 0.0, "evaluate_every": 0,
                    "checkpoint": {"every": 7}}  # fmt: skip
        super().__init__(graph or make("ring", nodes=NODES), RULES[rule], **{**defaults, **node})
        self.folder, self.resume_from = folder, None if resume is None else ResumeFrom((resume,))

    def make(self, uid: int, make_communication: Callable[[tuple[Schema, ...]], Communication]) -> Node:
        node = super().make(uid, make_communication)
        is_newcomer = uid >= self.graph.num_nodes
        resume = None if node.round or is_newcomer else self.resume_from
        node.checkpoints = Checkpoints(node, self.folder, {}, resume)
        node.checkpoints._writer = WriterInVirtualTime(self.folder)
        return node

    def until(self, seconds: float, **setting: Any) -> World:
        """Runs until that moment, at which everything ends as in a power failure."""
        options = {"seed": 1, "faults": Faults(links=FAULTY, lossy_seconds=8.0), **setting}
        world = self.world(compute_seconds=lambda uid, _: 0.1 * SLOW.get(uid, 1.0), **options)
        world.run(seconds)
        for node in self.nodes.values():
            assert isinstance(node.checkpoints, Checkpoints)
            node.checkpoints.close(60.0)
        return world


def nodes_by_cut(folder: Path) -> dict[str, set[int]]:
    """Returns, for each cut, the nodes of which there are checkpoints."""
    found: dict[str, set[int]] = {}
    for path in folder.glob("0*/*.json"):
        found.setdefault(path.parent.name, set()).add(int(path.stem))
    return found


def resumed_records(made: NodeRun) -> dict[int, dict[str, Any]]:
    return {record["uid"]: record for record in made.records if record["kind"] == "resumed"}


@pytest.mark.sampled(one=["seconds", "way"])
@pytest.mark.parametrize("seconds", [6.0, 8.3, 10.9])
@pytest.mark.parametrize("way", [
    "push_sum", "gossip", "pairs", "epidemic",
    *(pytest.param(way, marks=pytest.mark.slow) for way in ("int8", "cyclon")),
])  # fmt: skip
def test_a_killed_run_is_resumed_with_every_node_in_its_own_round(tmp_path: Path, way: str, seconds: float) -> None:
    first = CheckpointedRun(tmp_path / "a", **OPTIONS[way])
    first.until(seconds)
    rounds = {uid: node.round for uid, node in first.nodes.items()}
    assert max(rounds.values()) < 120 and any(len(uids) == NODES for uids in nodes_by_cut(first.folder).values())
    second = CheckpointedRun(tmp_path / "b", first.folder, **OPTIONS[way])
    world = second.until(LIMIT)
    assert not any(process.error for process in world.lives), [process.error for process in world.lives]
    begun = resumed_records(second)
    assert begun.keys() == set(range(NODES)) and all(not record["without"] for record in begun.values())
    assert len({record["round"] for record in begun.values()}) > 1 and begun[2]["round"] < begun[0]["round"]
    assert all(0 < record["round"] <= rounds[uid] for uid, record in begun.items())
    assert max(node.round for node in second.nodes.values()) == 120 and rms_deviation(second.nodes) < 0.4
    if way == "push_sum":
        total, weight = total_mass(second)
        assert weight == pytest.approx(NODES, abs=1e-9) and torch.allclose(total, initial_sum(second), atol=1e-5)
    if way == "pairs":
        end = torch.stack([node.training.model.parameters for node in second.nodes.values()]).double()
        assert torch.allclose(initial_sum(second), end.sum(0), atol=1e-4), "a pair averaged at one end only"
        found = ad_psgd_schedules(second)
        assert all(schedule.given[other] == found[other].taken[uid]
                   for uid, schedule in found.items() for other in found)  # fmt: skip
    # The second run has ended: a third one resumes from its last checkpoint
    third = CheckpointedRun(tmp_path / "c", second.folder, **{**OPTIONS[way], "rounds": 130})
    third.until(LIMIT)
    assert {uid: record["round"] for uid, record in resumed_records(third).items()} == \
        {uid: node.round for uid, node in second.nodes.items()}  # fmt: skip
    assert max(node.round for node in third.nodes.values()) == 130
    if way == "push_sum":
        assert total_mass(third)[1] == pytest.approx(NODES, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("holds_back", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_checkpoint_contains_a_payload_that_the_senders_checkpoint_has_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds_back: bool
) -> None:
    """If payloads that come too early are not held back, the checkpoints are no consistent cut: the test can fail."""
    if not holds_back:
        unmark = Cuts.unmark

        def ignore_number(self: Cuts, found: Collected) -> tuple[Collected, int]:
            plain, number = unmark(self, found)
            self.highest_known = max(self.highest_known, number)
            return plain, 0

        monkeypatch.setattr(Cuts, "unmark", ignore_number)
    whole, fits, weights = 0, [], []
    for seed in range(2):
        made = CheckpointedRun(tmp_path / str(seed), checkpoint={"every": 2, "keep": 50})
        made.until(9.0, seed=seed)
        for cut in (cut for cut, uids in nodes_by_cut(made.folder).items() if len(uids) == NODES):
            manifests = [store.read_manifest(made.folder / cut / f"{uid:03d}.json") for uid in range(NODES)]
            states = [decode(manifest.tree["sharing"], manifest.load()) for manifest in manifests]
            weight = sum(state[0]["rule"]["weight"] for state in states)
            for uid, (_, schedule) in enumerate(states):
                for to, index in schedule["sent"].items():
                    under_way = schedule["sums"][index]["w"] - states[to][1]["seen"].get(uid, {"w": 0.0})["w"]
                    fits.append(under_way >= 0)
                    weight += under_way
            weights.append(weight)
            whole += 1
    assert whole > 6 and weights == pytest.approx([NODES] * whole, abs=1e-9)
    assert all(fits) == holds_back


@pytest.mark.slow
@pytest.mark.sampled(one=["way"])
@pytest.mark.parametrize("way", ["push_sum", "pairs"])
def test_a_node_without_a_checkpoint_starts_from_the_mean_of_the_others(tmp_path: Path, way: str) -> None:
    """Its earlier messages do not count: it starts over, and the others drop its sums and offers."""
    CheckpointedRun(tmp_path / "a", **OPTIONS[way]).until(8.3)
    for path in (tmp_path / "a").glob("*/003.*"):
        path.unlink()
    second = CheckpointedRun(tmp_path / "b", tmp_path / "a", **OPTIONS[way])
    world = second.until(LIMIT)
    assert not any(process.error for process in world.lives)
    begun = resumed_records(second)
    assert all(record["without"] == [3] and record["rule"] == "anew" for record in begun.values())
    assert begun[3]["round"] == max(record["round"] for record in begun.values())
    assert max(node.round for node in second.nodes.values()) == 120 and rms_deviation(second.nodes) < 0.4
    if way == "push_sum":
        assert 0.5 * NODES < total_mass(second)[1] < 1.5 * NODES


def test_resuming_without_any_checkpoint_is_an_error(tmp_path: Path) -> None:
    made = CheckpointedRun(tmp_path / "b", tmp_path / "a")
    world = made.until(LIMIT)
    errors = [process.error for process in world.lives]
    assert all(errors) and any(isinstance(error, CheckpointError) for error in errors)
    assert any("no round has a complete checkpoint on all nodes" in str(error) for error in errors)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["push_sum", "pairs", "gossip"])
def test_nodes_write_checkpoints_after_a_node_has_died_and_come_back(tmp_path: Path, way: str) -> None:
    """In the new generation checkpoints have greater numbers than before, and the run can be resumed from them."""
    plan = (Kill(nodes=(4,), at_round=6), Restart(nodes=(4,), at_seconds=4.0))
    given = {**OPTIONS[way], "missing": "regroup", "graph": make("complete", nodes=NODES), "rounds": 300}
    setting: dict[str, Any] = {"limits": Limits(1.0, 20.0, 4, 300)}
    first = CheckpointedRun(tmp_path / "a", **given)
    world = first.until(20.0, faults=Faults(plan=plan), **setting)
    assert world.happened["kill"] == world.happened["restart"] == 1 and first.nodes[4].round > 6
    numbers = {int(cut[:8]): uids for cut, uids in nodes_by_cut(first.folder).items() if len(uids) == NODES}
    assert max(numbers) > max(record["round"] for record in first.records if record["kind"] == "generation")
    second = CheckpointedRun(tmp_path / "b", first.folder, **given)
    world = second.until(LIMIT, faults=Faults(), **setting)
    assert not any(process.error for process in world.lives)
    begun = resumed_records(second)
    assert all(not record["without"] for record in begun.values()) and len(begun) == NODES
    assert max(node.round for node in second.nodes.values()) == 300 and rms_deviation(second.nodes) < 0.05


def test_a_malformed_checkpoint_number_is_counted_as_a_fault_of_its_source(tmp_path: Path) -> None:
    made = CheckpointedRun(tmp_path / "a", rounds=3, checkpoint={"every": 50})
    made.until(LIMIT)
    schedule = made.nodes[0].schedule
    assert isinstance(schedule, AsynchronousPushSum)
    for number in (0, -1, 1.5, True, 1 << 60):
        collected = Collected(1, 1, Payload({"x": torch.ones(40)}, {"w": 1.0, NUMBER_SCALAR: number}))
        assert list(schedule._unmark_or_hold(collected, 0)) == []
    assert schedule.cuts.highest_known < 5 and schedule.communication.counters.faults["malformed_payload"] == 5
    plain, = schedule._unmark_or_hold(Collected(1, 1, Payload({"x": torch.ones(40)}, {"w": 1.0, NUMBER_SCALAR: 1})), 0)
    assert plain.payload.scalars == {"w": 1.0}


class FalseNumbers(Cuts):
    """Sends `false_number` instead of the number of its last checkpoint."""

    def mark(self, payload: Payload) -> Payload:
        return replace(payload, scalars={**payload.scalars, NUMBER_SCALAR: self.false_number})

    @property
    def false_number(self) -> int:
        raise NotImplementedError


class Huge(FalseNumbers):
    false_number = MAX_NUMBER  # type: ignore[assignment]


class Ahead(FalseNumbers):
    @property
    def false_number(self) -> int:
        return min(self.number + 1, MAX_NUMBER)


class Growing(FalseNumbers):
    """The number grows with every payload."""

    sent = 0

    @property
    def false_number(self) -> int:
        self.sent += 1
        return self.sent


class Back(FalseNumbers):
    false_number = 1  # type: ignore[assignment]


class RunWithFalseNumbers(CheckpointedRun):
    """Node 3 sends false checkpoint numbers."""

    cuts_of_node_3: type[Cuts] = Cuts

    def make(self, uid: int, make_communication: Callable[[tuple[Schema, ...]], Communication]) -> Node:
        node = super().make(uid, make_communication)
        if uid == 3:
            node.schedule.cuts.__class__ = self.cuts_of_node_3
        return node


@pytest.mark.sampled(one=["way", "cuts"])
@pytest.mark.parametrize("way", ["push_sum", "pairs", "gossip"])
@pytest.mark.parametrize("cuts", [Huge, Ahead, Back])
def test_false_checkpoint_numbers_stop_no_other_node(tmp_path: Path, cuts: type[Cuts], way: str) -> None:
    """They may spoil checkpoints. The other nodes neither wait for the skipped ones nor reject each other."""
    first = RunWithFalseNumbers(tmp_path / "a", **OPTIONS[way])
    first.cuts_of_node_3 = cuts
    world = first.until(LIMIT, faults=Faults())
    assert not any(process.error for process in world.lives)
    rounds = {uid: node.round for uid, node in first.nodes.items()}
    assert min(rounds[uid] for uid in (0, 1, 5)) > 80 and rounds[2] >= 10 and rounds[4] >= 25, rounds
    second = CheckpointedRun(tmp_path / "b", first.folder, **{**OPTIONS[way], "rounds": 140})
    world = second.until(LIMIT, faults=Faults())
    assert not any(process.error for process in world.lives) and len(resumed_records(second)) == NODES
    # the second run begins where the first one ended
    assert {uid: record["round"] for uid, record in resumed_records(second).items()} == rounds
    assert not any(node.communication.counters.faults for made in (first, second) for node in made.nodes.values())
    assert rms_deviation(second.nodes) < 0.05


@pytest.mark.slow
def test_a_resumed_run_does_not_write_its_checkpoint_again(tmp_path: Path) -> None:
    CheckpointedRun(tmp_path / "a").until(8.3)
    second = CheckpointedRun(tmp_path / "b", tmp_path / "a")
    second.until(LIMIT)
    begun = {uid: record["round"] for uid, record in resumed_records(second).items()}
    rounds = checkpoint_rounds_of(second, 0)
    assert begun[0] % 7 != 6 and rounds[0] == 7 * (begun[0] // 7 + 1), (begun, rounds)


def checkpoint_rounds_of(made: NodeRun, uid: int) -> list[int]:
    """Returns after which rounds a node wrote checkpoints."""
    return [record["round"] for record in made.records if record["kind"] == "checkpoint" and record["uid"] == uid]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["gossip"])
@pytest.mark.parametrize("cuts", [Huge, Growing])
def test_false_checkpoint_numbers_neither_fill_disks_nor_use_up_the_numbers(
    tmp_path: Path, cuts: type[Cuts], way: str
) -> None:
    """The other nodes write a few more checkpoints than they would at first, and then as many as usual to the end."""
    made = RunWithFalseNumbers(tmp_path / "a", rounds=600, checkpoint={"every": 150}, **OPTIONS[way])
    made.cuts_of_node_3 = cuts
    made.until(LIMIT, faults=Faults())
    for uid in (0, 1, 5):
        rounds = checkpoint_rounds_of(made, uid)
        most = MAX_UNASKED + 3 * (600 // 150) + 2
        assert 4 <= len(rounds) <= most, rounds
        assert sum(round > 300 for round in rounds) >= 2, rounds
        assert made.nodes[uid].schedule.cuts.number < 1 << 20


@pytest.mark.slow
def test_without_false_numbers_every_node_trusts_checkpoint_numbers(tmp_path: Path) -> None:
    made = CheckpointedRun(tmp_path / "a", checkpoint={"every": 1}, **OPTIONS["push_sum"])
    made.until(LIMIT)
    assert all(node.schedule.cuts.trusts_numbers for node in made.nodes.values())
    assert all(len(checkpoint_rounds_of(made, uid)) > 10 for uid in (0, 1, 5))


class RunWithoutReports(CheckpointedRun):
    """Node 3 never reports that it has written a checkpoint."""

    def make(self, uid: int, make_communication: Callable[[tuple[Schema, ...]], Communication]) -> Node:
        node = super().make(uid, make_communication)
        if uid == 3:
            node.checkpoints._exchange_reports = lambda: at_once(None)  # type: ignore[union-attr, method-assign]
        return node


@pytest.mark.slow
def test_a_member_that_reports_no_checkpoint_delays_the_next_one_for_one_time_out(tmp_path: Path) -> None:
    made = RunWithoutReports(tmp_path / "a", checkpoint={"every": 5}, rounds=250)
    world = made.until(LIMIT, faults=Faults(), config=CONFIG.model_copy(update={"timeout_seconds": 4.0}))
    assert not any(process.error for process in world.lives)
    written = {uid: checkpoint_rounds_of(made, uid) for uid in (0, 1, 5)}
    assert all(len(rounds) >= 4 for rounds in written.values()), written


def test_impossibly_large_checkpoint_numbers_are_ignored() -> None:
    cuts = Cuts(rounds=100, number=7)
    for number, seen in ((8, 8), (100 + MAX_LEAD, 100 + MAX_LEAD), (101 + MAX_LEAD, 0), (MAX_NUMBER, 0)):
        plain, found = cuts.unmark(Collected(1, 1, Payload({"x": torch.ones(4)}, {"w": 1.0, NUMBER_SCALAR: number})))
        assert found == seen and plain.payload.scalars == {"w": 1.0}
    cuts.adopt(5000)
    assert cuts.is_possible(5000 + MAX_LEAD) and not cuts.is_possible(5001 + MAX_LEAD)


@pytest.mark.parametrize(("mean", "due"), [
    ((math.nan, math.nan), False), ((1.0, math.inf), True), ((1.0, -1e300), True), ((-5.0, 1e300), False),
])  # fmt: skip
def test_nan_and_infinity_in_the_mean_of_minutes_end_neither_node_nor_checkpoints(
    monkeypatch: pytest.MonkeyPatch, mean: tuple[float, float], due: bool
) -> None:
    def return_mean(*_: object) -> Steps[tuple[torch.Tensor, int]]:
        return at_once((torch.tensor(mean, dtype=torch.float64), 3))

    monkeypatch.setattr(due_by_minutes, "mean_unless_ending", return_mean)
    node: Any = SimpleNamespace(round=40)
    due_by_time = due_by_minutes.DueByMinutes(node, 1.0)
    due_by_time.begin_generation()
    due_by_time._pending_poll = node
    assert run_without_waits(due_by_time.is_due()) == due
    next_poll = due_by_time._next_poll_round
    assert next_poll is not None and 40 < next_poll <= 40 + due_by_minutes.MAX_ROUNDS_BETWEEN_POLLS
