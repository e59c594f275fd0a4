"""What passes between the supervisor and its children: small JSON objects on a pipe, nothing pickled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Request:
    """Which experiment to load. Every child loads it by itself, so that nothing but text travels."""

    config: str
    overrides: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    machine: int | str | None = None
    """Number of this machine, "auto" to find it by its addresses, None when all nodes must be on one."""
    in_process: bool = False
    join: bool = False
    """The run has begun already, and lets this machine's nodes in (node.missing: regroup)."""


@dataclass(frozen=True)
class Facts:
    """What the supervisor must know of the loaded experiment."""

    name: str
    digest: str
    runs_dir: str
    config_text: str
    resolved_text: str
    graph_text: str
    mapping_text: str
    rounds: int
    evaluate_every: int
    in_process: bool
    timeout_seconds: float
    start_timeout_seconds: float
    machine: int
    machines: list[list[int]]
    """uids by machine."""
    hosts: list[str]
    """Host of each machine."""
    threads: dict[str, int]
    """uid -> threads, where the mapping says so."""
    regroup: bool = False
    """Whether the others go on when a node dies."""
    restarts: int = 0
    """How many times a node that died is started again."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Files that are copied into the run directory: name there -> path."""

    @property
    def local(self) -> tuple[int, ...]:
        return tuple(self.machines[self.machine])

    @property
    def num_nodes(self) -> int:
        return sum(map(len, self.machines))


@dataclass(frozen=True)
class Header:
    """What the console says about the experiment: (label, text) lines."""

    lines: list[list[str]]
    modules: dict[str, str] = field(default_factory=dict)
    """Modules of the user's own that were imported so far: name -> path."""


@dataclass(frozen=True)
class Task:
    """One child's work: the node `uid`, or all `uids` in one process."""

    request: Request
    uids: list[int]
    machine: int
    run_dir: str | None
    """None: nothing is written (a dry run)."""
    threads: int
    run_id: str
    """Hex; "" where another machine draws it."""
    in_process: bool
    """All `uids` in one process, stepped in turn."""
    progress_seconds: float
    """Rounds are reported at most this often; evaluations always."""
    socket_dir: str
    join: bool = False
    """The run has begun already."""
    endpoints: list[str] = field(default_factory=list)
    """Where the node listened before, when it is started again."""


@dataclass(frozen=True)
class Bound:
    uid: int
    control: str
    bulk: str


@dataclass(frozen=True)
class NodeJoined:
    uid: int


@dataclass(frozen=True)
class NodesAbsent:
    """From uid 0 while nodes join: who has not, and why nodes were refused (by the uid they claimed)."""

    uids: list[int]
    refusals: dict[str, str]


@dataclass(frozen=True)
class Progress:
    uid: int
    record: dict[str, Any]


@dataclass(frozen=True)
class Finished:
    uid: int
    figures: dict[str, Any]
    stopped: bool
    """Whether the run was asked to stop before its last round."""
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    """Modules of the user's own that the node had imported in the end: name -> path."""


@dataclass(frozen=True)
class Failed:
    uid: int
    exit_code: int
    title: str
    """One line."""
    text: str
    """The whole message of a DecentnodeError, the whole traceback of anything else."""
    follower: bool = False
    """The node failed only because another did."""


@dataclass(frozen=True)
class Peers:
    """uid -> (control, bulk) endpoints of the nodes on this machine."""

    endpoints: dict[str, list[str]]


@dataclass(frozen=True)
class StopRun:
    pass


@dataclass(frozen=True)
class PeerFailure:
    uid: int
    reason: str


ChildMessage = (
    Facts | Header | Bound | NodeJoined | NodesAbsent | Progress | Finished | Failed | Peers | StopRun | PeerFailure
)

KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (Facts, Header, Bound, NodeJoined, NodesAbsent, Progress, Finished, Failed, Peers, StopRun, PeerFailure)
}
