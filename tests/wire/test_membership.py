"""Agreement on generations over a simulated network: messages get lost, processes die, freeze and come back."""

from __future__ import annotations

import contextlib
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decentnode.errors import PeerFault
from decentnode.wire.codec import bitmap
from decentnode.wire.generation import Broken, Install, JoinRefused, Limits, new_origin
from decentnode.wire.membership import Membership
from decentnode.wire.messages import (
    FIELDS,
    MEMBERSHIP,
    NO_RUN,
    PROTOCOL_VERSION,
    Bye,
    Commit,
    Denied,
    Go,
    Join,
    Message,
    Ping,
    Pong,
    Prepare,
    Promise,
    Ready,
    Suspect,
)
from tests.conftest import scale
from tests.wire.test_codec import field_values
from tests.wire.world import RUN, SUSPECT, TICK, World


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
    world.run(2 * SUSPECT)
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


def test_who_said_goodbye_after_the_last_round_is_not_missed() -> None:
    world = World(4, min_nodes=3, rounds=7)
    for process in world.processes.values():
        process.membership.position = 7
    for uid in (0, 1, 2):
        world.processes[uid].membership.receive(Bye(RUN, 0, 3), world.now)
    world.kill(3)
    world.kill(2)
    world.run(4 * SUSPECT)
    assert world.agreed[1].members == (0, 1)


def test_who_says_goodbye_while_there_are_rounds_left_has_failed() -> None:
    """Node 4 may not be counted by both sides of a broken network: neither of two is more than half of five."""
    world = World(5)
    for uid in range(4):
        world.processes[uid].membership.receive(Bye(RUN, 0, 4), world.now)
    world.kill(4)
    world.run(4 * SUSPECT)
    assert world.agreed[1].members == (0, 1, 2, 3)
    world.cut_off({0, 1})
    world.run(10 * SUSPECT)
    assert len(world.agreed) == 1
    assert all(process.membership.stage != "steady" for process in world.processes.values())


def test_the_departed_count_only_for_a_generation_without_rounds() -> None:
    """Two of five are left after the others finished; what they agree on begins no round, though one is behind."""
    world = World(5, rounds=7)
    for uid, position in ((0, 7), (1, 6)):
        world.processes[uid].membership.position = position
    for source in (2, 3, 4):
        world.processes[0].membership.receive(Bye(RUN, 0, source), world.now)
        world.kill(source)
    world.run(4 * SUSPECT)
    assert world.agreed[1].members == (0, 1)
    assert world.agreed[1].first_round == 7


def test_two_generations_of_one_number_do_not_strand_anybody() -> None:
    """Node 2 promised number 1 to node 0, was started again, forgot it, and promised number 1 to node 1."""
    world = World(3)
    world.run(2)
    world.cut_off({1})
    world.run(6 * SUSPECT)
    assert world.processes[0].membership.generation.members == (0, 2)
    world.kill(2)
    world.cut.clear()
    world.cut_off({0})
    world.run(1)
    world.restart(2)
    world.run(8 * SUSPECT)
    first, second = (world.processes[uid].membership.generation for uid in (0, 1))
    assert (first.number, second.number, second.members) == (1, 1, (1, 2))
    assert first.name != second.name
    world.cut.clear()
    world.run(12 * SUSPECT)
    assert world.settled()


def test_a_survivor_of_a_dead_generation_yields_to_one_of_a_lower_name() -> None:
    """Nodes 0 and 2 agree again and again; then 2 is started again and goes on with 1, which knows of none of that."""
    world = World(3)
    world.cut_off({1})
    for _ in range(3):
        world.run(4 * SUSPECT)
        world.cut.add(frozenset((0, 2)))
        world.run(0.6 * SUSPECT)
        world.processes[0].membership.suspect([2], world.now)
        world.cut.discard(frozenset((0, 2)))
    world.run(4 * SUSPECT)
    world.kill(2)
    world.cut.clear()
    world.cut_off({0})
    world.run(1)
    world.restart(2)
    world.run(8 * SUSPECT)
    survivor, other = world.processes[0].membership.generation, world.processes[1].membership.generation
    assert survivor.name > other.name
    assert other.members == (1, 2)
    world.cut.clear()
    world.run(12 * SUSPECT)
    assert world.settled()


@pytest.mark.parametrize("seed", [0, 1, 5, 8, 12, 18])
def test_two_that_lead_because_they_do_not_hear_each_other_do_not_outbid_each_other_for_ever(seed: int) -> None:
    world = World(7, seed=seed)
    world.run(1)
    world.cut.add(frozenset((0, 2)))
    for uid, missed in ((0, [2]), (2, [0, 1])):
        world._handle(uid, world.processes[uid].membership.suspect(missed, world.now))
    world.kill(1)
    world.processes[0].membership.suspects.add(1)
    world.run(10 * SUSPECT)
    assert len(world.in_force()) == 1
    assert max(process.membership.promised for process in world.processes.values())[0] <= 3


def test_who_failed_while_a_generation_was_agreed_on_is_not_forgotten() -> None:
    """Node 3 fails after everybody promised: it says so to those that follow, then goodbye. It counts for nobody."""
    world = World(5)
    world.run(2)
    world.kill(4)
    for _ in range(400):
        world.step()
        if any(world.processes[uid].membership.stage == "promised" for uid in (1, 2)):
            break
    for uid in (0, 1, 2):
        membership = world.processes[uid].membership
        for message in (Suspect(RUN, 0, 3, bitmap([3], 5), 0), Bye(RUN, 0, 3)):
            world.take(uid, message)
        assert 3 in membership.failed
        assert 3 not in membership.left
    world.kill(3)
    world.run(8 * SUSPECT)
    assert world.processes[0].membership.generation.members == (0, 1, 2)
    world.cut_off({0})
    world.run(8 * SUSPECT)
    assert len(world.in_force()) == 0


def test_a_member_that_fails_after_it_got_ready_is_suspected_at_once() -> None:
    world = World(4)
    world.run(1)
    world.kill(3)
    while world.processes[1].membership.stage != "committed":
        world.step()
    membership = world.processes[1].membership
    world.take(1, Suspect(RUN, membership.promised[0], 2, bitmap([2], 4), 0, origin=membership.promised[1]))
    world.kill(2)
    while not world.processes[1].going:
        world.step()
    assert 2 in world.processes[1].going[0].members
    assert membership.stage != "steady"


def test_a_goodbye_that_comes_before_the_failure_is_known_does_not_count() -> None:
    world = World(4, rounds=3)
    membership = world.processes[0].membership
    membership.position = 3
    world.take(0, Bye(RUN, 0, 3))
    assert membership.left == {3}
    world.take(0, Suspect(RUN, 0, 3, bitmap([3], 4), 0))
    assert not membership.left
    assert membership.stage != "steady"


def test_too_few_of_an_older_generation_join_too_few_of_a_newer_one() -> None:
    """Node 4 was cut off; of those that went on without it, two die. Together they are enough."""
    world = World(5)
    world.cut_off({4})
    world.run(6 * SUSPECT)
    assert world.agreed[1].members == (0, 1, 2, 3)
    for uid in (2, 3):
        world.kill(uid)
    world.run(6 * SUSPECT)
    world.cut.clear()
    world.run(8 * SUSPECT)
    assert world.settled()
    assert world.processes[0].going[-1].fresh == {4}


def test_a_number_far_ahead_is_refused() -> None:
    """Numbers are finite: one wrong message may not use them up."""
    membership = World(3).processes[0].membership
    with pytest.raises(PeerFault, match="wrong_generation"):
        membership.receive(Promise(RUN, (1 << 32) - 1, 1, 0, 0, 0), 0.0)


def test_who_lives_in_another_generation_is_missed_in_this_one() -> None:
    world = World(3)
    membership = world.processes[0].membership
    since = world.now
    for _ in range(12):
        world.now += TICK
        membership.tick(world.now, [1, 2], since)
        membership.receive(Pong(RUN, 0, 2), world.now)
        membership.receive(Pong(RUN, 0, 1, origin=new_origin(1, os.urandom)), world.now)
    assert membership.suspects == {1}


def test_who_does_not_get_ready_is_left_out() -> None:
    """Node 3 lives and promises, but what it had is never put away."""

    class Stuck(World):
        def _handle(self, uid: int, events: list[object]) -> None:
            super()._handle(uid, [event for event in events if uid != 3 or not isinstance(event, Install)])

    world = Stuck(5)
    world.run(1)
    world.kill(4)
    world.run(60)
    assert any(generation.members == (0, 1, 2) for generation in world.known.values())


def test_a_generation_begins_after_the_furthest_of_its_members() -> None:
    world = World(5)
    world.run(1)
    for uid, position in enumerate((3, 7, 3, 4)):
        world.processes[uid].membership.position = position
    world.random.random = lambda: 0.9  # type: ignore[method-assign]  # nobody turns a round
    world.kill(4)
    world.run(4 * SUSPECT)
    assert world.agreed[1].first_round == 7


def test_a_stop_needs_no_majority_and_begins_no_round() -> None:
    world = World(5)
    world.run(2)
    for uid in (2, 3, 4):
        world.kill(uid)
    world.run(8 * SUSPECT)
    assert not world.agreed
    world.processes[1].membership.stopping = True
    world.run(6 * SUSPECT)
    assert world.settled()
    assert world.agreed[max(world.agreed)].stopping
    assert world.processes[0].membership.stopping


def test_nobody_is_let_in_once_a_stop_was_asked_for() -> None:
    world = World(4)
    world.run(1)
    for process in world.processes.values():
        process.membership.stopping = True
    world.kill(3)
    world.restart(3)
    world.run(4 * SUSPECT)
    assert world.processes[3].membership.stage == "outside"
    assert all(world.processes[uid].membership.steady for uid in (0, 1, 2))


def test_a_join_with_another_config_is_refused_by_name_on_both_sides() -> None:
    world = World(3)
    with pytest.raises(PeerFault, match=r"wrong_config: node 2 .*digest other, the run has d"):
        world.processes[0].membership.receive(Join(NO_RUN, 0, 2, PROTOCOL_VERSION, "other", 3), world.now)
    assert world.processes[0].membership.steady
    ((to, denied),) = world.processes[0].membership.outbox
    assert to == 2
    joiner = Membership(2, 3, world.limits, draw=os.urandom, digest="other")
    joiner.leave(world.now, "started")
    (event,) = joiner.receive(denied, world.now)
    assert event == JoinRefused(
        "refused by node 0: node 2 asks to join with another config or graph (digest other, the run has d)"
    )
    assert not joiner.receive(Denied(RUN, 0, 1, "d", "what another one asked"), world.now)


def test_who_asks_to_join_during_an_attempt_that_falls_short_is_counted_in_the_next() -> None:
    """Node 3 is the last with a model. Its attempt counts on node 0, which has finished, until a new process of it asks
    to join."""
    world = World(4, rounds=6)
    world.kill(2)
    world.run(4 * SUSPECT)
    for uid in (0, 1):
        world.kill(uid)
    last = world.processes[3].membership
    last.position = 6
    now_in, name = last.generation.number, last.generation.name
    last.receive(Bye(RUN, now_in, 0, origin=name[1]), world.now)

    def ask(source: int) -> None:
        last.receive(Join(RUN, now_in, source, PROTOCOL_VERSION, "d", 4, origin=name[1]), world.now)

    ask(1)
    ask(0)
    assert last.proposal is not None and last.proposal.members == {1, 3}
    number, origin = last.proposal.name
    last.receive(Promise(RUN, number, 1, 0, 1, 0, origin=origin), world.now)
    assert last.stage == "short" and last.generation.name == name
    ask(0)  # it goes on asking
    assert last.proposal is not None and last.proposal.members == {0, 1, 3}


def test_a_guest_that_ends_is_no_node_that_has_finished() -> None:
    """Node 1 was about to be let in, fails and is started again, while the others are past their last round: nothing
    makes the leader begin one attempt after the other."""
    world = World(5, rounds=20)
    world.kill(1)
    world.run(4 * SUSPECT)
    leader = world.processes[0].membership
    assert leader.generation.members == (0, 2, 3, 4)
    leader.position = 20
    number, origin = leader.generation.name
    leader.receive(Join(RUN, number, 1, PROTOCOL_VERSION, "d", 5, origin=origin), world.now)
    assert leader.proposal is not None and 1 in leader.proposal.members
    attempt = leader.proposal.name
    leader.receive(Bye(RUN, attempt[0], 1, origin=attempt[1]), world.now)  # it had promised
    assert leader.left == set()
    leader.receive(Join(RUN, number, 1, PROTOCOL_VERSION, "d", 5, origin=origin), world.now)
    world.restart(1)
    world.run(8 * SUSPECT)
    assert world.settled()
    assert leader.generation.number < 20


def test_who_left_and_asks_to_join_again_is_one_of_the_two() -> None:
    """The goodbye of node 1's old process comes after the new process asked to join."""
    world = World(5, rounds=20)
    world.kill(1)
    leader = world.processes[0].membership
    leader.position = 20
    for _ in range(2):
        leader.receive(Join(RUN, 0, 1, PROTOCOL_VERSION, "d", 5), world.now)
        assert leader.joiners == {1} and not leader.left
        leader.suspects.clear()
        leader.receive(Bye(RUN, 0, 1), world.now)
        assert leader.left == {1} and not leader.joiners


def test_late_copies_of_a_join_break_no_generation() -> None:
    """Node 2 comes back twice; what it said from outside arrives again, everywhere, when it is in for long."""
    world = World(4)
    for _ in range(2):
        world.kill(2)
        world.run(4 * SUSPECT)
        world.restart(2)
        world.run(3 * SUSPECT)
    assert world.settled()
    joins = [message for message in world.said if isinstance(message, Join)]
    assert joins
    before = [process.broken for process in world.processes.values()]
    for message in joins:
        for uid in (0, 1, 3):
            world.take(uid, message)
    world.run(4 * SUSPECT)
    assert [process.broken for process in world.processes.values()] == before


def test_a_late_copy_of_a_prepare_does_not_break_what_it_prepared() -> None:
    world = World(4)
    world.run(1)
    world.kill(3)
    world.run(4 * SUSPECT)
    assert world.settled()
    for message in [each for each in world.said if isinstance(each, Prepare)]:
        world.take(1, message)
    assert world.processes[1].membership.steady


def test_who_is_asked_to_promise_ends_its_generation_once() -> None:
    """The training is told that it is over, by the first word that ends it, and not again by those that follow."""
    membership = World(4).processes[1].membership
    words = [Prepare(RUN, number, 0, bitmap(range(4), 4), origin=new_origin(0, os.urandom)) for number in (1, 1, 2)]
    events = [membership.receive(word, 100.0) for word in words]
    assert events == [[Broken("node 0 prepares generation 1")], [], []]
    assert membership.stage == "promised" and membership.reason == "node 0 prepares generation 1"


def test_who_misses_somebody_already_keeps_the_reason_when_it_is_asked_to_promise() -> None:
    membership = World(4).processes[1].membership
    assert membership.suspect([3], 100.0) == [Broken("node 3 does not answer")]
    assert membership.receive(Prepare(RUN, 1, 0, bitmap([0, 1, 2], 4), origin=new_origin(0, os.urandom)), 100.0) == []
    assert membership.stage == "promised" and membership.reason == "node 3 does not answer"


@pytest.mark.parametrize("length", [511, 512, 513])
def test_of_a_long_refusal_as_much_is_told_as_a_message_holds(length: int) -> None:
    who = "n" * (length - 1) + "!"
    member = Membership(0, 3, Limits(SUSPECT, 20.0, 2), draw=os.urandom, digest="d", run=RUN, describe=lambda _uid: who)
    with pytest.raises(PeerFault):
        member.receive(Join(NO_RUN, 0, 2, PROTOCOL_VERSION, "other", 3), 100.0)
    ((_, denied),) = member.outbox
    whole = f"{who} asks to join with another config or graph (digest other, the run has d)"
    assert isinstance(denied, Denied) and denied.reason == whole[:512]


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
