from __future__ import annotations

import random
import re

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


class SimulatedNetwork:
    """Delivers the messages of sessions in random order, some of them twice."""

    def __init__(self, sessions: list[Session], seed: int = 0, duplication: float = 0.0) -> None:
        """duplication: share of messages that are delivered twice."""
        self.sessions = {session.uid: session for session in sessions}
        self.random = random.Random(seed)
        self.duplication = duplication
        self.events: dict[int, list[object]] = {session.uid: [] for session in sessions}
        """uid -> all events that its session returned."""
        self.faults: list[str] = []
        """Reasons of the PeerFaults that sessions raised."""
        self.in_flight: list[tuple[int, Message]] = []

    def collect(self) -> None:
        """Moves the messages in the sessions' outboxes onto the network."""
        for session in self.sessions.values():
            for to, message in session.outbox:
                self.in_flight += [(to, message)] * (2 if self.random.random() < self.duplication else 1)
            session.outbox.clear()

    def settle(self, now: float = 0.0, ticks: int = 1) -> None:
        """Ticks every session `ticks` times, a second apart, and delivers all messages after each tick."""
        for tick in range(ticks):
            for session in self.sessions.values():
                self.events[session.uid] += session.tick(now + tick)
            self.collect()
            while self.in_flight:
                to, message = self.in_flight.pop(self.random.randrange(len(self.in_flight)))
                if to in self.sessions:
                    try:
                        self.events[to] += self.sessions[to].receive(message, now + tick)
                    except PeerFault as fault:
                        self.faults.append(fault.reason)
                self.collect()


def make_sessions(n: int, without: tuple[int, ...] = ()) -> list[Session]:
    """Returns the sessions of a run of n nodes, of which only the root (uid 0) knows the run id."""
    return [Session(uid, n, "same", RUN if uid == 0 else None) for uid in range(n) if uid not in without]


@pytest.mark.parametrize("n", [1, 2, 9, 16, 100])
@pytest.mark.parametrize("seed", range(4))
def test_all_nodes_join_whatever_the_order_of_messages(n: int, seed: int) -> None:
    net = SimulatedNetwork(make_sessions(n), seed, duplication=0.3)
    net.settle(ticks=3)
    for session in net.sessions.values():
        assert session.state == "running" and session.run == RUN
        assert net.events[session.uid].count(Joined()) == 1
    assert set(net.faults) <= {"unexpected_message"}  # second copies of Start that arrive late


@pytest.mark.parametrize("missing", [(3,), (1,), (9, 15), (1, 2, 3)])
def test_the_root_and_all_joined_nodes_name_exactly_the_missing_nodes(missing: tuple[int, ...]) -> None:
    """The nodes below a missing node in the control tree are missing, too, because they join through it."""
    net = SimulatedNetwork(make_sessions(16, without=missing))
    net.settle(ticks=3)
    absent = {u for u in range(16) for m in missing if u in Session(m, 16, "", RUN).subtree()}
    assert net.sessions[0].absent == tuple(sorted(absent))
    event = net.sessions[0].give_up()
    assert event == NotAssembled(tuple(sorted(absent)), "")
    net.collect()
    net.settle(now=10)
    for uid, session in net.sessions.items():
        if uid not in absent and uid != 0:
            assert session.state == "failed" and NotAssembled(tuple(sorted(absent)), "") in net.events[uid]


@pytest.mark.parametrize(
    ("uid", "change", "reason"),
    [
        (3, {"digest": "other"}, "another config or graph \\(digest other, the run has same\\)"),
        (9, {"digest": "other"}, "another config or graph"),
        (2, {"num_nodes": 12}, "has 12 nodes in its graph, the run has 16"),
        (4, {"run": b"elsewher"}, "belongs to run"),
    ],
)
def test_a_node_of_another_experiment_is_refused_with_the_reason(
    uid: int, change: dict[str, object], reason: str
) -> None:
    sessions = make_sessions(16, without=(uid,))
    stranger = Session(uid, int(change.get("num_nodes", 16)), str(change.get("digest", "same")), change.get("run"))  # type: ignore[arg-type]
    stranger.tree = ControlTree.of(uid, 16)
    net = SimulatedNetwork([*sessions, stranger])
    net.settle(ticks=3)
    rejected = [event for event in net.events[uid] if isinstance(event, Rejected)]
    assert rejected and f"node {uid}" in rejected[0].reason
    assert re.search(reason, rejected[0].reason)
    assert uid in net.sessions[0].absent
    assert f"node {uid}" in net.sessions[0].give_up().reason


def test_a_forged_hello_does_not_exclude_the_node_with_that_uid() -> None:
    sessions = make_sessions(4)
    net = SimulatedNetwork(sessions)
    forged = Hello(NO_RUN, 0, 2, PROTOCOL_VERSION, "wrong", 4, "")
    assert sessions[0].receive(forged, 0.0) == []
    net.settle(ticks=3)
    assert {session.state for session in sessions} == {"running"} and not sessions[0].refusals


def joined_sessions(n: int = 4) -> list[Session]:
    net = SimulatedNetwork(make_sessions(n))
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
def test_an_inadmissible_message_is_refused_and_changes_nothing(to: int, message: Message, reason: str) -> None:
    sessions = joined_sessions()
    before = dict(vars(sessions[to]))
    with pytest.raises(PeerFault, match=reason):
        sessions[to].receive(message, 0.0)
    assert dict(vars(sessions[to])) == before


def test_a_stop_and_a_failure_reach_every_other_node_once() -> None:
    net = SimulatedNetwork(joined_sessions(30), duplication=0.5)
    net.sessions[17].ask_stop()
    net.sessions[23].fail(23, "out of memory")
    net.collect()
    net.settle()
    for uid in range(30):
        assert net.events[uid].count(StopAsked()) == (uid != 17)
        assert net.events[uid].count(PeerFailed(23, "out of memory")) == (uid != 23)


def refusal_reason(own: dict[str, str], other: dict[str, str], software: str = "decentnode 1") -> str:
    """Returns why a root with the config sections `own` refuses a node with the sections `other` and another digest."""
    root = Session(0, 4, "same", RUN, sections=own)
    stranger = Session(1, 4, "wrong", sections=other, software=software)
    stranger.tick(0.0)
    ((_, hello),) = stranger.outbox
    ((_, reject),) = answers_to(root, codec.decode(codec.encode(hello)))
    assert isinstance(reject, Reject)
    return reject.reason


def test_a_refusal_names_the_sections_that_differ() -> None:
    own = {"data": "0123456789abcdef", "graph (edges)": "abcdef0123456789", "training": "4444444444444444"}
    for names in (["data"], ["graph (edges)"], ["data", "training"]):
        reason = refusal_reason(own, {**own, **dict.fromkeys(names, "fff0000000000000")}, "decentnode 1; " * 30)
        assert f"(digest wrong, the run has same; these differ: {', '.join(names)}): compare" in reason
    for unlike in ({}, {"data": "f" * 16}, {**own, "more": "f" * 16},
                   {"training": "f" * 16, "graph (edges)": "f" * 16, "data": "f" * 16}):  # fmt: skip
        assert "(digest wrong, the run has same): compare" in refusal_reason(own, unlike), "another version's sections"
        assert "(digest wrong, the run has same): compare" in refusal_reason(unlike, own)
    assert "these differ" not in refusal_reason(own, own), "the short digests of sections may be equal by chance"


@pytest.mark.parametrize("length", [511, 512, 513, 5000])
def test_long_reasons_of_failures_and_refusals_are_cut_to_the_longest_text_of_a_message(length: int) -> None:
    reason = "".join(chr(0x3B1 + i % 17) for i in range(length - 1)) + "!"
    root = joined_sessions()[0]
    root.fail(2, reason)
    sent = {codec.decode(codec.encode(message)) for _, message in root.outbox}
    assert sent == {Fail(RUN, 0, 0, 2, reason[:512])}
    assert root.failed == {2: reason}, "the node itself keeps the whole reason"
    rejection = f"{reason} has another config or graph (digest wrong, the run has same): " \
                "compare config.resolved.yaml and graph.edges in the run folders of both machines"
    stranger = Hello(RUN, 0, 1, PROTOCOL_VERSION, "wrong", 4, "")
    assert answers_to(Session(0, 4, "same", RUN, describe=lambda _uid: reason), stranger) == [
        (1, Reject(RUN, 0, 0, "wrong", rejection[:512]))
    ]


def answers_to(session: Session, message: Message) -> list[tuple[int, Message]]:
    """Returns what a session sends when it receives `message`, encoded and decoded again."""
    session.outbox.clear()
    session.receive(message, 0.0)
    return [(to, codec.decode(codec.encode(answer))) for to, answer in session.outbox]


@pytest.mark.parametrize("length", [511, 512, 513])
def test_a_long_refusal_is_forwarded_to_the_root_cut_to_the_longest_text_of_a_message(length: int) -> None:
    reason = "n" * (length - 1) + "!"
    session = Session(1, 20, "same")
    session.note_refusal(9, reason)
    (_, refused), _ = answers_to(session, Welcome(RUN, 0, 0))
    assert refused == Refused(RUN, 0, 1, 9, reason[:512])
    session.outbox.clear()
    session.note_refusal(10, reason)
    assert session.outbox == [(0, Refused(RUN, 0, 1, 10, reason[:512]))]


def test_a_reason_that_is_not_valid_unicode_is_sent_with_replacement_characters() -> None:
    """Names of files may contain bytes that are no text, which Python represents as lone surrogates."""
    session = joined_sessions()[0]
    session.fail(2, "no such file: caf\udce9.npz")
    sent = {codec.decode(codec.encode(message)) for _, message in session.outbox}
    assert sent == {Fail(RUN, 0, 0, 2, "no such file: caf?.npz")}


def test_reports_of_all_nodes_reach_the_root() -> None:
    net = SimulatedNetwork(joined_sessions(30))
    for uid in range(1, 30):
        session = net.sessions[uid]
        assert session.tree.parent is not None
        session.send(session.tree.parent, Report, uid, {"uid": uid})
    net.collect()
    net.settle()
    assert {event.uid for event in net.events[0] if isinstance(event, Report)} == set(range(1, 30))
