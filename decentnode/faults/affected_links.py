"""Determines between which pairs of nodes faults affect messages with models."""

from __future__ import annotations

from collections.abc import Iterable

from decentnode.faults.vocabulary import PLANES, AnyFault, Break, Cut, HalfOpen, NetworkFault


class FaultyModelLinks:
    """Tells for a pair of nodes whether any fault affects models sent between them. The answer is the same on every
    node of a run, without communication."""

    def __init__(self, faults: Iterable[AnyFault]) -> None:
        """faults: of any kind; they need not be resolved."""
        distinct: dict[object, NetworkFault] = {}
        for fault in faults:
            if isinstance(fault, Cut):
                distinct[fault.sides] = fault
            elif isinstance(fault, NetworkFault.__args__) and fault.plane != "control":
                distinct[fault.source, fault.to] = fault
        self._faults = tuple(distinct.values())

    def __call__(self, a: int, b: int) -> bool:
        """Returns whether any fault affects models sent between these two nodes, in either direction."""
        return any(_affects(fault, a, b) or _affects(fault, b, a) for fault in self._faults)


def _affects(fault: NetworkFault, source: int, to: int) -> bool:
    if isinstance(fault, Cut):
        return fault.separates(source, to)
    if isinstance(fault, Break | HalfOpen):
        return (fault.source, fault.to) == (source, to)
    return fault.applies_to(source, to, PLANES.index("bulk"))
