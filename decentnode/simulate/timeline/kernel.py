"""Calls the C implementation of the fluid simulation, compiled at first use if there is a compiler. Its results are
bit-identical to those of the NumPy implementation."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np

from decentnode import native
from decentnode.simulate.timeline.fair import EQUAL


class RateRules(NamedTuple):
    """When rates are computed anew: EXACT_FLOWS and COARSE of `fluid`."""

    exact_flows: int
    coarse: float


class _Problem(ctypes.Structure):
    """Mirrors `struct problem` of fluid.c."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("flows", "each", "resources", "sets", "exact_flows")),
        *((name, ctypes.c_double) for name in ("coarse", "equal", "until", "later")),
        *((name, ctypes.c_void_p) for name in ("uses", "capacity", "most", "begin", "first", "alive", "left", "ends",
                                               "clock")),
        ("bound", ctypes.c_double),
    )  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the compiled library; None if there is no compiler, or it fails. Blocking, once in a process."""
    loaded = native.compiled(Path(__file__).with_name("fluid.c"))
    if loaded is not None:
        for function in (loaded.follow, loaded.rates):
            function.argtypes, function.restype = [ctypes.POINTER(_Problem)], ctypes.c_int
        loaded.join.argtypes, loaded.join.restype = [ctypes.c_size_t] * 2 + [ctypes.c_void_p] * 3, None
    return loaded


def fair_rates(uses: np.ndarray, capacity: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Returns the same as `fair.fair_rates`."""
    found = np.empty(most.size)
    _call("rates", uses, capacity, {"most": most, "ends": found}, equal=EQUAL)
    return found


def simulate(
    uses: np.ndarray, capacity: np.ndarray, most: np.ndarray, begin: np.ndarray, label: np.ndarray, left: np.ndarray,
    clock: np.ndarray, *, until: float, later: float, rules: RateRules,
) -> tuple[np.ndarray, float]:  # fmt: skip
    """Simulates flows. Returns (when each ends [F], infinite if that is later; the time up to which they were
    simulated).

    uses: [F, K] int, -1 for none. capacity: [R]. most, begin, left: [F] float64. label: [F] int, the set of each flow.
    clock: [sets] float64. `left` and `clock` are changed in place.
    """
    ends = np.full(label.size, np.inf)
    problem = _call(
        "follow", uses, capacity, {
            "most": most, "begin": begin, "left": left, "ends": ends, "clock": clock,
            "first": np.append(0, np.cumsum(np.bincount(label, minlength=clock.size))).astype(np.uintp),
            "alive": np.argsort(label, kind="stable").astype(np.uintp),
        }, sets=clock.size, until=until, later=later, equal=EQUAL, **rules._asdict(),
    )  # fmt: skip
    return ends, float(problem.bound)


def join(count: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns for each of `count` vertices the lowest vertex of its connected component, with edges between `a` and
    `b`."""
    loaded = library()
    assert loaded is not None
    lowest = np.empty(count, np.int64)
    a, b = np.ascontiguousarray(a, np.int64), np.ascontiguousarray(b, np.int64)
    loaded.join(count, a.size, a.ctypes.data, b.ctypes.data, lowest.ctypes.data)
    return lowest


def _call(
    name: str, uses: np.ndarray, capacity: np.ndarray, arrays: dict[str, np.ndarray], **numbers: float
) -> _Problem:  # fmt: skip
    """Calls a function of the library. Raises MemoryError."""
    arrays["uses"] = np.where(uses < 0, capacity.size, uses).astype(np.int64)
    arrays["capacity"] = np.append(capacity, np.inf)
    kept = {key: np.ascontiguousarray(each) for key, each in arrays.items()}
    assert all(kept[key] is arrays[key] for key in ("left", "ends", "clock") if key in kept), "changed in place"
    addresses = {key: each.ctypes.data for key, each in kept.items()}
    problem = _Problem(flows=len(uses), each=uses.shape[1], resources=capacity.size + 1, **addresses, **numbers)
    if getattr(library(), name)(problem):
        raise MemoryError(f"no memory for {len(uses)} transfers")
    return problem
