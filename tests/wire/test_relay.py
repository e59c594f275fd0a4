"""`RelayHub` without sockets: which nodes it serves, which frames it forwards, and which it refuses."""

from __future__ import annotations

import struct

import pytest

from decentnode.errors import PeerFault
from decentnode.wire.relay import (
    CLOSE,
    CREDIT,
    DATA,
    HELLO,
    MAX_ENDS,
    MAX_STREAMS,
    OPEN,
    OPENED,
    PIECE_BYTES,
    PING,
    RELAY_VERSION,
    RESET,
    SILENT_SECONDS,
    Frame,
    RelayHub,
    relay_order,
)

A, B, C = b"relay a", b"relay b", b"relay c"
"""Routes of three connections."""


class ClockedHub(RelayHub):
    """A hub that knows uids below 1000, and whose time the test sets."""

    def __init__(self) -> None:
        super().__init__(lambda identity: identity.isdigit() and int(identity) < 1000)
        self.now = 0.0

    def send(self, route: bytes, kind: int, stream: int = 0, number: int = 0, body: bytes = b"",
             plane: int = 0) -> list[tuple[bytes, int, int, bytes]]:  # fmt: skip
        """Sends a frame to the hub. Returns the frames that the hub sends then, as (route, kind, stream, body)."""
        self.take(route, b"", memoryview(Frame(kind, stream, plane, number, body).encoded()), self.now)
        answers = [(to, frame.kind, frame.stream, bytes(frame.body)) for to, frame in self.outbox]
        self.outbox.clear()
        return answers

    def say_hello(self, route: bytes, identity: bytes, reachable: bool = True) -> None:
        """Lets a node begin to use the relay. reachable: it also registers as reachable here."""
        self.take(route, b"", memoryview(Frame(HELLO, 0, int(reachable), RELAY_VERSION, identity).encoded()), self.now)
        assert [(to, frame.number) for to, frame in self.outbox] == [(route, 1)]
        self.outbox.clear()


def hub_with_stream() -> ClockedHub:
    """Returns a hub where node 5 at A has opened a stream to node 7 at B. It is stream 2 at A, and stream 1 at B."""
    hub = ClockedHub()
    hub.say_hello(A, b"5", reachable=False)
    hub.say_hello(B, b"7")
    assert hub.send(A, OPEN, 2, body=b"7", plane=1) == [(B, OPEN, 1, b"")]
    assert hub.send(B, OPENED, 1) == [(A, OPENED, 2, b"")]
    return hub


def test_a_stream_carries_bytes_both_ways_and_closes_at_both_ends() -> None:
    hub = hub_with_stream()
    assert hub.send(A, DATA, 2, body=b"there") == [(B, DATA, 1, b"there")]
    assert hub.send(B, DATA, 1, body=b"and back") == [(A, DATA, 2, b"and back")]
    assert hub.send(B, CREDIT, 1, 5) == [(A, CREDIT, 2, b"")]
    assert hub.relayed_bytes == len(b"there") + len(b"and back")
    assert hub.forwards_for_others(b"9") and not hub.forwards_for_others(b"5") and not hub.forwards_for_others(b"7")
    assert hub.send(A, CLOSE, 2) == [(B, CLOSE, 1, b"")]
    assert hub.send(B, DATA, 1, body=b"late") == [] and not hub.forwards_for_others(b"9")


def test_streams_to_unregistered_nodes_or_with_invalid_numbers_are_refused() -> None:
    hub = hub_with_stream()
    for stream, target in ((4, b"8"), (2, b"7"), (3, b"7"), (0, b"7"), (6, b"5")):  # 5 is not registered
        assert hub.send(A, OPEN, stream, body=target) == [(A, CLOSE, stream, b"")]
    assert hub.send(C, OPEN, 2, body=b"7") == hub.send(C, DATA, 2) == [(C, RESET, 0, b"")]
    assert hub.send(A, PING) == [(A, PING, 0, b"")]


def test_an_unknown_identity_is_refused_and_served_nothing() -> None:
    hub = ClockedHub()
    for identity in (b"1000", b"x"):
        hub.take(C, b"", memoryview(Frame(HELLO, 0, 1, RELAY_VERSION, identity).encoded()), 0.0)
        assert [(to, frame.number) for to, frame in hub.outbox] == [(C, 0)]
        hub.outbox.clear()
    assert not hub._connections and hub.send(C, PING) == [(C, RESET, 0, b"")]


def test_a_proven_identity_takes_precedence_over_the_claimed_one() -> None:
    hub = RelayHub(lambda identity: identity == b"the key")
    hub.take(A, b"the key", memoryview(Frame(HELLO, 0, 1, RELAY_VERSION, b"another key").encoded()), 0.0)
    assert [*hub._registered] == [b"the key"]


def test_a_closed_connection_closes_its_streams_and_its_node_may_connect_again() -> None:
    hub = hub_with_stream()
    hub.disconnect(B)
    assert [(to, frame.kind, frame.stream) for to, frame in hub.outbox] == [(A, CLOSE, 2)]
    hub.outbox.clear()
    assert hub.send(A, OPEN, 4, body=b"7") == [(A, CLOSE, 4, b"")] and not hub.forwards_for_others(b"9")
    hub.say_hello(C, b"7")
    assert hub.send(A, OPEN, 6, body=b"7") == [(C, OPEN, 1, b"")]


def test_a_silent_connection_is_forgotten_and_its_streams_are_closed() -> None:
    hub = hub_with_stream()
    hub.now = SILENT_SECONDS - 1
    hub.send(A, PING)
    hub.now = SILENT_SECONDS + 1
    assert hub.send(A, PING) == [(A, CLOSE, 2, b""), (A, PING, 0, b"")]
    assert [*hub._connections] == [A]


def test_the_numbers_of_connections_and_streams_are_bounded() -> None:
    hub = hub_with_stream()
    for number in range(1, MAX_STREAMS):
        assert hub.send(A, OPEN, 2 + 2 * number, body=b"7")[0][1] == OPEN
    assert hub.send(A, OPEN, 2 + 2 * MAX_STREAMS, body=b"7") == [(A, CLOSE, 2 + 2 * MAX_STREAMS, b"")]
    for number in range(MAX_ENDS - 2):
        hub.say_hello(b"relay %d" % number, b"9")
    hub.take(C, b"", memoryview(Frame(HELLO, 0, 1, RELAY_VERSION, b"8").encoded()), 0.0)
    assert hub.outbox[-1][1].number == 0 and len(hub._connections) == MAX_ENDS


@pytest.mark.parametrize("raw", [
    b"", b"\1", struct.pack("<BBII", 0, 0, 0, 0), struct.pack("<BBII", 9, 0, 0, 0), struct.pack("<BBII", PING, 2, 0, 0),
    struct.pack("<BBII", PING, 0, 0, 0) + b"more", struct.pack("<BBII", DATA, 0, 2, 0) + bytes(PIECE_BYTES + 1),
    Frame(HELLO, number=RELAY_VERSION).encoded(), Frame(HELLO, number=RELAY_VERSION, body=bytes(41)).encoded(),
    Frame(HELLO, number=RELAY_VERSION + 1, body=b"5").encoded(), Frame(RESET).encoded(),
], ids=str)  # fmt: skip
def test_an_invalid_frame_raises_a_peer_fault_and_changes_nothing(raw: bytes) -> None:
    hub = hub_with_stream()
    with pytest.raises(PeerFault):
        hub.take(A, b"", memoryview(raw), 0.0)
    assert not hub.outbox and hub.send(A, DATA, 2, body=b"x") == [(B, DATA, 1, b"x")]


def test_nodes_start_with_different_relays() -> None:
    assert [relay_order(uid, [0, 2, 5]) for uid in (6, 7, 8)] == [[0, 2, 5], [2, 5, 0], [5, 0, 2]]
    assert relay_order(3, []) == []
