"""The contract of a peer sampler: small messages in and out, and in each round the nodes to send the model to."""

from __future__ import annotations

import abc
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from decentnode.config import component
from decentnode.config.component import Component, Config

NO_PROFILE = np.zeros(0, np.float32)


@dataclass(frozen=True)
class Entry:
    """What one node knows of another."""

    uid: int
    age: int
    """For how many shuffles of those who passed it on it has been on its way: old ones are of nodes that may be
    gone."""
    profile: np.ndarray = field(default_factory=lambda: NO_PROFILE)  # [profile elements] float32
    """What the node itself said of its data or its model, when the entry was new."""


@dataclass(frozen=True)
class Shuffle:
    """A message between two samplers."""

    reply: bool
    """Whether it answers one."""
    entries: tuple[Entry, ...]
    near: bool = False
    """Whether it is between nodes that are alike, and tells what is best for the receiver (knn.py)."""


@dataclass(frozen=True)
class Profile:
    """What nodes tell of themselves."""

    of: Literal["nothing", "labels", "model"] = "nothing"
    """labels: the shares of their training samples that have each label. model: a sketch of their parameters."""
    elements: int = 0
    """Length of a sketch."""
    every: int = 1
    """Number of rounds between two sketches."""


@dataclass(frozen=True)
class Surroundings:
    """What a sampler knows when it begins."""

    uid: int
    num_nodes: int
    """Uids of the run are below it: others are refused."""
    contacts: tuple[int, ...]
    """The nodes that this one knows from the beginning."""
    seed: int
    profile_elements: int = 0
    """Length of every node's profile."""


class SamplerConfig(Config):
    """Keys that every sampler has."""

    degree: int = Field(4, ge=1, le=1024)
    """Number of nodes to which a node sends its model in a round; fewer while it knows fewer."""


class Sampler(Component, abc.ABC):
    """One node's sampler. No I/O, no clock: messages are arguments and results, and draws follow from the seed."""

    Config: ClassVar[type[component.Config]] = SamplerConfig
    around: Surroundings

    def __init__(self, config: component.Config, around: Surroundings) -> None:
        self.config, self.around = config, around
        self.profile = NO_PROFILE
        """What this node says of itself; whoever runs the sampler sets it, as often as it changes."""

    @classmethod
    def tells(cls, config: component.Config) -> Profile:  # noqa: ARG003
        """Returns what nodes tell of themselves."""
        return Profile()

    @property
    @abc.abstractmethod
    def longest(self) -> int:
        """The most entries of a message; longer ones are refused."""

    @abc.abstractmethod
    def begin(self, round: int) -> dict[int, Shuffle]:
        """Returns what to send at the beginning of a round, by uid."""

    @abc.abstractmethod
    def receive(self, source: int, message: Shuffle, round: int) -> Shuffle | None:
        """Takes a message in that came in a round, and returns the answer to it, if there is one.

        The message is checked (messages.py), but what it says may be wrong: it can make this node know nodes that are
        gone, or take one for another, and no more.
        """

    @abc.abstractmethod
    def targets(self, round: int) -> tuple[int, ...]:
        """Returns the nodes to send the model to in a round, ascending: `degree` of them, where so many are known."""

    @abc.abstractmethod
    def known(self) -> dict[int, Entry]:
        """Returns all that this node knows of others, by uid."""

    @abc.abstractmethod
    def forget(self, uids: Collection[int]) -> None:
        """These nodes are gone."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns copies of all that the sampler keeps between rounds."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
