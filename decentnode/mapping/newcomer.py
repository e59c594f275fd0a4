"""Adds a node that is not in the mapping, and its place, to the mapping's nodes."""

from __future__ import annotations

from dataclasses import dataclass

from decentnode.errors import UsageError
from decentnode.mapping.base import Mapping, Place


@dataclass(frozen=True)
class Newcomer:
    """What a node that is not in the mapping was told when it was admitted, and options of its own command."""

    place: Place
    token: bytes
    """Proves that the uid was granted to this node."""
    seats: bytes
    """The other nodes that have joined (wire/membership/seats.py)."""
    samples_of: int | None = None
    """The node of the mapping whose training samples it uses; None if it has none, or private files."""


def check_samples_of(uid: int | None, mapping: Mapping) -> None:
    """Raises UsageError unless a newcomer can use the samples of this node."""
    if uid is not None and not 0 <= uid < mapping.num_nodes:
        raise UsageError(f"--samples-of must be a node of the mapping, below {mapping.num_nodes}, got {uid}")


class WithNewcomer(Mapping):
    """A mapping with one more place, for the process of that node alone; `num_nodes` does not count it."""

    def __init__(self, mapping: Mapping, place: Place) -> None:
        self._mapping, self._place = mapping, place
        self.num_nodes, self.num_machines = mapping.num_nodes, mapping.num_machines

    def place(self, uid: int) -> Place:
        return self._place if uid == self._place.uid else self._mapping.place(uid)

    def uid(self, machine: int, rank: int) -> int:
        own = self._place
        return own.uid if (machine, rank) == (own.machine, own.rank) else self._mapping.uid(machine, rank)

    def local(self, machine: int) -> tuple[int, ...]:
        return (self._place.uid,) if machine == self._place.machine else self._mapping.local(machine)

    def find_machine(self, names: set[str]) -> int:
        return self._mapping.find_machine(names)


def machine_of(uid: int, mapping: Mapping) -> int:
    """Returns the machine number of a node beyond the mapping: each is on a machine of its own."""
    return mapping.num_machines + uid - mapping.num_nodes
