"""What a transport is made from: the keys that all transports have, where it listens, what payloads look like."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import Field, model_validator

from decentnode.config.component import Config
from decentnode.faults import Corrupt, Plan, StruckModels
from decentnode.payload import Payload, TensorSpec
from decentnode.wire.generation import Limits

if TYPE_CHECKING:
    import torch

    from decentnode.communication.shared_process import SharedProcess

SILENCE_SECONDS = 2.0
"""Where nobody waits for a node, it is asked whether it lives after a silence of so long, which costs four pings a
second: a slow one is asked in most of its rounds. Where nodes wait for each other, they ask after half a second."""


@dataclass(frozen=True)
class Schema:
    """What every payload of a run looks like; receivers size and validate by it, never by a message."""

    elements: int
    """Length P of the flat model."""
    tensors: Mapping[str, TensorSpec]
    elementwise: bool
    mailbox: int = 0
    """0: payloads are exchanged, each in its round. Otherwise nobody waits for them by their rounds
    (`Communication.publish`): a receiver keeps the newest so many of each source until it takes them."""


@dataclass(frozen=True)
class Collected:
    """One payload out of a mailbox, in memory of its own."""

    source: int
    round: int
    """Of the source when it published."""
    payload: Payload


@dataclass(frozen=True)
class LinkFaults:
    """What goes wrong between nodes."""

    plan: Plan
    """Resolved; faults of other kinds are not looked at."""
    seed: int
    """Of what is drawn for each message."""

    @property
    def damages(self) -> bool:
        """Whether messages arrive with other bytes."""
        return any(isinstance(each, Corrupt) for each in self.plan)

    @functools.cached_property
    def struck(self) -> StruckModels:
        """Between which nodes messages with models are struck."""
        return StruckModels(self.plan)


@dataclass(frozen=True)
class BindPlan:
    """Where a node listens."""

    ipc_dir: Path | None = None
    """Private folder for Unix sockets, or None for tcp only."""
    host: str = "127.0.0.1"
    """Address of the interface for tcp."""
    port: int | None = None
    """Control port (bulk is port + 1); None: free ones, and no tcp at all beside `ipc_dir`."""
    again: tuple[str, ...] = ()
    """Instead of free ports: the endpoints that the node had before it was started again."""


ExchangeKey = tuple[int, int]
"""Round and phase: what a node's payloads are told apart by."""

Endpoints = tuple[str, str]
"""Where a node listens: for control and for bulk messages."""


@dataclass(frozen=True)
class Growth:
    """What a node's transport must know where a run admits nodes that are not in the mapping."""

    founders: int
    """Nodes of the mapping; uids from there on are for those that come."""
    experiment: bytes
    """What they are told the experiment is (YAML)."""
    control: Mapping[int, str]
    """Where the nodes of the mapping can be reached from other machines: tcp://HOST:PORT."""
    token: bytes = b""
    """Of a node that came: what proves that its uid was granted to it."""
    seats: bytes = b""
    """Of a node that came: who else did (wire/membership/seats.py)."""
    secret: bytes = b""
    """Of a member: what invitations are made with (wire/invitation.py); empty where newcomers need none."""


@dataclass(frozen=True)
class TransportParts:
    """What a node's transport is made from, beside its config (`Communication.make`)."""

    uid: int
    machine_of: Mapping[int, int]
    """The machine of every uid of the run."""
    schemas: tuple[Schema, ...]
    """What payloads look like, by phase; the last one is that of averaged buffers."""
    digest: str
    """Of config and graph; nodes of another digest are refused."""
    base_dir: Path = Path()
    """Folder that the config's paths are relative to."""
    run_id: bytes | None = None
    """None adopts the one that uid 0 drew."""
    bind: BindPlan = BindPlan()
    device: torch.device | None = None
    """Of the models, and of payloads in `Arrival`; the CPU when None."""
    process: SharedProcess | None = None
    """What the node shares with others of its process, which one thread steps; None where it has the process for
    itself."""
    limits: Limits | None = None
    """Of generations of members; None where there is but one."""
    faults: LinkFaults | None = None
    """What goes wrong between nodes; None where nothing does but by itself."""
    growth: Growth | None = None
    """Where nodes that are not in the mapping may be admitted; None where none is."""
    relayed: Collection[int] = ()
    """Nodes of the mapping to which no other machine can connect: relays pass on what is sent to them."""
    sections: Mapping[str, str] = field(default_factory=dict)
    """Digests (hex) of the config's sections by name, so that a refusal can name those that differ."""

    @property
    def founders(self) -> int:
        """How many of the uids begin the run: the nodes of the mapping."""
        return len(self.machine_of) if self.growth is None else self.growth.founders


class CommunicationConfig(Config):
    """Keys that every transport has, and what the rest of the project asks of its config."""

    networked: ClassVar[bool] = False
    """Whether nodes are processes of their own, which listen and connect."""
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
        """After how long a silence a node is asked whether it lives, where nobody waits for it."""
        return min(self.suspect_seconds, SILENCE_SECONDS)

    @property
    def key_folder(self) -> Path | None:
        """Folder with the keys by which nodes prove who they are; None where they do not."""
        return None

    @property
    def unix_sockets(self) -> bool:
        """Whether nodes of one machine meet at Unix sockets."""
        return self.networked

    @property
    def shared_memory(self) -> bool | None:
        """Whether nodes of one machine exchange payloads through shared memory; None: where there is room for it."""
        return False

    timeout_seconds: float = Field(60.0, gt=0)
    """Longest time, in seconds, that a round, an evaluation or a barrier waits for a node before the node counts as
    lost. All waits of a round share it. A mean over all nodes, as evaluations need, waits this long after the last
    piece arrived; with `node.missing: regroup`, this long for each link of the tree along which it travels up and
    down."""
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
    def _in_proportion(cls, given: Any) -> Any:
        """The time-outs that are not given follow the one that is."""
        rounds = given.get("timeout_seconds") if isinstance(given, dict) else None
        if not isinstance(rounds, int | float) or isinstance(rounds, bool) or rounds <= 0:
            return given
        return {"start_timeout_seconds": max(60.0, rounds), "suspect_seconds": min(10.0, rounds / 3), **given}


ConfigT = TypeVar("ConfigT", bound=CommunicationConfig)
"""The Config of a transport."""
