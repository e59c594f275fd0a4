"""The compiled loops of advance.c: in one pass over memory they mix, take Adam's step and make the next snapshot.

They also hash what was sent, grain by grain (GRAIN_BYTES); such a hash is called a mark.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adam, AdamW, Optimizer

from decentnode import entropy, native

GRAIN_BYTES = 8192
"""The number of bytes that one mark is the hash of."""
MAX_ARRIVALS = 16
VECTORS = (16, 8)
"""Lengths of torch's vectors, in elements. Elements of a parameter that fill no vector are rounded differently."""
_SHIFT, _GRAINS_PER_THREAD = 4, 128

Rows = NDArray[np.void]
"""The constants and addresses of Adam's step for parameters that follow each other in memory, a row per parameter."""
ROW = np.dtype([
    ("size", "i8"), ("whole", "i8"), ("gradient", "u8"), ("first", "u8"), ("second", "u8"), ("lerp", "f4"),
    ("keep", "f4"), ("share", "f4"), ("step", "f4"), ("root", "f4"), ("eps", "f4"), ("decay", "f4"), ("shrink", "f4"),
    ("sign", "f4"), ("decays", "i4"),
])  # fmt: skip
_CONSTANTS = ("lerp", "keep", "share", "step", "root", "eps", "decay", "shrink", "sign", "decays")
Marks = NDArray[np.uint64]
_ENTRIES = ("exp_avg", "exp_avg_sq", "step")
"""The entries of Adam's state of a parameter."""


class _Mixing(ctypes.Structure):
    _fields_ = (
        ("sent", ctypes.c_void_p), ("arrived", ctypes.c_void_p * MAX_ARRIVALS), ("own", ctypes.c_float),
        ("less", ctypes.c_float), ("weights", ctypes.c_float * MAX_ARRIVALS), ("count", ctypes.c_int64),
    )  # fmt: skip


class Mixing:
    """The operation x <- own x + sum of weight * arrived, in the order given; it keeps what a script wrote into x."""

    def __init__(self, sent: Tensor, own: float, arrived: Sequence[tuple[Tensor, float]]) -> None:
        """sent, arrived: [n] float32 on a CPU, at most MAX_ARRIVALS; the caller keeps them alive as long as this."""
        self.c = _Mixing(sent=sent.data_ptr(), own=own, less=own - 1.0, count=len(arrived))
        for k, (tensor, weight) in enumerate(arrived):
            self.c.arrived[k], self.c.weights[k] = tensor.data_ptr(), weight


class CompiledLoops:
    """The compiled loops. Blocking; large parts are divided among as many threads as torch uses."""

    def __init__(self, library: ctypes.CDLL) -> None:
        keys = np.frombuffer(entropy.draw(GRAIN_BYTES + 8 * _SHIFT), np.uint64)
        self._keys, self._kept = ctypes.c_void_p(keys.ctypes.data), keys
        self._advance, self._snapshot, self._unchanged = library.advance, library.snapshot, library.unchanged
        self._advance.restype = self._snapshot.restype = None

    @staticmethod
    def grains(size_bytes: int) -> int:
        return -(-size_bytes // GRAIN_BYTES)

    def unchanged(self, x: Tensor, marks: Marks) -> bool:
        """Returns whether `x` [n] still has the hashes at the start of `marks`; wrong for one change in 2^64."""
        size = x.numel() * x.element_size()
        return bool(self._unchanged(ctypes.c_size_t(size), _address(x), self._keys, _array_address(marks)))

    def snapshot(self, x: Tensor, into: Tensor, copy: Tensor | None, marks: Marks) -> None:
        """Copies `x` [n] to `into` and `copy` [n], and writes its hashes to `marks` [grains or more, 2]."""
        size, per_grain = x.numel() * x.element_size(), GRAIN_BYTES // x.element_size()
        shares = self._shares(size)
        native.spread(self._snapshot, (
            (ctypes.c_size_t(min(size, b * GRAIN_BYTES) - a * GRAIN_BYTES), _address(x, a * per_grain),
             _address(into, a * per_grain), None if copy is None else _address(copy, a * per_grain), self._keys,
             _array_address(marks[a:]))
            for a, b in shares
        ), len(shares))  # fmt: skip

    def advance(
        self, x: Tensor, mixing: Mixing | None, rows: Rows | None, place: Tensor | None, marks: Marks
    ) -> None:
        """Mixes into `x` [n] float32, takes Adam's step, copies x to `place` [n] and hashes it; each step if given."""
        shares = self._shares(4 * x.numel())
        how = None if mixing is None else ctypes.byref(mixing.c)
        steps = None if rows is None else _array_address(rows)
        to = None if place is None else _address(place)
        native.spread(self._advance, (
            (ctypes.c_size_t(x.numel()), ctypes.c_size_t(a), ctypes.c_size_t(b), _address(x), how, steps, to,
             self._keys, _array_address(marks))
            for a, b in shares
        ), len(shares))  # fmt: skip

    def _shares(self, size: int) -> list[tuple[int, int]]:
        """Returns the grains [first, last) of each thread."""
        total = self.grains(size)
        return native.shares(total, min(torch.get_num_threads(), total // _GRAINS_PER_THREAD))


def _address(tensor: Tensor, element: int = 0) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr() + element * tensor.element_size())


def _array_address(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@functools.cache
def loops() -> CompiledLoops | None:
    """Returns the loops; None if they cannot be compiled. Compiles once per process, blocking."""
    library = native.compiled(Path(__file__).with_suffix(".c"))
    return None if library is None else CompiledLoops(library)


class AdamSteps:
    """Makes the loop's rows for steps of torch's fused Adam or AdamW, for parameters that are adjacent in memory.

    The loop gives bitwise torch's results, for float32 parameters on a CPU. Per parameter a step runs no Python code
    beyond iterators implemented in C: for 1,000 parameters these take 1 ms, where torch's `step` takes 4.
    """

    def __init__(self, params: Sequence[Parameter]) -> None:
        self.params = tuple(params)
        self._strides = [p.stride() for p in self.params]
        self._is_supported = all(p.dtype == torch.float32 and p.device.type == "cpu" for p in self.params)
        self._rows = np.zeros(len(self.params), ROW)
        sizes = self._rows["size"] = [p.numel() for p in self.params]
        lanes = vector_length() or 1
        self._rows["whole"] = [size - size % lanes for size in sizes]
        self._states: list[Any] = []
        """The optimizer's state of each parameter, whose tensors the rows point to; their `step` tensors are views of
        `_counts`."""
        self._addresses: list[list[int]] = []
        """[entry of `_ENTRIES`][parameter]: the address of the values when the rows were last pointed to them. A script
        may move them without making another tensor (`share_memory_`, `state["exp_avg"].data = ...`)."""
        self._counts = torch.empty(0)
        """[parameters] the number of steps taken, float32 as in torch."""
        self._lists: list[list[Tensor]] = []
        """The parameter list of each group; `_group` has the number of each parameter's group."""
        self._group = np.zeros(0)

    def take(self, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> Rows | None:
        """Counts one step and returns its rows. Returns None, having changed nothing, if torch has to take the step:
        with other settings, before there is a state, if a gradient is missing or has another layout or dtype.

        groups: the parameter groups, with these parameters alone. The rows are valid until the next call, and only
        while the gradients exist.
        """
        if not self._is_supported or type(optimizer) not in (Adam, AdamW):
            return None
        if not all(map(_are_settings_supported, groups)):
            return None
        if vector_length() is None or not self._assign_groups(groups):
            return None
        gradients: list[Any] = [p.grad for p in self.params]
        try:
            if [gradient.stride() for gradient in gradients] != self._strides:
                return None
            if set(map(operator.attrgetter("dtype"), gradients)) != {torch.float32}:  # see `Tensor.grad_dtype`
                return None
            self._rows["gradient"] = [gradient.data_ptr() for gradient in gradients]
        except (AttributeError, RuntimeError):  # a gradient is None, or its layout has no strides: torch handles both
            return None
        if not self._point_to(list(map(optimizer.state.get, self.params))):
            return None
        self._counts.add_(1)
        self._write_constants(groups, isinstance(optimizer, AdamW))
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers check whether a step was taken
        return self._rows

    def _assign_groups(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Notes which group each parameter is in; returns False if one is in none."""
        lists = [group["params"] for group in groups]
        if len(lists) != len(self._lists) or not all(map(operator.is_, lists, self._lists)):
            group_of = {p: number for number, params in enumerate(lists) for p in params}
            found = [group_of.get(p, -1) for p in self.params]
            if -1 in found:
                return False
            self._lists, self._group = lists, np.array(found, np.float64)
        return True

    def _write_constants(self, groups: Sequence[Mapping[str, Any]], decoupled: bool) -> None:
        """Writes the constants of each row; parameters of one group with equally many steps have the same ones."""
        # Steps are integers, exact in float64: group + number of groups * steps encodes both.
        keys, where = np.unique(self._group + float(len(groups)) * self._counts.numpy(), return_inverse=True)
        table = np.array([_constants(groups[int(key % len(groups))], key // len(groups), decoupled) for key in keys])
        for number, name in enumerate(_CONSTANTS):
            self._rows[name] = table[0, number] if len(keys) == 1 else table[where, number]

    def _point_to(self, states: list[Any]) -> bool:
        """Points the rows to the moments of these states. Returns False if there are none, or if their layout differs
        from the parameters'."""
        if not all(states):
            return False
        addresses = [[each[key].data_ptr() for each in states] for key in _ENTRIES]
        if addresses == self._addresses and all(map(operator.is_, states, self._states)):
            return True
        for p, state in zip(self.params, states, strict=True):
            moments = (state["exp_avg"], state["exp_avg_sq"])
            if any(m.dtype != p.dtype or m.device != p.device or m.stride() != p.stride() for m in moments):
                return False
        counts = [state["step"] for state in states]
        if any(count.dtype != torch.float32 or count.device.type != "cpu" for count in counts):
            return False
        self._counts = torch.stack(counts)  # one addition counts all steps; one call per parameter took a millisecond
        for state, count in zip(states, self._counts, strict=True):
            state["step"] = count
        self._states = states
        self._addresses = [[each[key].data_ptr() for each in states] for key in _ENTRIES]
        self._rows["first"], self._rows["second"], _ = self._addresses
        return True


def _are_settings_supported(group: Mapping[str, Any]) -> bool:
    numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    return (
        bool(group.get("fused")) and not group["amsgrad"] and not group["capturable"]
        and not group["differentiable"] and all(isinstance(number, float | int) for number in numbers)
        and 0.5 < group["betas"][0] < 1
    )  # fmt: skip


def _constants(group: Mapping[str, Any], step: float, decoupled: bool) -> tuple[Any, ...]:
    (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
    return (
        1 - beta1, beta2, 1 - beta2, -(lr / (1 - beta1**step)), math.sqrt(1 - beta2**step), group["eps"], decay,
        1 - lr * decay, -1.0 if group["maximize"] else 1.0, 0 if decay == 0 else 2 if decoupled else 1,
    )  # fmt: skip


@functools.cache
def vector_length() -> int | None:
    """Returns how many elements a vector of torch's fused Adam has on this processor, if the compiled loop gives
    bitwise its results, which is tried out; None otherwise."""
    return next((lanes for lanes in VECTORS if loops() is not None and _is_bitwise_exact(lanes)), None)


def _is_bitwise_exact(lanes: int) -> bool:
    compiled = loops()
    assert compiled is not None
    draw = torch.Generator("cpu").manual_seed(0)
    marks = np.zeros((1, 2), np.uint64)
    size = 64 * max(VECTORS) + 15
    for kind, decay, maximize in ((Adam, 0.0, False), (Adam, 0.1, True), (AdamW, 0.1, False)):
        start = torch.randn(size, generator=draw, dtype=torch.float32, device="cpu")  # whatever the default dtype is
        theirs, x = Parameter(start.clone()), start.clone()
        optimizer = kind([theirs], lr=0.01, weight_decay=decay, maximize=maximize, fused=True)
        moments = torch.zeros(2, size, dtype=torch.float32, device="cpu")
        for step in range(1, 9):
            draws = torch.randn(size, generator=draw, dtype=torch.float32, device="cpu")
            powers = torch.full_like(draws, 10.0) ** torch.randint(-9, 3, x.shape, generator=draw, device="cpu")
            theirs.grad = draws * powers
            optimizer.step()
            row = (size, size - size % lanes, theirs.grad.data_ptr(), moments[0].data_ptr(), moments[1].data_ptr(),
                   *_constants(optimizer.param_groups[0], step, kind is AdamW))  # fmt: skip
            compiled.advance(x, None, np.array([row], ROW), None, marks)
        state = optimizer.state[theirs]
        pairs = ((x, theirs), (moments[0], state["exp_avg"]), (moments[1], state["exp_avg_sq"]))
        if not all(torch.equal(mine, other) for mine, other in pairs):
            return False
    return True
