"""What lets a peer send bulk where the bulk socket does not use CURVE, and what encrypts bulk then. No sockets."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from decentnode import entropy
from decentnode.errors import PeerFault
from decentnode.wire import framing
from decentnode.wire.framing import Bytes

TOKEN_BYTES, SESSION_KEY_BYTES, TAG_BYTES = 16, 32, 16
LOGIN_DIGITS = 16
"""Of the number of a login, in hexadecimal."""


@dataclass
class BulkCredential:
    """What lets one peer send bulk to this node; given over CURVE, it is never sent in the clear.

    A bulk socket without CURVE takes a credential that every eavesdropper reads. So that it lets nobody in a second
    time, each is good for one login: a number that grows, and a proof that whoever sends it has the token.
    """

    token: bytes = field(repr=False, default_factory=lambda: entropy.draw(TOKEN_BYTES))
    key: bytes = field(repr=False, default_factory=lambda: entropy.draw(SESSION_KEY_BYTES))
    logins: int = 0
    """Number of the last login: the last one that was made, or that was accepted."""

    def log_in(self) -> bytes:
        """A credential for one connection."""
        self.logins += 1
        return self._credential(self.logins)

    def refusal(self, credential: bytes) -> str | None:
        """Why nobody gets in with a credential, or None where somebody does: once, and no more with those made before
        it, which belong to connections that were given up."""
        number = credential[:LOGIN_DIGITS]
        if len(number) < LOGIN_DIGITS or number.strip(b"0123456789abcdef"):
            return "stranger"
        if not hmac.compare_digest(self._credential(int(number, 16)), credential):
            return "stranger"
        if int(number, 16) <= self.logins:
            return "replayed_login"
        self.logins = int(number, 16)
        return None

    def _credential(self, number: int) -> bytes:
        digits = b"%0*x" % (LOGIN_DIGITS, number)
        return digits + hmac.new(self.token, b"decentnode bulk login " + digits, hashlib.sha256).hexdigest().encode()


class Cipher:
    """AES-256-GCM over the bodies of bulk messages, one direction of one edge (wire/framing.py)."""

    def __init__(self, given: BulkCredential) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher, self._refusals = AESGCM(given.key), (InvalidTag, ValueError)

    def encrypted(self, sequence: int, header: bytes, body: Bytes) -> bytes:
        """TAG_BYTES longer than the body."""
        return self._cipher.encrypt(framing.nonce(sequence), body, framing.associated(sequence, header))

    def decrypted(self, sequence: int, header: bytes, body: memoryview) -> memoryview:
        """Raises PeerFault when number, header or body are not what was encrypted."""
        plain = bytearray(max(0, body.nbytes - TAG_BYTES))
        try:
            self._cipher.decrypt_into(framing.nonce(sequence), body, framing.associated(sequence, header), plain)
        except self._refusals:
            raise PeerFault("checksum_mismatch", "not what was encrypted") from None
        return memoryview(plain)


@dataclass
class BulkAccess:
    """Whether bulk between nodes needs a credential of its own, and to whom this node gave one."""

    needs_credential: bool = False
    encrypts: bool = False
    """Whether bodies of bulk messages are encrypted with the key of the credential."""
    given: dict[int, BulkCredential] = field(default_factory=dict)
    """By uid: the credentials that this node gave."""

    def give(self, uid: int) -> BulkCredential:
        """The credential of `uid`, made when it asks for the first time. Raises PeerFault where bulk needs none."""
        if not self.needs_credential:
            raise PeerFault("unexpected_message", "Ask, but bulk needs no credential here")
        return self.given.setdefault(uid, BulkCredential())
