"""Waits for the next generation, step by step on a time of their own: no links, no threads."""

from __future__ import annotations

import random

import pytest

from decentnode.communication.counters import Counters
from decentnode.communication.run_state import RunFacts
from decentnode.communication.zeromq.protocol.reconfiguration import GenerationWait, Reconfiguration
from decentnode.errors import Interrupted, NoGeneration, PeerLost, Regrouping
from decentnode.wire.codec import to_bitmap
from decentnode.wire.generation import Generation, Limits, new_origin
from decentnode.wire.membership import Membership
from decentnode.wire.messages import NO_ORIGIN, Current, Message

RUN = b"theirrun"
STEP_SECONDS = 0.25


class Node:
    """One member; what it says reaches the others at the next step."""

    def __init__(self, uid: int, all_: dict[int, Node], n: int = 3) -> None:
        self.uid, self.all, self.post = uid, all_, list[Message]()
        draw = random.Random(uid)
        membership = Membership(uid, n, Limits(2.0, 20.0, 2), draw=draw.randbytes, digest="d", run=RUN)
        self.facts, self.woken = RunFacts(), 0
        self.reconfiguration = Reconfiguration(membership, self, self.facts, Counters(), self._wake)  # type: ignore[arg-type]
        self.reconfiguration.begin(RUN)
        self.installed: list[Generation] = []
        self.wait: GenerationWait | None = None
        self.entered: Generation | None = None
        self.renewed = 0

    def slowness(self, now: float) -> list[float]:
        """As `LinkSender.slowness`."""
        return []

    def renew_control(self) -> None:
        """As `LinkSender.renew_control`."""
        self.renewed += 1

    def _wake(self) -> None:
        self.woken += 1

    def send_once(self, uid: int, message: Message) -> None:
        """As `LinkSender.send_once`."""
        if uid in self.all:
            self.all[uid].post.append(message)

    def step(self, now: float) -> None:
        post, self.post = self.post, []
        for message in post:
            self.reconfiguration.receive(message, now)
        self.reconfiguration.tick(now)
        if self.facts.regrouping and self.wait is None:
            self.wait = GenerationWait(self.reconfiguration, 60.0, 120.0, self.installed.append, now)
        if self.wait is not None and self.entered is None and self.wait.step(now):
            self.entered = self.wait.generation


def test_the_others_go_on_without_a_member_that_died() -> None:
    made: dict[int, Node] = {}
    made.update({uid: Node(uid, made) for uid in range(3)})
    del made[2]
    made[0].reconfiguration.enter(4)
    made[0].reconfiguration.suspect([2], "it is dead", 100.0, dead=True)
    assert made[0].facts.regrouping and made[0].woken
    with pytest.raises(Regrouping):
        made[0].reconfiguration.enter(5)
    now = 100.0
    while not all(node.entered for node in made.values()):
        now += STEP_SECONDS
        assert now < 160
        for node in made.values():
            node.step(now)
    for node in made.values():
        assert node.entered is not None and node.entered.members == (0, 1)
        assert [each.name for each in node.installed] == [node.entered.name]
        assert not node.facts.regrouping
        node.reconfiguration.enter(node.entered.first_round)


def test_who_is_alone_gives_up_after_its_time() -> None:
    made: dict[int, Node] = {}
    made[0] = Node(0, made)
    made[0].reconfiguration.suspect([1, 2], "they are dead", 100.0, dead=True)
    now = 100.0
    with pytest.raises(NoGeneration, match="no new generation of members within 60 s"):
        while now < 300:
            now += STEP_SECONDS
            made[0].step(now)
    assert 160 < now <= 160 + 2 * STEP_SECONDS + 4


@pytest.mark.parametrize("answers", [False, True])
def test_who_is_not_let_in_names_whom_it_asked(answers: bool) -> None:
    made: dict[int, Node] = {}
    node = made[0] = Node(0, made)
    node.reconfiguration.leave("it comes from outside", 100.0)
    if answers:
        origin = new_origin(1, random.Random(1).randbytes)
        node.post.append(Current(RUN, 1, 2, to_bitmap([1, 2], 3), 1, 0, NO_ORIGIN, origin=origin))
    asked = "node 2 did not admit it" if answers else "no member of the run answers, asked node 1, node 2"
    with pytest.raises(PeerLost, match=f"it comes from outside; {asked}$"):
        for tick in range(300):
            node.step(100.0 + STEP_SECONDS * tick)


def test_who_is_alone_makes_its_control_connections_anew() -> None:
    """The others may live, and not hear it because a connection is dead in one direction, over which nothing numbered
    goes. Seldom, as it may be the others that are dead."""
    made: dict[int, Node] = {}
    node = made[0] = Node(0, made)
    node.step(100.0)
    assert not node.renewed
    node.reconfiguration.suspect([1, 2], "they do not answer", 100.0)
    renewed_at = []
    for tick in range(4 * 50):
        before = node.renewed
        node.step(now := 100.0 + STEP_SECONDS * tick)
        if node.renewed > before:
            renewed_at.append(now - (node.reconfiguration.alone_since or 0.0))
    assert renewed_at == [2.0, 4.0, 8.0, 16.0, 32.0]


def test_a_node_outside_ends_at_once_when_the_run_is_to_stop() -> None:
    made: dict[int, Node] = {}
    made[0] = Node(0, made)
    made[0].reconfiguration.leave("it comes from outside", 100.0)
    made[0].step(100.25)
    made[0].reconfiguration.stop(100.3)
    with pytest.raises(Interrupted):
        for tick in range(20):
            made[0].step(100.5 + STEP_SECONDS * tick)


def test_what_every_wait_raises_ends_this_one() -> None:
    made: dict[int, Node] = {}
    node = made[0] = Node(0, made)
    node.reconfiguration.leave("it comes from outside", 100.0)
    node.facts.failure = PeerLost("over", [1])
    with pytest.raises(PeerLost, match="over"):
        node.step(100.25)
