"""Converts entries to arrays and back, and checks messages from other nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from decentnode.errors import PeerFault
from decentnode.samplers.base import Entry, Sampler, Shuffle

MAX_AGE = 1 << 30
MALFORMED = "malformed_shuffle"


def tables_of(entries: Collection[Entry], profile_elements: int) -> dict[str, np.ndarray]:
    """Returns entries as arrays: uids and ages [k] int64, and, if there are profiles, profiles [k * elements]
    float32."""
    found = {"uids": np.array([entry.uid for entry in entries], np.int64),
             "ages": np.array([entry.age for entry in entries], np.int64)}  # fmt: skip
    if profile_elements:
        profiles = [entry.profile for entry in entries]
        found["profiles"] = np.concatenate(profiles) if profiles else np.zeros(0, np.float32)
    return found


def entries_of(tables: Mapping[str, np.ndarray]) -> tuple[Entry, ...]:
    """Returns the entries of which `tables_of` made these arrays."""
    uids, ages = tables["uids"], tables["ages"]
    profiles = tables.get("profiles", np.zeros(0, np.float32)).reshape(len(uids), -1) if len(uids) else ()
    return tuple(Entry(int(uid), int(age), profile.copy())
                 for uid, age, profile in zip(uids, ages, profiles, strict=True))  # fmt: skip


def shuffle_of(sampler: Sampler, tables: Mapping[str, np.ndarray], reply: bool, near: bool = False) -> Shuffle:
    """Returns the message that another node's sampler sent. Raises PeerFault for a message that no sampler of this run
    would send."""
    around = sampler.around
    uids, ages, elements = tables["uids"], tables["ages"], around.profile_elements
    profiles = tables.get("profiles", np.zeros(0, np.float32))
    if len(uids) != len(ages) or len(profiles) != len(uids) * elements:
        raise PeerFault(MALFORMED, f"{len(uids)} uids, {len(ages)} ages, {len(profiles)} entries of profiles")
    if len(uids) > sampler.longest or len(np.unique(uids)) < len(uids):
        raise PeerFault(MALFORMED, f"must have at most {sampler.longest} entries of different nodes, got {uids}")
    if len(uids) and not (uids.min() >= 0 and uids.max() < around.num_nodes):
        raise PeerFault(MALFORMED, f"must have uids below {around.num_nodes}, got {uids}")
    if len(ages) and not (ages.min() >= 0 and ages.max() <= MAX_AGE):
        raise PeerFault(MALFORMED, f"must have ages from 0 to {MAX_AGE}, got {ages}")
    if not np.isfinite(profiles).all():
        raise PeerFault(MALFORMED, "must have finite profiles")
    return Shuffle(reply, entries_of(tables), near)
