"""Time-varying graphs whose edges are a function of the round alone."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from decentnode import rng
from decentnode.config import component
from decentnode.errors import GraphError
from decentnode.graph.topology import Lists, NodesConfig, SeededConfig, Topology

Row = dict[int, float]


class GroupSchedule(Topology):
    """In each round the nodes are divided into groups, and every group takes its plain average."""

    own_weights = True

    def _groups(self, phase: int) -> list[list[int]]:
        """Returns disjoint groups; a node in no group stays alone."""
        raise NotImplementedError

    def _lists(self, phase: int) -> Lists:
        lists: list[tuple[int, ...]] = [()] * self.num_nodes
        for group in self._groups(phase):
            for uid in group:
                lists[uid] = tuple(sorted(j for j in group if j != uid))
        return lists

    def _row(self, uid: int, phase: int) -> Row:
        group = self.lists(phase)[uid]
        return {j: 1.0 / (len(group) + 1) for j in (uid, *group)}


def power_of_two(n: int, name: str) -> int:
    """Returns log2 n. Raises GraphError if n is not a power of two."""
    if n & (n - 1):
        raise GraphError(f"{name} needs a power of two, got {n} nodes; graph base_k_plus_1 works for every number")
    return n.bit_length() - 1


class OnePeerExponential(GroupSchedule):
    """Round t pairs i with i XOR 2^(t mod log2 n): the pairwise hypercube, exact after log2 n rounds."""

    config: NodesConfig

    def _set_up(self) -> None:
        self.num_nodes = self.config.nodes
        self.period = max(1, power_of_two(self.num_nodes, "one_peer_exponential"))

    def _groups(self, phase: int) -> list[list[int]]:
        return [[i, i ^ 1 << phase] for i in range(self.num_nodes) if i < i ^ 1 << phase < self.num_nodes]


class DirectedOnePeerExponential(Topology):
    """Round t sends from i to i + 2^(t mod log2 n) (Assran et al. 2019): exact over a period when n = 2^k."""

    config: NodesConfig

    directed = True
    own_weights = True

    def _set_up(self) -> None:
        self.num_nodes = self.config.nodes
        self.period = max(1, (self.num_nodes - 1).bit_length())

    def _lists(self, phase: int) -> Lists:
        n = self.num_nodes
        return [((i + (1 << phase)) % n,) if n > 1 else () for i in range(n)]

    def _row(self, uid: int, phase: int) -> Row:
        return {uid: 0.5, (uid - (1 << phase)) % self.num_nodes: 0.5} if self.num_nodes > 1 else {uid: 1.0}


class AlternatingRing(GroupSchedule):
    """Even rounds pair (0 1)(2 3)..., odd rounds (1 2)(3 4)...(n-1 0): a ring with one neighbor at a time."""

    config: NodesConfig

    def _set_up(self) -> None:
        n = self.num_nodes = self.config.nodes
        if n % 2 and n > 1:
            raise GraphError(f"alternating_ring needs an even number of nodes, got {n}; graph ring works for every "
                             "number")
        self.period = 2 if n > 2 else 1

    def _groups(self, phase: int) -> list[list[int]]:
        n = self.num_nodes
        return [[i, (i + 1) % n] for i in range(phase, n, 2)] if n > 1 else []


class AlternatingExponentialRingConfig(NodesConfig):
    nodes_per_machine: int = Field(ge=2)
    """Number of nodes on each machine; consecutive uids are on one machine. The number of machines must be a power of
    two."""


class AlternatingExponentialRing(GroupSchedule):
    """Decent-DP's AER: half of the machine pairs average over both machines while the other half averages within
    machines.

    Step i pairs machines j and j XOR 2^i; odd-numbered pairs go first, even-numbered ones in the next round.
    Exact after 2 log2 N rounds from round 0 for N machines (docs/explanation/graphs.rst, "What is exact when").
    """

    Config: ClassVar[type[component.Config]] = AlternatingExponentialRingConfig
    config: AlternatingExponentialRingConfig

    def _set_up(self) -> None:
        n, per_machine = self.config.nodes, self.config.nodes_per_machine
        self.num_nodes, self._per_machine = n, per_machine
        machines = n // per_machine
        if n % per_machine or machines < 2:
            raise GraphError(
                f"alternating_exponential_ring needs two or more machines of {per_machine} nodes, got {n} nodes; for "
                "one machine, use graph complete"
            )
        self._steps = power_of_two(machines, "alternating_exponential_ring (number of machines)")
        self.period = 2 * self._steps

    def _groups(self, phase: int) -> list[list[int]]:
        step, second = divmod(phase, 2)
        machines = self.num_nodes // self._per_machine
        pairs = [(j, j ^ 1 << step) for j in range(machines) if j < j ^ 1 << step]
        groups = []
        for number, (a, b) in enumerate(pairs):
            if number % 2 != second:
                groups.append(self._members(a) + self._members(b))
            else:
                groups += [self._members(a), self._members(b)]
        return groups

    def _members(self, machine: int) -> list[int]:
        return list(range(machine * self._per_machine, (machine + 1) * self._per_machine))


class RandomMatching(GroupSchedule):
    """A new random pairing in each round; if the number of nodes is odd, one node has no partner."""

    Config: ClassVar[type[component.Config]] = SeededConfig
    config: SeededConfig

    def _set_up(self) -> None:
        self.num_nodes = self.config.nodes
        self.period = None
        self._draw_seed = self.config.draw_seed(self.seed)

    def _groups(self, phase: int) -> list[list[int]]:
        order = rng.stream(self._draw_seed, rng.GLOBAL, "random matching", phase).permutation(self.num_nodes).tolist()
        return [order[i : i + 2] for i in range(0, self.num_nodes - 1, 2)]


class BaseConfig(NodesConfig):
    peers: int = Field(1, ge=1)
    """The k of the name: the largest number of neighbors of a node in one round. The graph averages exactly after one
    period; more neighbors make the period shorter."""


class Base(Topology):
    """Base-(k+1) graph (Takezawa et al. 2023, arXiv 2305.11420): exact averaging for every n with k peers per round."""

    Config: ClassVar[type[component.Config]] = BaseConfig
    config: BaseConfig
    own_weights = True

    def _set_up(self) -> None:
        self.num_nodes = self.config.nodes
        self._rounds = base_rounds(list(range(self.num_nodes)), self.config.peers + 1) or [[]]
        self.period = len(self._rounds)
        self._rows: list[list[Row]] = [_rows(self.num_nodes, edges) for edges in self._rounds]

    def _lists(self, phase: int) -> Lists:
        return [tuple(sorted(j for j in row if j != uid)) for uid, row in enumerate(self._rows[phase])]

    def _row(self, uid: int, phase: int) -> Row:
        return self._rows[phase][uid]


Weighted = list[tuple[int, int, float]]
"""The undirected edges of one round as (uid, uid, weight); the rest of each row is the node's own weight."""


def _rows(n: int, edges: Weighted) -> list[Row]:
    rows: list[Row] = [{} for _ in range(n)]
    for i, j, weight in edges:
        rows[i][j] = weight
        rows[j][i] = weight
    for uid, row in enumerate(rows):
        row[uid] = 1.0 - sum(row.values())
    return rows


def factors(n: int, largest: int) -> list[int] | None:
    """Returns the shortest list of factors of n that are at most `largest`; None if a prime factor is larger."""
    if n == 1:
        return []
    best: list[int] | None = None
    for first in range(min(largest, n), 1, -1):
        if n % first == 0:
            rest = factors(n // first, first)
            if rest is not None and (best is None or len(rest) + 1 < len(best)):
                best = [first, *rest]
    return best


def hyper_hypercube(nodes: list[int], base: int) -> list[Weighted]:
    """Returns rounds of complete groups of at most `base` nodes, exact if n has only factors up to `base` (algorithm
    1)."""
    sizes = factors(len(nodes), base)
    assert sizes is not None
    rounds, stride = [], 1
    for size in sizes:
        edges: Weighted = []
        for index, uid in enumerate(nodes):
            digit = index // stride % size
            edges += [(uid, nodes[index + step * stride], 1.0 / size) for step in range(1, size - digit)]
        rounds.append(edges)
        stride *= size
    return rounds


def base_rounds(nodes: list[int], base: int) -> list[Weighted]:
    """Returns the rounds of algorithm 3: groups average by algorithm 2, then a hyper-hypercube averages across the
    groups; the number of groups is the largest divisor of n whose prime factors are at most `base`. If algorithm 2
    alone takes no more rounds, returns its rounds."""
    n = len(nodes)
    if factors(n, base) is not None:
        return hyper_hypercube(nodes, base)
    smooth = max(d for d in range(1, n + 1) if n % d == 0 and factors(d, base) is not None)
    simple = simple_base_rounds(nodes, base)
    if smooth == 1:
        return simple
    size = n // smooth
    groups = [nodes[i * size : (i + 1) * size] for i in range(smooth)]
    inside = merge_parallel([simple_base_rounds(group, base) for group in groups])
    across = merge_parallel([hyper_hypercube([group[i] for group in groups], base) for i in range(size)])
    return min(simple, inside + across, key=len)


def simple_base_rounds(nodes: list[int], base: int) -> list[Weighted]:
    """Returns the rounds of algorithm 2: parts of size a (k+1)^p average inside, exchange with the largest part, and
    average again."""
    n = len(nodes)
    if factors(n, base) is not None:
        return hyper_hypercube(nodes, base)
    parts: list[tuple[list[int], int, int]] = []  # members, a, (k+1)^p
    left = nodes
    power = 1
    while power * base <= n:
        power *= base
    while left:
        while power > len(left):
            power //= base
        count = len(left) // power
        parts.append((left[: count * power], count, power))
        left = left[count * power :]
    inside = merge_parallel([hyper_hypercube(members, base) for members, _, _ in parts])
    return inside + _average_across_parts(parts, base)


def _average_across_parts(parts: list[tuple[list[int], int, int]], base: int) -> list[Weighted]:
    """Returns the rounds that bring parts, each of which already has its own mean on all its nodes, to the mean of all.

    Each node of the smaller parts is joined to one node in each of the a blocks of the first part, with weight |V_1| /
    (a n): then the mean of every block, and of the remaining parts together, is the common mean.
    """
    members, count, size = parts[0]
    rest = [uid for others, _, _ in parts[1:] for uid in others]
    if not rest:
        return []
    total = len(members) + len(rest)
    weight = len(members) / (count * total)
    blocks = [members[a * size : (a + 1) * size] for a in range(count)]
    edges: Weighted = [(uid, block[index], weight) for index, uid in enumerate(rest) for block in blocks]
    inside = [hyper_hypercube(block, base) for block in blocks]
    after = merge_parallel([*inside, _average_across_parts(parts[1:], base)])
    return [edges, *after]


def merge_parallel(sequences: list[list[Weighted]]) -> list[Weighted]:
    """Merges sequences of rounds over disjoint sets of nodes so that they run at the same time."""
    length = max(map(len, sequences), default=0)
    return [[edge for rounds in sequences if r < len(rounds) for edge in rounds[r]] for r in range(length)]
