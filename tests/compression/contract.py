"""Checks for every codec. To check another codec, add it to CODECS."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from decentnode import compression
from decentnode.compression.base import Codec
from decentnode.config.component import load_class
from decentnode.errors import PeerFault

CodecFactory = Callable[[], Codec]


def codec(name: str, **keys: object) -> CodecFactory:
    """Returns a function that makes a new codec."""
    codec_class = load_class(name, compression.CODECS, "compression")
    return lambda: codec_class(codec_class.Config.model_validate({"name": name, **keys}))


CODECS: dict[str, CodecFactory] = {name: codec(name) for name in compression.CODECS} | {
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
"""As ERRORS, for evenly spaced values, by the name of the codec; .05 for codecs that are not named."""
SIZES = (0, 1, 2, 7, 63, 1000, 1025, 300_001)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def random_values(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)


def seeded_generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def check_sizes_fit_the_schema(make_codec: CodecFactory) -> None:
    codec = make_codec()
    for count in SIZES:
        for dtype in DTYPES:
            given = random_values(count, dtype)
            before = given.clone()
            coded = codec.encode(given, seeded_generator())
            assert torch.equal(given, before), "encode changed its argument"
            schema = codec.schema(count, dtype)
            assert coded.keys() == schema.keys() and codec.metadata <= schema.keys()
            for name, spec in schema.items():
                size = coded[name].numel()
                assert coded[name].dtype == spec.dtype and coded[name].dim() == 1 and coded[name].is_contiguous()
                assert size == spec.max_elements if spec.exact else size <= spec.max_elements
            back = codec.decode(coded, count, dtype)
            assert back.shape == given.shape and back.dtype == dtype


def check_error_is_bounded(make_codec: CodecFactory, bound: float) -> None:
    codec, given = make_codec(), random_values(300_001)
    error = codec.decode(codec.encode(given, seeded_generator()), given.numel(), given.dtype) - given
    assert float(error.norm() / given.norm()) <= bound


def check_encoding_repeats_bit_for_bit(make_codec: CodecFactory) -> None:
    given = random_values(5000)
    first, second = (make_codec().encode(given, seeded_generator()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def check_unbiased_codecs_keep_the_expected_value(make_codec: CodecFactory) -> None:
    """Checks that the mean of many decoded encodings approaches the value; the mean is computed in float64."""
    codec, given = make_codec(), random_values(500)
    if not codec.unbiased:
        pytest.skip("the codec is biased")
    generator, total = seeded_generator(), torch.zeros(500, dtype=torch.float64)
    for _ in range(2000):
        total += codec.decode(codec.encode(given, generator), 500, given.dtype)
    once = (codec.decode(codec.encode(given, generator), 500, given.dtype) - given).norm()
    assert float((total / 2000 - given).norm()) < 3 * float(once) / 2000**0.5 + 1e-3


def check_zeros_stay_zero_and_non_finite_values_stay_non_finite(make_codec: CodecFactory) -> None:
    """Checks that vectors of zeros stay zero, and that values that are not finite do not become finite."""
    codec = make_codec()
    zeros = torch.zeros(1500)
    assert torch.equal(codec.decode(codec.encode(zeros, seeded_generator()), 1500, zeros.dtype), zeros)
    for odd in (float("nan"), float("inf"), -float("inf")):
        given = random_values(1500)
        given[37] = odd
        back = codec.decode(codec.encode(given, seeded_generator()), 1500, given.dtype)
        assert not bool(back[37].isfinite())


def check_finite_values_stay_finite(make_codec: CodecFactory) -> None:
    """Checks values up to the largest of each dtype, single ones and whole blocks, with both signs: they stay finite
    and keep their sign. Of evenly spaced values of any scale the error is checked, too."""
    codec = make_codec()
    for dtype in DTYPES:
        largest = torch.finfo(dtype).max
        alone = random_values(1500, dtype)
        alone[700], alone[900] = largest, -largest
        alternating = torch.full((1500,), largest, dtype=dtype)
        alternating[::2] = -largest
        steps = (torch.linspace(-1, 1, 1500, dtype=torch.float64) * largest).to(dtype)
        for given in (alone, alternating, steps, torch.full((1500,), largest, dtype=dtype)):
            back = codec.decode(codec.encode(given, seeded_generator()), 1500, dtype)
            assert bool(back.isfinite().all()), dtype
            assert bool((back.sign() * given.sign() >= 0).all()), "a sign was reversed"
        alone[3] = float("inf")
        assert not bool(codec.decode(codec.encode(alone, seeded_generator()), 1500, dtype)[3].isfinite())
    if codec.config.name == "float16":
        return  # float16 does not have this range
    for scale in (1e-30, 1e18, 1e21, 3e38):
        steps = torch.linspace(-1, 1, 1500, dtype=torch.float64) * scale
        error = codec.decode(codec.encode(steps.float(), seeded_generator()), 1500, torch.float32).double() - steps
        assert float((error / scale).norm() / (steps / scale).norm()) <= ERRORS_OF.get(codec.config.name, 0.05), scale


def check_malformed_parts_are_refused_or_decoded(make_codec: CodecFactory) -> None:
    """Checks that parts of the wrong size and missing parts are refused, and that after a flipped bit the codec either
    refuses the parts or decodes them to the right size."""
    codec, given = make_codec(), random_values(700)
    coded = codec.encode(given, seeded_generator())
    for name, tensor in coded.items():
        for bad in (tensor[:0], torch.cat([tensor, tensor])):
            if bad.numel() != tensor.numel():
                with pytest.raises(PeerFault):
                    codec.decode({**coded, name: bad}, 700, given.dtype)
        with pytest.raises(PeerFault):
            codec.decode({k: t for k, t in coded.items() if k != name}, 700, given.dtype)
    generator = torch.Generator().manual_seed(5)
    for _ in range(200):
        name = list(coded)[int(torch.randint(len(coded), (), generator=generator))]
        raw = coded[name].clone().view(torch.uint8)
        place, bit = (int(torch.randint(limit, (), generator=generator)) for limit in (raw.numel(), 8))
        raw[place] ^= 1 << bit
        try:
            back = codec.decode({**coded, name: raw.view(coded[name].dtype)}, 700, given.dtype)
        except PeerFault:
            continue
        assert back.shape == (700,) and back.dtype == given.dtype


CHECKS = [
    check_sizes_fit_the_schema, check_encoding_repeats_bit_for_bit, check_unbiased_codecs_keep_the_expected_value,
    check_zeros_stay_zero_and_non_finite_values_stay_non_finite, check_finite_values_stay_finite,
    check_malformed_parts_are_refused_or_decoded,
]  # fmt: skip
