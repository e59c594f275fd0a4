"""Packing: the bytes of a compressed bucket."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decentnode.errors import PeerFault
from decentnode.parallel.buckets.packing import Packing
from decentnode.parallel.planning.rules import make_coding, make_sharing

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
RULES: list[Any] = [
    {"name": "full", "compression": {"name": "int8"}}, {"name": "full", "compression": {"name": "bfloat16"}},
    {"name": "choco", "choose": "all"}, {"name": "choco", "fraction": 0.3},
    {"name": "choco", "choose": "all", "compression": {"name": "sign"}},
    {"name": "choco", "fraction": 0.4, "compression": {"name": "int4"}},
    {"name": "choco", "choose": "all", "compression": {"name": "qsgd"}},
]  # fmt: skip


def make_packing(rule: Any, sizes: list[int], dtype: torch.dtype) -> Packing:
    coding = make_coding(make_sharing(rule))
    assert coding is not None
    return Packing(coding, sizes, dtype)


@given(rule=st.sampled_from(RULES), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1000),
       sizes=st.lists(st.integers(1, 70), min_size=1, max_size=4))  # fmt: skip
def test_encoding_and_decoding_is_a_contraction(
    rule: Any, dtype: torch.dtype, seed: int, sizes: list[int]
) -> None:
    made, draws = make_packing(rule, sizes, dtype), torch.Generator().manual_seed(seed)
    values = torch.randn(sum(sizes), generator=draws).to(dtype)
    before, packed = values.clone(), torch.full((made.size_bytes,), 255, dtype=torch.uint8)
    made.encode(values, packed, draws)
    assert torch.equal(values, before)
    decoded = torch.zeros_like(values)
    made.add_to(decoded, packed)
    error = (values - decoded).double().norm() / values.double().norm()
    assert error < 1.0 + 1e-2, "a contraction, or nearly one"
    if "fraction" in rule:
        assert int((decoded != 0).sum()) <= max(1, round(rule["fraction"] * len(values)))
    elif rule["name"] == "full":
        again = torch.empty_like(values)
        made.decode(packed, again)
        assert torch.equal(again, decoded) and error < 0.01


@given(rule=st.sampled_from(RULES), raw=st.binary(min_size=400, max_size=400))
def test_any_bytes_are_decoded_or_refused(rule: Any, raw: bytes) -> None:
    """A rank may send nonsense: decoding must neither crash nor write outside of the bucket."""
    made = make_packing(rule, [11, 9], torch.float32)
    packed = torch.frombuffer(bytearray(raw[: made.size_bytes]), dtype=torch.uint8)
    memory = torch.zeros(60)
    try:
        made.add_to(memory[20:40], packed)
    except PeerFault:
        return
    assert not memory[:20].any() and not memory[40:].any()


def test_complex_parameters_are_not_compressed() -> None:
    with pytest.raises(ValueError, match="must be floating point to be compressed"):
        make_packing(RULES[0], [4], torch.complex64)
    assert make_packing({"name": "choco", "choose": "all"}, [4], torch.complex64).size_bytes == 32
