"""Agreement on generations over a simulated network: messages get lost, processes die, freeze and come back."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decentnode.errors import PeerFault
from decentnode.wire import codec
from decentnode.wire.membership import Broken, Generation, Going, Install, Limits, Membership, Outside
from decentnode.wire.messages import (
    FIELDS,
    MEMBERSHIP,
    NO_RUN,
    PROTOCOL_VERSION,
    Bye,
    Commit,
    Go,
    Join,
    Message,
    Ping,
    Prepare,
    Promise,
    Ready,
    Suspect,
)
from tests.conftest import scale
from tests.wire.test_codec import field_values

RUN = b"theirrun"
TICK, SUSPECT = 0.25, 2.0


@dataclass
class Process:
    """A membership, and an owner that turns rounds while it may."""

    membership: Membership
    frozen: bool = False
    inbox: list[Message] = field(default_factory=list)
    """What came while it was frozen."""
    going: list[Generation] = field(default_factory=list)
    broken: int = 0


class World:
    """Processes and a network with a virtual clock."""

    def __init__(self, num_nodes: int, *, seed: int = 0, loss: float = 0.0, min_nodes: int | None = None) -> None:
        self.num_nodes, self.loss, self.random = num_nodes, loss, random.Random(seed)
        self.limits = Limits(SUSPECT, 20.0, num_nodes // 2 + 1 if min_nodes is None else min_nodes)
        self.now = 100.0
        self.processes = {uid: Process(self.make(uid, RUN)) for uid in range(num_nodes)}
        self.cut: set[frozenset[int]] = set()
        self.said: list[Message] = []
        self._queue: list[tuple[float, int, int, Message]] = []
        self._order = itertools.count()
        self.agreed: dict[int, Generation] = {}
        self.installed: set[tuple[int, int]] = set()
        """(uid, generation) of all times."""
        self.unique = True

    def make(self, uid: int, run: bytes) -> Membership:
        return Membership(uid, self.num_nodes, self.limits, digest="d", run=run)

    # -- faults -----------------------------------------------------------------------------------------------

    def kill(self, uid: int) -> None:
        self.processes.pop(uid, None)

    def restart(self, uid: int) -> None:
        process = self.processes[uid] = Process(self.make(uid, NO_RUN))
        self._handle(uid, process.membership.leave(self.now, "started again"))

    def freeze(self, uid: int) -> None:
        if uid in self.processes:
            self.processes[uid].frozen = True

    def thaw(self, uid: int) -> None:
        process = self.processes.get(uid)
        if process is not None and process.frozen:
            process.frozen = False
            for message in process.inbox:
                self._take(uid, message)
            process.inbox.clear()

    # -- time -------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK
            while self._queue and self._queue[0][0] <= self.now:
                _, _, to, message = heapq.heappop(self._queue)
                process = self.processes.get(to)
                if process is None:
                    continue
                if process.frozen:
                    process.inbox.append(message)
                else:
                    self._take(to, message)
            for uid, process in sorted(self.processes.items()):
                if process.frozen:
                    continue
                membership = process.membership
                if membership.steady:
                    membership.position += self.random.random() < 0.3
                others = [other for other in membership.generation.members if other != uid]
                self._handle(uid, membership.tick(self.now, others, 1.0))

    def _take(self, uid: int, message: Message) -> None:
        self._handle(uid, self.processes[uid].membership.receive(codec.decode(codec.encode(message)), self.now))

    def _handle(self, uid: int, events: list[object]) -> None:
        process = self.processes[uid]
        for event in events:
            if isinstance(event, Install):
                self.installed.add((uid, event.generation.number))
                self._handle(uid, process.membership.installed(event.generation.number, self.now))
            elif isinstance(event, Going):
                self._entered(process, event.generation)
            elif isinstance(event, Broken):
                process.broken += 1
            else:
                assert isinstance(event, Outside)
        outbox, process.membership.outbox = process.membership.outbox, []
        for to, message in outbox:
            assert to != uid
            self.said.append(message)
            if frozenset((uid, to)) not in self.cut and self.random.random() >= self.loss:
                delay = self.random.uniform(0.0, 0.3)
                heapq.heappush(self._queue, (self.now + delay, next(self._order), to, message))

    def _entered(self, process: Process, generation: Generation) -> None:
        process.going.append(generation)
        known = self.agreed.setdefault(generation.number, generation)
        assert known == generation or not self.unique, "two generations of one number"
        if self.limits.min_nodes > self.num_nodes // 2:
            assert len(set(generation.members) | process.membership.left) > self.num_nodes // 2
        for other in generation.members:  # nobody goes before everybody is ready
            assert (other, generation.number) in self.installed, "went before all were ready"
        if process.membership.uid in generation.fresh:
            process.membership.fresh = False  # its owner takes the mean of the others

    def settled(self) -> bool:
        """Whether all that live are steady in one generation, which they make up."""
        found = {process.membership.generation for process in self.processes.values()}
        steady = all(process.membership.steady for process in self.processes.values())
        return steady and len(found) == 1 and next(iter(found)).members == tuple(sorted(self.processes))


def test_nothing_happens_while_everybody_answers() -> None:
    world = World(5)
    world.run(60)
    assert all(p.membership.generation.number == 0 and not p.broken for p in world.processes.values())
    assert {type(m).__name__ for m in world.said} == {"Ping", "Pong"}


@pytest.mark.parametrize("dead", [0, 1, 4])
def test_the_others_go_on_without_a_dead_member(dead: int) -> None:
    world = World(5)
    world.run(5)
    positions = [p.membership.position for uid, p in world.processes.items() if uid != dead]
    world.kill(dead)
    world.run(4 * SUSPECT)
    assert world.settled()
    generation = world.agreed[1]
    assert generation.first_round >= max(positions)
    assert not generation.fresh
    assert all(p.membership.position >= generation.first_round for p in world.processes.values())


def test_a_restarted_member_joins_the_next_generation_as_fresh() -> None:
    world = World(4)
    world.kill(2)
    world.run(4 * SUSPECT)
    world.restart(2)
    world.run(2)
    assert world.settled()
    assert world.agreed[2].fresh == {2}


def test_a_quick_restart_is_noticed_though_nobody_missed_the_old_process() -> None:
    world = World(4)
    world.run(2)
    world.kill(0)
    world.restart(0)
    world.run(SUSPECT)
    assert world.settled()
    assert world.processes[0].going[-1].fresh == {0}


def test_a_frozen_member_is_left_out_and_comes_back() -> None:
    world = World(5)
    world.freeze(0)
    world.run(4 * SUSPECT)
    assert world.processes[1].membership.generation.members == (1, 2, 3, 4)
    world.thaw(0)
    world.run(3 * SUSPECT)
    assert world.settled()
    assert world.processes[0].going[-1].fresh == {0}


def test_a_whole_machine_that_slept_blames_nobody() -> None:
    world = World(3)
    for uid in range(3):
        world.freeze(uid)
    world.run(10 * SUSPECT)
    for uid in range(3):
        world.thaw(uid)
    world.run(3)
    assert world.settled()
    assert world.processes[0].membership.generation.number == 0


def test_too_few_wait_for_more_instead_of_going_on() -> None:
    world = World(4)
    world.kill(2)
    world.kill(3)
    world.run(10 * SUSPECT)
    assert not world.agreed
    assert {p.membership.stage for p in world.processes.values()} <= {"short", "suspecting"}
    assert "needs 3 of 4 nodes" in world.processes[0].membership.reason
    world.restart(3)
    world.run(3 * SUSPECT)
    assert world.settled()
    assert world.agreed[1].fresh == {3}
    assert world.agreed[1].members == (0, 1, 3)


def test_two_nodes_go_on_when_one_is_restarted() -> None:
    world = World(2)
    world.run(5)
    world.kill(0)
    world.run(2 * SUSPECT)
    assert world.processes[1].membership.stage == "short"
    world.restart(0)
    world.run(2 * SUSPECT)
    assert world.settled()
    assert world.processes[0].going[-1].fresh == {0}
    assert world.processes[0].going[-1].first_round >= 1


def test_only_the_larger_side_of_a_cut_goes_on_and_the_smaller_comes_back() -> None:
    world = World(5)
    world.cut = {frozenset((a, b)) for a in (0, 1) for b in (2, 3, 4)}
    world.run(12 * SUSPECT)
    assert world.processes[2].membership.generation.members == (2, 3, 4)
    assert world.processes[0].membership.generation.number == 0
    world.cut = set()
    world.run(6 * SUSPECT)
    assert world.settled()


def test_two_members_that_cannot_speak_to_each_other_do_not_bring_down_the_rest() -> None:
    world = World(5)
    world.cut = {frozenset((3, 4))}
    steady = 0
    for _ in range(400):
        world.run(2 * TICK)
        membership = world.processes[0].membership
        assert {0, 1, 2} <= set(membership.generation.members)
        steady += membership.steady
    assert steady > 300
    assert membership.generation.number < 30


def test_who_said_goodbye_is_not_missed() -> None:
    world = World(4, min_nodes=3)
    for uid in (0, 1, 2):
        world.processes[uid].membership.receive(Bye(RUN, 0, 3), world.now)
    world.kill(3)
    world.kill(2)
    world.run(4 * SUSPECT)
    assert world.agreed[1].members == (0, 1)


def test_a_join_with_another_config_is_refused() -> None:
    world = World(3)
    with pytest.raises(PeerFault, match="wrong_config"):
        world.processes[0].membership.receive(Join(NO_RUN, 0, 2, PROTOCOL_VERSION, "other", 3, bytes(8)), world.now)
    assert world.processes[0].membership.steady


def test_messages_of_another_run_are_refused() -> None:
    membership = World(3).processes[0].membership
    with pytest.raises(PeerFault, match="wrong_run"):
        membership.receive(Ping(b"anything", 0, 1), 0.0)
    with pytest.raises(PeerFault, match="unknown_uid"):
        membership.receive(Ping(RUN, 0, 3), 0.0)


def words() -> st.SearchStrategy[Message]:
    """Of anybody, near enough to the truth to get past the first checks."""
    near = {"run": st.sampled_from([RUN, NO_RUN]), "generation": st.integers(0, 9), "source": st.integers(0, 6)}
    return st.one_of([
        st.builds(kind, **{each.name: field_values(each.metadata) for each in FIELDS[kind]} | near)
        for kind in MEMBERSHIP
    ])  # fmt: skip


@settings(max_examples=scale(100, 5_000), deadline=None)
@given(heard=st.lists(words(), max_size=12))
def test_no_word_does_more_than_break_the_protocol(heard: list[Message]) -> None:
    """Anything from anybody: typed errors alone, and no more said than a few words per word."""
    membership = World(5).processes[3].membership
    for now, word in enumerate(heard):
        with contextlib.suppress(PeerFault):
            membership.receive(word, 100.0 + now)
        membership.tick(100.0 + now)
    assert len(membership.outbox) <= 40 * (len(heard) + 1)


STAGES = [Suspect, Prepare, Promise, Commit, Ready, Go]


@pytest.mark.parametrize("fault", ["kill", "freeze"])
@pytest.mark.parametrize("stage", STAGES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("victim", [1, 2, 5])
def test_a_second_fault_at_every_step(fault: str, stage: type[Message], victim: int) -> None:
    """Uid 0 dies; as soon as somebody says `stage`, uid 1 (which leads then) or another is hit, too."""
    world = World(6, min_nodes=3, seed=victim)
    world.kill(0)
    for _ in range(200):
        before = len(world.said)
        world.run(TICK)
        if any(isinstance(message, stage) for message in world.said[before:]):
            break
    else:
        pytest.fail(f"nobody said {stage.__name__}")
    getattr(world, fault)(victim)
    world.run(8 * SUSPECT)
    alive = {uid for uid, process in world.processes.items() if not process.frozen}
    assert {world.processes[uid].membership.generation for uid in alive} == {
        world.processes[min(alive)].membership.generation
    }
    assert set(world.processes[min(alive)].membership.generation.members) == alive
    world.thaw(victim)
    world.run(6 * SUSPECT)
    assert world.settled()


faults = st.lists(
    st.tuples(st.sampled_from(["kill", "restart", "freeze", "thaw", "cut", "heal"]), st.integers(0, 5),
              st.floats(0.25, 3 * SUSPECT)),
    max_size=12,
)


@settings(max_examples=scale(60, 2000), deadline=None, derandomize=not scale(0, 1))
@given(plan=faults, mortal=st.integers(0, 5), seed=st.integers(0, 1 << 20), loss=st.sampled_from([0.0, 0.05, 0.2]))
def test_whatever_happens_all_that_live_agree_in_the_end(
    plan: list[tuple[str, int, float]], mortal: int, seed: int, loss: float
) -> None:
    """One node may die again and again, all may freeze, connections break, messages get lost."""
    _survive([(fault, mortal if fault in ("kill", "restart") else uid, s) for fault, uid, s in plan], seed, loss, True)


@settings(max_examples=scale(30, 1000), deadline=None, derandomize=not scale(0, 1))
@given(plan=faults, seed=st.integers(0, 1 << 20), loss=st.sampled_from([0.0, 0.05]))
def test_whoever_dies_all_that_live_agree_in_the_end(
    plan: list[tuple[str, int, float]], seed: int, loss: float
) -> None:
    """So many may forget what they promised that a number comes twice, but not to two generations of the living."""
    _survive(plan, seed, loss, False)


def _survive(plan: list[tuple[str, int, float]], seed: int, loss: float, unique: bool) -> None:
    world = World(6, seed=seed, loss=loss)
    world.unique = unique
    for fault, uid, seconds in plan:
        if fault == "restart":
            if uid not in world.processes:
                world.restart(uid)
        elif fault == "cut":
            world.cut.add(frozenset((uid, (uid + 1) % 6)))
        elif fault == "heal":
            world.cut.clear()
        else:
            getattr(world, fault)(uid)
        world.run(seconds)
    world.cut.clear()
    world.loss = min(world.loss, 0.05)
    for uid in range(6):
        world.thaw(uid)
    gone = [uid for uid in range(6) if uid not in world.processes]
    with_model = [p for p in world.processes.values() if not p.membership.fresh]
    for uid in gone[: max(0, len(gone) - 2)]:
        world.restart(uid)
    for _ in range(40):
        world.run(SUSPECT)
        if world.settled():
            break
    if with_model:
        assert world.settled(), [(u, p.membership.stage, p.membership.generation) for u, p in world.processes.items()]
    for process in world.processes.values():
        numbers = [generation.number for generation in process.going]
        assert numbers == sorted(set(numbers))
