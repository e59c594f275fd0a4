"""The kernel on a real GPU. None of this has run so far."""

from __future__ import annotations

import pytest
import torch

from decentnode.mixing import mix_into
from decentnode.mixing.mix import _load_kernel, _mix_chained
from tests.gpu.pretended import needs_a_real_gpu
from tests.test_mixing import make_models, mix_with_mul_and_add, replace_kernel_by_one_that_cannot_launch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("elements", [1, 4096, 1_000_003])
@pytest.mark.parametrize("arrivals", [0, 1, 3, 8, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_mixing_equals_mixing_on_the_cpu(elements: int, arrivals: int, dtype: torch.dtype) -> None:
    model, received = make_models(elements, arrivals, dtype)
    on_gpu = [(tensor.cuda(), w) for tensor, w in received]
    out = mix_into(torch.empty(elements, device="cuda"), model.cuda(), 0.3, on_gpu)
    assert torch.allclose(out.cpu(), mix_with_mul_and_add(model, 0.3, received), rtol=1e-6, atol=1e-5)
    own = model.cuda()
    assert torch.equal(mix_into(own, own, 0.3, on_gpu), out)  # in place, with the same bits


@needs_a_real_gpu
@pytest.mark.parametrize("arrivals", [1, 2, 4, 8])
def test_a_large_model_is_mixed_by_the_triton_kernel(arrivals: int) -> None:
    """64 M elements, as eval/benchmarks/gpu.py measures: more blocks than the small sizes have."""
    x = torch.randn(64_000_000, device="cuda")
    assert _load_kernel(x.device) is not None, "Triton is missing, or launches no kernel: its warning says why"
    received = [(torch.randn_like(x), 1 / (arrivals + 1)) for _ in range(arrivals)]
    expected = x.clone()
    _mix_chained(expected, x, 1 / (arrivals + 1), received)
    assert torch.allclose(mix_into(x, x, 1 / (arrivals + 1), received), expected, rtol=1e-6, atol=1e-5)


def test_models_are_mixed_where_triton_cannot_launch_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replace_kernel_by_one_that_cannot_launch(monkeypatch)
    model, received = make_models(5000, 3)
    out = mix_into(torch.empty(5000, device="cuda"), model.cuda(), 0.3, [(tensor.cuda(), w) for tensor, w in received])
    assert torch.allclose(out.cpu(), mix_with_mul_and_add(model, 0.3, received), rtol=1e-6, atol=1e-5)
    assert caplog.text.count("Triton launches no kernel there") == 1
    _load_kernel.cache_clear()
