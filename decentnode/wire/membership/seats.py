"""Uids beyond the mapping's: whom this node knows to have one, and who may get the next. No sockets.

A *seat* is a uid at or above the number of nodes in the mapping. The node that leads grants seats, one at a time, and
names all that it knows in every `Prepare`, so that the members of a generation know where each other listen before it
is in force. Two leaders may grant one seat to two newcomers; the token that each seat is granted with tells them apart,
and the one that no generation knows is never let in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from ipaddress import ip_address

from decentnode.errors import PeerFault
from decentnode.wire.messages import MAX_SEATS, MAX_SEATS_BYTES, REACH_RELAYED, REACH_UNKNOWN, SEAT_TOKEN_BYTES

RESERVED_SECONDS = 30.0
"""How long a seat is kept for whom it was granted to, while that node is no member."""
ENDPOINT = re.compile(r"tcp://(\[[0-9A-Fa-f:.]{2,45}\]|[0-9]{1,3}(\.[0-9]{1,3}){3}):[0-9]{1,5}")
"""Addresses alone, no names: who looks a name up waits."""
HIDDEN = "hidden"
"""Of a node behind a relay whose own address is not known."""
FACTS = re.compile(r"[0-9]{1,7} [0-9a-f]{16} ([0-9A-Fa-f:.]{2,45}|hidden|-) ([0-9a-f]{16}|-)")
KEY = re.compile(r"[!-~]{40}")


@dataclass(frozen=True)
class Seat:
    """Who has a uid beyond the mapping's, and where that node listens."""

    token: bytes
    control: str
    bulk: str
    key: str = ""
    """Its public key (Z85); empty where nodes have none."""
    via: str = ""
    """Of a node to which nobody can connect, so that relays pass on what others send to it (wire/relay.py): the address
    that it comes from, or HIDDEN; empty of others."""
    invitation: str = ""
    """Id of the invitation that let it in, in hexadecimal; empty without one."""

    @property
    def owner(self) -> str:
        """Who has the seat: its key, or where nodes have none, its address, and that of its router."""
        return self.key or f"{self.control} {self.bulk} {self.via}"


def seen_from(control: str, address: str, reach: int) -> str:
    """Returns `Seat.via` of a node that says that it listens at `control`. Where it does not say whether others reach
    it there, it counts as behind a router that translates addresses when it comes from another one.

    address: of its connection; "" where that is not known, and it counts as reached.
    """
    own, seen = control.rpartition(":")[0].removeprefix("tcp://").strip("[]"), address.removeprefix("::ffff:")
    try:
        same = ip_address(own) == ip_address(seen)
    except ValueError:
        same, seen = True, HIDDEN
    hidden = reach == REACH_RELAYED or (reach == REACH_UNKNOWN and not same)
    return str(seen) if hidden else ""


def check(control: str, bulk: str, key: str) -> None:
    """Raises PeerFault unless these are two TCP endpoints of one host and a key, or no key."""
    for at in (control, bulk):
        if not ENDPOINT.fullmatch(at) or not 0 < int(at.rpartition(":")[2]) < 1 << 16:
            raise PeerFault("malformed_header", f"endpoint {at[:80]!r}")
    if control.rpartition(":")[0] != bulk.rpartition(":")[0] or (key and not KEY.fullmatch(key)):
        raise PeerFault("malformed_header", f"endpoints {control} and {bulk}, or their key")


class Seats:
    """Those that one node knows of."""

    def __init__(self, founders: int, num_nodes: int) -> None:
        """founders: nodes of the mapping. num_nodes: uids that there can be."""
        self.first, self.stop = founders, num_nodes
        self.known: dict[int, Seat] = {}
        self._granted: dict[int, float] = {}
        """When this node granted them."""
        self._invited: dict[str, set[str]] = {}
        """By id of an invitation: the owners of all seats that it is known to have been used for."""

    def used_up(self, seat: Seat, uses: int) -> bool:
        """Whether the invitation of a seat that is asked for was used `uses` times, by others."""
        owners = self._invited.get(seat.invitation, set())
        return seat.owner not in owners and len(owners) >= uses

    def _note(self, seat: Seat) -> None:
        if seat.invitation:
            self._invited.setdefault(seat.invitation, set()).add(seat.owner)

    def grant(self, asked: Seat, taken: Collection[int], now: float, draw: Callable[[int], bytes]) -> int | None:
        """The uid of a newcomer that asks for a seat, whose token is drawn anew; None where all are taken.

        taken: uids of members and of those that ask to join. Who has a key, or else an address, that was granted a seat
        before gets the same again: its old process is gone. Others get one that nobody had, before one that nobody has
        any more.
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
        """Who was granted this uid does not come: it is free at once, and its invitation was not used."""
        seat = self.known.pop(uid)
        self._granted.pop(uid, None)
        self._invited.get(seat.invitation, set()).discard(seat.owner)

    def admits(self, uid: int, token: bytes) -> bool:
        """Whether who asks to join as `uid` is who has that uid."""
        return uid < self.first or (uid in self.known and self.known[uid].token == token)

    def learn(self, raw: bytes) -> list[int]:
        """Take over what a leader says of seats; the uids whose seats are new here or another node's now. Raises
        PeerFault, and takes nothing, where it is malformed."""
        found = self._parsed(raw)
        new = [uid for uid, seat in found.items() if self.known.get(uid) != seat]
        self.known.update(found)
        for seat in found.values():
            self._note(seat)
        return new

    def encoded(self) -> bytes:
        """What `learn` reads: a line per seat."""
        return "".join(f"{uid} {seat.token.hex()} {seat.control} {seat.bulk} {seat.key or '-'} {seat.via or '-'} "
                       f"{seat.invitation or '-'}\n" for uid, seat in sorted(self.known.items())).encode()  # fmt: skip

    def _parsed(self, raw: bytes) -> dict[int, Seat]:
        found: dict[int, Seat] = {}
        if len(raw) > MAX_SEATS_BYTES or not raw.isascii():
            raise PeerFault("malformed_header", f"{len(raw)} bytes of seats")
        for line in raw.decode().splitlines()[: MAX_SEATS + 1]:
            words = line.split(" ")
            facts = " ".join(words[:2] + words[5:])
            if len(words) != 7 or not FACTS.fullmatch(facts):
                raise PeerFault("malformed_header", f"seat {line[:80]!r}")
            key = "" if words[4] == "-" else words[4]
            check(words[2], words[3], key)
            uid = int(words[0])
            if not self.first <= uid < self.stop or uid in found:
                raise PeerFault("unknown_uid", f"seat {uid}")
            via, invitation = ("" if word == "-" else word for word in words[5:])
            found[uid] = Seat(bytes.fromhex(words[1]), words[2], words[3], key, via, invitation)
        return found
