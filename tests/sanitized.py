"""python tests/sanitized.py FOLDER SEED TRIALS: tests the C loops that were compiled into FOLDER with sanitizers.

Every buffer is allocated by malloc with exactly its size, so that each access beyond it is detected; it may start at
any offset. Results are compared with float64. torch is not imported, as its libraries are not built with sanitizers.
"""

from __future__ import annotations

import ctypes
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

SIZES = [0, 1, 2, 7, 8, 9, 31, 63, 64, 65, 255, 2047, 2048, 2049, 4095, 4097, 6143, 8193, 20000]
BYTES = [0, 1, 3, 7, 8, 9, 31, 33, 65, 8191, 8192, 8193, 16384, 20001]
OFFSETS = [0, 4, 8, 12, 28, 32, 36, 60, 64]
GRAIN, KEYS, VECTOR, MOST = 8192, 1028, 8, 16
CONSTANTS = ("lerp", "keep", "share", "step", "root", "eps", "decay", "shrink", "sign")
ROW = np.dtype([("size", "i8"), ("whole", "i8"), ("gradient", "u8"), ("first", "u8"), ("second", "u8"),
                *((name, "f4") for name in CONSTANTS), ("decays", "i4")])  # fmt: skip
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]


class Buffer:
    """A copy of an array in malloc'ed memory of its own."""

    def __init__(self, values: Any, offset: int | None = None) -> None:
        array = np.ascontiguousarray(values)
        offset = random.choice(OFFSETS) if offset is None else offset
        self._begin, self._like = libc.malloc(array.nbytes + offset), array
        self.address = ctypes.c_void_p(self._begin + offset)
        self.put(array)

    def put(self, array: Any) -> None:
        ctypes.memmove(self.address, array.ctypes.data, array.nbytes)

    @property
    def values(self) -> Any:
        found = np.frombuffer(ctypes.string_at(self.address, self._like.nbytes), self._like.dtype)
        return found.reshape(self._like.shape)

    def __del__(self) -> None:
        libc.free(self._begin)


class _Mixing(ctypes.Structure):
    _fields_ = (("sent", ctypes.c_void_p), ("arrived", ctypes.c_void_p * MOST), ("own", ctypes.c_float),
                ("less", ctypes.c_float), ("weights", ctypes.c_float * MOST), ("count", ctypes.c_int64))  # fmt: skip


class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("flows", "each", "resources", "sets", "exact_flows")),
        *((name, ctypes.c_double) for name in ("coarse", "equal", "until", "later")),
        *((name, ctypes.c_void_p) for name in ("uses", "capacity", "most", "begin", "first", "alive", "left", "ends",
                                               "clock")),
        ("bound", ctypes.c_double),
    )  # fmt: skip


def draw_normal(*shape: int) -> Any:
    return draw.normal(size=shape).astype(np.float32)


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=3e-3, atol=3e-3)


def size_t(value: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(value)


def weighted_sum(loops: ctypes.CDLL) -> None:
    n, count = random.choice(SIZES), random.choice([0, 1, 2, 3, 4, 5, 8, 9])
    x, arrivals, weights = draw_normal(n), draw_normal(count, n), draw_normal(count)
    own, held, model = 0.3, [Buffer(each) for each in arrivals], Buffer(x)
    out = random.choice([model, Buffer(np.full(n, np.nan, np.float32))])
    addresses, factors = Buffer(np.array([each.address.value for each in held], np.uintp), 0), Buffer(weights)
    loops.weighted_sum(size_t(n), out.address, model.address, ctypes.c_float(own), size_t(count), addresses.address,
                       factors.address)  # fmt: skip
    assert_close(out.values, own * x.astype(np.float64) + weights.astype(np.float64) @ arrivals)


def weighted_rows(loops: ctypes.CDLL) -> None:
    rows, width = random.choice([1, 2, 5, 9]), random.choice([0, 1, 63, 64, 65, 700])
    x, own = draw_normal(rows, width), draw_normal(rows)
    sources = [sorted(random.sample(range(rows), random.randint(0, rows))) for _ in range(rows)]
    weights = [draw_normal(len(each)) for each in sources]
    starts = np.cumsum([0, *map(len, sources)]).astype(np.uintp)
    joined = np.array([source for each in sources for source in each], np.uintp)
    flat = [Buffer(own), Buffer(starts, 0), Buffer(joined, 0), Buffer(np.concatenate(weights))]
    model, out, cut = Buffer(x), Buffer(np.full_like(x, np.nan)), random.randint(0, width)
    for start, stop in ((0, cut), (cut, width)):
        loops.weighted_rows(*map(size_t, (rows, width, start, stop, random.choice([16, 64, 4096]))), out.address,
                            model.address, *(each.address for each in flat))  # fmt: skip
    matrix = np.diag(own.astype(np.float64))
    for row, (theirs, factors) in enumerate(zip(sources, weights, strict=True)):
        for source, factor in zip(theirs, factors, strict=True):
            matrix[row, source] += factor
    assert_close(out.values, matrix @ x)


def accum_adam(loops: ctypes.CDLL) -> None:
    n, last = random.choice(SIZES), random.random() < 0.5
    given = [draw_normal(n), draw_normal(n), draw_normal(n), np.abs(draw_normal(n)), draw_normal(n)]
    constants = np.array([random.choice([-1, 1]), 0.1, 0.99, 0.1, 0.999, 0.001, 0.01, 1.1, 1e-8, 0.25], np.float32)
    held, kept = [Buffer(each) for each in given], Buffer(constants)
    (loops.last if last else loops.inside)(size_t(n), *(each.address for each in held), kept.address)
    x, g, m, v, total = (each.astype(np.float64) for each in given)
    sign, l2, shrink, new1, keep2, new2, step, root, eps, share = constants.astype(np.float64)
    g = sign * g + l2 * x
    x = shrink * x - step * (m + new1 * (g - m)) / (root * np.sqrt(keep2 * v + new2 * g * g) + eps)
    total = total + share * g
    if last:
        m, v, total = m + new1 * (total - m), keep2 * v + new2 * total * total, 0 * total
    for found, expected in zip(held, (x, given[1], m, v, total), strict=True):
        assert_close(found.values, expected)


def snapshot(loops: ctypes.CDLL) -> None:
    size = random.choice(BYTES)
    given = draw.integers(0, 256, size).astype(np.uint8)
    x, into, second = (Buffer(each) for each in (given, 0 * given, 0 * given))
    keys, marks = Buffer(draw.integers(0, 2**63, KEYS), 0), Buffer(np.zeros((-(-size // GRAIN), 2), np.uint64), 0)
    both = random.random() < 0.5
    loops.snapshot(size_t(size), x.address, into.address, second.address if both else None, keys.address, marks.address)
    assert (into.values == given).all() and (not both or (second.values == given).all())
    arguments = (size_t(size), x.address, keys.address, marks.address)
    assert loops.unchanged(*arguments) == 1
    if size:
        given[random.randrange(size)] ^= 1
        x.put(given)
        assert loops.unchanged(*arguments) == 0


def advance(loops: ctypes.CDLL) -> None:
    n, count, decays = random.choice(SIZES[1:]), random.choice([1, 2, MOST]), random.choice([0, 1, 2])
    grains = -(-4 * n // GRAIN)
    x, arrivals = draw_normal(n), draw_normal(count, n)
    model, sent, place, scratch = Buffer(x), Buffer(x), Buffer(0 * x), Buffer(0 * x)
    keys, marks = Buffer(draw.integers(0, 2**63, KEYS), 0), Buffer(np.zeros((grains, 2), np.uint64), 0)
    loops.snapshot(size_t(4 * n), model.address, scratch.address, None, keys.address, marks.address)
    written = random.choice([0, 1])
    model.put(x + np.float32(written))
    held = [Buffer(each) for each in arrivals]
    mixing = _Mixing(sent=sent.address, own=0.5, less=-0.5, count=count)
    for k, each in enumerate(held):
        mixing.arrived[k], mixing.weights[k] = each.address.value, 0.5 / count
    expected = 0.5 * x.astype(np.float64) + 0.5 * arrivals.astype(np.float64).mean(0) + written
    cuts = sorted(random.choices(range(n + 1), k=random.randint(0, 4)))
    rows, states, at = np.zeros(len(cuts) + 1, ROW), [], 0
    for row, size in enumerate(np.diff([0, *cuts, n]).tolist()):
        state = [Buffer(each) for each in (draw_normal(size), draw_normal(size), np.abs(draw_normal(size)))]
        states.append(state)
        rows[row] = (size, size - size % VECTOR, *(each.address.value for each in state), 0.1, 0.999, 0.001, -0.01,
                         0.9, 1e-8, 0.1, 0.99, 1.0, decays)  # fmt: skip
        w = expected[at : at + size]
        g = state[0].values.astype(np.float64) + (0.1 * w if decays == 1 else 0)
        m, v = state[1].values + 0.1 * (g - state[1].values), 0.999 * state[2].values + 0.001 * g * g
        expected[at : at + size] = w * (0.99 if decays == 2 else 1) - 0.01 * m / (np.sqrt(v) / 0.9 + 1e-8)
        at += size
    table, cut = Buffer(rows.view(np.uint8), 0), random.randint(0, grains)
    for start, stop in ((0, cut), (cut, grains)):
        if start < stop:
            loops.advance(size_t(n), size_t(start), size_t(stop), model.address, ctypes.byref(mixing), table.address,
                          place.address, keys.address, marks.address)  # fmt: skip
    assert_close(model.values, expected)
    assert (place.values == model.values).all()


def follow(loops: ctypes.CDLL) -> None:
    flows, each, resources = random.choice(SIZES[1:11]), random.randint(0, 3), random.randint(1, 40)
    sets = random.randint(1, min(flows, 4))
    numbers = {"flows": flows, "each": each, "resources": resources + 1, "sets": sets,
               "exact_flows": random.choice([4, 1000]), "coarse": 0.125, "equal": 1e-9,
               "until": random.choice([0.0, 1.0, np.inf]), "later": np.inf}  # fmt: skip
    uses, label = draw.integers(0, resources + 1, (flows, each)), np.sort(draw.integers(0, sets, flows))
    label[:sets] = np.arange(sets)  # no set is empty
    label = np.sort(label)
    work, begin = draw.uniform(0, 2, flows), draw.choice([0.0, 0.5], flows)
    capacity, most = np.append(draw.uniform(1, 4, resources), np.inf), draw.choice([0.5, np.inf], flows)
    arrays = {"uses": uses, "capacity": capacity, "most": most, "begin": begin,
              "first": np.searchsorted(label, np.arange(sets + 1)), "alive": np.arange(flows), "left": work,
              "ends": np.full(flows, np.inf), "clock": np.zeros(sets)}  # fmt: skip
    held = {name: Buffer(values, 8 * random.randint(0, 3)) for name, values in arrays.items()}
    problem = _Problem(**numbers, **{name: buffer.address for name, buffer in held.items()})
    assert not loops.follow(ctypes.byref(problem))
    ends = held["ends"].values
    left = held["left"].values
    assert (np.isfinite(ends) | (numbers["until"] < np.inf)).all() and ((left == 0) | np.isinf(ends)).all()
    assert (ends * (1 + 1e-6) >= begin + work / np.minimum(most, capacity[uses].min(1, initial=np.inf))).all()
    assert not loops.rates(ctypes.byref(problem))
    rates = held["ends"].values
    load = np.bincount(uses.ravel(), np.repeat(np.where(np.isfinite(rates), rates, 0), each), resources + 1)
    assert (load <= capacity * (1 + 1e-6)).all() and (rates <= most).all() and (rates > 0).all()


def join(loops: ctypes.CDLL) -> None:
    count, edges = random.choice(SIZES[1:11]), random.choice(SIZES[:11])
    a, b = draw.integers(0, count, edges), draw.integers(0, count, edges)
    held = [Buffer(a, 0), Buffer(b, 0), Buffer(np.full(count, -1), 0)]
    loops.join(size_t(count), size_t(edges), *(each.address for each in held))
    lowest, before = np.arange(count), np.full(count, -1)
    while (lowest != before).any():
        before = lowest.copy()
        np.minimum.at(lowest, a, lowest[b])
        np.minimum.at(lowest, b, lowest[a])
    assert (held[2].values == lowest).all()


CHECKS = {"weighted_sum": [weighted_sum, weighted_rows], "accum_adam": [accum_adam], "advance": [snapshot, advance],
          "fluid": [follow, join]}  # fmt: skip

if __name__ == "__main__":
    seed, trials = int(sys.argv[2]), int(sys.argv[3])
    draw = np.random.default_rng(seed)
    random.seed(seed)
    for library, checks in CHECKS.items():
        loops = ctypes.CDLL(str(Path(sys.argv[1]) / f"{library}.so"))
        for check in checks:
            for _ in range(trials):
                check(loops)
            print(check.__name__)
