"""The keys of virtual time: how long local steps take on every node, and what links between nodes pass.

Times are of a world that is described here, not of the machine that simulates it (docs/howto/virtual_time.rst).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from decentnode.config.component import Settings


class StragglerConfig(Settings):
    """Nodes that are slower than the others."""

    nodes: tuple[int, ...] = ()
    """Their uids; drawn where not given."""
    fraction: float = Field(0.0, ge=0, le=1)
    """Without `nodes`: the share of the nodes that is drawn, once for the run."""
    factor: float = Field(2.0, gt=0)
    """By which their local steps take longer."""
    chance: float = Field(1.0, gt=0, le=1)
    """Probability, in each round anew, that such a node is slow."""

    @model_validator(mode="after")
    def _names_somebody(self) -> Self:
        if bool(self.nodes) == bool(self.fraction):
            raise ValueError("needs either nodes or a fraction of them")
        return self


class DeviceClassConfig(Settings):
    """Nodes of one kind of device."""

    share: float = Field(gt=0, le=1)
    """Share of the nodes that are of this kind; which ones is drawn."""
    factor: float = Field(1.0, gt=0)
    """By which their local steps take longer than `step_seconds`."""


class ChurnConfig(Settings):
    """Nodes that come and go by themselves."""

    up_seconds: float = Field(gt=0)
    """Mean of the exponentially distributed times for which a node is there."""
    away_seconds: float = Field(gt=0)
    """Mean of those for which it is away."""


class ComputeConfig(Settings):
    """How long the local work of a round takes on each node, in virtual seconds."""

    step_seconds: float | Literal["measured"] = "measured"
    """Seconds of one local step on a node that nothing else slows down; measured: a few steps of the experiment are
    timed on this machine."""
    overhead_seconds: float = Field(0.0, ge=0)
    """Seconds that each round takes on each node beside steps, transfers and mixing."""
    mixing_bytes_per_second: float | None = Field(None, gt=0)
    """Bytes of arrived payloads that a node mixes in a second; mixing takes no time when not given."""
    cores: float | None = Field(None, gt=0)
    """Cores of each machine, which its nodes share fairly, each using one at most. When not given, every node has one
    to itself."""
    factors: tuple[float, ...] = ()
    """By which the steps of each node take longer, in the order of their uids; 1 when not given."""
    classes: tuple[DeviceClassConfig, ...] = ()
    """Kinds of devices; their shares must sum to 1."""
    stragglers: tuple[StragglerConfig, ...] = ()
    """Nodes that are slower than the others."""
    spread: float = Field(0.0, ge=0, le=10)
    """Deviation of a round's time by its mean: every node's time is multiplied by a lognormal number of mean 1, drawn
    anew in each round."""
    node_spread: float = Field(0.0, ge=0, le=10)
    """The same, drawn once per node for the run."""
    trace: Path | None = None
    """File of devices in FedScale's format, which gives every node a speed in place of `step_seconds`, and a
    bandwidth."""
    availability: Path | None = None
    """File of devices' availability in FedScale's format."""
    churn: ChurnConfig | None = None
    """Times for which nodes are away, drawn instead of read."""
    when_away: Literal["wait", "skip"] = "wait"
    """What a node's absence does. wait: its work goes on when it is back, and its neighbors wait for it. skip: rounds
    that begin while it is away pass without it."""

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
    """What a connection passes in each direction."""

    mbit_per_second: float | None = Field(None, gt=0)
    """Bandwidth in Mbit/s; without bound when not given."""
    latency_seconds: float = Field(0.0, ge=0)
    """Seconds from the last byte's departure to its arrival."""

    @property
    def bytes_per_second(self) -> float:
        return float("inf") if self.mbit_per_second is None else 1e6 / 8 * self.mbit_per_second


UNBOUNDED = LinkConfig.model_validate({})


class MachineLinkConfig(LinkConfig):
    """The connection of two machines, shared by all edges between their nodes."""

    machines: tuple[int, int]
    """Numbers of the two machines. What is said of [0, 1] holds for [1, 0], too, where no entry names that."""
    interface: str | None = None
    """Network interface of the first of them, as `decentnode doctor` found it; for people."""


class EdgeLinkConfig(LinkConfig):
    """The connection of two nodes, which they have to themselves."""

    nodes: tuple[int, int]
    """Their uids."""


class UplinkConfig(Settings):
    """What one machine sends, and what it receives, to and from all others together."""

    machine: int = Field(ge=0)
    """Its number."""
    mbit_per_second: float = Field(gt=0)
    """Bandwidth of each direction in Mbit/s."""


class CallCostsConfig(Settings):
    """What operations of torch.distributed cost beside the bytes on the links, where nodes of a clique exchange by them
    (``communication: collective``, or ``cliques``). What is not given is taken for the backend, as the guide on plans
    says."""

    call_seconds: float | None = Field(None, ge=0)
    """Seconds of one batch or collective call; a payload takes one for each ``chunk_bytes`` of it."""
    peer_seconds: float | None = Field(None, ge=0)
    """Seconds that a batch takes longer for each neighbor in it."""
    hop_seconds: float | None = Field(None, ge=0)
    """Seconds of one step from node to node within a machine; an all-reduce of n nodes in a ring has 2 (n - 1)."""
    network_hop_seconds: float | None = Field(None, ge=0)
    """The same between machines, beside the latency of the link."""
    busy_share: float | None = Field(None, ge=0, lt=1)
    """Share of a node's compute that an exchange takes from the local steps while it is under way: of NCCL the
    multiprocessors of the GPU that its kernels hold."""


class LinksConfig(Settings):
    """What connects the nodes. Every transfer passes all that applies to it, and gets a max-min fair share of each."""

    between_machines: LinkConfig = UNBOUNDED
    """Pairs of machines that `machines` does not name; every pair is a connection of its own."""
    same_machine: LinkConfig = UNBOUNDED
    """Pairs of nodes on one machine; every pair is a connection of its own."""
    machines: tuple[MachineLinkConfig, ...] = ()
    """Pairs of machines with a connection of their own."""
    edges: tuple[EdgeLinkConfig, ...] = ()
    """Pairs of nodes with a connection of their own, beside that of their machines."""
    uplink_mbit_per_second: float | None = Field(None, gt=0)
    """What each machine sends in Mbit/s, and what it receives, where `uplinks` does not say; without bound when not
    given."""
    uplinks: tuple[UplinkConfig, ...] = ()
    """Machines with an uplink of their own."""
    node_mbit_per_second: float | None = Field(None, gt=0)
    """What each node sends in Mbit/s, and what it receives; without bound when not given."""
    calls: CallCostsConfig = CallCostsConfig.model_validate({})
    """What operations of torch.distributed cost beside the bytes on the links."""
    matrix: Path | None = None
    """File with Mbit/s between places, in Diablo's format: a line per sender, numbers separated by commas. Node i is at
    place i modulo the number of lines."""
    jitter: float = Field(0.0, ge=0, le=10)
    """Deviation of what a transfer has to pass by its mean: a lognormal factor, drawn for each transfer."""
    efficiency: float = Field(1.0, gt=0, le=1)
    """Share of each bandwidth that carries payloads; 0.94 for TCP in frames of 1,500 bytes."""
