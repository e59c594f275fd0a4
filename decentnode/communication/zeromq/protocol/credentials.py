"""Credentials and encryption of bulk messages on bulk sockets that do not use CURVE. No sockets."""

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
"""Hexadecimal digits of the number of a login."""


@dataclass
class BulkCredential:
    """Allows one peer to send bulk messages to this node. It is sent over CURVE, never unencrypted.

    A bulk socket without CURVE accepts logins that any eavesdropper can read. To be useless to an eavesdropper, each
    login is valid once: it consists of an increasing number and a proof that its sender has the token.
    """

    token: bytes = field(repr=False, default_factory=lambda: entropy.draw(TOKEN_BYTES))
    key: bytes = field(repr=False, default_factory=lambda: entropy.draw(SESSION_KEY_BYTES))
    logins: int = 0
    """Number of the last login that was made (on the sender) or accepted (on the receiver)."""

    def log_in(self) -> bytes:
        """Returns a login for one connection."""
        self.logins += 1
        return self._credential(self.logins)

    def refusal(self, credential: bytes) -> str | None:
        """Returns why a login is refused, or None if it is accepted. An accepted login and all logins made before it,
        which belong to connections that were given up, are refused from then on."""
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
    """Encrypts the bodies of bulk messages in one direction of one edge with AES-256-GCM (wire/framing.py)."""

    def __init__(self, given: BulkCredential) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher, self._refusals = AESGCM(given.key), (InvalidTag, ValueError)

    def encrypt(self, sequence: int, header: bytes, body: Bytes) -> bytes:
        """Returns the encrypted body, which is TAG_BYTES longer."""
        return self._cipher.encrypt(framing.nonce(sequence), body, framing.associated_data(sequence, header))

    def decrypt(self, sequence: int, header: bytes, body: memoryview) -> memoryview:
        """Returns the decrypted body. Raises PeerFault if sequence number, header or body were changed."""
        plain = bytearray(max(0, body.nbytes - TAG_BYTES))
        try:
            self._cipher.decrypt_into(framing.nonce(sequence), body, framing.associated_data(sequence, header), plain)
        except self._refusals:
            raise PeerFault("checksum_mismatch", "not what was encrypted") from None
        return memoryview(plain)


@dataclass
class BulkAccess:
    """Whether bulk messages need credentials, and the credentials that this node gave to its peers."""

    needs_credential: bool = False
    encrypts: bool = False
    """Whether bodies of bulk messages are encrypted with the key of the credential."""
    given: dict[int, BulkCredential] = field(default_factory=dict)
    """uid -> the credential that this node gave to it."""

    def give(self, uid: int) -> BulkCredential:
        """Returns the credential of `uid`, created the first time. Raises PeerFault if bulk messages need none."""
        if not self.needs_credential:
            raise PeerFault("unexpected_message", "Ask, but bulk needs no credential here")
        return self.given.setdefault(uid, BulkCredential())
