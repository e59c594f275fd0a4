"""The keys of virtual time: how long local steps take on every node, and the capacity of links between nodes.

The times are those of the simulated machines that these keys describe, not of the machine that simulates them
(docs/howto/virtual_time.rst).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from decentnode.config.component import Settings


class StragglerConfig(Settings):
    """Nodes that are slower than the others."""

    nodes: tuple[int, ...] = ()
    """Uids of the stragglers. Default: drawn at random."""
    fraction: float = Field(0.0, ge=0, le=1)
    """Without `nodes`: share of the nodes that are stragglers, drawn once for the run."""
    factor: float = Field(2.0, gt=0)
    """How many times as long their local steps take."""
    chance: float = Field(1.0, gt=0, le=1)
    """Probability that a straggler is slow in a round, drawn anew in each round."""

    @model_validator(mode="after")
    def _names_somebody(self) -> Self:
        if bool(self.nodes) == bool(self.fraction):
            raise ValueError("needs either nodes or a fraction of them")
        return self


class DeviceClassConfig(Settings):
    """Nodes of one kind of device."""

    share: float = Field(gt=0, le=1)
    """Share of the nodes that are of this class; which nodes is drawn at random."""
    factor: float = Field(1.0, gt=0)
    """How many times as long as `step_seconds` their local steps take."""


class ChurnConfig(Settings):
    """Nodes that come and go by themselves."""

    up_seconds: float = Field(gt=0)
    """Mean time for which a node is present; the times are exponentially distributed."""
    away_seconds: float = Field(gt=0)
    """Mean time for which a node is away; the times are exponentially distributed."""


class ComputeConfig(Settings):
    """How long the local work of a round takes on each node, in virtual seconds."""

    step_seconds: float | Literal["measured"] = "measured"
    """Seconds of one local step on a node that nothing else slows down; measured: time a few steps of the experiment on
    this machine."""
    overhead_seconds: float = Field(0.0, ge=0)
    """Seconds of each round on each node in addition to steps, transfers and mixing."""
    mixing_bytes_per_second: float | None = Field(None, gt=0)
    """Bytes of received payloads that a node mixes in a second. Default: mixing takes no time."""
    cores: float | None = Field(None, gt=0)
    """Cores of each machine, shared fairly by its nodes; a node uses at most one. Default: one core for every node."""
    factors: tuple[float, ...] = ()
    """How many times as long the steps of each node take, in the order of the uids. Default: 1 for all."""
    classes: tuple[DeviceClassConfig, ...] = ()
    """Classes of devices; their shares must sum to 1."""
    stragglers: tuple[StragglerConfig, ...] = ()
    """Nodes that are slower than the others."""
    spread: float = Field(0.0, ge=0, le=10)
    """Standard deviation of a round's time relative to its mean: each node's time is multiplied by a lognormal factor
    of mean 1, drawn anew in each round."""
    node_spread: float = Field(0.0, ge=0, le=10)
    """Like `spread`, but drawn once per node for the whole run."""
    trace: Path | None = None
    """File of devices in FedScale's format, which gives every node a speed (instead of `step_seconds`) and a
    bandwidth."""
    availability: Path | None = None
    """File with the availability of devices, in FedScale's format."""
    churn: ChurnConfig | None = None
    """Draw the times for which nodes are away, instead of reading them from a file."""
    when_away: Literal["wait", "skip"] = "wait"
    """What happens while a node is away. wait: its work continues when it is back, and its neighbors wait for it. skip:
    rounds that begin while it is away proceed without it."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.step_seconds != "measured" and self.step_seconds <= 0:
            raise ValueError(f"step_seconds must be more than 0, got {self.step_seconds:g}")
        if any(factor <= 0 for factor in self.factors):
            raise ValueError("factors must all be more than 0")
        if self.classes and abs(sum(each.share for each in self.classes) - 1) > 1e-6:
            raise ValueError(f"the shares of classes must sum to 1, got {sum(c.share for c in self.classes):g}")
        if self.availability is not None and self.churn is not None:
            raise ValueError("needs availability or churn, not both")
        return self


class LinkConfig(Settings):
    """The bandwidth and latency of a connection in each direction."""

    mbit_per_second: float | None = Field(None, gt=0)
    """Bandwidth in Mbit/s. Default: unlimited."""
    latency_seconds: float = Field(0.0, ge=0)
    """Seconds from the departure of the last byte to its arrival."""

    @property
    def bytes_per_second(self) -> float:
        return float("inf") if self.mbit_per_second is None else 1e6 / 8 * self.mbit_per_second


UNBOUNDED = LinkConfig.model_validate({})


class MachineLinkConfig(LinkConfig):
    """The connection of two machines, shared by all edges between their nodes."""

    machines: tuple[int, int]
    """Numbers of the two machines. An entry for [0, 1] also holds for [1, 0], unless that has an entry of its own."""
    interface: str | None = None
    """Network interface of the first machine, as `decentnode doctor` found it; for information only."""


class EdgeLinkConfig(LinkConfig):
    """The connection of two nodes, which they have to themselves."""

    nodes: tuple[int, int]
    """Uids of the two nodes."""

    @field_validator("nodes")
    @classmethod
    def _are_different(cls, value: tuple[int, int]) -> tuple[int, int]:
        if value[0] == value[1]:
            raise ValueError(f"must be two different uids, got {list(value)}")
        return value


class UplinkConfig(Settings):
    """The bandwidth of one machine to all others together, and of all others to it."""

    machine: int = Field(ge=0)
    """Number of the machine."""
    mbit_per_second: float = Field(gt=0)
    """Bandwidth of each direction in Mbit/s."""


class CallCostsConfig(Settings):
    """The costs of torch.distributed's operations in addition to the bytes on the links, if nodes of a clique exchange
    with them (``communication: collective``, or ``cliques``). A key that is not given has the value of the backend, as
    the guide on plans says."""

    call_seconds: float | None = Field(None, ge=0)
    """Seconds of one batch or collective call; a payload takes one call per ``chunk_bytes``."""
    peer_seconds: float | None = Field(None, ge=0)
    """Additional seconds of a batch for each neighbor in it."""
    hop_seconds: float | None = Field(None, ge=0)
    """Seconds of one step from node to node within a machine; an all-reduce of n nodes in a ring has 2 (n - 1)
    steps."""
    network_hop_seconds: float | None = Field(None, ge=0)
    """Seconds of one step from node to node between machines, in addition to the latency of the link."""
    busy_share: float | None = Field(None, ge=0, lt=1)
    """Share of a node's compute that an exchange takes from the local steps while it is in progress; for NCCL, the
    share of the GPU's multiprocessors that its kernels occupy."""


class LinksConfig(Settings):
    """The connections between nodes. A transfer uses all that apply to it, and gets a max-min fair share of each."""

    between_machines: LinkConfig = UNBOUNDED
    """Connections between machines that `machines` does not list; every pair of machines has its own."""
    same_machine: LinkConfig = UNBOUNDED
    """Connections between nodes of one machine; every pair of nodes has its own."""
    machines: tuple[MachineLinkConfig, ...] = ()
    """Pairs of machines with settings of their own."""
    edges: tuple[EdgeLinkConfig, ...] = ()
    """Pairs of nodes with a connection of their own, in addition to that of their machines."""
    uplink_mbit_per_second: float | None = Field(None, gt=0)
    """What each machine can send, and can receive, in Mbit/s, unless `uplinks` says otherwise. Default: unlimited."""
    uplinks: tuple[UplinkConfig, ...] = ()
    """Machines with an uplink of their own."""
    node_mbit_per_second: float | None = Field(None, gt=0)
    """What each node can send, and can receive, in Mbit/s. Default: unlimited."""
    calls: CallCostsConfig = CallCostsConfig.model_validate({})
    """Costs of torch.distributed operations in addition to the bytes on the links."""
    matrix: Path | None = None
    """File with bandwidths in Mbit/s between places, in Diablo's format: one line per sender, numbers separated by
    commas. Node i is at place i modulo the number of lines."""
    jitter: float = Field(0.0, ge=0, le=10)
    """Standard deviation, relative to the mean, of the lognormal factor by which the size of each transfer is
    multiplied."""
    efficiency: float = Field(1.0, gt=0, le=1)
    """Share of each bandwidth that carries payloads; 0.94 for TCP with frames of 1,500 bytes."""
