"""Random masks that cancel in a sum: for each pair of senders, one adds what the other subtracts (Bonawitz et al. 2017,
doi 10.1145/3133956.3133982, section 4).

The two nodes of a pair need not be able to reach each other: they agree on a secret by public keys that a third node
passes on, which does not learn the secret. Needs the library cryptography (extra `security`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from decentnode import entropy

KEY_BYTES = 32
"""The size of a public key, of a secret, and of a mask's key."""
BLOCK_ELEMENTS = 1 << 16
"""Masks are made and added in blocks of 256 KiB, which stay in the cache of a core: 6 GB/s, and 4 GB/s in blocks of
16 KiB (AES instructions of a server's core)."""
_ZEROS = bytes(4 * BLOCK_ELEMENTS)
_ANY_PRIVATE_KEY = X25519PrivateKey.from_private_bytes(bytes(KEY_BYTES))


def check_public(public: bytes) -> None:
    """Raises ValueError for a public key with which everybody would know the secret, or which is none."""
    _ANY_PRIVATE_KEY.exchange(X25519PublicKey.from_public_bytes(public))


class KeyPair:
    """A private key of one node, and what follows from it. Every object has a new one."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.from_private_bytes(entropy.draw(KEY_BYTES))
        self.public = self._private.public_key().public_bytes_raw()
        self._secrets: dict[bytes, bytes] = {}

    def secret(self, public: bytes) -> bytes:
        """Returns what only this node and the owner of `public` know (X25519, RFC 7748). Raises ValueError as
        `check_public`."""
        if public not in self._secrets:
            self._secrets[public] = self._private.exchange(X25519PublicKey.from_public_bytes(public))
        return self._secrets[public]

    def mask_key(self, public: bytes, receiver: int) -> bytes:
        """Returns the key of the mask in payloads to `receiver` of this node and the owner of `public`, to be used
        once (HKDF, RFC 5869)."""
        info = b"decentnode mask for node %d" % receiver
        return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(self.secret(public))


def add_masks(values: np.ndarray, keys: Iterable[tuple[bytes, bool]]) -> None:
    """Adds a mask for each key to the values modulo 2^32, in place, or subtracts it.

    values: [P] uint32. keys: (key, whether its mask is added). A mask is the key stream of AES-256 in counter mode, as
    little-endian integers.
    """
    streams = [(Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor(), np.add if added else np.subtract)
               for key, added in keys]  # fmt: skip
    mask = np.empty(BLOCK_ELEMENTS + 4, "<u4")  # older versions of the library want room for one more block of AES
    for start in range(0, len(values), BLOCK_ELEMENTS):
        part = values[start : start + BLOCK_ELEMENTS]
        for stream, combine in streams:
            stream.update_into(_ZEROS[: part.nbytes], mask.data.cast("B"))
            combine(part, mask[: len(part)], out=part)
