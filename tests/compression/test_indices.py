"""Coded indices, packed bits, and the choice of entries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decentnode.compression import bits, indices, select
from decentnode.errors import PeerFault
from tests.conftest import scale


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_decode_returns_the_encoded_indices(case: tuple[int, set[int]]) -> None:
    elements, chosen = case
    at = torch.tensor(sorted(chosen), dtype=torch.int64)
    stream = indices.encode(at, elements)
    assert torch.equal(indices.decode(stream, elements), at)
    assert stream.numel() <= indices.largest_bytes(elements)


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_codes_of_fixed_size_have_that_size_and_are_decoded(case: tuple[int, set[int]]) -> None:
    elements, chosen = case
    at = torch.tensor(sorted(chosen), dtype=torch.int64)
    stream = indices.encode_fixed(at, elements)
    assert stream.dtype == torch.uint8 and stream.numel() == indices.fixed_bytes(len(at), elements)
    assert torch.equal(indices.decode_fixed(stream, len(at), elements), at)


@pytest.mark.parametrize("place", ["first", "last", "spread"])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.02, 0.1, 0.3])
def test_codes_of_fixed_size_take_less_than_half_a_bit_more_than_the_entropy(density: float, place: str) -> None:
    elements = 1 << 20
    count = round(density * elements)
    at = {"first": torch.arange(count), "last": torch.arange(elements - count, elements),
          "spread": torch.arange(count) * (elements // count)}[place]  # fmt: skip
    stream = indices.encode_fixed(at, elements)
    entropy = -(math.log2(density) + (1 - density) / density * math.log2(1 - density)) * count
    assert 8 * stream.numel() <= entropy + 0.55 * count + 16
    assert torch.equal(indices.decode_fixed(stream, count, elements), at)


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n), st.randoms())))
def test_any_bytes_of_fixed_size_are_refused_or_decode_to_numbers_in_the_range(case: tuple[int, int, Any]) -> None:
    elements, count, random = case
    stream = torch.tensor(list(random.randbytes(indices.fixed_bytes(count, elements))), dtype=torch.uint8)
    try:
        at = indices.decode_fixed(stream, count, elements)
    except PeerFault:
        return
    assert at.numel() == count and 0 <= int(at.min()) <= int(at.max()) < elements


@pytest.mark.parametrize("density", [0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.36, 0.38, 0.42, 0.45, 0.5,
                                     0.51, 0.6, 0.7, 0.9, 0.97, 0.99, 0.999])  # fmt: skip
def test_encoded_indices_take_at_most_five_percent_more_bytes_than_their_entropy(density: float) -> None:
    elements = 1 << 20
    at = select.random_positions(density, elements, np.random.default_rng(1))
    p = at.numel() / elements
    entropy = -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) * elements / 8
    assert indices.encode(at, elements).numel() <= 1.05 * entropy


def test_gaps_beyond_32_bits_are_encoded() -> None:
    at = torch.tensor([0, 5, (1 << 33) + 7, (1 << 34) - 1])
    assert torch.equal(indices.decode(indices.encode(at, 1 << 34), 1 << 34), at)


@pytest.mark.parametrize(("positions", "elements", "stream"), [
    ([], 9, "0200" "000000000000"),
    (range(5), 5, "0000" "050000000000"),
    ([0, 5], 8, "0100" "020000000000" "21"),
    ([3, 4, 70], 100, "0204" "030000000000" "43" "0301"),
    ([i for i in range(100) if i not in (3, 4, 70)], 100, "0304" "610000000000" "43" "0301"),
])  # fmt: skip
def test_the_byte_format_does_not_change(positions: list[int], elements: int, stream: str) -> None:
    """Kind, Rice parameter, number of indices; then bits, lowest first. Other versions must be able to read it."""
    at = torch.tensor(list(positions), dtype=torch.int64)
    assert bytes(indices.encode(at, elements).tolist()).hex() == stream
    assert torch.equal(indices.decode(torch.tensor(list(bytes.fromhex(stream)), dtype=torch.uint8), elements), at)


@pytest.mark.parametrize("stream", [
    "0201000000000000", "0228000000000000ff", "0300000000000000", "0328010000000000", "03010000000000000000",
    "02080a0000000000" + "00" * 20, "0229000000000000", "0400000000000000", "02",
])  # fmt: skip
def test_malformed_bytes_are_refused_or_decode_to_no_indices(stream: str) -> None:
    """Gaps with a parameter but without a gap, parameters that are too large, unknown kinds."""
    raw = torch.tensor(list(bytes.fromhex(stream)), dtype=torch.uint8)
    try:
        assert indices.decode(raw, 2000).numel() == 0
    except PeerFault as fault:
        assert fault.reason == "malformed_payload"


def test_any_bytes_are_decoded_or_refused() -> None:
    generator = np.random.default_rng(3)
    real = [indices.encode(select.random_positions(p, 2000, generator), 2000).numpy()
            for p in (0.01, 0.1, 0.45, 0.6, 0.95)]  # fmt: skip
    for case in range(scale(3000, 100_000)):
        size = int(generator.integers(0, 80))
        raw = generator.integers(0, 256, size, dtype=np.uint8) if case % 2 else real[case // 2 % len(real)].copy()
        if case % 4 == 1 and size > 2:  # a head that gets further than most
            raw[0], raw[1], raw[2:8] = raw[0] % 4, raw[1] % 12, [*(raw[2:4] % 8), 0, 0, 0, 0][: len(raw[2:8])]
        for _ in range(int(generator.integers(1, 4))):
            if raw.size:
                raw[generator.integers(raw.size)] = generator.integers(256)
        try:
            found = indices.decode(torch.from_numpy(raw), 2000)
        except PeerFault as fault:
            assert fault.reason == "malformed_payload"
            continue
        assert found.dtype == torch.int64 and found.numel() <= 2000
        assert not found.numel() or (int(found[0]) >= 0 and int(found[-1]) < 2000)
        assert bool((found[1:] > found[:-1]).all())


@given(st.lists(st.booleans(), max_size=600))
def test_flags_are_packed_to_the_same_bytes_by_the_code_for_gpus(flags: list[bool]) -> None:
    given = torch.tensor(flags, dtype=torch.bool)
    assert torch.equal(bits._pack_on_device(given), bits.pack(given))


@given(st.integers(1, 17), st.lists(st.integers(0, 2**17 - 1), max_size=50))
def test_numbers_of_any_bit_width_are_packed_and_unpacked(width: int, numbers: list[int]) -> None:
    given = torch.tensor([n & ((1 << width) - 1) for n in numbers], dtype=torch.int64)
    packed = bits.pack_numbers(given, width)
    assert packed.numel() == bits.packed_bytes(len(numbers), width)
    assert torch.equal(bits.unpack_numbers(packed, width, len(numbers)).long(), given)


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.5, float("inf"), float("nan")]), min_size=1, max_size=60),
       st.integers(0, 70))  # fmt: skip
def test_the_largest_scores_are_chosen_and_of_equal_ones_the_first(scores: list[float], count: int) -> None:
    key = [math.inf if math.isnan(s) else s for s in scores]
    expected = sorted(sorted(range(len(key)), key=lambda i: (-key[i], i))[:count])
    assert select.largest(torch.tensor(scores), count).tolist() == expected


@pytest.mark.sampled(one=["kind"])
@pytest.mark.parametrize("kind", ["normal", "zeros", "few", "equal", "front"])
def test_the_largest_of_a_million_scores_are_those_of_a_full_sort(kind: str) -> None:
    generator, elements = torch.Generator().manual_seed(1), 1_000_003
    scores = torch.randn(elements, generator=generator).abs()
    scores = {"normal": scores, "zeros": scores * 0, "few": scores * (scores > 3.5), "equal": scores.round(),
              "front": scores * torch.arange(elements, 0, -1)}[kind]  # fmt: skip
    for count in (1, 100, 100_000, 600_000, elements - 1):
        expected = scores.sort(descending=True, stable=True).indices[:count].sort().values
        assert torch.equal(select.largest(scores, count), expected)


def test_random_positions_have_their_density() -> None:
    for fraction in (0.001, 0.3, 0.99, 1.0):
        at = select.random_positions(fraction, 200_000, np.random.default_rng(2))
        assert abs(at.numel() - fraction * 200_000) <= 5 * (200_000 * fraction * (1 - fraction)) ** 0.5
        assert bool((at[1:] > at[:-1]).all()) and int(at[0]) >= 0 and int(at[-1]) < 200_000
