from __future__ import annotations

import base64

import pytest

from decentnode.errors import PeerFault
from decentnode.wire.invitation import Invitation, issue, opened
from decentnode.wire.membership.seats import Seat, Seats, relay_address

SECRET = bytes(range(32))
TEXT = issue(SECRET, 3, 1000, lambda count: bytes(count))
AT = ("tcp://10.0.0.9:1", "tcp://10.0.0.9:2")


def test_an_invitation_says_how_many_and_until_when() -> None:
    assert opened(SECRET, TEXT, 1000.0) == Invitation(bytes(8), 3, 1000)
    assert len(TEXT) < 64 and SECRET.hex() not in base64.urlsafe_b64decode(TEXT[4:] + "==").hex()


def altered(place: int) -> str:
    return TEXT[:place] + ("A" if TEXT[place] != "A" else "B") + TEXT[place + 1 :]


@pytest.mark.parametrize(("text", "now", "why"), [
    ("", 0.0, "has no invitation"), (TEXT, 1001.0, "expired 1 s ago"), (TEXT[:-1], 0.0, "is not valid"),
    (TEXT[4:], 0.0, "is not valid"), ("dn1-\u00e4", 0.0, "is not valid"), ("dn1-" + "*" * 46, 0.0, "not valid"),
    *((altered(place), 0.0, "not made with this run's secret") for place in (4, 16, 20, 30, 40)),
    (issue(bytes(32), 3, 1000, bytes), 0.0, "not made with this run's secret"),
])  # fmt: skip
def test_what_is_none_or_over_lets_nobody_in(text: str, now: float, why: str) -> None:
    with pytest.raises(PeerFault, match=why) as raised:
        opened(SECRET, text, now)
    assert raised.value.reason == "uninvited"


def test_an_invitation_is_used_by_so_many_whoever_leads_and_again_by_those() -> None:
    leader, other = Seats(3, 7), Seats(3, 7)
    for number in range(2):
        leader.grant(Seat(b"", f"tcp://10.0.0.{number}:1", f"tcp://10.0.0.{number}:2", "", "", "ab" * 8), (), 0.0,
                     lambda count: bytes(count))  # fmt: skip
    other.learn(leader.encoded())
    third = Seat(b"", *AT, "", "", "ab" * 8)
    for each in (leader, other):
        assert each.used_up(third, 2) and not each.used_up(third, 3)
        assert not each.used_up(Seat(b"", "tcp://10.0.0.1:1", "tcp://10.0.0.1:2", "", "", "ab" * 8), 2)
        assert not each.used_up(Seat(b"", *AT, "", "", "cd" * 8), 1)


def test_seats_say_who_is_relayed_and_invited() -> None:
    seats, other = Seats(3, 7), Seats(3, 7)
    seats.grant(Seat(b"", *AT, "k" * 40, "203.0.113.4", "ab" * 8), (), 0.0, lambda count: bytes(count))
    assert other.learn(seats.encoded()) == [3] and other.known == seats.known and other.known[3].via
    for raw in (seats.encoded().replace(b"203.0.", b"away."), seats.encoded().replace(b"abab", b"xyxy")):
        with pytest.raises(PeerFault, match="seat"):
            Seats(3, 7).learn(raw)


@pytest.mark.parametrize(("own", "seen", "reach", "found"), [
    ("10.0.0.9", "10.0.0.9", 0, ""), ("10.0.0.9", "::ffff:10.0.0.9", 0, ""), ("10.0.0.9", "10.9.9.4", 0, "10.9.9.4"),
    ("10.0.0.9", "", 0, ""), ("[fd00::1]", "fd00:0::1", 0, ""), ("[fd00::1]", "fd00::2", 0, "fd00::2"),
    ("10.0.0.9", "nonsense", 0, ""), ("10.0.0.9", "203.0.113.4", 1, ""), ("10.0.0.9", "10.0.0.9", 2, "10.0.0.9"),
    ("10.0.0.9", "", 2, "hidden"),
])  # fmt: skip
def test_who_comes_from_another_address_is_behind_a_router(own: str, seen: str, reach: int, found: str) -> None:
    assert relay_address(f"tcp://{own}:24000", seen, reach) == found


def test_two_at_home_with_one_address_are_two() -> None:
    seats = Seats(3, 7)
    for number in (1, 2, 1):
        seats.grant(Seat(b"", *AT, "", f"203.0.113.{number}"), (), 0.0, lambda count: bytes(count))
    assert [each.via for each in seats.known.values()] == ["203.0.113.1", "203.0.113.2"]
