from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from decentnode.tensors import BLOCK_ELEMENTS, GPU_BLOCK_ELEMENTS, FlatModel, as_bytes, blocks


class UnusualModule(nn.Module):
    """A module with tied and frozen parameters, channels_last weights, integer and float buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.first = nn.Linear(5, 5, bias=False)
        self.second = nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.norm = nn.BatchNorm1d(5)


@given(st.integers(0, 3 * BLOCK_ELEMENTS), st.integers(0, 3 * BLOCK_ELEMENTS))
def test_blocks_cover_the_range_and_end_at_multiples_of_the_block_size(start: int, length: int) -> None:
    cuts = list(blocks(start, start + length, torch.device("cpu")))
    assert [x for a, b in cuts for x in (a, b)] == sorted(x for a, b in cuts for x in (a, b))
    assert sum(b - a for a, b in cuts) == length
    assert all(a < b for a, b in cuts)
    assert all(b == c for (_, b), (c, _) in itertools.pairwise(cuts))
    assert all(b % BLOCK_ELEMENTS == 0 for _, b in cuts[:-1])


def test_a_gpu_gets_large_blocks() -> None:
    """Each block costs a launch of every kernel, which takes the host as long as a GPU takes for a million elements."""
    gpu = torch.device("cuda", 0)
    assert list(blocks(5, 25_000_000, gpu)) == [(5, 25_000_000)]
    assert [b for _, b in blocks(0, 3 * GPU_BLOCK_ELEMENTS, gpu)] == [k * GPU_BLOCK_ELEMENTS for k in (1, 2, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_as_bytes_is_a_view(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).to(dtype).view(2, 3)
    view = as_bytes(tensor)
    assert view.nbytes == 6 * tensor.element_size()
    tensor.zero_()
    assert bytes(view) == bytes(view.nbytes)
    assert as_bytes(torch.empty(0)).nbytes == 0


def test_a_flat_model_keeps_the_values_and_shares_memory_with_the_module() -> None:
    module = UnusualModule()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = FlatModel(module)
    assert model.num_parameters == 4 * 3 * 9 + 4 + 25 + 10
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    model.parameters.fill_(2.0)
    assert all((p == (2 if p.requires_grad else 1)).all() for p in module.parameters())
    module.first.weight.data.fill_(3.0)
    assert (model.parameters == 3).sum() == 25 and (module.second.weight == 3).all()
    assert module.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.buffers.numel() == 10
    model.buffers.fill_(5.0)
    assert (module.norm.running_mean == 5).all() and module.norm.num_batches_tracked == 0


def test_a_flat_model_uses_the_storage_that_is_given() -> None:
    stack = torch.zeros(3, 8)
    modules = [nn.Linear(3, 2) for _ in range(3)]
    models = [FlatModel(module, row) for module, row in zip(modules, stack, strict=True)]
    stack += 1.0
    for module, model in zip(modules, models, strict=True):
        assert torch.equal(module.weight.flatten(), model.parameters[:6])
    other = torch.arange(8.0)
    models[1].rebind(other)
    assert modules[1].bias.tolist() == [6.0, 7.0] and models[1].parameters is other
    for wrong in (torch.zeros(7), torch.zeros(8, dtype=torch.float64), torch.zeros(16)[::2]):
        with pytest.raises(ValueError, match="storage must be contiguous"):
            FlatModel(modules[0], wrong)


def test_flat_gradients_can_be_read_and_set() -> None:
    module = UnusualModule()
    model = FlatModel(module)
    assert (model.gradients() == 0).all()
    images, rows = torch.randn(2, 3, 5, 5), torch.randn(2, 5)
    (module.conv(images).square().sum() + module.second(module.first(rows)).square().sum()).backward()
    flat = model.gradients()
    step = model.parameters - 0.1 * flat
    torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1).step()
    assert torch.allclose(model.parameters, step)
    direction = torch.randn_like(flat)
    model.set_gradients(direction)
    assert torch.equal(model.gradients(), direction)
    assert module.conv.weight.grad.stride() == module.conv.weight.stride()
    with pytest.raises(ValueError, match="flat must be contiguous"):
        model.set_gradients(direction[:-1])


def test_training_the_views_gives_the_bits_of_training_the_module() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    torch.manual_seed(0)
    flat = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    model = FlatModel(flat)
    for module in (plain, flat):
        optimizer = torch.optim.Adam(module.parameters(), fused=True)
        for step in range(5):
            optimizer.zero_grad()
            module(torch.full((2, 4), float(step))).square().sum().backward()
            optimizer.step()
    assert torch.equal(torch.cat([p.flatten() for p in plain.parameters()]), model.parameters)


def test_modules_that_cannot_be_flat_are_refused() -> None:
    for module in (nn.ReLU(), nn.ParameterList([torch.empty(0)])):
        with pytest.raises(ValueError, match="must have trainable parameters, got none"):
            FlatModel(module)
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ValueError, match=r"one dtype and device, got 0\.weight of float32, 1\.weight of float64; "):
        FlatModel(mixed)
    with pytest.raises(ValueError, match=r"got 0\.weight of float32 on cpu, 1\.weight of float32 on meta; "):
        FlatModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))
    wide = nn.Linear(2, 2)
    wide.register_buffer("scale", torch.ones(1, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"float buffers must be torch\.float32, got scale of float64"):
        FlatModel(wide)


def test_overlapping_parameters_are_made_dense() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(1, 3).expand(4, 3))
    model = FlatModel(module)
    model.parameters.copy_(torch.arange(12.0))
    assert module.weight.flatten().tolist() == list(range(12))


@pytest.mark.slow
def test_keep_freed_memory_avoids_page_faults_on_reuse() -> None:
    code = """
import resource, torch
from decentnode.tensors import keep_freed_memory
if not keep_freed_memory():
    raise SystemExit(3)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(1 << 24).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
least = min(faults() for _ in range(8))  # the system may take pages away meanwhile, but not every time
raise SystemExit(0 if least < 1000 else 1)  # of 16,384 pages of 4 KiB
"""
    status = subprocess.run([sys.executable, "-c", code], check=False).returncode
    if status == 3:
        pytest.skip("not glibc")
    assert status == 0
