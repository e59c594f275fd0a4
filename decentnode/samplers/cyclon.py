"""The peer sampler CYCLON: nodes shuffle partial views with each other (Voulgaris, Gavidia and van Steen 2005, section
2.3)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from decentnode import rng
from decentnode.config import component
from decentnode.samplers.base import Entry, Sampler, SamplerConfig, Shuffle, Surroundings
from decentnode.samplers.messages import entries_of, tables_of

MAX_PENDING_SHUFFLES = 4
"""Largest number of shuffles whose answer is still awaited. The entries of a later answer only fill free places of the
view, or replace older entries of the same nodes."""


class CyclonConfig(SamplerConfig):
    view: int = Field(20, ge=2, le=1024)
    """Number of other nodes that a node knows at a time."""
    exchange: int = Field(8, ge=1, le=1024)
    """Number of entries that a node sends in a shuffle, its own included; at most `view`."""
    every: int = Field(1, ge=1)
    """Number of rounds between two shuffles that a node starts."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.exchange > self.view:
            raise ValueError(f"exchange must be at most view ({self.view}), got {self.exchange}")
        return self


class Cyclon(Sampler):
    """Every node keeps a view: entries of `view` other nodes, with ages. It starts a shuffle with the node of the
    oldest entry: it removes that entry, sends some entries and a new one of its own, and receives some of the other's;
    each side replaces the entries it sent by those it received. Views become like random samples, and every node is in
    about the same number of views.

    Entries of a node that is gone grow old, are asked, and are dropped with that: an entry comes back only with an
    answer.
    """

    Config: ClassVar[type[component.Config]] = CyclonConfig
    config: CyclonConfig

    def __init__(self, config: component.Config, around: Surroundings) -> None:
        super().__init__(config, around)
        self._view: dict[int, Entry] = {}
        self._pending: dict[int, tuple[int, ...]] = {}
        """By uid, for the last `MAX_PENDING_SHUFFLES` shuffles that this node began: the uids of the entries that it
        sent, without its own."""
        self._reset_view(around.contacts)

    @property
    def longest(self) -> int:
        return self.config.exchange

    def _reset_view(self, uids: Collection[int]) -> None:
        candidates = [uid for uid in uids if uid != self.around.uid]
        few = len(candidates) <= self.config.view
        chosen = candidates if few else self._sample(candidates, self.config.view, "contacts", 0)
        self._view = {uid: Entry(uid, 0, np.zeros(self.around.profile_elements, np.float32)) for uid in chosen}

    def _sample(self, uids: Collection[int], count: int, purpose: str, round: int) -> list[int]:
        """Returns a random sample of this many of the given uids; all of them if there are not more."""
        ordered = sorted(uids)
        if count >= len(ordered):
            return ordered
        draws = rng.stream(self.around.seed, self.around.uid, f"sampler {purpose}", round)
        return [ordered[k] for k in draws.choice(len(ordered), count, replace=False).tolist()]

    def own(self) -> Entry:
        """Returns the entry of this node itself."""
        return Entry(self.around.uid, 0, self.profile)

    def begin(self, round: int) -> dict[int, Shuffle]:
        if round % self.config.every:
            return {}
        if not self._view:  # all known nodes are gone, but the initial contacts may be back
            self._reset_view(self.around.contacts)
        self._view = {uid: replace(entry, age=entry.age + 1) for uid, entry in self._view.items()}
        if not self._view:
            return {}
        most = max(entry.age for entry in self._view.values())
        [oldest] = self._sample([uid for uid, entry in self._view.items() if entry.age == most], 1, "oldest", round)
        del self._view[oldest]
        sent = self._sample(self._view, self.config.exchange - 1, "shuffle", round)
        self._remember_shuffle(oldest, sent)
        return {oldest: Shuffle(False, (self.own(), *(self._view[uid] for uid in sent)))}

    def _remember_shuffle(self, uid: int, sent: Collection[int]) -> None:
        self._pending.pop(uid, None)
        while len(self._pending) >= MAX_PENDING_SHUFFLES:
            self._pending.pop(next(iter(self._pending)))
        self._pending[uid] = tuple(sent)

    def receive(self, source: int, message: Shuffle, round: int) -> Shuffle | None:
        if message.near:
            return None
        if message.reply:
            self._merge(message.entries, self._pending.pop(source, ()))
            return None
        sent = self._sample([uid for uid in self._view if uid != source], self.config.exchange,
                          f"answer to {source}", round)  # fmt: skip
        answer = Shuffle(True, tuple(self._view[uid] for uid in sent))
        self._merge(message.entries, sent)
        return answer

    def _merge(self, entries: Collection[Entry], sent: Collection[int]) -> None:
        """Adds entries to the view: into free places first, then in place of entries that were sent (`sent`). Of two
        entries of one node, the younger is kept."""
        replaceable = [uid for uid in sent if uid in self._view]
        for entry in entries:
            known = self._view.get(entry.uid)
            if entry.uid == self.around.uid or (known is not None and known.age <= entry.age):
                continue
            if known is None and len(self._view) >= self.config.view:
                if not replaceable:
                    continue
                del self._view[replaceable.pop()]
            self._view[entry.uid] = entry
            if entry.uid in replaceable:  # an entry that was sent and came back is a new one
                replaceable.remove(entry.uid)

    def targets(self, round: int) -> tuple[int, ...]:
        return tuple(sorted(self._sample(self._view, self.config.degree, "targets", round)))

    def known(self) -> dict[int, Entry]:
        return dict(self._view)

    def forget(self, uids: Collection[int]) -> None:
        for uid in uids:
            self._view.pop(uid, None)
            self._pending.pop(uid, None)

    def state_dict(self) -> dict[str, Any]:
        return {"view": tables_of(self._view.values(), self.around.profile_elements),
                "asked": {str(uid): list(sent) for uid, sent in self._pending.items()}}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._view = {entry.uid: entry for entry in entries_of(state["view"])}
        self._pending = {int(uid): tuple(sent) for uid, sent in state["asked"].items()}
