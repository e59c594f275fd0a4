"""The messages between the supervisor and its children: small JSON objects on a pipe, nothing pickled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Request:
    """The experiment to load. Every child loads it by itself, so that only text is sent."""

    config: str
    """The experiment's file; "" where `layers` are all of it."""
    overrides: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    machine: int | str | None = None
    """Number of this machine, "auto" to find it by its addresses, None when all nodes must be on one."""
    in_process: bool = False
    one_round: bool = False
    """Whether the experiment, once it is found right as it is, is to do one round, however many it says."""
    simulate: bool = False
    """With `in_process`: whether the section `simulate` of the experiment says how the nodes are computed."""
    join: bool = False
    """Whether the run has begun already, and this machine's nodes ask to join it (node.missing: regroup)."""
    resume: str | None = None
    """The run to go on from: its folder, or "" for the latest of the experiment's name; None for a new run."""
    layers: list[dict[str, Any]] = field(default_factory=list)
    """Sections as plain data that are laid over the file, one after the other."""
    forked: bool = False
    """Whether children are forks of this process, and so have the objects that the experiment is made of."""
    folder: str = ""
    """The current directory of children; "" where they have it from the fork server."""
    variables: dict[str, str | None] = field(default_factory=dict)
    """Environment variables that were changed (None: removed) since the fork server took them."""
    found: dict[str, float] = field(default_factory=dict)
    """Values that were searched for when the experiment was loaded before (experiment/derived.py)."""

    @property
    def shown(self) -> str:
        """What messages call the experiment: its file, if it is one."""
        return self.config or "experiment"


@dataclass(frozen=True)
class Facts:
    """The properties of the loaded experiment that the supervisor needs."""

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
    """The uids on each machine."""
    hosts: list[str]
    """Host of each machine."""
    threads: dict[str, int]
    """uid -> threads, where the mapping says so."""
    processes: list[list[int]] = field(default_factory=list)
    """The uids of this machine by process."""
    found: dict[str, float] = field(default_factory=dict)
    """As `Request.found`, for the nodes: one process of a machine searches, not each."""
    regroup: bool = False
    """Whether the others go on when a node dies."""
    own_rounds: bool = False
    """Whether nodes wait for no round of each other, and the first that has made all ends the run."""
    sides: bool = False
    """Whether all sides of a broken network go on."""
    restarts: int = 0
    """How many times a node that died is started again."""
    task: dict[str, Any] = field(default_factory=dict)
    """What the run's task measures: `TaskMetrics.plain`."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Files that are copied into the run directory: name there -> path."""
    resume: list[str] | None = None
    """Folders of runs in whose checkpoints nodes look for theirs; None for a new run."""
    resume_runs: list[str] = field(default_factory=list)
    """Ids of these runs."""
    faults: list[dict[str, Any]] = field(default_factory=list)
    """The faults of the experiment, resolved (`Experiment.make_faults`)."""
    checked: bool = False
    """Whether the records of all nodes are checked when the run is over."""
    min_nodes: int = 1
    """The least number of nodes of a generation."""
    newcomers: int = 0
    """How many nodes the run admits that are not in the mapping."""
    trackers: list[dict[str, Any]] = field(default_factory=list)
    """The sections of `run.trackers`."""
    finished: str = ""
    """Of a run that is asked to go on and has nothing left to do: a sentence that says so."""
    meets: bool = False
    """Whether nodes come to stand before the same round when the run is stopped, so that the checkpoints of the stop
    are of one moment."""

    @property
    def local(self) -> tuple[int, ...]:
        return tuple(self.machines[self.machine])

    @property
    def num_nodes(self) -> int:
        return sum(map(len, self.machines))


@dataclass(frozen=True)
class Header:
    """The description of the experiment on the console: (label, text) lines."""

    lines: list[list[str]]
    modules: dict[str, str] = field(default_factory=dict)
    """Modules of the user's own that were imported so far: name -> path."""


@dataclass(frozen=True)
class Task:
    """The work of one child: one node, several of this machine, or all nodes of the run without a network."""

    request: Request
    uids: list[int]
    machine: int
    run_dir: str | None
    """None for a dry run, which writes nothing."""
    threads: int
    run_id: str
    """The run's id in hex; "" where another machine draws it."""
    in_process: bool
    """Whether `uids` are all nodes of the run, which hand everything to each other."""
    progress_seconds: float
    """Least time between two reports of rounds; evaluations are always reported."""
    socket_dir: str
    join: bool = False
    """Whether the run has begun already."""
    endpoints: dict[str, list[str]] = field(default_factory=dict)
    """uid -> endpoints of the node before it was started again; empty the first time."""
    resume: list[str] | None = None
    """As `Facts.resume`."""
    resume_runs: list[str] = field(default_factory=list)
    began: float | None = None
    """When the run began (`clock.now()`, of all processes of a machine); None where it begins with this process."""


@dataclass(frozen=True)
class Bound:
    """The node listens at these endpoints."""

    uid: int
    control: str
    bulk: str


@dataclass(frozen=True)
class NodeJoined:
    """The node is connected, and its run begins."""

    uid: int


@dataclass(frozen=True)
class Engine:
    """Which engine computes the nodes of a simulated run, and why that one."""

    name: str
    reason: str


@dataclass(frozen=True)
class NodesAbsent:
    """From uid 0 while nodes connect: the uids that have not yet, and why nodes were refused, by the uid they
    claimed."""

    uids: list[int]
    refusals: dict[str, str]


@dataclass(frozen=True)
class Progress:
    """A record of the node's metrics.jsonl."""

    uid: int
    record: dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """The node has ended in order."""

    uid: int
    figures: dict[str, Any]
    stopped: bool
    """Whether the run was asked to stop before its last round."""
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    """From the lowest uid: the closing figures of every node."""
    modules: dict[str, str] = field(default_factory=dict)
    """Modules of the user's own that the node had imported in the end: name -> path."""
    left: bool = False
    """Whether this node alone was asked to leave before its last round, and the others go on."""
    struck: dict[str, int] = field(default_factory=dict)
    """In a simulated run: how many processes were struck, by the kind of fault; the same of all nodes."""


@dataclass(frozen=True)
class Failed:
    """The node, or (uid -1) the child that loads the experiment, has failed."""

    uid: int
    exit_code: int
    title: str
    """The failure in one line."""
    text: str
    """The whole message of a DecentnodeError, the whole traceback of anything else."""
    follower: bool = False
    """Whether the node failed only because another did."""
    gave_up: bool = False
    """Whether it had waited in vain for a generation with enough of the others."""


@dataclass(frozen=True)
class Closed:
    """A node that failed has let go of its sockets and files, and its process goes on with others: the node may be
    started again."""

    uid: int


@dataclass(frozen=True)
class FaultDue:
    """A node begins the round in which this fault of the plan strikes it, and asks to be struck."""

    uid: int
    index: int


@dataclass(frozen=True)
class Terminated:
    """A node's process got SIGTERM, and asks to have the run stopped: all nodes before the same round, for their
    checkpoints."""

    uid: int


@dataclass(frozen=True)
class Peers:
    """uid -> (control, bulk) endpoints of the nodes on this machine."""

    endpoints: dict[str, list[str]]


@dataclass(frozen=True)
class StopRun:
    """Finish the round under way, then close."""


@dataclass(frozen=True)
class OrderRun:
    """People order the whole run to pause, resume or evaluate: the receiver passes it on to all nodes
    (wire/orders.py)."""

    action: str


@dataclass(frozen=True)
class LeaveRun:
    """This node alone is to end after the round under way; the answer is a LeaveAnswer."""

    uid: int
    others: list[int] = field(default_factory=list)
    """Nodes of this machine that were asked before, and may not have left yet."""


@dataclass(frozen=True)
class LeaveAnswer:
    """The node leaves after its round, or stays for this reason."""

    uid: int
    refusal: str = ""


@dataclass(frozen=True)
class PeerFailure:
    """Another node of this machine failed."""

    uid: int
    reason: str


ChildMessage = (
    Facts | Header | Bound | NodeJoined | Engine | NodesAbsent | Progress | Finished | Failed | Closed | FaultDue |
    Terminated | Peers | StopRun | OrderRun | LeaveRun | LeaveAnswer | PeerFailure
)

KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(Facts, Header, Bound, NodeJoined, Engine, NodesAbsent, Progress, Finished, Failed, Closed, Peers),
        *(FaultDue, Terminated, StopRun, OrderRun, LeaveRun, LeaveAnswer, PeerFailure),
    )
}
