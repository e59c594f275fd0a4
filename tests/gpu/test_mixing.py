"""The kernel on a real GPU, beside the speed of a copy there. None of this has run so far."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from decentnode.mixing import mix_into, passes
from decentnode.mixing.mix import _chain, _kernel
from tests.test_mixing import case, chained

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("elements", [1, 4096, 1_000_003])
@pytest.mark.parametrize("arrivals", [0, 1, 3, 8, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_result_is_the_cpus(elements: int, arrivals: int, dtype: torch.dtype) -> None:
    model, received = case(elements, arrivals, dtype)
    there = [(tensor.cuda(), w) for tensor, w in received]
    out = mix_into(torch.empty(elements, device="cuda"), model.cuda(), 0.3, there)
    assert torch.allclose(out.cpu(), chained(model, 0.3, received), rtol=1e-6, atol=1e-5)
    own = model.cuda()
    assert torch.equal(mix_into(own, own, 0.3, there), out)  # in place, and the same bits again


def milliseconds(work: Callable[[], object]) -> float:
    """Median of 20, by CUDA events."""
    times = []
    for _ in range(25):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times[5:])[10]


@pytest.mark.parametrize("arrivals", [1, 2, 4, 8])
def test_speed_beside_a_copy(arrivals: int) -> None:
    elements = 64_000_000
    x = torch.ones(elements, device="cuda")
    received = [(torch.ones_like(x), 1 / (arrivals + 1)) for _ in range(arrivals)]
    y = torch.empty_like(x)
    copy = 2 * 4e-6 * elements / milliseconds(lambda: y.copy_(x))
    fused = 4e-6 * elements * passes(arrivals, fused=True) / milliseconds(
        lambda: mix_into(x, x, 1 / (arrivals + 1), received)
    )
    chain = milliseconds(lambda: _chain(x, x, 1 / (arrivals + 1), received))
    print(f"\n{arrivals} arrivals on {torch.cuda.get_device_name()}: copy {copy:.0f} GB/s, one kernel {fused:.0f} GB/s "
          f"({fused / copy:.2f} of it, asked >= 0.85) in {passes(arrivals, True)} passes; chained "
          f"{passes(arrivals, False)} passes, {chain:.2f} ms")  # fmt: skip
    assert _kernel() is not None, "Triton is missing"
