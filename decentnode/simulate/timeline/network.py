"""What the transfers of a round pass on their way, and when they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from decentnode import rng
from decentnode.errors import UsageError
from decentnode.experiment.virtual_time import LinksConfig
from decentnode.simulate.timeline import traces
from decentnode.simulate.timeline.compute import lognormal
from decentnode.simulate.timeline.fluid import FairSharing

MESSAGE, MEETING, BATCH = -3, -2, -1
"""How a transfer depends on others (`Transfers.joins`)."""


@dataclass(frozen=True, eq=False)
class Joining:
    """How the transfers of one phase depend on each other, and what they cost beside the bytes on the links."""

    joins: np.ndarray
    """[F] int. MESSAGE: a transfer begins when its sender has. MEETING: when both ends have. BATCH: when both have, and
    it ends when all of them have that its receiver takes part in, as sender or receiver. A number from 0 on: that of a
    collective call, whose transfers all begin when the last of its nodes has, and all end together."""
    seconds: np.ndarray
    """[F] that a transfer takes beside those of its bytes; of a collective call with all latencies of its steps."""
    mixed: np.ndarray
    """[F] bytes that the receiver mixes of what comes."""
    busy_share: np.ndarray
    """[F] share of the compute of both ends that is not there for local steps while a transfer is under way."""

    @cached_property
    def calls(self) -> list[np.ndarray]:
        """Of every collective call, which transfers are its own: bool [F]."""
        return [self.joins == call for call in np.unique(self.joins[self.joins >= 0])]

    def among(self, order: np.ndarray) -> Joining:
        """Returns the same of the transfers in another order."""
        return Joining(self.joins[order], self.seconds[order], self.mixed[order], self.busy_share[order])


@dataclass(frozen=True, eq=False)
class Transfers:
    """The payloads that nodes send to each other in one phase of a round, by ascending receiver."""

    source: np.ndarray
    """[F] uids."""
    target: np.ndarray
    """[F] uids, ascending."""
    sizes: np.ndarray
    """[F] bytes."""
    joining: Joining | None = None
    """None where every transfer is a message that leaves when its sender has it."""

    @staticmethod
    def of(
        source: Sequence[int], target: Sequence[int], sizes: Sequence[float] | float, *, joining: Joining | None = None
    ) -> Transfers:
        """Transfers in any order, in which those of `joining` are, too; one size stands for all."""
        order = np.argsort(np.array(target, int), kind="stable")
        every = np.broadcast_to(np.array(sizes, float), (len(source),))
        return Transfers(np.array(source, int)[order], np.array(target, int)[order], every[order],
                         None if joining is None else joining.among(order))  # fmt: skip

    @property
    def mixed(self) -> np.ndarray:
        """[F] bytes that the receiver mixes of what comes."""
        return self.sizes if self.joining is None else self.joining.mixed

    def begins(self, ready: np.ndarray) -> np.ndarray:
        """Returns when each transfer begins [F]. ready: [N] when each node has what it sends; minus infinity for nodes
        that take no part."""
        begins: np.ndarray = ready[self.source]
        if self.joining is None:
            return begins
        begins = np.where(self.joining.joins == MESSAGE, begins, np.maximum(begins, ready[self.target]))
        for call in self.joining.calls:
            begins[call] = begins[call].max()
        return begins

    def ends(self, arrived: np.ndarray, there: np.ndarray) -> np.ndarray:
        """Returns when each transfer is over for its receiver [F]. arrived: [F] when its own bytes are there, infinite
        where that is not known. there: bool [F], which transfers take place."""
        if self.joining is None:
            return arrived
        found = arrived.copy()
        if (batch := (self.joining.joins == BATCH) & there).any():
            last = np.full(int(max(self.source.max(), self.target.max())) + 1, -np.inf)
            for end in (self.source, self.target):
                np.maximum.at(last, end[batch], arrived[batch])
            found[batch] = last[self.target[batch]]
        for call in self.joining.calls:
            found[call & there] = arrived[call & there].max(initial=-np.inf)
        return found

    def held_up_by(self, ready: np.ndarray) -> np.ndarray:
        """Returns for whom the receiver of each transfer waits [F]: the sender, or of a collective call the member that
        was ready last, unless this is the receiver itself."""
        if self.joining is None:
            return self.source
        found = self.source.copy()
        for call in self.joining.calls:
            uids = np.unique(np.append(self.source[call], self.target[call]))
            late = uids[np.argmax(ready[uids])]
            found[call & (self.target != late)] = late
        return found

    @cached_property
    def are_busy(self) -> bool:
        """Whether some take of the compute of their ends."""
        return self.joining is not None and bool(self.joining.busy_share.any())

    def busy(self, arrived: np.ndarray, there: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (until when transfers take of each node's compute, minus infinity where none does; which share of
        it), each [N]. arrived: [F], as `ends` returned it. there: as for `ends`."""
        until, share = np.full(num_nodes, -np.inf), np.zeros(num_nodes)
        if self.joining is not None:
            there = (self.joining.busy_share > 0) & there
            for end in (self.source, self.target):
                np.maximum.at(until, end[there], arrived[there])
                np.maximum.at(share, end[there], self.joining.busy_share[there])
        return until, share

    @cached_property
    def receivers(self) -> tuple[np.ndarray, np.ndarray]:
        """(uids [M] that receive, where the transfers of each begin [M])."""
        uids, first = np.unique(self.target, return_index=True)
        return uids, first


NOBODY = Transfers.of([], [], [])


@dataclass(frozen=True, eq=False)
class Ways:
    """What the transfers of one set pass."""

    transfers: Transfers
    """Kept, so that their id stays theirs."""
    uses: np.ndarray
    """[F, 5] int: connections of bounded bandwidth; -1 for none."""
    latency: np.ndarray
    """[F] seconds from the end of the last byte to the arrival."""
    edges: np.ndarray
    """[F] int: the number of each pair of nodes, the same in all sets."""
    sharing: FairSharing
    """Of connections that other pairs of nodes may use, too."""

    @property
    def alone(self) -> np.ndarray:
        """[F] seconds that the bytes take when nothing else is under way."""
        return self.sharing.alone


class Network:
    """The connections of N nodes; a pure function of (config, seed, round)."""

    def __init__(
        self, config: LinksConfig, machine_of: Sequence[int], *, node_bytes_per_second: np.ndarray | None = None,
        seed: int = 1, base_dir: Path = Path(),
    ) -> None:
        """machine_of: the machine of each node. node_bytes_per_second: [N] what each node sends and receives, beside
        what the config says. Raises UsageError for uids or machines that are not there, DataError for a matrix that
        cannot be read."""
        self.config = config
        self.machine_of = np.array(machine_of)
        self.num_nodes, self._seed = len(machine_of), seed
        self._capacity: list[float] = []
        self._capacities = np.empty(0)
        self._names: list[str] = []
        self._by_pair: dict[tuple[str, int, int], int] = {}
        self._matrix = None if config.matrix is None else traces.matrix(base_dir / config.matrix)
        self._prepared: dict[int, Ways] = {}
        self._edge_numbers: dict[tuple[int, int], int] = {}
        self._alone_on = np.bincount(self.machine_of) == 1
        self._check()
        # An entry holds for both directions, unless another one names the pair the other way round.
        self._machines = {pair: each for each in config.machines for pair in _both(each.machines)}
        self._machines |= {each.machines: each for each in config.machines}
        self._edges = {pair: each for each in config.edges for pair in _both(each.nodes)}
        uplinks = {each.machine: each.mbit_per_second for each in config.uplinks}
        every = {m: uplinks.get(m, config.uplink_mbit_per_second) for m in np.unique(self.machine_of).tolist()}
        self._uplinks = {m: 1e6 / 8 * rate for m, rate in every.items() if rate is not None}
        self._of_node = np.full(self.num_nodes, np.inf)
        if config.node_mbit_per_second is not None:
            self._of_node[:] = 1e6 / 8 * config.node_mbit_per_second
        if node_bytes_per_second is not None:
            self._of_node = np.minimum(self._of_node, node_bytes_per_second)

    def _check(self) -> None:
        machines = int(self.machine_of.max()) + 1
        for what, number, count in (
            *(("links.machines", m, machines) for each in self.config.machines for m in each.machines),
            *(("links.edges", uid, self.num_nodes) for each in self.config.edges for uid in each.nodes),
            *(("links.uplinks", each.machine, machines) for each in self.config.uplinks),
        ):
            if not 0 <= number < count:
                raise UsageError(f"simulate.{what} must name numbers from 0 to {count - 1}, got {number}")

    @property
    def varies(self) -> bool:
        """Whether transfers differ by chance."""
        return self.config.jitter > 0

    def arrivals(self, transfers: Transfers, begins: np.ndarray, round: int, phase: int = 0) -> np.ndarray:
        """Returns when each transfer that begins at `begins` [F] has arrived [F]; of one that does not take place both
        are infinite."""
        ways = self.ways(transfers)
        ends = ways.sharing.ends(begins, self.factors(round, phase, begins.size))
        return transfers.ends(ends + ways.latency, np.isfinite(begins))

    def factors(self, round: int, phase: int, count: int) -> np.ndarray | None:
        """Returns by what chance multiplies the bytes of each transfer [count]; None where it has no part."""
        if not self.config.jitter:
            return None
        draws = rng.stream(self._seed, rng.GLOBAL, f"jitter of phase {phase}", round)
        return lognormal(draws, self.config.jitter, count)

    @property
    def capacity(self) -> np.ndarray:
        """[R] bytes per second of each connection that some `Ways` know."""
        if self._capacities.size < len(self._capacity):
            self._capacities = np.array(self._capacity)
        return self._capacities

    @property
    def num_edges(self) -> int:
        """Pairs of nodes that some `Ways` know."""
        return len(self._edge_numbers)

    def latency(self, source: int, target: int) -> float:
        """Returns the seconds from the last byte's departure to its arrival between two nodes."""
        return self._way(source, target)[1]

    def quiet_seconds(self, transfers: Transfers) -> float:
        """Returns how long the transfers take when they begin together, nothing else is under way, and chance has no
        part."""
        ways = self._prepare(transfers)
        return float((ways.sharing.ends(np.zeros(transfers.sizes.size)) + ways.latency).max(initial=0.0))

    def loads(self, transfers: Transfers) -> dict[str, tuple[float, float]]:
        """Returns the bytes that the transfers bring over each connection of bounded bandwidth, and the seconds that
        they keep it busy at least, by its name: "machine 0 -> machine 1"."""
        if not transfers.source.size:
            return {}
        uses = self.ways(transfers).uses
        found: dict[str, tuple[float, float]] = {}
        capacity = np.array(self._capacity)
        total = np.zeros(len(capacity))
        for column in range(uses.shape[1]):
            there = uses[:, column] >= 0
            total += np.bincount(uses[there, column], transfers.sizes[there], len(capacity))
        for index in np.flatnonzero(total):
            if np.isfinite(capacity[index]):
                found[self._names[index]] = (float(total[index]), float(total[index] / capacity[index]))
        return found

    def ways(self, transfers: Transfers) -> Ways:
        """Returns what transfers pass; the same object for the same ones, if there are not too many others."""
        known = self._prepared.get(id(transfers))
        if known is None:
            if len(self._prepared) >= 64:
                self._prepared.clear()
            known = self._prepared[id(transfers)] = self._prepare(transfers)
        return known

    def _prepare(self, transfers: Transfers) -> Ways:
        uses, latency, most, edges = [], [], [], []
        for i, j in zip(transfers.source.tolist(), transfers.target.tolist(), strict=True):
            way, seconds, rate = self._way(i, j)
            uses.append(way)
            latency.append(seconds)
            most.append(rate)
            edges.append(self._edge_numbers.setdefault((i, j), len(self._edge_numbers)))
        found, capacity = np.array(uses, int).reshape(-1, 5), self.capacity
        # The connection of two machines with one node each is as good as the edge's own.
        own = (self._alone_on[self.machine_of[transfers.source]] & self._alone_on[self.machine_of[transfers.target]])
        shared, rates = found.copy(), np.array(most)
        rates[own] = np.minimum(rates[own], np.append(capacity, np.inf)[found[own, 2]])
        shared[own, 2] = -1
        every = np.array(latency)
        if transfers.joining is not None:  # a collective call has those of its steps in its own seconds
            every = np.where(transfers.joining.joins < 0, every, 0.0) + transfers.joining.seconds
        sharing = FairSharing(shared, capacity, transfers.sizes, rates)
        return Ways(transfers, found, every, np.array(edges, int), sharing)

    def _way(self, source: int, target: int) -> tuple[list[int], float, float]:
        """Returns what a payload between two nodes passes: its shared resources, its latency, and the largest rate of
        its own connection."""
        config = self.config
        own, latency = np.inf, 0.0
        way = [self._resource("node {} ->", source, -1, self._of_node[source]),
               self._resource("-> node {}", target, -1, self._of_node[target])]  # fmt: skip
        a, b = int(self.machine_of[source]), int(self.machine_of[target])
        if (edge := self._edges.get((source, target))) is not None:
            own, latency = edge.bytes_per_second, edge.latency_seconds
        elif self._matrix is not None:
            places = len(self._matrix)
            own = 1e6 / 8 * self._matrix[source % places, target % places]
        if a == b:
            link = config.same_machine
            if edge is None:
                own, latency = min(own, link.bytes_per_second), latency + link.latency_seconds
        else:
            pair = self._machines.get((a, b), config.between_machines)
            latency += pair.latency_seconds if edge is None else 0.0
            way += [
                self._resource("machine {} -> machine {}", a, b, pair.bytes_per_second),
                self._resource("machine {} ->", a, -1, self._uplinks.get(a, np.inf)),
                self._resource("-> machine {}", b, -1, self._uplinks.get(b, np.inf)),
            ]
        return [*way, *[-1] * (5 - len(way))], latency, own * config.efficiency

    def _resource(self, name: str, a: int, b: int, bytes_per_second: float) -> int:
        """Returns the number of a resource, made when it is first asked for; -1 for one without a bound."""
        if not np.isfinite(bytes_per_second):
            return -1
        key = (name, a, b)
        if key not in self._by_pair:
            self._by_pair[key] = len(self._capacity)
            self._capacity.append(float(bytes_per_second) * self.config.efficiency)
            self._names.append(name.format(a, b))
        return self._by_pair[key]


def _both(pair: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    return pair, (pair[1], pair[0])
