"""Checkpoints of nodes that are in different rounds: they fit together, whenever the run is killed."""

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
from decentnode.communication.base import Communication
from decentnode.communication.parts import Collected, Schema
from decentnode.communication.run_state import Steps, at_once, run_without_waits
from decentnode.errors import CheckpointError
from decentnode.faults import Faults, Kill, Restart
from decentnode.node.checkpoints import due_by_minutes
from decentnode.node.checkpoints.due_asynchronously import MOST_UNASKED
from decentnode.node.checkpoints.manager import Checkpoints
from decentnode.node.checkpoints.resume_agreement import ResumeFrom
from decentnode.node.node import Node
from decentnode.node.schedules.asynchronous.cuts import MAX_LEAD, MAX_NUMBER, NUMBER_SCALAR, Cuts
from decentnode.node.schedules.asynchronous.push_sum import AsynchronousPushSum
from decentnode.payload import Payload
from decentnode.simulate.world.world import World
from decentnode.wire.generation import Limits
from tests.graph.contract import make
from tests.node.test_asynchronous import FAULTY, LIMIT, NODES, mass, pairs, spread, started
from tests.sharing.contract import RULES
from tests.simulate.world.runs import CONFIG, NodeRun

SLOW = {2: 10.0, 4: 3.0}
WAYS: dict[str, dict[str, Any]] = {
    "push_sum": {"rule": "push_sum"}, "gossip": {"rule": "full", "buffers": 2}, "int8": {"rule": "full+int8"},
    "pairs": {"rule": "full", "schedule": "ad_psgd", "buffers": 2},
    "epidemic": {"rule": "full", "schedule": "epidemic"},
    "cyclon": {"rule": "full", "schedule": "epidemic",
               "sampler": {"name": "cyclon", "view": 4, "exchange": 2, "degree": 2}},
}  # fmt: skip


class Kept(NodeRun):
    """A run whose nodes write checkpoints to a folder, and go on from those of another one."""

    def __init__(
        self, folder: Path, resume: Path | None = None, *, rule: str = "push_sum", graph: Any = None, **node: Any
    ) -> None:
        given = {"schedule": "gossip_async", "rounds": 120, "lr": 0.0, "evaluate_every": 0, "checkpoint": {"every": 7}}
        super().__init__(graph or make("ring", nodes=NODES), RULES[rule], **{**given, **node})
        self.folder, self.from_where = folder, None if resume is None else ResumeFrom((resume,))

    def make(self, uid: int, make_communication: Callable[[tuple[Schema, ...]], Communication]) -> Node:
        node = super().make(uid, make_communication)
        resume = self.from_where if not node.round and uid < self.graph.num_nodes else None  # newcomers have nothing
        node.checkpoints = Checkpoints(node, self.folder, {}, resume)
        return node

    def until(self, seconds: float, **setting: Any) -> World:
        """Everything ends at that moment, as if the power failed."""
        given = {"seed": 1, "faults": Faults(links=FAULTY, lossy_seconds=8.0), **setting}
        world = self.world(compute_seconds=lambda uid, _: 0.1 * SLOW.get(uid, 1.0), **given)
        world.run(seconds)
        for node in self.nodes.values():
            assert isinstance(node.checkpoints, Checkpoints)
            node.checkpoints.close(10.0)
        return world


def kept(folder: Path) -> dict[str, set[int]]:
    """By cut: of which nodes there are checkpoints."""
    found: dict[str, set[int]] = {}
    for path in folder.glob("0*/*.json"):
        found.setdefault(path.parent.name, set()).add(int(path.stem))
    return found


def resumed(made: NodeRun) -> dict[int, dict[str, Any]]:
    return {each["uid"]: each for each in made.records if each["kind"] == "resumed"}


@pytest.mark.sampled(one=["seconds", "way"])
@pytest.mark.parametrize("seconds", [6.0, 8.3, 10.9])
@pytest.mark.parametrize("way", [
    "push_sum", "gossip", "pairs", "epidemic",
    *(pytest.param(way, marks=pytest.mark.slow) for way in ("int8", "cyclon")),
])  # fmt: skip
def test_a_run_that_was_killed_goes_on_from_rounds_of_each_nodes_own(tmp_path: Path, way: str, seconds: float) -> None:
    first = Kept(tmp_path / "a", **WAYS[way])
    first.until(seconds)
    rounds = {uid: node.round for uid, node in first.nodes.items()}
    assert max(rounds.values()) < 120 and any(len(uids) == NODES for uids in kept(first.folder).values())
    second = Kept(tmp_path / "b", first.folder, **WAYS[way])
    world = second.until(LIMIT)
    assert not any(process.error for process in world.lives), [process.error for process in world.lives]
    begun = resumed(second)
    assert begun.keys() == set(range(NODES)) and all(not each["without"] for each in begun.values())
    assert len({each["round"] for each in begun.values()}) > 1 and begun[2]["round"] < begun[0]["round"]
    assert all(0 < each["round"] <= rounds[uid] for uid, each in begun.items())
    assert max(node.round for node in second.nodes.values()) == 120 and spread(second.nodes) < 0.4
    if way == "push_sum":
        total, weight = mass(second)
        assert weight == pytest.approx(NODES, abs=1e-9) and torch.allclose(total, started(second), atol=1e-5)
    if way == "pairs":
        end = torch.stack([node.training.model.parameters for node in second.nodes.values()]).double()
        assert torch.allclose(started(second), end.sum(0), atol=1e-4), "each pair averaged at both ends, or at neither"
        found = pairs(second)
        assert all(each.given[other] == found[other].taken[uid] for uid, each in found.items() for other in found)
    # and once more, from the last checkpoint of the run that has ended
    third = Kept(tmp_path / "c", second.folder, **{**WAYS[way], "rounds": 130})
    third.until(LIMIT)
    assert {uid: each["round"] for uid, each in resumed(third).items()} == \
        {uid: node.round for uid, node in second.nodes.items()}  # fmt: skip
    assert max(node.round for node in third.nodes.values()) == 130
    if way == "push_sum":
        assert mass(third)[1] == pytest.approx(NODES, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("holds", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_checkpoint_has_received_what_another_one_has_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds: bool
) -> None:
    """holds: else payloads that come too early are not held back, and the checkpoints do not fit together."""
    if not holds:
        unmark = Cuts.unmark

        def unread(self: Cuts, found: Collected) -> tuple[Collected, int]:
            plain, number = unmark(self, found)
            self.highest_known = max(self.highest_known, number)
            return plain, 0

        monkeypatch.setattr(Cuts, "unmark", unread)
    whole, fits, weights = 0, [], []
    for seed in range(2):
        made = Kept(tmp_path / str(seed), checkpoint={"every": 2, "keep": 50})
        made.until(9.0, seed=seed)
        for cut in (cut for cut, uids in kept(made.folder).items() if len(uids) == NODES):
            manifests = [store.read_manifest(made.folder / cut / f"{uid:03d}.json") for uid in range(NODES)]
            states = [decode(each.tree["sharing"], each.load()) for each in manifests]
            weight = sum(state[0]["rule"]["weight"] for state in states)
            for uid, (_, schedule) in enumerate(states):
                for to, index in schedule["sent"].items():
                    under_way = schedule["sums"][index]["w"] - states[to][1]["seen"].get(uid, {"w": 0.0})["w"]
                    fits.append(under_way >= 0)
                    weight += under_way
            weights.append(weight)
            whole += 1
    assert whole > 6 and weights == pytest.approx([NODES] * whole, abs=1e-9)
    assert all(fits) == holds


@pytest.mark.slow
@pytest.mark.sampled(one=["way"])
@pytest.mark.parametrize("way", ["push_sum", "pairs"])
def test_a_node_without_its_file_goes_on_from_the_mean_of_the_others(tmp_path: Path, way: str) -> None:
    """Nothing of what it has said before counts: it begins anew, and the others forget its sums and offers."""
    Kept(tmp_path / "a", **WAYS[way]).until(8.3)
    for path in (tmp_path / "a").glob("*/003.*"):
        path.unlink()
    second = Kept(tmp_path / "b", tmp_path / "a", **WAYS[way])
    world = second.until(LIMIT)
    assert not any(process.error for process in world.lives)
    begun = resumed(second)
    assert all(each["without"] == [3] and each["rule"] == "anew" for each in begun.values())
    assert begun[3]["round"] == max(each["round"] for each in begun.values())
    assert max(node.round for node in second.nodes.values()) == 120 and spread(second.nodes) < 0.4
    if way == "push_sum":
        assert 0.5 * NODES < mass(second)[1] < 1.5 * NODES


def test_no_file_at_all_is_an_error_that_names_it(tmp_path: Path) -> None:
    made = Kept(tmp_path / "b", tmp_path / "a")
    world = made.until(LIMIT)
    errors = [process.error for process in world.lives]
    assert all(errors) and any(isinstance(error, CheckpointError) for error in errors)
    assert any("no round has a complete checkpoint on all nodes" in str(error) for error in errors)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["push_sum", "pairs", "gossip"])
def test_checkpoints_go_on_after_a_node_has_died_and_come_back(tmp_path: Path, way: str) -> None:
    """In the new generation all make further ones, with greater numbers than before, and the run goes on from them."""
    plan = (Kill(nodes=(4,), at_round=6), Restart(nodes=(4,), at_seconds=4.0))
    given = {**WAYS[way], "missing": "regroup", "graph": make("complete", nodes=NODES), "rounds": 300}
    setting: dict[str, Any] = {"limits": Limits(1.0, 20.0, 4, 300)}
    first = Kept(tmp_path / "a", **given)
    world = first.until(20.0, faults=Faults(plan=plan), **setting)
    assert world.happened["kill"] == world.happened["restart"] == 1 and first.nodes[4].round > 6
    numbers = {int(cut[:8]): uids for cut, uids in kept(first.folder).items() if len(uids) == NODES}
    assert max(numbers) > max(each["round"] for each in first.records if each["kind"] == "generation")
    second = Kept(tmp_path / "b", first.folder, **given)
    world = second.until(LIMIT, faults=Faults(), **setting)
    assert not any(process.error for process in world.lives)
    assert all(not each["without"] for each in resumed(second).values()) and len(resumed(second)) == NODES
    assert max(node.round for node in second.nodes.values()) == 300 and spread(second.nodes) < 0.05


def test_a_number_that_is_none_is_a_fault_of_its_source(tmp_path: Path) -> None:
    made = Kept(tmp_path / "a", rounds=3, checkpoint={"every": 50})
    made.until(LIMIT)
    schedule = made.nodes[0].schedule
    assert isinstance(schedule, AsynchronousPushSum)
    for number in (0, -1, 1.5, True, 1 << 60):
        each = Collected(1, 1, Payload({"x": torch.ones(40)}, {"w": 1.0, NUMBER_SCALAR: number}))
        assert list(schedule._unmark_or_hold(each, 0)) == []
    assert schedule.cuts.highest_known < 5 and schedule.communication.counters.faults["malformed_payload"] == 5
    plain, = schedule._unmark_or_hold(Collected(1, 1, Payload({"x": torch.ones(40)}, {"w": 1.0, NUMBER_SCALAR: 1})), 0)
    assert plain.payload.scalars == {"w": 1.0}


class Lying(Cuts):
    """Says other numbers than it is at."""

    def mark(self, payload: Payload) -> Payload:
        return replace(payload, scalars={**payload.scalars, NUMBER_SCALAR: self.made_up})

    @property
    def made_up(self) -> int:
        raise NotImplementedError


class Huge(Lying):
    made_up = MAX_NUMBER  # type: ignore[assignment]


class Ahead(Lying):
    @property
    def made_up(self) -> int:
        return min(self.number + 1, MAX_NUMBER)


class Climbing(Lying):
    """With every payload that it makes."""

    climbed = 0

    @property
    def made_up(self) -> int:
        self.climbed += 1
        return self.climbed


class Back(Lying):
    made_up = 1  # type: ignore[assignment]


class Liar(Kept):
    """Node 3 lies."""

    lie: type[Cuts] = Cuts

    def make(self, uid: int, make_communication: Callable[[tuple[Schema, ...]], Communication]) -> Node:
        node = super().make(uid, make_communication)
        if uid == 3:
            node.schedule.cuts.__class__ = self.lie
        return node


@pytest.mark.sampled(one=["way", "lie"])
@pytest.mark.parametrize("way", ["push_sum", "pairs", "gossip"])
@pytest.mark.parametrize("lie", [Huge, Ahead, Back])
def test_a_node_that_makes_numbers_up_stops_nobody(tmp_path: Path, lie: type[Cuts], way: str) -> None:
    """It may spoil checkpoints; the others neither wait for those that were left out, nor refuse each other."""
    first = Liar(tmp_path / "a", **WAYS[way])
    first.lie = lie
    world = first.until(LIMIT, faults=Faults())
    assert not any(process.error for process in world.lives)
    rounds = {uid: node.round for uid, node in first.nodes.items()}
    assert min(rounds[uid] for uid in (0, 1, 5)) > 80 and rounds[2] >= 10 and rounds[4] >= 25, rounds
    second = Kept(tmp_path / "b", first.folder, **{**WAYS[way], "rounds": 140})
    world = second.until(LIMIT, faults=Faults())
    assert not any(process.error for process in world.lives) and len(resumed(second)) == NODES
    assert {uid: each["round"] for uid, each in resumed(second).items()} == rounds, "from the end of the first one"
    assert not any(each.communication.counters.faults for made in (first, second) for each in made.nodes.values())
    assert spread(second.nodes) < 0.05


@pytest.mark.slow
def test_a_resumed_run_has_its_checkpoint_already(tmp_path: Path) -> None:
    Kept(tmp_path / "a").until(8.3)
    second = Kept(tmp_path / "b", tmp_path / "a")
    second.until(LIMIT)
    begun = {uid: each["round"] for uid, each in resumed(second).items()}
    made = [each["round"] for each in second.records if each["kind"] == "checkpoint" and each["uid"] == 0]
    assert begun[0] % 7 != 6 and made[0] == 7 * (begun[0] // 7 + 1), (begun, made)


def written(made: NodeRun, uid: int) -> list[int]:
    """After which rounds a node wrote checkpoints."""
    return [each["round"] for each in made.records if each["kind"] == "checkpoint" and each["uid"] == uid]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["gossip"])
@pytest.mark.parametrize("lie", [Huge, Climbing])
def test_numbers_that_are_made_up_neither_fill_disks_nor_use_themselves_up(
    tmp_path: Path, lie: type[Cuts], way: str
) -> None:
    """The others write some checkpoints more than they would, and then as many, to the end."""
    made = Liar(tmp_path / "a", rounds=600, checkpoint={"every": 150}, **WAYS[way])
    made.lie = lie
    made.until(LIMIT, faults=Faults())
    for uid in (0, 1, 5):
        rounds = written(made, uid)
        most = MOST_UNASKED + 3 * (600 // 150) + 2
        assert 4 <= len(rounds) <= most, rounds
        assert sum(each > 300 for each in rounds) >= 2, rounds
        assert made.nodes[uid].schedule.cuts.number < 1 << 20


@pytest.mark.slow
def test_in_an_honest_run_every_number_is_believed(tmp_path: Path) -> None:
    made = Kept(tmp_path / "a", checkpoint={"every": 1}, **WAYS["push_sum"])
    made.until(LIMIT)
    assert all(node.schedule.cuts.trusts_numbers for node in made.nodes.values())
    assert all(len(written(made, uid)) > 10 for uid in (0, 1, 5))


class Silent(Kept):
    """Node 3 never says that it has made a checkpoint."""

    def make(self, uid: int, make_communication: Callable[[tuple[Schema, ...]], Communication]) -> Node:
        node = super().make(uid, make_communication)
        if uid == 3:
            node.checkpoints._exchange_reports = lambda: at_once(None)  # type: ignore[union-attr, method-assign]
        return node


@pytest.mark.slow
def test_a_member_that_says_nothing_holds_up_the_next_checkpoint_for_a_time_out_alone(tmp_path: Path) -> None:
    made = Silent(tmp_path / "a", checkpoint={"every": 5}, rounds=250)
    world = made.until(LIMIT, faults=Faults(), config=CONFIG.model_copy(update={"timeout_seconds": 4.0}))
    assert not any(process.error for process in world.lives)
    assert all(len(written(made, uid)) >= 4 for uid in (0, 1, 5)), [written(made, uid) for uid in made.nodes]


def test_numbers_beyond_all_that_a_run_can_have_count_for_nothing() -> None:
    cuts = Cuts(rounds=100, number=7)
    for number, seen in ((8, 8), (100 + MAX_LEAD, 100 + MAX_LEAD), (101 + MAX_LEAD, 0), (MAX_NUMBER, 0)):
        plain, found = cuts.unmark(Collected(1, 1, Payload({"x": torch.ones(4)}, {"w": 1.0, NUMBER_SCALAR: number})))
        assert found == seen and plain.payload.scalars == {"w": 1.0}
    cuts.adopt(5000)
    assert cuts.is_possible(5000 + MAX_LEAD) and not cuts.is_possible(5001 + MAX_LEAD)


@pytest.mark.parametrize(("told", "due"), [
    ((math.nan, math.nan), False), ((1.0, math.inf), True), ((1.0, -1e300), True), ((-5.0, 1e300), False),
])  # fmt: skip
def test_what_is_no_number_in_a_mean_neither_ends_the_node_nor_its_checkpoints(
    monkeypatch: pytest.MonkeyPatch, told: tuple[float, float], due: bool
) -> None:
    def mean(*_: object) -> Steps[tuple[torch.Tensor, int]]:
        return at_once((torch.tensor(told, dtype=torch.float64), 3))

    monkeypatch.setattr(due_by_minutes, "mean_unless_ending", mean)
    node: Any = SimpleNamespace(round=40)
    asked = due_by_minutes.DueByMinutes(node, 1.0)
    asked.begin_generation()
    asked._pending_poll = node
    assert run_without_waits(asked.is_due()) == due
    asked_at = asked._next_poll_round
    assert asked_at is not None and 40 < asked_at <= 40 + due_by_minutes.MOST_ROUNDS_BETWEEN_POLLS
