"""The compiled loops: marks of changes, mixing, steps with the bits of torch's Adam, and the compiled file's safety."""

from __future__ import annotations

import copy
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW

from decentnode import native
from decentnode.parallel.buckets import advance
from decentnode.parallel.buckets.advance import GRAIN_BYTES, AdamSteps, CompiledLoops, Mixing, loops, vector_length

needs_loops = pytest.mark.skipif(loops() is None, reason="no C compiler")
needs_exact = pytest.mark.skipif(vector_length() is None, reason="torch's fused Adam rounds otherwise here")


def compiled_loops() -> CompiledLoops:
    found = loops()
    assert found is not None
    return found


def empty_marks(x: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.zeros((CompiledLoops.grains(x.numel() * x.element_size()), 2), np.uint64)


@needs_exact
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("default_dtype")
def test_the_trial_run_is_in_float32_whatever_the_default_dtype_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a default of bfloat16, the loop wrote past the end of the trial's tensors."""
    dtypes = []
    run = CompiledLoops.advance

    def check_dtype(self: CompiledLoops, x: torch.Tensor, *rest: Any) -> None:
        dtypes.append(x.dtype)
        assert x.dtype == torch.float32
        run(self, x, *rest)

    monkeypatch.setattr(CompiledLoops, "advance", check_dtype)
    assert advance.vector_length.__wrapped__() == vector_length() and dtypes


@needs_loops
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("elements", [1, 7, 1000, 2048, 5003, 600_001])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_snapshot_copies_and_its_marks_tell_whether_the_tensor_changed(
    dtype: torch.dtype, elements: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x = torch.randn(elements).to(dtype)
    into, copy, marks = torch.zeros(2, elements, dtype=dtype)[1], torch.zeros_like(x), empty_marks(x)
    compiled_loops().snapshot(x, into, copy, marks)
    assert torch.equal(x, into) and torch.equal(x, copy) and compiled_loops().unchanged(x, marks)
    marks[-1, 0] += 1
    assert not compiled_loops().unchanged(x, marks)


@pytest.mark.slow
@needs_loops
@given(data=st.data(), elements=st.integers(1, 5000))
def test_marks_notice_every_changed_bit(data: st.DataObject, elements: int) -> None:
    x = np.random.default_rng(elements).integers(0, 256, elements, np.uint8)
    tensor, marks = torch.from_numpy(x), np.zeros((CompiledLoops.grains(elements), 2), np.uint64)
    compiled_loops().snapshot(tensor, torch.empty_like(tensor), None, marks)
    kept = x.copy()
    places = data.draw(st.lists(st.integers(0, elements - 1), min_size=1, max_size=8, unique=True))
    for place in places:
        x[place] ^= data.draw(st.integers(1, 255))
    assert not compiled_loops().unchanged(tensor, marks)
    x[:] = kept
    assert compiled_loops().unchanged(tensor, marks)


@needs_loops
def test_marks_notice_swapped_values_and_ones_that_become_zeros() -> None:
    """Simple sums of the words would miss these changes."""
    for a, b in ((torch.arange(2048.0), torch.arange(2048.0).flip(0)), (torch.ones(4096), torch.zeros(4096)),
                 (torch.tensor([1.0, 2.0] * 1024), torch.tensor([2.0, 1.0] * 1024))):  # fmt: skip
        marks = empty_marks(a)
        compiled_loops().snapshot(a, torch.empty_like(a), None, marks)
        assert not compiled_loops().unchanged(b, marks)


@needs_loops
@pytest.mark.parametrize("arrivals", [1, 2, 5, 16])
@pytest.mark.parametrize("elements", [5, 2048, 300_003])
@pytest.mark.parametrize("threads", [1, 4])
def test_mixing_has_the_bits_of_torchs_mul_and_add(
    arrivals: int, elements: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, sent, marks = torch.randn(elements), torch.empty(elements), empty_marks(torch.empty(elements))
    arrived = [(torch.randn(elements), 0.1 + 0.01 * k) for k in range(arrivals)]
    compiled_loops().snapshot(x, sent, None, marks)
    expected = x * 0.3
    for tensor, weight in arrived:
        expected.add_(tensor, alpha=weight)
    mixed = x.clone()
    compiled_loops().advance(mixed, Mixing(sent, 0.3, arrived), None, None, marks)
    assert torch.equal(mixed, expected)
    x[::7] += 1  # what a script writes after the snapshot is kept whole
    expected = x + (0.3 - 1.0) * sent + sum(weight * tensor for tensor, weight in arrived)
    compiled_loops().advance(x, Mixing(sent, 0.3, arrived), None, None, marks)
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)


def params_of(start: torch.Tensor, sizes: list[int]) -> list[Parameter]:
    """Returns parameters that are views of one flat tensor."""
    return [Parameter(piece) for piece in start.split(sizes)]


@needs_exact
@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize(("decay", "maximize"), [(0.0, False), (0.1, False), (0.05, True)])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_combined_pass_has_the_bits_of_mixing_and_torchs_adam_step(
    kind: type, decay: float, maximize: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [16, 4096, 1, 15, 160, 2049, 0, 31, 32, 700_001]
    total, draw = sum(sizes), torch.Generator().manual_seed(1)
    start = torch.randn(total, generator=draw)
    mine, theirs = start.clone(), start.clone()
    ours, torchs = params_of(mine, sizes), params_of(theirs, sizes)
    make = partial(kind, lr=0.01, weight_decay=decay, maximize=maximize, fused=True)
    a, b = make(ours), make(torchs)
    place, marks, steps = torch.empty(total), empty_marks(mine), AdamSteps(ours)
    for step in range(4):
        for p, q in zip(ours, torchs, strict=True):
            p.grad = torch.randn(p.shape, generator=draw)
            q.grad = p.grad.clone()
        arrived = torch.randn(total, generator=draw)
        theirs.mul_(0.75).add_(arrived, alpha=0.25)
        b.step()
        if step == 0:  # torch makes the optimizer's state
            assert steps.take(a, a.param_groups) is None
            mine.mul_(0.75).add_(arrived, alpha=0.25)
            a.step()
            compiled_loops().snapshot(mine, place, None, marks)
        else:
            rows = steps.take(a, a.param_groups)
            assert rows is not None
            with monkeypatch.context() as patched:
                patched.setattr(torch, "get_num_threads", lambda: threads)
                compiled_loops().advance(mine, Mixing(place, 0.75, [(arrived, 0.25)]), rows, place, marks)
        assert torch.equal(mine, theirs) and torch.equal(place, mine) and compiled_loops().unchanged(mine, marks)
        a.param_groups[0]["lr"] = b.param_groups[0]["lr"] = 0.02 / (step + 1)
    for p, q in zip(ours, torchs, strict=True):
        assert all(torch.equal(a.state[p][key], b.state[q][key]) for key in ("step", "exp_avg", "exp_avg_sq"))


@needs_exact
def test_optimizers_that_the_loop_does_not_support_are_left_to_torch() -> None:
    def is_taken(optimizer: Any, params: list[Parameter]) -> bool:
        """Takes a step, then returns whether the loop would take the next."""
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        before = [float(optimizer.state[p]["step"]) for p in params if "step" in optimizer.state[p]]
        rows = AdamSteps(params).take(optimizer, optimizer.param_groups)
        after = [float(optimizer.state[p]["step"]) for p in params if "step" in optimizer.state[p]]
        assert after == ([s + 1 for s in before] if rows is not None else before)
        return rows is not None

    def one_parameter(elements: int = 64) -> list[Parameter]:
        return [Parameter(torch.zeros(elements))]

    assert is_taken(Adam(p := one_parameter(), fused=True), p)
    for settings in ({"fused": False}, {"amsgrad": True, "fused": True}, {"betas": (0.4, 0.9), "fused": True},
                     {"lr": torch.tensor(0.1), "fused": True}):  # fmt: skip
        assert not is_taken(Adam(p := one_parameter(), **settings), p)  # type: ignore[arg-type]
    assert not is_taken(SGD(p := one_parameter(), lr=0.1), p)
    assert is_taken(Adam(p := one_parameter(61), fused=True), p)
    p = one_parameter()
    optimizer = Adam(p, fused=True)
    assert is_taken(optimizer, p)
    p[0].grad = None
    assert AdamSteps(p).take(optimizer, optimizer.param_groups) is None
    optimizer = Adam(p := [Parameter(torch.zeros(4, 16))], fused=True)
    assert is_taken(optimizer, p)
    p[0].grad = torch.ones(16, 4).t()
    assert AdamSteps(p).take(optimizer, optimizer.param_groups) is None
    if hasattr(p[0], "grad_dtype"):  # the loop would read past the end of a gradient of 16 bits
        p[0].grad, p[0].grad_dtype = None, torch.bfloat16
        p[0].grad = torch.ones(4, 16, dtype=torch.bfloat16)
        assert AdamSteps(p).take(optimizer, optimizer.param_groups) is None


@needs_exact
def test_groups_and_step_counts_that_differ_have_the_bits_of_torchs_adam_step() -> None:
    """With two learning rates, a parameter that gets gradients later, and states that a script loads, replaces
    or moves."""
    draw = torch.Generator().manual_seed(2)
    start = torch.randn(40, generator=draw)
    mine, theirs = start.clone(), start.clone()
    ours, torchs = params_of(mine, [7, 16, 17]), params_of(theirs, [7, 16, 17])
    a, b = (Adam([{"params": [p[2], p[0]], "lr": 0.1}, {"params": [p[1]], "weight_decay": 0.2}], fused=True)
            for p in (ours, torchs))  # fmt: skip
    steps, taken = AdamSteps(ours), 0
    for step in range(8):
        for p, q in zip(ours, torchs, strict=True):
            q.grad = None if step == 0 and p is ours[1] else torch.randn(p.shape, generator=draw)
            p.grad = None if q.grad is None else q.grad.clone()
        b.step()
        rows = steps.take(a, a.param_groups)
        taken += rows is not None
        if rows is None:
            a.step()
        else:
            compiled_loops().advance(mine, None, rows, None, empty_marks(mine))
        assert torch.equal(mine, theirs)
        if step == 3:
            a.load_state_dict(copy.deepcopy(b.state_dict()))
        if step == 5:
            for optimizer, params in ((a, ours), (b, torchs)):
                optimizer.state[params[2]]["exp_avg"] = torch.full((17,), 0.5)
        if step == 6:  # the same tensors, elsewhere in memory
            for state in a.state.values():
                state["exp_avg"].share_memory_()
                for key in ("exp_avg_sq", "step"):
                    state[key].data = state[key].clone()
    assert taken == 6, "torch takes the first step, and the one in which the second parameter has no state yet"
    assert [float(a.state[p]["step"]) for p in ours] == [8.0, 7.0, 8.0]
    assert all(torch.equal(a.state[p][key], b.state[q][key]) for key in ("exp_avg", "exp_avg_sq")
               for p, q in zip(ours, torchs, strict=True))  # fmt: skip


SOURCE = Path(advance.__file__).with_suffix(".c")


def compile_again() -> object:
    return native.compiled.__wrapped__(SOURCE)


def test_without_a_compiler_there_are_no_loops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "/bin/false")
    assert compile_again() is None
    monkeypatch.setattr(native.shutil, "which", lambda _: None)
    assert compile_again() is None


@needs_loops
@pytest.mark.slow
def test_the_compiled_file_is_cached_and_used_only_where_others_cannot_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls, real = [], native._compile
    monkeypatch.setattr(native, "_compile", lambda *args: (calls.append(args[-1]), real(*args)))
    assert compile_again() is not None and compile_again() is not None
    (kept,) = (tmp_path / "decentnode").iterdir()
    assert calls == [kept] and kept.stat().st_mode & 0o077 == 0
    kept.chmod(0o722)  # another user could have written it: it is compiled again
    assert compile_again() is not None and len(calls) == 2 and kept.stat().st_mode & 0o077 == 0
    (tmp_path / "decentnode").chmod(0o777)  # another user could replace the file: the folder is not used
    assert compile_again() is not None and len(calls) == 3 and calls[2].parent.parent != tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert compile_again() is not None and len(calls) == 4


assert GRAIN_BYTES % 64 == 0
