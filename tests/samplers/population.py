"""Samplers of many nodes that exchange their views, in one process, without tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from decentnode.samplers.base import Sampler, Surroundings
from decentnode.samplers.cyclon import Cyclon, CyclonConfig
from decentnode.samplers.messages import shuffle_of, tables_of


class Population:
    """The samplers of nodes 0 .. n - 1. At the beginning each knows the nodes at some distances on a circle."""

    def __init__(
        self, num_nodes: int, config: CyclonConfig | None = None, kind: type[Cyclon] = Cyclon,
        profiles: np.ndarray | None = None, distances: Sequence[int] = (1, 2),
    ) -> None:
        self.config = config or CyclonConfig(name="cyclon")
        self.samplers: dict[int, Sampler] = {}
        self.undelivered = 0
        """Messages to nodes that are dead."""
        for uid in range(num_nodes):
            contacts = tuple((uid + k) % num_nodes for k in distances)
            elements = 0 if profiles is None else profiles.shape[1]
            sampler = kind(self.config, Surroundings(uid, num_nodes, contacts, 1, elements))
            if profiles is not None:
                sampler.profile = profiles[uid]
            self.samplers[uid] = sampler
        self.round = 0
        self.most_entries = 0
        """The largest number of entries in a message."""

    def kill(self, uids: Collection[int]) -> None:
        for uid in uids:
            del self.samplers[uid]

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            for uid, sampler in sorted(self.samplers.items()):
                for to, message in sampler.begin(self.round).items():
                    answer = self._deliver(uid, to, message)
                    if answer is not None:
                        assert self._deliver(to, uid, answer) is None
            self.round += 1

    def _deliver(self, source: int, to: int, message):  # type: ignore[no-untyped-def]
        if to not in self.samplers:
            self.undelivered += 1
            return None
        self.most_entries = max(self.most_entries, len(message.entries))
        receiver = self.samplers[to]
        tables = tables_of(message.entries, receiver.around.profile_elements)
        return receiver.receive(source, shuffle_of(receiver, tables, message.reply, message.near), self.round)

    def targets(self, rounds: int) -> dict[int, tuple[int, ...]]:
        """Returns the targets of every node in the next `rounds` rounds."""
        return {uid: tuple(to for r in range(rounds) for to in sampler.targets(self.round + r))
                for uid, sampler in self.samplers.items()}  # fmt: skip

    def in_degrees(self) -> np.ndarray:
        """Returns, for every node, how many others know it."""
        counts = dict.fromkeys(self.samplers, 0)
        for sampler in self.samplers.values():
            for uid in sampler.known():
                if uid in counts:
                    counts[uid] += 1
        return np.array(list(counts.values()))

    def dead_share(self) -> float:
        """Returns the share of dead nodes among those that living nodes know."""
        known = [uid for sampler in self.samplers.values() for uid in sampler.known()]
        return sum(uid not in self.samplers for uid in known) / len(known)


def connected(targets: dict[int, Sequence[int]]) -> bool:
    """Returns whether every node reaches every other along directed edges."""
    reversed_edges: dict[int, list[int]] = {uid: [] for uid in targets}
    for uid, others in targets.items():
        for other in others:
            if other in reversed_edges:
                reversed_edges[other].append(uid)
    return all(len(_reached(edges)) == len(targets) for edges in (targets, reversed_edges))


def _reached(edges: dict[int, Sequence[int]] | dict[int, list[int]]) -> set[int]:
    """Returns the nodes to which there is a path from the one with the lowest uid."""
    start = min(edges)
    seen, queue = {start}, deque([start])
    while queue:
        for other in edges[queue.popleft()]:
            if other in edges and other not in seen:
                seen.add(other)
                queue.append(other)
    return seen
