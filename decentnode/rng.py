"""Independent random streams from one seed: a draw depends only on (seed, uid, purpose, round)."""

from __future__ import annotations

import zlib

import numpy as np

PHILOX_WORDS = 4
"""Words that the generator gives per counter value."""
GLOBAL = -1
"""The uid of draws that must be the same on every node (initial model, partition, graph)."""


def _seed_words(seed: int, uid: int, purpose: str, round: int) -> list[int]:
    if seed < 0:
        raise ValueError(f"seed must be non-negative, got {seed}")
    return [seed, uid + 1, zlib.crc32(purpose.encode()), round + 1]


def stream(seed: int, uid: int, purpose: str, round: int = -1) -> np.random.Generator:
    """Returns a NumPy generator; equal arguments give equal draws on every machine."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(_seed_words(seed, uid, purpose, round))))


def torch_seed(seed: int, uid: int, purpose: str, round: int = -1) -> int:
    """Returns a 63-bit seed for a torch generator, drawn from the same streams."""
    words = np.random.SeedSequence(_seed_words(seed, uid, purpose, round)).generate_state(2, np.uint32)
    return (int(words[0]) << 32 | int(words[1])) & (2**63 - 1)


def words(seed: int, purpose: str, round: int, uids: range, count: int) -> np.ndarray:
    """Returns [uids, count] uint64: `count` random words for each of some consecutive nodes. A node's words do not
    depend on which other nodes are requested, and are found without computing those of other nodes (a counter-based
    generator, Salmon et al. 2011)."""
    blocks = -(-count // PHILOX_WORDS)
    key = np.random.SeedSequence(_seed_words(seed, GLOBAL, purpose, round)).generate_state(2, np.uint64)
    drawn = np.random.Philox(key=key, counter=uids.start * blocks).random_raw(len(uids) * blocks * PHILOX_WORDS)
    found: np.ndarray = drawn.reshape(len(uids), -1)[:, :count]
    return found
