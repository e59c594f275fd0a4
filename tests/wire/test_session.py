from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from decentnode.errors import PeerFault
from decentnode.wire import codec
from decentnode.wire.control_tree import ControlTree
from decentnode.wire.messages import (
    NO_RUN,
    PROTOCOL_VERSION,
    Absent,
    Chunk,
    Fail,
    Hello,
    Message,
    Refused,
    Reject,
    Report,
    Start,
    Stop,
    Welcome,
)
from decentnode.wire.session import Session
from decentnode.wire.session_events import Joined, NotAssembled, PeerFailed, Rejected, StopAsked

RUN = b"run-id-8"


class Net:
    """Delivers what sessions say, in random order, twice or late when asked."""

    def __init__(self, sessions: list[Session], seed: int = 0, twice: float = 0.0) -> None:
        self.sessions = {session.uid: session for session in sessions}
        self.draw = random.Random(seed)
        self.twice = twice
        self.events: dict[int, list[object]] = {session.uid: [] for session in sessions}
        self.faults: list[str] = []
        self.flying: list[tuple[int, Message]] = []

    def collect(self) -> None:
        for session in self.sessions.values():
            for to, message in session.outbox:
                self.flying += [(to, message)] * (2 if self.draw.random() < self.twice else 1)
            session.outbox.clear()

    def settle(self, now: float = 0.0, ticks: int = 1) -> None:
        for tick in range(ticks):
            for session in self.sessions.values():
                self.events[session.uid] += session.tick(now + tick)
            self.collect()
            while self.flying:
                to, message = self.flying.pop(self.draw.randrange(len(self.flying)))
                if to in self.sessions:
                    try:
                        self.events[to] += self.sessions[to].receive(message, now + tick)
                    except PeerFault as fault:
                        self.faults.append(fault.reason)
                self.collect()


def make(n: int, but: tuple[int, ...] = (), digest: Callable[[int], str] = lambda _: "same") -> list[Session]:
    return [Session(u, n, digest(u), RUN if u == 0 else None) for u in range(n) if u not in but]


@pytest.mark.parametrize("n", [1, 2, 9, 16, 100])
@pytest.mark.parametrize("seed", range(4))
def test_everybody_joins_in_any_order(n: int, seed: int) -> None:
    net = Net(make(n), seed, twice=0.3)
    net.settle(ticks=3)
    for session in net.sessions.values():
        assert session.state == "running" and session.run == RUN
        assert net.events[session.uid].count(Joined()) == 1
    assert set(net.faults) <= {"unexpected_message"}  # late doubles of the start


@pytest.mark.parametrize("missing", [(3,), (1,), (9, 15), (1, 2, 3)])
def test_the_root_names_exactly_who_is_missing(missing: tuple[int, ...]) -> None:
    net = Net(make(16, but=missing))
    net.settle(ticks=3)
    below = {u for u in range(16) for m in missing if u in Session(m, 16, "", RUN).subtree()}
    assert net.sessions[0].absent == tuple(sorted(below))
    event = net.sessions[0].give_up()
    assert event == NotAssembled(tuple(sorted(below)), "")
    net.collect()
    net.settle(now=10)
    for uid, session in net.sessions.items():
        if uid not in below and uid != 0:
            assert session.state == "failed" and NotAssembled(tuple(sorted(below)), "") in net.events[uid]


@pytest.mark.parametrize(
    ("uid", "change", "says"),
    [
        (3, {"digest": "other"}, "another config or graph \\(digest other, the run has same\\)"),
        (9, {"digest": "other"}, "another config or graph"),
        (2, {"num_nodes": 12}, "has 12 nodes in its graph, the run has 16"),
        (4, {"run": b"elsewher"}, "belongs to run"),
    ],
)
def test_a_stranger_is_refused_by_name(uid: int, change: dict[str, object], says: str) -> None:
    sessions = make(16, but=(uid,))
    stale = Session(uid, int(change.get("num_nodes", 16)), str(change.get("digest", "same")), change.get("run"))  # type: ignore[arg-type]
    stale.tree = ControlTree.of(uid, 16)
    net = Net([*sessions, stale])
    net.settle(ticks=3)
    rejected = [event for event in net.events[uid] if isinstance(event, Rejected)]
    assert rejected and f"node {uid}" in rejected[0].reason
    pytest.importorskip("re").search(says, rejected[0].reason) or pytest.fail(rejected[0].reason)
    assert uid in net.sessions[0].absent
    assert f"node {uid}" in net.sessions[0].give_up().reason


def test_a_foreign_hello_in_my_name_does_not_throw_me_out() -> None:
    sessions = make(4)
    net = Net(sessions)
    forged = Hello(NO_RUN, 0, 2, PROTOCOL_VERSION, "wrong", 4, "")
    assert sessions[0].receive(forged, 0.0) == []
    net.settle(ticks=3)
    assert {s.state for s in sessions} == {"running"} and not sessions[0].refusals


def joined(n: int = 4) -> list[Session]:
    net = Net(make(n))
    net.settle(ticks=2)
    return list(net.sessions.values())


@pytest.mark.parametrize(
    ("to", "message", "reason"),
    [
        (0, Stop(b"otherrun", 0, 1), "wrong_run"), (0, Stop(RUN, 1, 1), "wrong_generation"),
        (0, Stop(RUN, 0, 4), "unknown_uid"), (0, Stop(RUN, 0, 0), "unknown_uid"),
        (0, Start(RUN, 0, 1), "unexpected_message"), (1, Report(RUN, 0, 0, 2, {}), "wrong_sender"),
        (0, Report(RUN, 0, 1, 77, {}), "unknown_uid"), (0, Absent(RUN, 0, 1, b"", ""), "unexpected_message"),
        (0, Chunk(NO_RUN, 0, 1, 0, 0, 0, 0, 1, {}), "wrong_run"), (0, Welcome(RUN, 0, 1), "unexpected_message"),
    ],
)  # fmt: skip
def test_what_may_not_be_said_changes_nothing(to: int, message: Message, reason: str) -> None:
    sessions = joined()
    before = dict(vars(sessions[to]))
    with pytest.raises(PeerFault, match=reason):
        sessions[to].receive(message, 0.0)
    assert dict(vars(sessions[to])) == before


def test_stops_and_failures_reach_everybody_once() -> None:
    net = Net(joined(30), twice=0.5)
    net.sessions[17].ask_stop()
    net.sessions[23].fail(23, "out of memory")
    net.collect()
    net.settle()
    for uid in range(30):
        assert net.events[uid].count(StopAsked()) == (uid != 17)
        assert net.events[uid].count(PeerFailed(23, "out of memory")) == (uid != 23)


def refusal(own: dict[str, str], other: dict[str, str], software: str = "decentnode 1") -> str:
    """Why a root of sections `own` refuses a node of sections `other` and another digest."""
    root = Session(0, 4, "same", RUN, sections=own)
    stranger = Session(1, 4, "wrong", sections=other, software=software)
    stranger.tick(0.0)
    ((_, hello),) = stranger.outbox
    ((_, reject),) = said(root, codec.decode(codec.encode(hello)))
    assert isinstance(reject, Reject)
    return reject.reason


def test_a_refusal_names_the_sections_that_differ() -> None:
    own = {"data": "0123456789abcdef", "graph (edges)": "abcdef0123456789", "training": "4444444444444444"}
    for names in (["data"], ["graph (edges)"], ["data", "training"]):
        reason = refusal(own, {**own, **dict.fromkeys(names, "fff0000000000000")}, "decentnode 1; " * 30)
        assert f"(digest wrong, the run has same; these differ: {', '.join(names)}): compare" in reason
    for unlike in ({}, {"data": "f" * 16}, {**own, "more": "f" * 16},
                   {"training": "f" * 16, "graph (edges)": "f" * 16, "data": "f" * 16}):  # fmt: skip
        assert "(digest wrong, the run has same): compare" in refusal(own, unlike), "another version's sections"
        assert "(digest wrong, the run has same): compare" in refusal(unlike, own)
    assert "these differ" not in refusal(own, own), "digests of a section are short"


@pytest.mark.parametrize("length", [511, 512, 513, 5000])
def test_of_a_long_reason_as_much_is_told_as_a_message_holds(length: int) -> None:
    reason = "".join(chr(0x3B1 + i % 17) for i in range(length - 1)) + "!"
    root, told = joined()[0], reason[:512]
    root.fail(2, reason)
    assert {codec.decode(codec.encode(message)) for _, message in root.outbox} == {Fail(RUN, 0, 0, 2, told)}
    assert root.failed == {2: reason}, "here all of it is known"
    whole = f"{reason} has another config or graph (digest wrong, the run has same): " \
            "compare config.resolved.yaml and graph.edges in the run folders of both machines"
    stranger = Hello(RUN, 0, 1, PROTOCOL_VERSION, "wrong", 4, "")
    assert said(Session(0, 4, "same", RUN, describe=lambda _uid: reason), stranger) == [
        (1, Reject(RUN, 0, 0, "wrong", whole[:512]))
    ]


def said(session: Session, message: Message) -> list[tuple[int, Message]]:
    """What a session answers, as it comes out at the other end."""
    session.outbox.clear()
    session.receive(message, 0.0)
    return [(to, codec.decode(codec.encode(answer))) for to, answer in session.outbox]


@pytest.mark.parametrize("length", [511, 512, 513])
def test_of_a_long_refusal_the_root_is_told_as_much_as_a_message_holds(length: int) -> None:
    reason = "n" * (length - 1) + "!"
    session = Session(1, 20, "same")
    session.note_refusal(9, reason)
    (_, refused), _ = said(session, Welcome(RUN, 0, 0))
    assert refused == Refused(RUN, 0, 1, 9, reason[:512])
    session.outbox.clear()
    session.note_refusal(10, reason)
    assert session.outbox == [(0, Refused(RUN, 0, 1, 10, reason[:512]))]


def test_a_reason_that_is_no_text_is_told_all_the_same() -> None:
    """Names of files may hold bytes that are none."""
    session = joined()[0]
    session.fail(2, "no such file: caf\udce9.npz")
    assert {codec.decode(codec.encode(m)) for _, m in session.outbox} == {Fail(RUN, 0, 0, 2, "no such file: caf?.npz")}


def test_reports_of_the_whole_tree_reach_the_root() -> None:
    net = Net(joined(30))
    for uid in range(1, 30):
        session = net.sessions[uid]
        assert session.tree.parent is not None
        session.send(session.tree.parent, Report, uid, {"uid": uid})
    net.collect()
    net.settle()
    assert {event.uid for event in net.events[0] if isinstance(event, Report)} == set(range(1, 30))
