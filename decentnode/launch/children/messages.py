"""The messages between the supervisor and its children: small JSON objects on a pipe; nothing is pickled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from decentnode.errors import AssemblyError, Diverged, EnvironmentFault, UsageError


@dataclass(frozen=True)
class Request:
    """Which experiment to load, and how to run it. Every child loads the experiment itself, so that only text is sent.
    """

    config: str
    """The experiment's file; "" if it consists of `layers` only."""
    overrides: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    machine: int | str | None = None
    """Number of this machine; "auto" to find it by scheduler or address; None if all nodes must be on one machine."""
    in_process: bool = False
    one_round: bool = False
    """Whether to run only one round, after the experiment was checked with all its rounds."""
    simulate: bool = False
    """With `in_process`: whether the experiment's section `simulate` says how the nodes are computed."""
    join: bool = False
    """Whether the run has already begun, and this machine's nodes ask to join it (node.missing: regroup)."""
    resume: str | None = None
    """The run to resume: its folder, or "" for the latest run of the experiment's name; None for a new run."""
    layers: list[dict[str, Any]] = field(default_factory=list)
    """Sections as plain data that are merged over the file, one after the other."""
    forked: bool = False
    """Whether children are forks of this process, and so have the objects of which the experiment is made."""
    folder: str = ""
    """The current directory for children; "" to keep the fork server's."""
    variables: dict[str, str | None] = field(default_factory=dict)
    """Environment variables that changed (None: were removed) since the fork server was started."""
    found: dict[str, float] = field(default_factory=dict)
    """Results of searches in an earlier load of the experiment (experiment/derived.py), which need not be repeated."""
    optima: dict[str, list[float]] = field(default_factory=dict)
    """Results of optimizations in an earlier load of the experiment (graph/optima.py), which need not be repeated."""

    @property
    def shown(self) -> str:
        """The experiment's name in messages: its file, if it has one."""
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
    """uid -> number of threads, for nodes of this machine."""
    processes: list[list[int]] = field(default_factory=list)
    """The uids of this machine by process."""
    found: dict[str, float] = field(default_factory=dict)
    """`Request.found` for the nodes: the search is done once per machine, not in each process."""
    optima: dict[str, list[float]] = field(default_factory=dict)
    """`Request.optima` for the nodes, likewise."""
    regroup: bool = False
    """Whether the others continue when a node dies."""
    own_rounds: bool = False
    """Whether nodes make their rounds without waiting for each other, and the first one that has made all its rounds
    ends the run."""
    continues_on_partition: bool = False
    """Whether all sides of a network partition continue."""
    restarts: int = 0
    """How many times a node that died is restarted."""
    task: dict[str, Any] = field(default_factory=dict)
    """The metrics of the run's task: `TaskMetrics.plain`."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Files that are copied into the run directory: name there -> path."""
    resume: list[str] | None = None
    """Run folders in which nodes look for their checkpoints; None for a new run."""
    resume_runs: list[str] = field(default_factory=list)
    """Ids of these runs."""
    faults: list[dict[str, Any]] = field(default_factory=list)
    """The faults of the experiment, resolved (`Experiment.make_faults`)."""
    checks_records: bool = False
    """Whether the records of all nodes are checked when the run is over."""
    min_nodes: int = 1
    """The least number of nodes of a generation."""
    newcomers: int = 0
    """How many nodes the run admits that are not in the mapping."""
    attackers: list[int] = field(default_factory=list)
    """Nodes that attack the others (`Experiment.attackers`)."""
    trackers: list[dict[str, Any]] = field(default_factory=list)
    """The sections of `run.trackers`."""
    finished: str = ""
    """A sentence that says that the run to resume has nothing left to do; "" if it has, or the run is new."""
    pauses_before_stop: bool = False
    """Whether a stop pauses all nodes before the same round first, so that their last checkpoints are of one cut."""

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
    """The user's own modules that have been imported so far: name -> path."""


@dataclass(frozen=True)
class Task:
    """The work of one child: one node, several nodes of this machine, or all nodes of a run without a network."""

    request: Request
    uids: list[int]
    machine: int
    run_dir: str | None
    """None for a dry run, which writes nothing."""
    threads: int
    run_id: str
    """The run's id in hex; "" if another machine draws it."""
    in_process: bool
    """Whether `uids` are all nodes of the run, which communicate within the process."""
    progress_seconds: float
    """Least time between two reports of rounds; evaluations are always reported."""
    socket_dir: str
    join: bool = False
    """Whether the run has already begun."""
    endpoints: dict[str, list[str]] = field(default_factory=dict)
    """uid -> endpoints of the node before it was restarted; empty at its first start."""
    resume: list[str] | None = None
    """As `Facts.resume`."""
    resume_runs: list[str] = field(default_factory=list)
    began: float | None = None
    """When the run began (`clock.now()`, which all processes of a machine share); None if this process begins it."""


@dataclass(frozen=True)
class Bound:
    """The node listens at these endpoints."""

    uid: int
    control: str
    bulk: str


@dataclass(frozen=True)
class NodeJoined:
    """The node is connected, and begins its rounds."""

    uid: int


@dataclass(frozen=True)
class Engine:
    """Which engine computes the nodes of a simulated run, and the reason for the choice."""

    name: str
    reason: str


@dataclass(frozen=True)
class NodesAbsent:
    """Report of uid 0 while nodes connect: the uids that have not connected yet, and why nodes were refused, by the uid
    that they claimed."""

    uids: list[int]
    refusals: dict[str, str]


@dataclass(frozen=True)
class Progress:
    """A record of the node's metrics.jsonl."""

    uid: int
    record: dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """The node has ended regularly."""

    uid: int
    figures: dict[str, Any]
    stopped: bool
    """Whether the run was asked to stop before its last round."""
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The closing figures of every node; only from the lowest uid."""
    modules: dict[str, str] = field(default_factory=dict)
    """The user's own modules that the node had imported by its end: name -> path."""
    left: bool = False
    """Whether only this node was asked to leave before its last round, and the others continue."""
    injected_faults: dict[str, int] = field(default_factory=dict)
    """Number of process faults injected in a simulated run, by kind; the same in the message of each node."""


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
    """Whether the node timed out waiting for a generation with enough of the other nodes."""

    @property
    def ends_run(self) -> bool:
        """Whether the other nodes could not continue either, even with `missing: regroup`: they would fail in the same
        way."""
        return self.exit_code in (
            UsageError.exit_code, EnvironmentFault.exit_code, AssemblyError.exit_code, Diverged.exit_code
        )  # fmt: skip


@dataclass(frozen=True)
class Closed:
    """A node that failed has closed its sockets and files, while its process continues with other nodes. The node may
    now be restarted."""

    uid: int


@dataclass(frozen=True)
class FaultDue:
    """A node begins the round in which this fault of the plan is due, and asks the supervisor to inject it."""

    uid: int
    index: int


@dataclass(frozen=True)
class Terminated:
    """A node's process received SIGTERM, and asks the supervisor to stop the run: all nodes before the same round,
    because of their checkpoints."""

    uid: int


@dataclass(frozen=True)
class Peers:
    """The endpoints of the nodes on this machine: uid -> [control, bulk]."""

    endpoints: dict[str, list[str]]


@dataclass(frozen=True)
class StopRun:
    """The node is to finish its current round and then end."""


@dataclass(frozen=True)
class OrderRun:
    """A user's order to the whole run to pause, resume or evaluate, or the supervisor's to meet before a stop. The
    receiving node passes it on to all nodes (wire/orders.py)."""

    action: str


@dataclass(frozen=True)
class LeaveRun:
    """Only this node is to end after its current round; it answers with a LeaveAnswer."""

    uid: int
    others: list[int] = field(default_factory=list)
    """Nodes of this machine that were asked to leave earlier, and may not have left yet."""


@dataclass(frozen=True)
class LeaveAnswer:
    """The node leaves after its round, or, with a non-empty `refusal`, stays for this reason."""

    uid: int
    refusal: str = ""


@dataclass(frozen=True)
class PeerFailure:
    """Another node of this machine failed."""

    uid: int
    reason: str
    ends_run: bool = False
    """Whether the nodes of this machine end because of it, even if they could continue without that node."""


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
