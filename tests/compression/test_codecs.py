"""Value codecs: the contract, and properties of single codecs."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch

from decentnode import compression
from decentnode.compression.lossless import Lossless
from decentnode.errors import EnvironmentFault, PeerFault
from tests.compression.contract import (
    CHECKS,
    CODECS,
    ERRORS,
    check_error_is_bounded,
    codec,
    random_values,
    seeded_generator,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("check", CHECKS)
def test_contract(name: str, check: Callable[..., None]) -> None:
    check(CODECS[name])


@pytest.mark.parametrize("name", CODECS)
def test_the_error_of_random_values_is_bounded(name: str) -> None:
    check_error_is_bounded(CODECS[name], ERRORS[name])


def test_every_codec_has_the_expected_bytes_of_data_and_metadata() -> None:
    """For a length that is a multiple of all block sizes; scales are metadata."""
    values = random_values(4096)
    expected = {"float16": (8192, 0), "bfloat16": (8192, 0), "truncate": (12288, 0), "int8": (4096, 16),
                "int4": (2048, 16), "qsgd": (2048, 128), "sign": (512, 16)}  # fmt: skip
    for name, (data, metadata) in expected.items():
        each = CODECS[name]()
        coded = each.encode(values, seeded_generator())
        sizes = {part: tensor.numel() * tensor.element_size() for part, tensor in coded.items()}
        assert sum(size for part, size in sizes.items() if part not in each.metadata) == data, name
        assert sum(size for part, size in sizes.items() if part in each.metadata) == metadata, name


def test_int8_and_int4_round_to_the_nearest_multiple_of_the_scale() -> None:
    values = random_values(2048)
    blocks = values.double().view(2, 1024)
    for name, levels in (("int8", 127), ("int4", 7)):
        scale = blocks.abs().amax(1, keepdim=True) / levels
        reference = ((blocks / scale).round() * scale).view(-1)
        each = CODECS[name]()
        back = each.decode(each.encode(values), 2048, torch.float32).double()
        off = (back - reference).abs() > 1e-6
        assert float(off.double().mean()) < 1e-3, "only values half-way between two multiples may be rounded otherwise"


def test_truncate_keeps_the_leading_bits() -> None:
    each = codec("truncate", bits=16)()
    values = random_values(999)
    back = each.decode(each.encode(values), 999, torch.float32)
    assert torch.equal(back.view(torch.int32) & 0xFFFF, torch.zeros(999, dtype=torch.int32))
    assert float(((back - values) / values).abs().max()) <= 2**-8


def test_sign_decodes_to_the_mean_magnitude_of_the_block() -> None:
    each, values = codec("sign", block=8)(), random_values(20)
    back = each.decode(each.encode(values), 20, torch.float32)
    for start in (0, 8, 16):
        part = values[start : start + 8]
        torch.testing.assert_close(back[start : start + 8], part.sign() * part.abs().mean())


def test_zlib_compresses_a_smooth_signal_and_adds_at_most_a_byte_to_noise() -> None:
    each = CODECS["zlib"]()
    assert each.encode(torch.arange(10_000.0))["q"].numel() < 20_000
    noise = torch.randint(0, 256, (4000,), generator=seeded_generator(), dtype=torch.uint8).view(torch.float32)
    assert each.encode(noise.nan_to_num())["q"].numel() <= 4001


@pytest.mark.parametrize("name", compression.LOSSLESS)
def test_a_decompression_bomb_is_refused_without_using_much_memory(name: str) -> None:
    """A stream that would decompress to 64 MiB of zeros: no more than the size in the schema is decompressed."""
    each = codec(name)()
    assert isinstance(each, Lossless)
    zeros = np.zeros(1 << 26, np.uint8)
    bomb = torch.from_numpy(np.frombuffer(b"\1" + each.compress(zeros.data), np.uint8).copy())
    assert bomb.numel() < 4 * 100_000, "the stream must fit the schema"
    del zeros
    tracemalloc.start()
    with pytest.raises(PeerFault):
        each.decode({"q": bomb}, 100_000, torch.float32)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 22


def test_a_missing_library_is_reported_with_the_extra_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(EnvironmentFault, match=r"zstandard.*decentnode\[codecs\]"):
        codec("zstd")()
