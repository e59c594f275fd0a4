"""Waits for the next generation, stepped on virtual time without links or threads."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from decentnode.communication.counters import Counters
from decentnode.communication.run_state import RunFacts
from decentnode.communication.zeromq.protocol.reconfiguration import GenerationWait, Reconfiguration
from decentnode.errors import DecentnodeError, Interrupted, NoGeneration, PeerLost, Regrouping
from decentnode.wire.codec import to_bitmap
from decentnode.wire.generation import Generation, Limits, new_origin
from decentnode.wire.membership import Membership
from decentnode.wire.messages import NO_ORIGIN, Current, Message

RUN = b"theirrun"
STEP_SECONDS = 0.25


class Node:
    """One member of a run. Its messages reach the other nodes at their next step."""

    def __init__(self, uid: int, nodes: dict[int, Node], n: int = 3, min_nodes: int = 2) -> None:
        """nodes: uid -> every live node of the run, this one included."""
        self.uid, self.nodes, self.inbox = uid, nodes, list[Message]()
        draw = random.Random(uid)
        membership = Membership(uid, n, Limits(2.0, 20.0, min_nodes), draw=draw.randbytes, digest="d", run=RUN)
        self.facts, self.num_woken = RunFacts(), 0
        self.reconfiguration = Reconfiguration(membership, self, self.facts, Counters(), self._wake)  # type: ignore[arg-type]
        self.reconfiguration.begin(RUN)
        self.installed: list[Generation] = []
        self.wait: GenerationWait | None = None
        self.entered: Generation | None = None
        self.num_renewed = 0

    def slowness(self, now: float) -> list[float]:
        """As `LinkSender.slowness`."""
        return []

    def renew_control(self) -> None:
        """As `LinkSender.renew_control`."""
        self.num_renewed += 1

    def _wake(self) -> None:
        self.num_woken += 1

    def send_once(self, uid: int, message: Message) -> None:
        """As `LinkSender.send_once`."""
        if uid in self.nodes:
            self.nodes[uid].inbox.append(message)

    def step(self, now: float) -> None:
        inbox, self.inbox = self.inbox, []
        for message in inbox:
            self.reconfiguration.receive(message, now)
        self.reconfiguration.tick(now)
        if self.facts.regrouping and self.wait is None:
            self.wait = GenerationWait(self.reconfiguration, 60.0, 120.0, self.installed.append, now)
        if self.wait is not None and self.entered is None and self.wait.step(now):
            self.entered = self.wait.generation


def test_survivors_enter_a_generation_without_a_dead_member() -> None:
    nodes: dict[int, Node] = {}
    nodes.update({uid: Node(uid, nodes) for uid in range(3)})
    del nodes[2]
    nodes[0].reconfiguration.enter(4)
    nodes[0].reconfiguration.suspect([2], "it is dead", 100.0, dead=True)
    assert nodes[0].facts.regrouping and nodes[0].num_woken
    with pytest.raises(Regrouping):
        nodes[0].reconfiguration.enter(5)
    now = 100.0
    while not all(node.entered for node in nodes.values()):
        now += STEP_SECONDS
        assert now < 160
        for node in nodes.values():
            node.step(now)
    for node in nodes.values():
        assert node.entered is not None and node.entered.members == (0, 1)
        assert [generation.name for generation in node.installed] == [node.entered.name]
        assert not node.facts.regrouping
        node.reconfiguration.enter(node.entered.first_round)


def test_a_node_without_other_members_gives_up_after_its_time_out() -> None:
    nodes: dict[int, Node] = {}
    nodes[0] = Node(0, nodes)
    nodes[0].reconfiguration.suspect([1, 2], "they are dead", 100.0, dead=True)
    now = 100.0
    with pytest.raises(NoGeneration, match="no new generation of members within 60 s"):
        while now < 300:
            now += STEP_SECONDS
            nodes[0].step(now)
    assert 160 < now <= 160 + 2 * STEP_SECONDS + 4


def renew_generations(until: float, rounds_begin: bool) -> Iterator[float]:
    """Leaves node 2 out of every generation as soon as it is in force, whereupon node 2 asks to join; yields the
    times."""
    nodes: dict[int, Node] = {}
    nodes.update({uid: Node(uid, nodes) for uid in range(3)})
    now, formed = 100.0, set[tuple[int, ...]]()
    nodes[0].reconfiguration.suspect([2], "nothing from node 2", now)
    while now < until:
        yield (now := now + STEP_SECONDS)
        nodes[2].facts.waiting = None if nodes[2].facts.regrouping else ((0,), now - 1.0)
        for node in nodes.values():
            node.step(now)
        entered = nodes[0].entered
        members = () if entered is None else entered.members
        if members and all(nodes[uid].entered for uid in members):
            assert entered is not None
            formed.add(members)
            for uid in members:
                nodes[uid].wait = nodes[uid].entered = None
                if rounds_begin:
                    nodes[uid].reconfiguration.enter(entered.first_round)
            if 2 in members:
                nodes[0].reconfiguration.suspect([2], "nothing from node 2", now)
    assert formed == {(0, 1), (0, 1, 2)}


def test_generations_of_the_same_members_in_turn_in_which_no_round_begins_end_the_run() -> None:
    """Messages about members arrive, but models do not: every generation is formed, and none gets any further."""
    times = renew_generations(400.0, rounds_begin=False)
    with pytest.raises(NoGeneration, match=r"no round began .* for 12\d s, .* answered: .*; .*MTU"):
        for now in times:
            assert now < 240.0


def test_generations_of_the_same_members_in_turn_in_which_rounds_begin_do_not_end_the_run() -> None:
    assert [*renew_generations(400.0, rounds_begin=True)][-1] >= 400.0


def test_a_node_that_gives_up_names_the_leader_for_which_it_waited() -> None:
    """The leader answers, but has too few nodes for a generation."""
    nodes: dict[int, Node] = {}
    nodes.update({uid: Node(uid, nodes, min_nodes=3) for uid in range(2)})
    nodes[1].reconfiguration.suspect([2], "node 2 does not answer", 100.0)
    with pytest.raises(NoGeneration, match="within 60 s; node 2 does not answer; node 0 had to begin one"):
        for tick in range(300):
            for uid in (1, 0):
                nodes[uid].step(100.0 + STEP_SECONDS * tick)


@pytest.mark.parametrize("answers", [False, True])
def test_a_node_that_is_not_admitted_names_the_nodes_that_it_asked(answers: bool) -> None:
    nodes: dict[int, Node] = {}
    node = nodes[0] = Node(0, nodes)
    node.reconfiguration.leave("it comes from outside", 100.0)
    if answers:
        origin = new_origin(1, random.Random(1).randbytes)
        node.inbox.append(Current(RUN, 1, 2, to_bitmap([1, 2], 3), 1, 0, NO_ORIGIN, origin=origin))
    asked = "node 2 did not admit it" if answers else "no member of the run answers, asked node 1, node 2"
    with pytest.raises(PeerLost, match=f"it comes from outside; {asked}$"):
        for tick in range(300):
            node.step(100.0 + STEP_SECONDS * tick)


@pytest.mark.parametrize(("error", "at", "stop_at"), [(NoGeneration, 222.0, 900), (Interrupted, 150.0, 200)])
def test_a_node_that_was_outside_often_and_therefore_asks_late_gives_up_later(
    error: type[DecentnodeError], at: float, stop_at: int
) -> None:
    """It asks 62 s after the sixth time; with the suspect_seconds of a run, that is longer than it waits."""
    nodes: dict[int, Node] = {}
    node = nodes[0] = Node(0, nodes)
    for _ in range(5):
        node.reconfiguration.membership.joining.begin(0.0)
    node.reconfiguration.leave("it comes from outside", 100.0)
    assert node.reconfiguration.membership.joining.begins_at == 162.0
    with pytest.raises(error, match="no member of the run answers"):
        for tick in range(900):
            now = 100.0 + STEP_SECONDS * tick
            if tick == stop_at:
                node.reconfiguration.stop(now)
            node.step(now)
    assert at <= now <= at + 4.0


def test_a_node_without_other_members_renews_its_control_connections_less_and_less_often() -> None:
    """The other nodes may be alive, and not receive anything because a connection is half-open and carries no numbered
    message whose missing acknowledgement would show that. It renews rarely, because the others may really be dead."""
    nodes: dict[int, Node] = {}
    node = nodes[0] = Node(0, nodes)
    node.step(100.0)
    assert not node.num_renewed
    node.reconfiguration.suspect([1, 2], "they do not answer", 100.0)
    renewed_at = []
    for tick in range(4 * 50):
        before = node.num_renewed
        node.step(now := 100.0 + STEP_SECONDS * tick)
        if node.num_renewed > before:
            renewed_at.append(now - (node.reconfiguration.alone_since or 0.0))
    assert renewed_at == [2.0, 4.0, 8.0, 16.0, 32.0]


def test_a_node_outside_ends_its_wait_at_once_when_a_stop_is_requested() -> None:
    nodes: dict[int, Node] = {}
    nodes[0] = Node(0, nodes)
    nodes[0].reconfiguration.leave("it comes from outside", 100.0)
    nodes[0].step(100.25)
    nodes[0].reconfiguration.stop(100.3)
    with pytest.raises(Interrupted):
        for tick in range(20):
            nodes[0].step(100.5 + STEP_SECONDS * tick)


def test_the_failure_of_the_run_ends_the_wait() -> None:
    nodes: dict[int, Node] = {}
    node = nodes[0] = Node(0, nodes)
    node.reconfiguration.leave("it comes from outside", 100.0)
    node.facts.failure = PeerLost("over", [1])
    with pytest.raises(PeerLost, match="over"):
        node.step(100.25)
