"""Peer samplers that connect similar, or dissimilar, nodes, compared by their data or their models."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from decentnode.config import component
from decentnode.samplers.base import Entry, Profile, Shuffle, Surroundings
from decentnode.samplers.cyclon import Cyclon, CyclonConfig
from decentnode.samplers.messages import entries_of, tables_of


class KnnConfig(CyclonConfig):
    by: Literal["labels", "model"] = "labels"
    """What nodes are compared by. labels: the share of their training samples that has each label. model: a random
    projection of their parameters to `sketch` numbers."""
    measure: Literal["cosine", "distance"] = "cosine"
    """How two nodes are compared: by cosine similarity or by Euclidean distance."""
    prefer: Literal["similar", "dissimilar"] = "similar"
    """Whether a node looks for the nodes most similar to it, or for the least similar ones."""
    random: int = Field(1, ge=0)
    """How many of the `degree` targets are drawn from the view instead. With 0, similar nodes may end up in groups that
    never hear of each other."""
    refresh: int = Field(10, ge=1)
    """Number of rounds between two choices of the targets; in between, the targets stay the same."""
    oldest: int = Field(50, ge=1)
    """An entry is dropped if no shuffle has refreshed it for this many shuffles: its node may be gone."""
    sketch: int = Field(32, ge=1, le=4096)
    """Length of the projection with by: model."""

    @model_validator(mode="after")
    def _is_below_degree(self) -> Self:
        if self.random >= self.degree:
            raise ValueError(f"random must be below degree ({self.degree}), got {self.random}")
        return self


class Knn(Cyclon):
    """Cyclon's views, plus the `degree` best nodes that were ever seen (Voulgaris and van Steen 2005, VICINITY).
    Besides each shuffle of the views there is a shuffle with one of the best nodes, which answers with its best
    candidates for the asking node: nodes that are similar know others that are. The views are unaffected and stay
    random samples."""

    Config: ClassVar[type[component.Config]] = KnnConfig
    config: KnnConfig

    def __init__(self, config: component.Config, around: Surroundings) -> None:
        super().__init__(config, around)
        self._best: dict[int, Entry] = {}
        self._best_targets: tuple[int, ...] = ()
        """The best nodes as of the last refresh."""
        self._chosen_in_round = -1

    @classmethod
    def tells(cls, config: component.Config) -> Profile:
        assert isinstance(config, KnnConfig)
        return Profile("labels") if config.by == "labels" else Profile("model", config.sketch, config.refresh)

    def begin(self, round: int) -> dict[int, Shuffle]:
        if round % self.config.every:
            return {}
        self._best = {uid: replace(entry, age=entry.age + 1) for uid, entry in self._best.items()
                      if entry.age < self.config.oldest}  # fmt: skip
        shuffles = super().begin(round)
        if others := self._best.keys() - shuffles.keys():
            [partner] = self._sample(others, 1, "near partner", round)
            sent = self._best_for(self._best[partner])[: self.config.exchange - 1]
            shuffles[partner] = Shuffle(False, (self.own(), *sent), near=True)
        return shuffles

    def receive(self, source: int, message: Shuffle, round: int) -> Shuffle | None:
        answer = None if message.near else super().receive(source, message, round)
        of_source = next((entry for entry in message.entries if entry.uid == source), None)
        if message.near and not message.reply and of_source is not None:
            answer = Shuffle(True, tuple(self._best_for(of_source)[: self.config.exchange]), near=True)
        self._update_best(message.entries)
        return answer

    def _best_for(self, other: Entry) -> list[Entry]:
        """Returns all entries that this node has of other nodes than `other`, the best for `other` first."""
        known = {**self._view, **self._best}
        return self._ranked((entry for uid, entry in known.items() if uid != other.uid), other.profile)

    def _ranked(self, entries: Iterable[Entry], profile: np.ndarray) -> list[Entry]:
        """Returns the entries whose profile is known (not zero), the best for a node with this profile first."""
        with_profile = [entry for entry in entries if entry.profile.any()]
        if not with_profile:
            return []
        scores = similarities(np.stack([entry.profile for entry in with_profile]), profile, self.config.measure)
        if self.config.prefer == "dissimilar":
            scores = -scores
        order = sorted(range(len(with_profile)), key=lambda k: (-scores[k], with_profile[k].uid))
        return [with_profile[k] for k in order]

    def _update_best(self, entries: Collection[Entry]) -> None:
        known = dict(self._best)
        for entry in entries:
            is_fresh = entry.age < self.config.oldest  # an entry that was dropped here must not come back from others
            if is_fresh and entry.uid != self.around.uid and (
                entry.uid not in known or entry.age < known[entry.uid].age
            ):
                known[entry.uid] = entry
        self._best = {entry.uid: entry for entry in self._ranked(known.values(), self.profile)[: self.config.degree]}

    def targets(self, round: int) -> tuple[int, ...]:
        config = self.config
        if self._chosen_in_round < 0 or round // config.refresh != self._chosen_in_round // config.refresh:
            self._update_best(self._view.values())
            best = self._ranked(self._best.values(), self.profile)[: config.degree - config.random]
            self._best_targets, self._chosen_in_round = tuple(entry.uid for entry in best), round
        others = [uid for uid in self._view if uid not in self._best_targets]
        drawn = self._sample(others, config.degree - len(self._best_targets), "targets", round)
        return tuple(sorted((*self._best_targets, *drawn)))

    def known(self) -> dict[int, Entry]:
        return {**self._view, **self._best}

    def forget(self, uids: Collection[int]) -> None:
        super().forget(uids)
        for uid in uids:
            self._best.pop(uid, None)
        self._best_targets = tuple(uid for uid in self._best_targets if uid not in uids)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "best": tables_of(self._best.values(), self.around.profile_elements),
                "chosen": list(self._best_targets), "chosen_in": self._chosen_in_round}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._best = {entry.uid: entry for entry in entries_of(state["best"])}
        self._best_targets, self._chosen_in_round = tuple(state["chosen"]), state["chosen_in"]


def similarities(profiles: np.ndarray, own: np.ndarray, measure: str) -> np.ndarray:
    """Returns how similar each of profiles [k, elements] is to the profile `own` [elements], larger being more similar:
    their cosine, or their negative Euclidean distance."""
    if measure == "distance":
        negative_distances: np.ndarray = -np.linalg.norm(profiles - own, axis=1)
        return negative_distances
    lengths = np.linalg.norm(profiles, axis=1) * np.linalg.norm(own)
    found: np.ndarray = profiles @ own / np.maximum(lengths, 1e-30)
    return found
