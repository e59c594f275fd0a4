"""Checks for every codec. To check another codec, add it to CODECS."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from decentnode import compression
from decentnode.compression.base import Codec
from decentnode.config.component import load_class
from decentnode.errors import PeerFault

Make = Callable[[], Codec]


def codec(name: str, **keys: object) -> Make:
    found = load_class(name, compression.CODECS, "compression")
    return lambda: found(found.Config.model_validate({"name": name, **keys}))


CODECS: dict[str, Make] = {name: codec(name) for name in compression.CODECS} | {
    "int8 unbiased": codec("int8", unbiased=True, block=64),
    "int4 unbiased": codec("int4", unbiased=True, block=32),
    "qsgd of three levels": codec("qsgd", levels=1, block=16),
    "truncate to 13 bits": codec("truncate", bits=13),
    "zstd of int4": codec("zstd", of={"name": "int4"}),
    "zlib of truncate": codec("zlib", of={"name": "truncate", "bits": 16}, level=6),
    "lz4 of sign": codec("lz4", of={"name": "sign"}),
}
ERRORS = {"float16": 1e-3, "bfloat16": 8e-3, "truncate": 1e-4, "int8": 0.01, "int4": 0.2, "qsgd": 1.2, "sign": 0.7,
          "zlib": 0.0, "zstd": 0.0, "lz4": 0.0, "int8 unbiased": 0.02, "int4 unbiased": 0.3,
          "qsgd of three levels": 4.0, "truncate to 13 bits": 0.1, "zstd of int4": 0.2, "zlib of truncate": 8e-3,
          "lz4 of sign": 0.7}  # fmt: skip
"""The largest norm of the error, relative to that of the values, for Gaussian values."""
ERRORS_OF = {"qsgd": 4.0, "sign": 0.7, "int4": 0.3, "lz4": 0.7, "zstd": 0.3}
"""As ERRORS, for evenly spaced values, by the name of the codec; .05 for all others."""
SIZES = (0, 1, 2, 7, 63, 1000, 1025, 300_001)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def values(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)


def draws() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def check_sizes_are_as_announced(make: Make) -> None:
    each = make()
    for count in SIZES:
        for dtype in DTYPES:
            given = values(count, dtype)
            kept = given.clone()
            coded = each.encode(given, draws())
            assert torch.equal(given, kept), "values were changed"
            schema = each.schema(count, dtype)
            assert coded.keys() == schema.keys() and each.metadata <= schema.keys()
            for name, spec in schema.items():
                size = coded[name].numel()
                assert coded[name].dtype == spec.dtype and coded[name].dim() == 1 and coded[name].is_contiguous()
                assert size == spec.max_elements if spec.exact else size <= spec.max_elements
            back = each.decode(coded, count, dtype)
            assert back.shape == given.shape and back.dtype == dtype


def check_error_is_bounded(make: Make, bound: float) -> None:
    each, given = make(), values(300_001)
    error = each.decode(each.encode(given, draws()), given.numel(), given.dtype) - given
    assert float(error.norm() / given.norm()) <= bound


def check_repeats_bit_for_bit(make: Make) -> None:
    given = values(5000)
    first, second = (make().encode(given, draws()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def check_unbiased(make: Make) -> None:
    """Checks that the mean of many encodings approaches the value; the mean is computed in float64."""
    each, given = make(), values(500)
    if not each.unbiased:
        return
    generator, total = draws(), torch.zeros(500, dtype=torch.float64)
    for _ in range(2000):
        total += each.decode(each.encode(given, generator), 500, given.dtype)
    once = (each.decode(each.encode(given, generator), 500, given.dtype) - given).norm()
    assert float((total / 2000 - given).norm()) < 3 * float(once) / 2000**0.5 + 1e-3


def check_odd_values(make: Make) -> None:
    """Checks that zeros stay zero, and that values that are not finite do not become finite."""
    each = make()
    zeros = torch.zeros(1500)
    assert torch.equal(each.decode(each.encode(zeros, draws()), 1500, zeros.dtype), zeros)
    for odd in (float("nan"), float("inf"), -float("inf")):
        given = values(1500)
        given[37] = odd
        back = each.decode(each.encode(given, draws()), 1500, given.dtype)
        assert not bool(back[37].isfinite())


def check_finite_values_come_back_finite(make: Make) -> None:
    """Checks values up to the largest of each dtype, among others and in whole blocks, with both signs."""
    each = make()
    for dtype in DTYPES:
        largest = torch.finfo(dtype).max
        alone = values(1500, dtype)
        alone[700], alone[900] = largest, -largest
        alternating = torch.full((1500,), largest, dtype=dtype)
        alternating[::2] = -largest
        steps = (torch.linspace(-1, 1, 1500, dtype=torch.float64) * largest).to(dtype)
        for given in (alone, alternating, steps, torch.full((1500,), largest, dtype=dtype)):
            back = each.decode(each.encode(given, draws()), 1500, dtype)
            assert bool(back.isfinite().all()), dtype
            assert bool((back.sign() * given.sign() >= 0).all()), "no sign may turn"
        alone[3] = float("inf")
        assert not bool(each.decode(each.encode(alone, draws()), 1500, dtype)[3].isfinite())
    if each.config.name == "float16":
        return  # float16 does not have this range
    for scale in (1e-30, 1e18, 1e21, 3e38):
        steps = torch.linspace(-1, 1, 1500, dtype=torch.float64) * scale
        error = each.decode(each.encode(steps.float(), draws()), 1500, torch.float32).double() - steps
        assert float((error / scale).norm() / (steps / scale).norm()) <= ERRORS_OF.get(each.config.name, 0.05), scale


def check_bad_bytes_are_refused(make: Make) -> None:
    each, given = make(), values(700)
    coded = each.encode(given, draws())
    for name, tensor in coded.items():
        for bad in (tensor[:0], torch.cat([tensor, tensor])):
            if bad.numel() != tensor.numel():
                with pytest.raises(PeerFault):
                    each.decode({**coded, name: bad}, 700, given.dtype)
        with pytest.raises(PeerFault):
            each.decode({k: t for k, t in coded.items() if k != name}, 700, given.dtype)
    generator = torch.Generator().manual_seed(5)
    for _ in range(200):
        name = list(coded)[int(torch.randint(len(coded), (), generator=generator))]
        raw = coded[name].clone().view(torch.uint8)
        place, bit = (int(torch.randint(limit, (), generator=generator)) for limit in (raw.numel(), 8))
        raw[place] ^= 1 << bit
        try:
            back = each.decode({**coded, name: raw.view(coded[name].dtype)}, 700, given.dtype)
        except PeerFault:
            continue
        assert back.shape == (700,) and back.dtype == given.dtype


CHECKS = [check_sizes_are_as_announced, check_repeats_bit_for_bit, check_unbiased, check_odd_values,
          check_finite_values_come_back_finite, check_bad_bytes_are_refused]  # fmt: skip
