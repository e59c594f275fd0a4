"""What a transport is constructed from: the configuration keys common to all transports, its addresses, and the schemas
of payloads."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import Field, model_validator

from decentnode.config.component import Config
from decentnode.faults import Corrupt, FaultyModelLinks, Plan
from decentnode.payload import Payload, TensorSpec
from decentnode.wire.generation import Limits

if TYPE_CHECKING:
    import torch

    from decentnode.communication.shared_process import SharedProcess

SILENCE_SECONDS = 2.0
"""If no node waits for a silent node, it is pinged after this many seconds of silence, four times a second: a slow node
is pinged in most of its rounds. Nodes that wait for each other ping after half a second."""


@dataclass(frozen=True)
class Schema:
    """What every payload of a run looks like. Receivers allocate and validate by the schema, never by a message."""

    elements: int
    """Length P of the flat model."""
    tensors: Mapping[str, TensorSpec]
    elementwise: bool
    mailbox: int = 0
    """0: payloads are exchanged, each in its round. Otherwise no node waits for a particular payload
    (`Communication.publish`), and a receiver keeps this many of the newest payloads of each source until it takes
    them."""


@dataclass(frozen=True)
class Collected:
    """One payload taken out of a mailbox, in memory of its own."""

    source: int
    round: int
    """The source's round when it published the payload."""
    payload: Payload


@dataclass(frozen=True)
class LinkFaults:
    """Injected faults on messages between nodes."""

    plan: Plan
    """The resolved plan; kinds of faults other than those on messages are ignored."""
    seed: int
    """Seed of the random draws for each message."""

    @property
    def damages(self) -> bool:
        """Whether any fault changes the bytes of messages."""
        return any(isinstance(each, Corrupt) for each in self.plan)

    @functools.cached_property
    def affects_models(self) -> FaultyModelLinks:
        """Says between which nodes faults affect messages that carry models."""
        return FaultyModelLinks(self.plan)


@dataclass(frozen=True)
class BindPlan:
    """Where a node listens."""

    ipc_dir: Path | None = None
    """Private folder for Unix sockets; None for tcp only."""
    host: str = "127.0.0.1"
    """Address of the interface for tcp."""
    port: int | None = None
    """Control port (bulk is port + 1). None: free ports, and no tcp at all if there is an `ipc_dir`."""
    again: tuple[str, ...] = ()
    """The endpoints that the node had before it was restarted, used instead of free ports."""


ExchangeKey = tuple[int, int]
"""(round, phase), which identifies a node's payload."""

Endpoints = tuple[str, str]
"""Where a node listens for control messages and for bulk messages."""


@dataclass(frozen=True)
class Growth:
    """What a node's transport must know if the run admits nodes that are not in the mapping."""

    founders: int
    """Number of nodes in the mapping; uids from there on are for newcomers."""
    experiment: bytes
    """The experiment (YAML) that is sent to newcomers."""
    control: Mapping[int, str]
    """Addresses at which other machines can reach the nodes of the mapping: tcp://HOST:PORT."""
    token: bytes = b""
    """On a newcomer: proves that its uid was granted to it."""
    seats: bytes = b""
    """On a newcomer: the other newcomers that were admitted (wire/membership/seats.py)."""
    secret: bytes = b""
    """On a member: the secret from which invitations are made (wire/invitation.py); empty if newcomers need no
    invitation."""


@dataclass(frozen=True)
class TransportParts:
    """What a node's transport is constructed from, beside its config (`Communication.make`)."""

    uid: int
    machine_of: Mapping[int, int]
    """The machine of every uid of the run."""
    schemas: tuple[Schema, ...]
    """The schema of payloads by phase; the last one is that of averaged buffers."""
    digest: str
    """Digest of config and graph; nodes with a different digest are refused."""
    base_dir: Path = Path()
    """The folder that the config's paths are relative to."""
    run_id: bytes | None = None
    """The id of the run; None adopts the id that uid 0 drew."""
    bind: BindPlan = BindPlan()
    device: torch.device | None = None
    """The device of the models, and of payloads in `Arrival`; the CPU when None."""
    process: SharedProcess | None = None
    """Shared by the nodes of this process if one thread steps several of them; None if the node has the process to
    itself."""
    limits: Limits | None = None
    """Time-outs and fewest members of membership generations; None if there is a single generation."""
    faults: LinkFaults | None = None
    """Injected faults between nodes; None for none."""
    growth: Growth | None = None
    """Given if nodes outside the mapping may be admitted."""
    relayed: Collection[int] = ()
    """Nodes of the mapping that other machines cannot connect to: relays forward what is sent to them."""
    sections: Mapping[str, str] = field(default_factory=dict)
    """Digests (hex) of the config's sections by name, so that a refusal can name the sections that differ."""

    @property
    def founders(self) -> int:
        """How many uids take part from the beginning: the nodes of the mapping."""
        return len(self.machine_of) if self.growth is None else self.growth.founders


class CommunicationConfig(Config):
    """Keys that every transport has, and what the rest of the project asks of its config."""

    networked: ClassVar[bool] = False
    """Whether nodes are separate processes that listen and connect."""
    has_generations: ClassVar[bool] = False
    """Whether members that fail can be left out (`node.missing: regroup`)."""
    has_mailboxes: ClassVar[bool] = False
    """Whether payloads can be sent to nodes that do not expect them (`Communication.publish`)."""

    @property
    def steps_nodes(self) -> bool:
        """Whether one thread may step several nodes (`mapping.nodes_per_process`)."""
        return False

    @property
    def silence_seconds(self) -> float:
        """Seconds of silence after which a node is pinged when no node waits for it."""
        return min(self.suspect_seconds, SILENCE_SECONDS)

    @property
    def key_folder(self) -> Path | None:
        """Folder with the keys by which nodes authenticate; None if they do not."""
        return None

    @property
    def unix_sockets(self) -> bool:
        """Whether nodes of one machine connect over Unix sockets."""
        return self.networked

    @property
    def shared_memory(self) -> bool | None:
        """Whether nodes of one machine exchange payloads through shared memory; None: if there is room for it."""
        return False

    timeout_seconds: float = Field(60.0, gt=0)
    """Longest time, in seconds, that a round, an evaluation or a barrier waits for a node before the node counts as
    lost. All waits of a round share it. A mean over all nodes, as evaluations need, waits this long after the last
    piece arrived, at the end of the run also after other data from the awaited node; with `node.missing: regroup`, this
    long for each link of the tree along which it travels up and down."""
    start_timeout_seconds: float = Field(60.0, gt=0)
    """Longest time, in seconds, to wait until all nodes have joined, at the start of the run and of each new generation
    of members. If not given, it is at least `timeout_seconds`."""
    suspect_seconds: float = Field(10.0, gt=0)
    """With `node.missing: regroup`: a node that answers no ping for this long, in seconds, is left out of the next
    generation. If all nodes have answered fast so far, it is left out sooner: after 8 times the longest of the last
    answers, but not before 1.5 s. With an asynchronous schedule, a node is first pinged when nothing has arrived from
    it for two seconds, or for this time if that is less. If not given, it is at most a third of `timeout_seconds`."""

    @model_validator(mode="before")
    @classmethod
    def _derive_timeouts(cls, given: Any) -> Any:
        """Derives the time-outs that are not given from `timeout_seconds`."""
        rounds = given.get("timeout_seconds") if isinstance(given, dict) else None
        if not isinstance(rounds, int | float) or isinstance(rounds, bool) or rounds <= 0:
            return given
        return {"start_timeout_seconds": max(60.0, rounds), "suspect_seconds": min(10.0, rounds / 3), **given}


ConfigT = TypeVar("ConfigT", bound=CommunicationConfig)
"""The Config of a transport."""
