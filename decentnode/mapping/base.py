"""The contract of a mapping: uid <-> (machine, rank) <-> address."""

from __future__ import annotations

import abc
import functools
import re
from dataclasses import dataclass
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from decentnode.config.component import Component, Config


def checked_device(wanted: str) -> str:
    """Returns `wanted`. Raises ValueError unless it names a device."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", wanted):
        raise ValueError(f"must be auto, cpu, cuda or cuda:N, got {wanted!r}")
    return wanted


Device = Annotated[str, pydantic.AfterValidator(checked_device)]


class MappingConfig(Config):
    """Keys that every mapping has."""

    nodes_per_process: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    """How many nodes of a machine share a process, which steps them in turn: they need less memory and fewer threads,
    and the results are the same. auto: one process per core if a machine has more than 4 nodes per core, computes on
    CPUs and the model has at most 16 MiB; else one process per node."""


@dataclass(frozen=True)
class Place:
    """The machine, address, device and threads of one node."""

    uid: int
    machine: int
    rank: int
    host: str
    """Name or address that the other nodes connect to; IPv6 addresses without brackets."""
    port: int | None
    """First of the node's two TCP ports (control; bulk is port + 1). None: free ports, possible with one machine
    only."""
    device: str
    """auto, cpu, cuda or cuda:N."""
    bind: str
    """Address of the interface that the node listens on."""
    threads: int | None = None
    """Threads of the node, or None: cores / nodes of the machine."""
    behind_nat: bool = False
    """Whether no other machine can connect to it, so that relays forward what is sent to it."""


class Mapping(Component, abc.ABC):
    """Assigns nodes to machines; a pure function of its Config."""

    num_nodes: int
    num_machines: int

    @abc.abstractmethod
    def place(self, uid: int) -> Place:
        """Returns the place of a node. Raises MappingError if `uid` is not mapped."""

    @abc.abstractmethod
    def uid(self, machine: int, rank: int) -> int:
        """Returns the uid at a place. Raises MappingError if there is no such place."""

    def local(self, machine: int) -> tuple[int, ...]:
        """Returns the uids on one machine, ascending."""
        return self._by_machine.get(machine, ())

    @functools.cached_property
    def _by_machine(self) -> dict[int, tuple[int, ...]]:
        """The uids of each machine. Cached, because each of thousands of nodes looks its machine up."""
        found: dict[int, list[int]] = {}
        for uid in range(self.num_nodes):
            found.setdefault(self.place(uid).machine, []).append(uid)
        return {machine: tuple(uids) for machine, uids in found.items()}

    def nodes_by_machine(self) -> list[tuple[int, ...]]:
        """Returns the uids on every machine, ascending."""
        return [self.local(machine) for machine in range(self.num_machines)]

    def first_places(self) -> list[Place]:
        """Returns the place of the first node of every machine; whether a machine can be reached is checked there."""
        return [self.place(uids[0]) for uids in self.nodes_by_machine()]

    @abc.abstractmethod
    def find_machine(self, names: set[str]) -> int:
        """Returns the machine whose host is one of `names` (this host's names and addresses).

        Raises MappingError, with the hosts that were compared, if none or several match.
        """
