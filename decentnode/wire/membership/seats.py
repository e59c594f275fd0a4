"""Uids beyond those of the mapping: which nodes have them, and how the leader grants them. No sockets.

A *seat* is a uid at or above the number of nodes in the mapping. The leader grants seats one at a time, and lists all
that it knows in every `Prepare`, so that the members of a generation know each other's addresses before it is in force.
Two leaders may grant the same seat to two newcomers. Each seat is granted with a token that tells them apart, and the
newcomer whose token no generation knows is never admitted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from ipaddress import ip_address

from decentnode.errors import PeerFault
from decentnode.wire.messages import MAX_SEATS, MAX_SEATS_BYTES, REACH_RELAYED, REACH_UNKNOWN, SEAT_TOKEN_BYTES

RESERVED_SECONDS = 30.0
"""How long a seat is reserved for the node that it was granted to, while that node is not a member."""
ENDPOINT = re.compile(r"tcp://(\[[0-9A-Fa-f:.]{2,45}\]|[0-9]{1,3}(\.[0-9]{1,3}){3}):[0-9]{1,5}")
"""Only numeric addresses, no host names, because looking up a name blocks."""
HIDDEN = "hidden"
"""`Seat.via` of a node behind a relay whose own address is not known."""
FACTS_PATTERN = re.compile(r"[0-9]{1,7} [0-9a-f]{16} ([0-9A-Fa-f:.]{2,45}|hidden|-) ([0-9a-f]{16}|-)")
KEY_PATTERN = re.compile(r"[!-~]{40}")


@dataclass(frozen=True)
class Seat:
    """The node that has a uid beyond those of the mapping, and the addresses at which it listens."""

    token: bytes
    control: str
    bulk: str
    key: str = ""
    """The node's public key (Z85); empty if nodes have no keys."""
    via: str = ""
    """For a node that others reach only through relays (wire/relay.py): the address that its connections come from, or
    HIDDEN; empty for other nodes."""
    invitation: str = ""
    """Id of the invitation with which it was admitted, in hexadecimal; empty without one."""

    @property
    def owner(self) -> str:
        """Identifies the node that has the seat: its key, or its addresses and its router's if nodes have no keys."""
        return self.key or f"{self.control} {self.bulk} {self.via}"


def relay_address(control: str, address: str, reach: int) -> str:
    """Returns `Seat.via` of a node that reports that it listens at `control`.

    If it does not report whether others reach it there (`reach`), it counts as behind a router that translates
    addresses if its connection comes from another address. address: the address of its connection; "" if not known, and
    the node then counts as reachable.
    """
    own, observed = control.rpartition(":")[0].removeprefix("tcp://").strip("[]"), address.removeprefix("::ffff:")
    try:
        same = ip_address(own) == ip_address(observed)
    except ValueError:
        same, observed = True, HIDDEN
    hidden = reach == REACH_RELAYED or (reach == REACH_UNKNOWN and not same)
    return str(observed) if hidden else ""


def check_seat(control: str, bulk: str, key: str) -> None:
    """Raises PeerFault unless `control` and `bulk` are TCP endpoints of one host and `key` is a public key or empty."""
    for at in (control, bulk):
        if not ENDPOINT.fullmatch(at) or not 0 < int(at.rpartition(":")[2]) < 1 << 16:
            raise PeerFault("malformed_header", f"endpoint {at[:80]!r}")
    if control.rpartition(":")[0] != bulk.rpartition(":")[0] or (key and not KEY_PATTERN.fullmatch(key)):
        raise PeerFault("malformed_header", f"endpoints {control} and {bulk}, or their key")


class Seats:
    """The seats that one node knows of."""

    def __init__(self, founders: int, num_nodes: int) -> None:
        """founders: number of nodes in the mapping. num_nodes: number of possible uids."""
        self.first, self.stop = founders, num_nodes
        self.known: dict[int, Seat] = {}
        self._granted: dict[int, float] = {}
        """uid -> when this node granted it."""
        self._invited: dict[str, set[str]] = {}
        """Id of an invitation -> the owners of all seats that it is known to have been used for."""

    def used_up(self, seat: Seat, uses: int) -> bool:
        """Returns whether other nodes have used the invitation of the requested seat `uses` times or more."""
        owners = self._invited.get(seat.invitation, set())
        return seat.owner not in owners and len(owners) >= uses

    def _note(self, seat: Seat) -> None:
        if seat.invitation:
            self._invited.setdefault(seat.invitation, set()).add(seat.owner)

    def grant(self, asked: Seat, taken: Collection[int], now: float, draw: Callable[[int], bytes]) -> int | None:
        """Grants a seat to a newcomer, with a new token, and returns its uid; None if all seats are taken.

        taken: uids of members and of nodes that ask to join. A newcomer whose owner (`Seat.owner`) was granted a seat
        before gets the same one again, because its previous process is dead. Others get a seat that no node has had,
        or, if there is none, one that no node has any more.
        """
        again = [uid for uid, seat in self.known.items() if seat.owner == asked.owner]
        uid = again[0] if again else None
        if uid is None:
            free = [uid for uid in range(self.first, self.stop)
                    if uid not in taken and now - self._granted.get(uid, -RESERVED_SECONDS) >= RESERVED_SECONDS]
            if not free:
                return None
            uid = min(free, key=lambda uid: (uid in self.known, uid))
        self._granted[uid] = now
        self.known[uid] = replace(asked, token=draw(SEAT_TOKEN_BYTES))
        self._note(asked)
        return uid

    def release(self, uid: int) -> None:
        """Frees the uid of a newcomer that does not join; its invitation then counts as not used."""
        seat = self.known.pop(uid)
        self._granted.pop(uid, None)
        self._invited.get(seat.invitation, set()).discard(seat.owner)

    def admits(self, uid: int, token: bytes) -> bool:
        """Returns whether a node that asks to join as `uid` with this token has that uid."""
        return uid < self.first or (uid in self.known and self.known[uid].token == token)

    def learn(self, raw: bytes) -> list[int]:
        """Takes over the seats that a leader sent. Returns the uids whose seats are new or changed here. Raises
        PeerFault for malformed bytes, and then changes nothing."""
        found = self._parse(raw)
        new = [uid for uid, seat in found.items() if self.known.get(uid) != seat]
        self.known.update(found)
        for seat in found.values():
            self._note(seat)
        return new

    def encoded(self) -> bytes:
        """Returns all known seats as the bytes that `learn` reads, one line for each."""
        return "".join(f"{uid} {seat.token.hex()} {seat.control} {seat.bulk} {seat.key or '-'} {seat.via or '-'} "
                       f"{seat.invitation or '-'}\n" for uid, seat in sorted(self.known.items())).encode()  # fmt: skip

    def _parse(self, raw: bytes) -> dict[int, Seat]:
        found: dict[int, Seat] = {}
        if len(raw) > MAX_SEATS_BYTES or not raw.isascii():
            raise PeerFault("malformed_header", f"{len(raw)} bytes of seats")
        for line in raw.decode().splitlines()[: MAX_SEATS + 1]:
            words = line.split(" ")
            facts = " ".join(words[:2] + words[5:])
            if len(words) != 7 or not FACTS_PATTERN.fullmatch(facts):
                raise PeerFault("malformed_header", f"seat {line[:80]!r}")
            key = "" if words[4] == "-" else words[4]
            check_seat(words[2], words[3], key)
            uid = int(words[0])
            if not self.first <= uid < self.stop or uid in found:
                raise PeerFault("unknown_uid", f"seat {uid}")
            via, invitation = ("" if word == "-" else word for word in words[5:])
            found[uid] = Seat(bytes.fromhex(words[1]), words[2], words[3], key, via, invitation)
        return found
