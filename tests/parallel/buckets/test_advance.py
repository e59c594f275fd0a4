"""The compiled loops: marks, mixing, Adam's bits, and who may write what is loaded."""

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


def made() -> CompiledLoops:
    found = loops()
    assert found is not None
    return found


def marks_for(x: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.zeros((CompiledLoops.grains(x.numel() * x.element_size()), 2), np.uint64)


@needs_exact
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("default_dtype")
def test_the_trial_is_of_float32_whatever_a_script_has_as_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop wrote behind a trial of bfloat16."""
    seen = []
    run = CompiledLoops.advance

    def checked(self: CompiledLoops, x: torch.Tensor, *rest: Any) -> None:
        seen.append(x.dtype)
        assert x.dtype == torch.float32
        run(self, x, *rest)

    monkeypatch.setattr(CompiledLoops, "advance", checked)
    assert advance.vector_length.__wrapped__() == vector_length() and seen


@needs_loops
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("elements", [1, 7, 1000, 2048, 5003, 600_001])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_snapshot_is_a_copy_with_marks(
    dtype: torch.dtype, elements: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x = torch.randn(elements).to(dtype)
    into, copy, marks = torch.zeros(2, elements, dtype=dtype)[1], torch.zeros_like(x), marks_for(x)
    made().snapshot(x, into, copy, marks)
    assert torch.equal(x, into) and torch.equal(x, copy) and made().unchanged(x, marks)
    marks[-1, 0] += 1
    assert not made().unchanged(x, marks)


@pytest.mark.slow
@needs_loops
@given(data=st.data(), elements=st.integers(1, 5000))
def test_every_changed_bit_is_noticed(data: st.DataObject, elements: int) -> None:
    x = np.random.default_rng(elements).integers(0, 256, elements, np.uint8)
    tensor, marks = torch.from_numpy(x), np.zeros((CompiledLoops.grains(elements), 2), np.uint64)
    made().snapshot(tensor, torch.empty_like(tensor), None, marks)
    kept = x.copy()
    places = data.draw(st.lists(st.integers(0, elements - 1), min_size=1, max_size=8, unique=True))
    for place in places:
        x[place] ^= data.draw(st.integers(1, 255))
    assert not made().unchanged(tensor, marks)
    x[:] = kept
    assert made().unchanged(tensor, marks)


@needs_loops
def test_marks_know_places_and_whole_words() -> None:
    """What simple sums would miss: things that swap places, and ones that all become zeros."""
    for a, b in ((torch.arange(2048.0), torch.arange(2048.0).flip(0)), (torch.ones(4096), torch.zeros(4096)),
                 (torch.tensor([1.0, 2.0] * 1024), torch.tensor([2.0, 1.0] * 1024))):  # fmt: skip
        marks = marks_for(a)
        made().snapshot(a, torch.empty_like(a), None, marks)
        assert not made().unchanged(b, marks)


@needs_loops
@pytest.mark.parametrize("arrivals", [1, 2, 5, 16])
@pytest.mark.parametrize("elements", [5, 2048, 300_003])
@pytest.mark.parametrize("threads", [1, 4])
def test_mixing_has_the_bits_of_mul_and_add(
    arrivals: int, elements: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, sent, marks = torch.randn(elements), torch.empty(elements), marks_for(torch.empty(elements))
    arrived = [(torch.randn(elements), 0.1 + 0.01 * k) for k in range(arrivals)]
    made().snapshot(x, sent, None, marks)
    expected = x * 0.3
    for tensor, weight in arrived:
        expected.add_(tensor, alpha=weight)
    mixed = x.clone()
    made().advance(mixed, Mixing(sent, 0.3, arrived), None, None, marks)
    assert torch.equal(mixed, expected)
    x[::7] += 1  # by a script: kept whole
    expected = x + (0.3 - 1.0) * sent + sum(weight * tensor for tensor, weight in arrived)
    made().advance(x, Mixing(sent, 0.3, arrived), None, None, marks)
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)


def params_of(start: torch.Tensor, sizes: list[int]) -> list[Parameter]:
    """Views of one flat tensor."""
    return [Parameter(piece) for piece in start.split(sizes)]


@needs_exact
@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize(("decay", "maximize"), [(0.0, False), (0.1, False), (0.05, True)])
@pytest.mark.parametrize("threads", [1, 3])
def test_one_pass_has_the_bits_of_mixing_and_torchs_step(
    kind: type, decay: float, maximize: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [16, 4096, 1, 15, 160, 2049, 0, 31, 32, 700_001]
    total, draw = sum(sizes), torch.Generator().manual_seed(1)
    start = torch.randn(total, generator=draw)
    mine, theirs = start.clone(), start.clone()
    ours, torchs = params_of(mine, sizes), params_of(theirs, sizes)
    make = partial(kind, lr=0.01, weight_decay=decay, maximize=maximize, fused=True)
    a, b = make(ours), make(torchs)
    place, marks, steps = torch.empty(total), marks_for(mine), AdamSteps(ours)
    for step in range(4):
        for p, q in zip(ours, torchs, strict=True):
            p.grad = torch.randn(p.shape, generator=draw)
            q.grad = p.grad.clone()
        arrived = torch.randn(total, generator=draw)
        theirs.mul_(0.75).add_(arrived, alpha=0.25)
        b.step()
        if step == 0:  # the state is torch's to make
            assert steps.take(a, a.param_groups) is None
            mine.mul_(0.75).add_(arrived, alpha=0.25)
            a.step()
            made().snapshot(mine, place, None, marks)
        else:
            rows = steps.take(a, a.param_groups)
            assert rows is not None
            with monkeypatch.context() as patched:
                patched.setattr(torch, "get_num_threads", lambda: threads)
                made().advance(mine, Mixing(place, 0.75, [(arrived, 0.25)]), rows, place, marks)
        assert torch.equal(mine, theirs) and torch.equal(place, mine) and made().unchanged(mine, marks)
        a.param_groups[0]["lr"] = b.param_groups[0]["lr"] = 0.02 / (step + 1)
    for p, q in zip(ours, torchs, strict=True):
        assert all(torch.equal(a.state[p][key], b.state[q][key]) for key in ("step", "exp_avg", "exp_avg_sq"))


@needs_exact
def test_what_only_torch_can_do_is_left_to_it() -> None:
    def tried(optimizer: Any, params: list[Parameter]) -> bool:
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        before = [float(optimizer.state[p]["step"]) for p in params if "step" in optimizer.state[p]]
        rows = AdamSteps(params).take(optimizer, optimizer.param_groups)
        after = [float(optimizer.state[p]["step"]) for p in params if "step" in optimizer.state[p]]
        assert after == ([s + 1 for s in before] if rows is not None else before)
        return rows is not None

    def one(elements: int = 64) -> list[Parameter]:
        return [Parameter(torch.zeros(elements))]

    assert tried(Adam(p := one(), fused=True), p)
    for settings in ({"fused": False}, {"amsgrad": True, "fused": True}, {"betas": (0.4, 0.9), "fused": True},
                     {"lr": torch.tensor(0.1), "fused": True}):  # fmt: skip
        assert not tried(Adam(p := one(), **settings), p)  # type: ignore[arg-type]
    assert not tried(SGD(p := one(), lr=0.1), p)
    assert tried(Adam(p := one(61), fused=True), p)
    p = one()
    optimizer = Adam(p, fused=True)
    assert tried(optimizer, p)
    p[0].grad = None
    assert AdamSteps(p).take(optimizer, optimizer.param_groups) is None
    optimizer = Adam(p := [Parameter(torch.zeros(4, 16))], fused=True)
    assert tried(optimizer, p)
    p[0].grad = torch.ones(16, 4).t()
    assert AdamSteps(p).take(optimizer, optimizer.param_groups) is None
    if hasattr(p[0], "grad_dtype"):  # of a gradient of 16 bits the loop would read as many bytes behind it
        p[0].grad, p[0].grad_dtype = None, torch.bfloat16
        p[0].grad = torch.ones(4, 16, dtype=torch.bfloat16)
        assert AdamSteps(p).take(optimizer, optimizer.param_groups) is None


@needs_exact
def test_groups_and_counts_of_their_own_have_their_own_constants() -> None:
    """Two rates, a parameter that joins later, states that a script loads or replaces: the bits of torch's step."""
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
            made().advance(mine, None, rows, None, marks_for(mine))
        assert torch.equal(mine, theirs)
        if step == 3:
            a.load_state_dict(copy.deepcopy(b.state_dict()))
        if step == 5:
            for optimizer, params in ((a, ours), (b, torchs)):
                optimizer.state[params[2]]["exp_avg"] = torch.full((17,), 0.5)
    assert taken == 6, "but the first, and that of the parameter that had no state yet"
    assert [float(a.state[p]["step"]) for p in ours] == [8.0, 7.0, 8.0]


SOURCE = Path(advance.__file__).with_suffix(".c")


def compiled_again() -> object:
    return native.compiled.__wrapped__(SOURCE)


def test_without_a_compiler_there_are_no_loops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "/bin/false")
    assert compiled_again() is None
    monkeypatch.setattr(native.shutil, "which", lambda _: None)
    assert compiled_again() is None


@needs_loops
@pytest.mark.slow
def test_what_was_compiled_is_kept_where_only_the_user_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls, real = [], native._compile
    monkeypatch.setattr(native, "_compile", lambda *args: (calls.append(args[-1]), real(*args)))
    assert compiled_again() is not None and compiled_again() is not None
    (kept,) = (tmp_path / "decentnode").iterdir()
    assert calls == [kept] and kept.stat().st_mode & 0o077 == 0
    kept.chmod(0o722)  # somebody else could have written it: made anew
    assert compiled_again() is not None and len(calls) == 2 and kept.stat().st_mode & 0o077 == 0
    (tmp_path / "decentnode").chmod(0o777)  # or put another in its place: not used
    assert compiled_again() is not None and len(calls) == 3 and calls[2].parent.parent != tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert compiled_again() is not None and len(calls) == 4


assert GRAIN_BYTES % 64 == 0
