"""Between which nodes faults strike messages with models."""

from __future__ import annotations

from collections.abc import Iterable

from decentnode.faults.vocabulary import PLANES, AnyFault, Break, Cut, HalfOpen, OnLinks


class StruckModels:
    """The same answer on every node of a run, without a message."""

    def __init__(self, faults: Iterable[AnyFault]) -> None:
        """faults: of any kind, also before they are resolved."""
        alike: dict[object, OnLinks] = {}
        for fault in faults:
            if isinstance(fault, Cut):
                alike[fault.sides] = fault
            elif isinstance(fault, OnLinks.__args__) and fault.plane != "control":
                alike[fault.source, fault.to] = fault
        self._faults = tuple(alike.values())

    def __call__(self, a: int, b: int) -> bool:
        """Whether any fault strikes models between these two, in either direction."""
        return any(_strikes(fault, a, b) or _strikes(fault, b, a) for fault in self._faults)


def _strikes(fault: OnLinks, source: int, to: int) -> bool:
    if isinstance(fault, Cut):
        return fault.severs(source, to)
    if isinstance(fault, Break | HalfOpen):
        return (fault.source, fault.to) == (source, to)
    return fault.is_about(source, to, PLANES.index("bulk"))
