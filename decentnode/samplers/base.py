"""The contract of a peer sampler: it exchanges small messages and chooses in each round the nodes to send the model
to."""

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
    """What a node knows about another node."""

    uid: int
    age: int
    """Age in shuffles: how many its holders have begun since the entry was new. The node of an old entry may be
    gone."""
    profile: np.ndarray = field(default_factory=lambda: NO_PROFILE)  # [profile elements] float32
    """The profile of its data or model that the node had when the entry was new."""


@dataclass(frozen=True)
class Shuffle:
    """A message between two samplers."""

    reply: bool
    """Whether it answers another message."""
    entries: tuple[Entry, ...]
    near: bool = False
    """Whether it is exchanged with one of the best nodes and carries the best candidates for the receiver (knn.py)."""


@dataclass(frozen=True)
class Profile:
    """What a node's profile consists of."""

    of: Literal["nothing", "labels", "model"] = "nothing"
    """labels: for each label, the share of the node's training samples that have it. model: a sketch of its
    parameters."""
    elements: int = 0
    """Length of a sketch."""
    every: int = 1
    """Number of rounds between two sketches."""


@dataclass(frozen=True)
class Surroundings:
    """What a sampler knows when it is made."""

    uid: int
    num_nodes: int
    """All uids of the run are below this number; others are refused."""
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
        """This node's own profile; whoever runs the sampler updates it."""

    @classmethod
    def tells(cls, config: component.Config) -> Profile:  # noqa: ARG003
        """Returns what the nodes' profiles consist of."""
        return Profile()

    @property
    @abc.abstractmethod
    def longest(self) -> int:
        """The largest number of entries in a message; longer messages are refused."""

    @abc.abstractmethod
    def begin(self, round: int) -> dict[int, Shuffle]:
        """Returns the messages to send at the beginning of a round, by uid."""

    @abc.abstractmethod
    def receive(self, source: int, message: Shuffle, round: int) -> Shuffle | None:
        """Processes a message that arrived in a round. Returns the answer to it, if there is one.

        The form of the message has been checked (messages.py), but its contents may be wrong. The worst that they can
        do is make this node know nodes that are gone, or false profiles.
        """

    @abc.abstractmethod
    def targets(self, round: int) -> tuple[int, ...]:
        """Returns the nodes to send the model to in a round, ascending: `degree` of them, or fewer if fewer are
        known."""

    @abc.abstractmethod
    def known(self) -> dict[int, Entry]:
        """Returns all entries of other nodes that this node has, by uid."""

    @abc.abstractmethod
    def forget(self, uids: Collection[int]) -> None:
        """Removes all entries of these nodes, because they are gone."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns copies of all state that the sampler keeps between rounds."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
