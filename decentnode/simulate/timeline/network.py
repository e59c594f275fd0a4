"""Which connections the transfers of a round use, and when they arrive."""

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

MESSAGE, RENDEZVOUS, BATCH = -3, -2, -1
"""How a transfer depends on others (`Dependencies.modes`)."""


@dataclass(frozen=True, eq=False)
class Dependencies:
    """How the transfers of one phase depend on each other, and what they cost apart from their bytes on the links."""

    modes: np.ndarray
    """[F] int. MESSAGE: a transfer begins when its sender is ready. RENDEZVOUS: when both ends are ready. BATCH:
    likewise, and it ends for its receiver when all transfers that the receiver takes part in, as sender or receiver,
    have ended. A number from 0 on identifies a collective call, whose transfers all begin when the last of its nodes is
    ready, and all end together."""
    seconds: np.ndarray
    """[F] seconds that a transfer takes apart from its bytes; for a collective call they include the latencies of its
    steps."""
    mixed: np.ndarray
    """[F] bytes of the transfer that the receiver mixes."""
    busy_share: np.ndarray
    """[F] share of the compute of both ends that a transfer takes away from local steps while it is in flight."""

    @cached_property
    def calls(self) -> list[np.ndarray]:
        """For every collective call, a mask of its transfers: bool [F]."""
        return [self.modes == call for call in np.unique(self.modes[self.modes >= 0])]

    def reordered(self, order: np.ndarray) -> Dependencies:
        """Returns the same with the transfers in another order."""
        return Dependencies(self.modes[order], self.seconds[order], self.mixed[order], self.busy_share[order])


@dataclass(frozen=True, eq=False)
class Transfers:
    """The payloads that nodes send to each other in one phase of a round, by ascending receiver."""

    source: np.ndarray
    """[F] uids."""
    target: np.ndarray
    """[F] uids, ascending."""
    sizes: np.ndarray
    """[F] bytes."""
    dependencies: Dependencies | None = None
    """None if every transfer is a message that leaves as soon as its sender has it."""

    @staticmethod
    def of(
        source: Sequence[int], target: Sequence[int], sizes: Sequence[float] | float, *,
        dependencies: Dependencies | None = None,
    ) -> Transfers:
        """Returns transfers given in any order, `dependencies` in the same order; a single size applies to all."""
        order = np.argsort(np.array(target, int), kind="stable")
        every = np.broadcast_to(np.array(sizes, float), (len(source),))
        return Transfers(np.array(source, int)[order], np.array(target, int)[order], every[order],
                         None if dependencies is None else dependencies.reordered(order))  # fmt: skip

    @property
    def mixed(self) -> np.ndarray:
        """[F] bytes of each transfer that the receiver mixes."""
        return self.sizes if self.dependencies is None else self.dependencies.mixed

    def begins(self, ready: np.ndarray) -> np.ndarray:
        """Returns when each transfer begins [F]. ready: [N] when each node has what it sends; minus infinity for nodes
        that take no part."""
        begins: np.ndarray = ready[self.source]
        if self.dependencies is None:
            return begins
        begins = np.where(self.dependencies.modes == MESSAGE, begins, np.maximum(begins, ready[self.target]))
        for call in self.dependencies.calls:
            begins[call] = begins[call].max()
        return begins

    def ends(self, arrived: np.ndarray, there: np.ndarray) -> np.ndarray:
        """Returns when each transfer is over for its receiver [F]. arrived: [F] when its own bytes have arrived,
        infinite if that is not known. there: bool [F], which transfers take place."""
        if self.dependencies is None:
            return arrived
        found = arrived.copy()
        if (batch := (self.dependencies.modes == BATCH) & there).any():
            last = np.full(int(max(self.source.max(), self.target.max())) + 1, -np.inf)
            for end in (self.source, self.target):
                np.maximum.at(last, end[batch], arrived[batch])
            found[batch] = last[self.target[batch]]
        for call in self.dependencies.calls:
            found[call & there] = arrived[call & there].max(initial=-np.inf)
        return found

    def waits_on(self, ready: np.ndarray) -> np.ndarray:
        """Returns for which node the receiver of each transfer waits [F]: the sender, or, in a collective call, the
        member that was ready last, unless that is the receiver itself."""
        if self.dependencies is None:
            return self.source
        found = self.source.copy()
        for call in self.dependencies.calls:
            uids = np.unique(np.append(self.source[call], self.target[call]))
            late = uids[np.argmax(ready[uids])]
            found[call & (self.target != late)] = late
        return found

    @cached_property
    def take_compute(self) -> bool:
        """Whether some transfers take compute from their ends."""
        return self.dependencies is not None and bool(self.dependencies.busy_share.any())

    def compute_taken(self, arrived: np.ndarray, there: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (until when transfers take some of each node's compute, minus infinity if none does; the share that
        they take), each [N]. arrived: [F], as `ends` returned it. there: as for `ends`."""
        until, share = np.full(num_nodes, -np.inf), np.zeros(num_nodes)
        if self.dependencies is not None:
            there = (self.dependencies.busy_share > 0) & there
            for end in (self.source, self.target):
                np.maximum.at(until, end[there], arrived[there])
                np.maximum.at(share, end[there], self.dependencies.busy_share[there])
        return until, share

    @cached_property
    def receivers(self) -> tuple[np.ndarray, np.ndarray]:
        """(uids that receive [M], index of the first transfer to each [M])."""
        uids, first = np.unique(self.target, return_index=True)
        return uids, first


NO_TRANSFERS = Transfers.of([], [], [])


@dataclass(frozen=True, eq=False)
class Routes:
    """The connections that a set of transfers uses."""

    transfers: Transfers
    """Kept, so that its id is not reused."""
    uses: np.ndarray
    """[F, 5] int: connections of limited bandwidth; -1 for none."""
    latency: np.ndarray
    """[F] seconds from when the last byte has been sent to its arrival."""
    edges: np.ndarray
    """[F] int: the number of each transfer's pair of nodes, the same in all sets."""
    sharing: FairSharing
    """The flows on connections that other pairs of nodes may use, too."""

    @property
    def alone(self) -> np.ndarray:
        """[F] seconds that the bytes take on idle connections."""
        return self.sharing.alone


class Network:
    """The connections of N nodes; a pure function of (config, seed, round)."""

    def __init__(
        self, config: LinksConfig, machine_of: Sequence[int], *, node_bytes_per_second: np.ndarray | None = None,
        seed: int = 1, base_dir: Path = Path(),
    ) -> None:
        """machine_of: the machine of each node. node_bytes_per_second: [N] limits of what each node sends and receives,
        in addition to those of the config. Raises UsageError for uids or machines that do not exist, DataError for a
        matrix that cannot be read."""
        self.config = config
        self.machine_of = np.array(machine_of)
        self.num_nodes, self._seed = len(machine_of), seed
        self._capacity: list[float] = []
        self._capacities = np.empty(0)
        self._names: list[str] = []
        self._resource_numbers: dict[tuple[str, int, int], int] = {}
        self._matrix = None if config.matrix is None else traces.matrix(base_dir / config.matrix)
        self._routes_by_id: dict[int, Routes] = {}
        self._edge_numbers: dict[tuple[int, int], int] = {}
        self._has_own_machine = np.bincount(self.machine_of) == 1
        self._check()
        # An entry applies to both directions, unless another entry names the pair in reverse order.
        self._machines = {pair: each for each in config.machines for pair in _both_directions(each.machines)}
        self._machines |= {each.machines: each for each in config.machines}
        self._edge_links = {pair: each for each in config.edges for pair in _both_directions(each.nodes)}
        uplinks = {each.machine: each.mbit_per_second for each in config.uplinks}
        every = {m: uplinks.get(m, config.uplink_mbit_per_second) for m in np.unique(self.machine_of).tolist()}
        self._uplinks = {m: 1e6 / 8 * rate for m, rate in every.items() if rate is not None}
        self._node_rates = np.full(self.num_nodes, np.inf)
        if config.node_mbit_per_second is not None:
            self._node_rates[:] = 1e6 / 8 * config.node_mbit_per_second
        if node_bytes_per_second is not None:
            self._node_rates = np.minimum(self._node_rates, node_bytes_per_second)

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
        """Whether transfers vary randomly."""
        return self.config.jitter > 0

    def arrivals(self, transfers: Transfers, begins: np.ndarray, round: int, phase: int = 0) -> np.ndarray:
        """Returns when each transfer that begins at `begins` [F] has arrived [F]; both are infinite for one that does
        not take place."""
        routes = self.routes(transfers)
        ends = routes.sharing.ends(begins, self.factors(round, phase, begins.size))
        return transfers.ends(ends + routes.latency, np.isfinite(begins))

    def factors(self, round: int, phase: int, count: int) -> np.ndarray | None:
        """Returns the random factors by which the bytes of each transfer are multiplied [count]; None without
        jitter."""
        if not self.config.jitter:
            return None
        draws = rng.stream(self._seed, rng.GLOBAL, f"jitter of phase {phase}", round)
        return lognormal(draws, self.config.jitter, count)

    @property
    def capacity(self) -> np.ndarray:
        """[R] bytes per second of each connection that occurs in some `Routes`."""
        if self._capacities.size < len(self._capacity):
            self._capacities = np.array(self._capacity)
        return self._capacities

    @property
    def num_edges(self) -> int:
        """Number of pairs of nodes that occur in some `Routes`."""
        return len(self._edge_numbers)

    def latency(self, source: int, target: int) -> float:
        """Returns the seconds between the departure and the arrival of the last byte between two nodes."""
        return self._route(source, target)[1]

    def idle_seconds(self, transfers: Transfers) -> float:
        """Returns how long the transfers take if they begin together on idle connections, without jitter."""
        routes = self._prepare(transfers)
        return float((routes.sharing.ends(np.zeros(transfers.sizes.size)) + routes.latency).max(initial=0.0))

    def loads(self, transfers: Transfers) -> dict[str, tuple[float, float]]:
        """Returns the bytes that the transfers send over each connection of limited bandwidth, and the least number of
        seconds for which they keep it busy, by its name: "machine 0 -> machine 1"."""
        if not transfers.source.size:
            return {}
        uses = self.routes(transfers).uses
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

    def routes(self, transfers: Transfers) -> Routes:
        """Returns the connections that transfers use; cached by the id of `transfers`."""
        known = self._routes_by_id.get(id(transfers))
        if known is None:
            if len(self._routes_by_id) >= 64:
                self._routes_by_id.clear()
            known = self._routes_by_id[id(transfers)] = self._prepare(transfers)
        return known

    def _prepare(self, transfers: Transfers) -> Routes:
        uses, latency, most, edges = [], [], [], []
        for i, j in zip(transfers.source.tolist(), transfers.target.tolist(), strict=True):
            way, seconds, rate = self._route(i, j)
            uses.append(way)
            latency.append(seconds)
            most.append(rate)
            edges.append(self._edge_numbers.setdefault((i, j), len(self._edge_numbers)))
        found, capacity = np.array(uses, int).reshape(-1, 5), self.capacity
        # The connection of two machines with one node each belongs to their edge alone.
        from_own, to_own = (self._has_own_machine[self.machine_of[end]] for end in (transfers.source, transfers.target))
        own = from_own & to_own
        shared, rates = found.copy(), np.array(most)
        rates[own] = np.minimum(rates[own], np.append(capacity, np.inf)[found[own, 2]])
        shared[own, 2] = -1
        every = np.array(latency)
        if transfers.dependencies is not None:  # the seconds of a collective call include its latencies
            every = np.where(transfers.dependencies.modes < 0, every, 0.0) + transfers.dependencies.seconds
        sharing = FairSharing(shared, capacity, transfers.sizes, rates)
        return Routes(transfers, found, every, np.array(edges, int), sharing)

    def _route(self, source: int, target: int) -> tuple[list[int], float, float]:
        """Returns what a payload between two nodes uses: its shared resources, its latency, and the largest rate of its
        own connection."""
        config = self.config
        own, latency = np.inf, 0.0
        resources = [self._resource("node {} ->", source, -1, self._node_rates[source]),
                     self._resource("-> node {}", target, -1, self._node_rates[target])]  # fmt: skip
        a, b = int(self.machine_of[source]), int(self.machine_of[target])
        if (edge := self._edge_links.get((source, target))) is not None:
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
            resources += [
                self._resource("machine {} -> machine {}", a, b, pair.bytes_per_second),
                self._resource("machine {} ->", a, -1, self._uplinks.get(a, np.inf)),
                self._resource("-> machine {}", b, -1, self._uplinks.get(b, np.inf)),
            ]
        return [*resources, *[-1] * (5 - len(resources))], latency, own * config.efficiency

    def _resource(self, name: str, a: int, b: int, bytes_per_second: float) -> int:
        """Returns the number of a resource, which is created at first use; -1 for one without a limit."""
        if not np.isfinite(bytes_per_second):
            return -1
        key = (name, a, b)
        if key not in self._resource_numbers:
            self._resource_numbers[key] = len(self._capacity)
            self._capacity.append(float(bytes_per_second) * self.config.efficiency)
            self._names.append(name.format(a, b))
        return self._resource_numbers[key]


def _both_directions(pair: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    return pair, (pair[1], pair[0])
