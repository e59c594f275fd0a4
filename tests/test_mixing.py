from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from decentnode.mixing import KERNEL_ARRIVALS, cpu, mix, mix_into, passes
from decentnode.mixing.rows import RowWeights
from decentnode.tensors import BLOCK_ELEMENTS

SIZES = [0, 1, 1000, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS + 13]


def make_models(
    elements: int, arrivals: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, list[tuple[Tensor, float]]]:
    draw = torch.Generator().manual_seed(elements + arrivals)
    received = [(torch.randn(elements, generator=draw).to(dtype), 0.1 * (k + 1)) for k in range(arrivals)]
    return torch.randn(elements, generator=draw), received


def mix_with_mul_and_add(model: Tensor, weight: float, received: Sequence[tuple[Tensor, float]]) -> Tensor:
    out = model * weight
    for tensor, w in received:
        out.add_(tensor.to(out.dtype), alpha=w)
    return out


@pytest.mark.sampled
@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("arrivals", [0, 1, 2, 3, 4, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compiled", [True, False])
def test_mix_into_has_the_bits_of_mul_and_add(
    elements: int, arrivals: int, dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(cpu, "library", lambda: None)
    model, received = make_models(elements, arrivals, dtype)
    expected, out = mix_with_mul_and_add(model, 0.3, received), torch.empty_like(model)
    assert mix_into(out, model, 0.3, received) is out and torch.equal(out, expected)
    mix_into(model, model, 0.3, received)
    assert torch.equal(model, expected)


@pytest.mark.skipif(cpu.library() is None, reason="no C compiler")
def test_several_threads_mix_a_large_model_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, received = make_models(500_003, 3)
    expected = mix_with_mul_and_add(model, 0.3, received)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(mix_into(model, model, 0.3, received), expected)


def test_slices_and_strided_tensors_are_mixed_with_the_same_bits() -> None:
    """Tensors may start at any offset; tensors with gaps are mixed without the compiled loop."""
    whole, received = make_models(3001, 2)
    pieces = [(r[1:], w) for r, w in received]
    expected = mix_with_mul_and_add(whole[1:], 0.3, pieces)
    assert torch.equal(mix_into(torch.empty(3000), whole[1:], 0.3, pieces), expected)
    gaps = [(r[::2], w) for r, w in received]
    expected = mix_with_mul_and_add(whole[::2], 0.3, gaps)
    assert torch.equal(mix_into(torch.empty(1501), whole[::2], 0.3, gaps), expected)


def test_mix_into_agrees_with_float64() -> None:
    model, received = make_models(5000, 4)
    expected = 0.3 * model.double() + sum(w * r.double() for r, w in received)
    assert torch.allclose(mix_into(model, model, 0.3, received).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("out", "arrived"), [(999, 1000), (1001, 1000), (1000, 999), (1000, 1001), (1000, 1)])
def test_tensors_of_another_size_are_refused(out: int, arrived: int) -> None:
    """The compiled loop once read past the end of shorter arrivals, and wrote past the end of a shorter result."""
    with pytest.raises(ValueError, match=r"must be \[1000\], got"):
        mix_into(torch.zeros(out), torch.zeros(1000), 0.5, [(torch.zeros(1000), 0.2), (torch.zeros(arrived), 0.3)])


def test_mixing_equal_models_with_weights_that_sum_to_one_keeps_them() -> None:
    same = torch.full((1000,), 0.75)
    mix_into(same, same, 0.5, [(same.clone(), 0.25), (same.clone(), 0.25)])
    assert torch.equal(same, torch.full((1000,), 0.75))


def test_float64_models_take_float32_arrivals() -> None:
    model, received = make_models(1000, 2)
    expected = mix_with_mul_and_add(model.double(), 0.3, received)
    assert torch.equal(mix_into(torch.empty(1000).double(), model.double(), 0.3, received), expected)


def test_passes_counts_the_reads_and_writes_of_the_model() -> None:
    assert [passes(d, fused=True) for d in (0, 1, 4, 8, 9)] == [2, 3, 6, 10, 13]
    assert [passes(d, fused=False) for d in (0, 1, 4)] == [2, 5, 14]
    assert passes(KERNEL_ARRIVALS, fused=True) == KERNEL_ARRIVALS + 2


INTERPRETED = """
import torch
from decentnode.mixing.kernel import launch
from tests.test_mixing import make_models, mix_with_mul_and_add
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for arrivals in (0, 1, 5, 8):
        for elements in (1, 4096, 5000):
            model, received = make_models(elements, arrivals, dtype)
            expected, out = mix_with_mul_and_add(model, 0.3, received), torch.empty_like(model)
            launch(out, model, 0.3, received)
            assert torch.allclose(out, expected, rtol=1e-6, atol=1e-6)
            launch(model, model, 0.3, received)
            assert torch.equal(model, out)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not here (torch for CUDA brings it)")
def test_the_triton_kernel_in_tritons_interpreter_agrees_with_mul_and_add() -> None:
    root = Path(__file__).parents[1]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", INTERPRETED]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


COMPILED = """
import re, subprocess, sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from decentnode.mixing.kernel import BLOCK, _weighted_sum
THREADS, H100_REGISTERS, DELAY_BYTES = 256, 65536, 32 << 10
tools, folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin", Path(sys.argv[1])
names = _weighted_sum.arg_names
tensors = {"out", "x", *(f"r{k}" for k in range(8))}
aligned = {(k,): [["tt.divisibility", 16]] for k, name in enumerate(names) if name in tensors}
for dtype, size in (("fp32", 4), ("bf16", 2)):
    for arrivals in (1, 2, 4, 8):
        for integer in ("i32", "i64"):
            kinds = {name: f"*{dtype}" if name in tensors else "fp32" for name in names}
            kinds |= {"n": integer, "ARRIVALS": "constexpr", "BLOCK_SIZE": "constexpr"}
            constants = {(names.index("ARRIVALS"),): arrivals, (names.index("BLOCK_SIZE"),): BLOCK}
            made = compile(ASTSource(_weighted_sum, kinds, constants, aligned), target=GPUTarget("cuda", 90, 32),
                           options={"num_warps": THREADS // 32})
            cubin = folder / "kernel.cubin"
            cubin.write_bytes(made.asm["cubin"])
            output_of = lambda *command: subprocess.run(command, capture_output=True, text=True, check=True).stdout
            code, usage = output_of(tools / "nvdisasm", cubin), output_of(tools / "cuobjdump", "-res-usage", cubin)
            of_16 = BLOCK * size // 16 // THREADS
            found = code.count("LDG.E.128"), code.count("STG.E.128")
            assert found == ((arrivals + 1) * of_16, of_16), found
            assert not re.search(r"\\b(LDL|STL)\\b", code), "local memory"
            registers = int(re.search(r"REG:(\\d+)", usage)[1])
            blocks = min(H100_REGISTERS // (THREADS * -(-registers // 8) * 8), 2048 // THREADS)
            # loads of whole blocks before what was loaded is first used, or 8 behind each other in the middle of it
            ahead = max(map(len, re.findall("L+", "".join(
                "L" if "LDG.E.128" in line else "." if re.search(r"\\b(FFMA|FMUL)\\b", line) else ""
                for line in code.splitlines()))))
            under_way = blocks * THREADS * 16 * ahead
            assert under_way >= DELAY_BYTES, (dtype, arrivals, registers, ahead)
            print(dtype, arrivals, integer, registers, "registers", blocks, "blocks", under_way, "bytes")
"""
"""DELAY_BYTES: the bytes that a multiprocessor must have in flight to read at full speed: 3.35 TB/s / 132 for about
1.2 us."""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not here (torch for CUDA brings it)")
def test_the_compiled_kernel_reads_16_bytes_at_a_time_whatever_the_size(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    path = f"{root}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run([sys.executable, "-c", COMPILED, str(tmp_path)], cwd=root, capture_output=True, text=True,
                          timeout=200, env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"),
                                            "PYTHONPATH": path})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 16


def test_without_a_working_triton_launcher_mixing_uses_no_triton_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine with Triton may lack the C compiler or Python's headers, with which Triton makes its launchers."""
    replace_kernel_by_one_that_cannot_launch(monkeypatch)
    for _ in range(2):
        assert mix._load_kernel(torch.device("cpu")) is None
    assert len(caplog.records) == 1 and "'gcc'" in caplog.text
    mix._load_kernel.cache_clear()


def replace_kernel_by_one_that_cannot_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the kernel by one that cannot be launched, as if gcc did not find Python.h."""

    def launch_once(_device: torch.device) -> None:
        raise subprocess.CalledProcessError(1, ["gcc", "cuda_utils.c"])

    made = SimpleNamespace(launch=None, launch_once=launch_once)
    monkeypatch.setitem(sys.modules, "decentnode.mixing.kernel", made)  # type: ignore[arg-type]
    mix._load_kernel.cache_clear()


@pytest.mark.parametrize(("nodes", "width"), [(1, 5), (3, 64), (5, 1000), (7, 4099)])
def test_mixing_all_rows_at_once_equals_mixing_each_node(
    nodes: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(nodes, width)
    rows = [{j: 1.0 / (1 + min(i, 6)) for j in {(i + k) % nodes for k in range(1 + min(i, 6))}} for i in range(nodes)]
    mixed = RowWeights(rows).mixed(x)
    for uid, row in enumerate(rows):
        own = torch.empty(width)
        mix_into(own, x[uid], row[uid], [(x[j], w) for j, w in sorted(row.items()) if j != uid])
        if width >= cpu.SMALLEST and cpu.library() is not None:
            assert torch.equal(mixed[uid], own)
        torch.testing.assert_close(mixed[uid], own)
    torch.testing.assert_close(RowWeights(rows).mixed(x.double()).float(), mixed)
    monkeypatch.setattr(cpu, "library", lambda: None)
    torch.testing.assert_close(RowWeights(rows).mixed(x), mixed)
    monkeypatch.setattr("decentnode.mixing.rows.DENSE_NODES", 0)
    torch.testing.assert_close(RowWeights(rows).mixed(x), mixed)
