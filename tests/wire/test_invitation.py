from __future__ import annotations

import base64

import pytest

from decentnode.errors import PeerFault
from decentnode.wire.invitation import Invitation, issue, opened
from decentnode.wire.membership.seats import Seat, Seats, relay_address

SECRET = bytes(range(32))
TEXT = issue(SECRET, 3, 1000, lambda count: bytes(count))
ADDRESSES = ("tcp://10.0.0.9:1", "tcp://10.0.0.9:2")
"""Control and bulk address of a newcomer."""


def test_an_invitation_states_its_uses_and_expiry_and_hides_the_secret() -> None:
    assert opened(SECRET, TEXT, 1000.0) == Invitation(bytes(8), 3, 1000)
    assert len(TEXT) < 64 and SECRET.hex() not in base64.urlsafe_b64decode(TEXT[4:] + "==").hex()


def altered_text(index: int) -> str:
    """Returns the invitation with another character at `index`."""
    return TEXT[:index] + ("A" if TEXT[index] != "A" else "B") + TEXT[index + 1 :]


@pytest.mark.parametrize(("text", "now", "reason"), [
    ("", 0.0, "has no invitation"), (TEXT, 1001.0, "expired 1 s ago"), (TEXT[:-1], 0.0, "is not valid"),
    (TEXT[4:], 0.0, "is not valid"), ("dn1-\u00e4", 0.0, "is not valid"), ("dn1-" + "*" * 46, 0.0, "not valid"),
    *((altered_text(index), 0.0, "not made with this run's secret") for index in (4, 16, 20, 30, 40)),
    (issue(bytes(32), 3, 1000, bytes), 0.0, "not made with this run's secret"),
])  # fmt: skip
def test_an_invalid_or_expired_invitation_is_refused_with_the_reason(text: str, now: float, reason: str) -> None:
    with pytest.raises(PeerFault, match=reason) as raised:
        opened(SECRET, text, now)
    assert raised.value.reason == "uninvited"


def test_an_invitation_is_used_up_for_new_nodes_but_not_for_nodes_that_used_it() -> None:
    """The same holds at another leader, which learned the seats from the first."""
    leader, other = Seats(3, 7), Seats(3, 7)
    for number in range(2):
        leader.grant(Seat(b"", f"tcp://10.0.0.{number}:1", f"tcp://10.0.0.{number}:2", "", "", "ab" * 8), (), 0.0,
                     lambda count: bytes(count))  # fmt: skip
    other.learn(leader.encoded())
    third = Seat(b"", *ADDRESSES, "", "", "ab" * 8)
    for seats in (leader, other):
        assert seats.used_up(third, 2) and not seats.used_up(third, 3)
        assert not seats.used_up(Seat(b"", "tcp://10.0.0.1:1", "tcp://10.0.0.1:2", "", "", "ab" * 8), 2)
        assert not seats.used_up(Seat(b"", *ADDRESSES, "", "", "cd" * 8), 1)


def test_encoded_seats_carry_relay_address_and_invitation_and_refuse_wrong_ones() -> None:
    seats, other = Seats(3, 7), Seats(3, 7)
    seats.grant(Seat(b"", *ADDRESSES, "k" * 40, "203.0.113.4", "ab" * 8), (), 0.0, lambda count: bytes(count))
    assert other.learn(seats.encoded()) == [3] and other.known == seats.known and other.known[3].via
    for raw in (seats.encoded().replace(b"203.0.", b"away."), seats.encoded().replace(b"abab", b"xyxy")):
        with pytest.raises(PeerFault, match="seat"):
            Seats(3, 7).learn(raw)


@pytest.mark.parametrize(("own", "observed", "reach", "expected"), [
    ("10.0.0.9", "10.0.0.9", 0, ""), ("10.0.0.9", "::ffff:10.0.0.9", 0, ""), ("10.0.0.9", "10.9.9.4", 0, "10.9.9.4"),
    ("10.0.0.9", "", 0, ""), ("[fd00::1]", "fd00:0::1", 0, ""), ("[fd00::1]", "fd00::2", 0, "fd00::2"),
    ("10.0.0.9", "nonsense", 0, ""), ("10.0.0.9", "203.0.113.4", 1, ""), ("10.0.0.9", "10.0.0.9", 2, "10.0.0.9"),
    ("10.0.0.9", "", 2, "hidden"),
])  # fmt: skip
def test_a_node_that_connects_from_another_address_is_behind_a_router(
    own: str, observed: str, reach: int, expected: str
) -> None:
    assert relay_address(f"tcp://{own}:24000", observed, reach) == expected


def test_nodes_with_equal_private_addresses_behind_different_routers_get_different_seats() -> None:
    seats = Seats(3, 7)
    for number in (1, 2, 1):
        seats.grant(Seat(b"", *ADDRESSES, "", f"203.0.113.{number}"), (), 0.0, lambda count: bytes(count))
    assert [seat.via for seat in seats.known.values()] == ["203.0.113.1", "203.0.113.2"]
