"""Invitations, which a node outside the mapping needs to be admitted if the run asks for one.

An invitation is authenticated (HMAC) with a secret that the members of a run share. It says how many nodes it admits
and until when, and does not contain the secret. Anyone who has its text may use it: keep it like a password until it
is used up.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass

from decentnode.errors import PeerFault

SECRET_BYTES = 32
ID_BYTES, PROOF_BYTES = 8, 16
MAX_USES, MAX_SECONDS = 1 << 12, 10 * 366 * 86400
PREFIX = "dn1-"
"""The first characters of every invitation."""
_FACTS = struct.Struct("<8sHQ")
_PURPOSE = b"decentnode invitation "


@dataclass(frozen=True)
class Invitation:
    """The content of an invitation whose proof was verified."""

    id: bytes
    uses: int
    """How many nodes it admits."""
    until: int
    """Seconds since 1970 after which it admits nobody."""


def issue(secret: bytes, uses: int, until: int, draw: Callable[[int], bytes]) -> str:
    """Returns the text of a new invitation. draw: returns the given number of random bytes, as os.urandom does."""
    facts = _FACTS.pack(draw(ID_BYTES), uses, until)
    return PREFIX + base64.urlsafe_b64encode(facts + _proof(secret, facts)).decode().rstrip("=")


def opened(secret: bytes, text: str, now: float) -> Invitation:
    """Returns the invitation of a text. now: seconds since 1970. Raises PeerFault ("uninvited") with the reason if the
    text is no invitation, was not made with this secret, or has expired."""
    if not text:
        raise PeerFault("uninvited", "it has no invitation (decentnode invite)")
    size = _FACTS.size + PROOF_BYTES
    try:
        raw = base64.b64decode(text.removeprefix(PREFIX).encode("ascii") + b"=" * (-size % 3), b"-_", validate=True)
    except (ValueError, UnicodeEncodeError):
        raw = b""
    if not text.startswith(PREFIX) or len(raw) != size:
        raise PeerFault("uninvited", "its invitation is not valid text of `decentnode invite`")
    facts, proof = raw[: _FACTS.size], raw[_FACTS.size :]
    if not hmac.compare_digest(proof, _proof(secret, facts)):
        raise PeerFault("uninvited", "its invitation was not made with this run's secret")
    found = Invitation(*_FACTS.unpack(facts))
    if now > found.until:
        raise PeerFault("uninvited", f"its invitation expired {now - found.until:.0f} s ago")
    return found


def _proof(secret: bytes, facts: bytes) -> bytes:
    return hmac.new(secret, _PURPOSE + facts, hashlib.sha256).digest()[:PROOF_BYTES]
