"""Division of a vector into blocks that end where its tensors end, so that no two tensors share a scale."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decentnode.compression.division import Division
from decentnode.errors import PeerFault
from tests.compression.contract import DTYPES, CodecFactory, codec, seeded_generator

SIZES = [5, 64, 70_000, 1, 1, 1, 0, 200_000, 63, 29_866]
"""300,001 values: tensors that end within blocks, on their borders, and several in one block."""
BLOCKWISE = {
    "sign": codec("sign"), "sign of small blocks": codec("sign", block=64), "int8": codec("int8"),
    "int8 unbiased": codec("int8", unbiased=True, block=64), "int4": codec("int4"),
    "int4 of one block": codec("int4", block=1 << 18), "qsgd": codec("qsgd"),
    "zlib of int8": codec("zlib", of={"name": "int8"}),
}  # fmt: skip
ERRORS = {"sign": 0.7, "int8": 0.02, "int4": 0.2, "qsgd": 1.2, "zlib": 0.02}
"""Largest norm of the error relative to that of Gaussian values of any scale."""


def block_numbers(sizes: list[int], size: int) -> list[int]:
    """Returns the number of the block of every value."""
    found: list[int] = []
    block = -1
    for tensor in sizes:
        for k in range(tensor):
            block += int(k == 0 or len(found) % size == 0)
            found.append(block)
    return found


def values_of_unequal_scales(sizes: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns random values of tensors with these sizes, of scales 1 and 1e-4 in turn."""
    values = torch.cat([torch.randn(size, generator=seeded_generator().manual_seed(k)) * (1e-4 if k % 2 else 1.0)
                        for k, size in enumerate(sizes)])  # fmt: skip
    return values.to(dtype)


@given(sizes=st.lists(st.integers(0, 40), max_size=12), size=st.sampled_from([8, 16, 32]), start=st.integers(0, 4))
def test_blocks_contain_the_values_that_a_loop_assigns_to_them(sizes: list[int], size: int, start: int) -> None:
    expected, count = block_numbers(sizes, size), sum(sizes)
    division = Division.of(sizes, size)
    assert division.count == count and division.num_blocks() == len({*expected})
    begin = min(start * size, count // size * size)
    if begin == count:
        return
    blocks, here = division.blocks(begin, count), np.asarray(expected[begin:]) - expected[begin]
    assert np.repeat(np.arange(len(blocks)), blocks.sizes).tolist() == here.tolist()
    values = torch.randn(count - begin, generator=seeded_generator())
    each = [values[torch.from_numpy(here == block)] for block in range(len(blocks))]
    torch.testing.assert_close(blocks.sums(values), torch.stack([part.sum() for part in each]))
    assert torch.equal(blocks.largest(values), torch.stack([part.max() for part in each]))
    numbers = torch.arange(1.0, len(blocks) + 1)
    assert torch.equal(blocks.times(values, numbers), values * numbers[torch.from_numpy(here)])


@pytest.mark.parametrize("name", BLOCKWISE)
@pytest.mark.parametrize("sizes", [SIZES, [1024, 700, 1348, 2048, 10]], ids=["many", "few"])
def test_tensors_of_small_scale_beside_others_are_coded_as_precisely_as_alone(name: str, sizes: list[int]) -> None:
    values = values_of_unequal_scales(sizes)
    each = BLOCKWISE[name]().divided(sizes)
    back = each.decode(each.encode(values, seeded_generator()), len(values), torch.float32)
    bound = ERRORS[name.split()[0]]
    for part, found in zip(values.split(sizes), back.split(sizes), strict=True):
        assert float((found - part).norm()) <= bound * float(part.norm())
    together = BLOCKWISE[name]()
    if not together.unbiased:  # without the division small values become zero, or as large as those of the next tensor
        spoiled = together.decode(together.encode(values), len(values), torch.float32).split(sizes)
        worst = max(float((found - part).norm() / part.norm())
                    for part, found in zip(values.split(sizes), spoiled, strict=True) if len(part))  # fmt: skip
        assert worst > 5 * bound or worst > 0.99


@pytest.mark.parametrize("make", [codec("sign"), codec("int8"), codec("int4", block=64),
                                  codec("zlib", of={"name": "int4"})])  # fmt: skip
def test_values_of_one_tensor_do_not_affect_the_coding_of_another(make: CodecFactory) -> None:
    """Also NaN and infinity. A tensor that begins with a block is coded to the same values as alone."""
    sizes = [1024, 700, 1348, 2048, 10]
    values = values_of_unequal_scales(sizes)
    each = make().divided(sizes)
    back = each.decode(each.encode(values), len(values), torch.float32)
    for odd in (1e30, float("nan"), -float("inf")):
        changed = values.clone()
        changed[1100] = odd
        found = each.decode(each.encode(changed), len(values), torch.float32)
        assert torch.equal(found[:1024], back[:1024]) and torch.equal(found[1724:], back[1724:])
        assert bool(found[1100].isfinite()) == (odd == 1e30)
    alone = make()
    part = values[3072:5120]
    assert torch.equal(back[3072:5120], alone.decode(alone.encode(part), 2048, torch.float32))


@pytest.mark.parametrize("name", BLOCKWISE)
def test_coded_sizes_of_divided_vectors_fit_the_schema(name: str) -> None:
    each = BLOCKWISE[name]().divided(SIZES)
    for dtype in DTYPES:
        values = values_of_unequal_scales(SIZES, dtype)
        coded = each.encode(values, seeded_generator())
        for part, spec in each.schema(len(values), dtype).items():
            size = coded[part].numel()
            assert coded[part].dtype == spec.dtype
            assert size == spec.max_elements if spec.exact else size <= spec.max_elements
        back = each.decode(coded, len(values), dtype)
        assert back.shape == values.shape and back.dtype == dtype
    other = BLOCKWISE[name]().divided([*SIZES[:3], 3, *SIZES[6:]])  # a model with other tensors
    with pytest.raises(PeerFault):
        other.decode(coded, len(values), dtype)


@pytest.mark.sampled(one=["name"])
@pytest.mark.parametrize("name", ["sign", "int4", "qsgd", "zlib of int8", "int8 unbiased"])
@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=20), seed=st.integers(0, 99))
def test_no_choice_of_entries_exceeds_largest_schema(name: str, sizes: list[int], seed: int) -> None:
    """largest_schema depends on the model alone, not on which entries a payload has."""
    each, random = BLOCKWISE[name](), np.random.default_rng(seed)
    chosen = [int(random.integers(size + 1)) for size in sizes]
    count = sum(chosen) + int(random.integers(sum(sizes) - sum(chosen) + 1))
    bounds = each.largest_schema(count, torch.float32, len(sizes))
    for part, spec in each.divided(chosen).schema(sum(chosen), torch.float32).items():
        assert spec.max_elements <= bounds[part].max_elements and not bounds[part].exact


def test_the_division_costs_at_most_one_scale_per_tensor() -> None:
    """Of 4 bytes. A model of many tiny tensors has no more scales than values, and tensors of one value are exact."""
    sizes = [1] * 50 + [10_000, 3] * 20
    plain, cut = (c.schema(sum(sizes), torch.float32)["scale"].max_elements
                  for c in (codec("sign")(), codec("sign")().divided(sizes)))  # fmt: skip
    assert plain == -(-sum(sizes) // 1024) and plain < cut < plain + len(sizes)
    each, values = codec("sign")().divided([1] * 500), values_of_unequal_scales([1] * 500)
    assert each.schema(500, torch.float32)["scale"].max_elements == 500
    assert torch.equal(each.decode(each.encode(values), 500, torch.float32), values)


def test_scales_are_in_the_order_of_the_vector_although_it_is_coded_in_pieces() -> None:
    sizes = [99_999, 1, 65_536, 31]
    each = codec("sign", block=256)().divided(sizes)
    values = values_of_unequal_scales(sizes)
    scale = each.encode(values)["scale"]
    blocks = np.asarray(block_numbers(sizes, 256))
    ends = [*np.flatnonzero(np.diff(blocks, prepend=-1)), len(values)]
    by_hand = torch.stack([values[a:b].abs().mean() for a, b in pairwise(ends)])
    torch.testing.assert_close(scale, by_hand, rtol=1e-5, atol=0)
