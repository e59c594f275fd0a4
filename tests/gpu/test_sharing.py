"""Rules and codecs on a GPU: the same numbers as on the CPU, up to rounding, without leaving the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decentnode.compression import indices, select
from decentnode.compression.division import Division
from tests.compression.contract import CODECS, random_values
from tests.graph.contract import make
from tests.sharing.contract import RULES, codec_of, random_models, run_round, set_up_rules

pytestmark = pytest.mark.gpu


def models_after_rounds(name: str, device: str) -> list[Tensor]:
    """Returns the models after three rounds on a device, and checks that they stay on it."""
    models = [model.to(device) for model in random_models(4, 500)]
    graph = make("line" if RULES[name]().requirements.tree else "ring", nodes=4)
    rules = set_up_rules(RULES[name], models)
    for r in range(3):
        run_round(rules, models, graph, r)
    assert all(model.device.type == device for model in models)
    return [model.cpu() for model in models]


@pytest.mark.parametrize("name", RULES)
def test_every_rule_gives_the_models_of_the_cpu(name: str) -> None:
    codec = codec_of(RULES[name]())
    on_cpu, on_gpu = models_after_rounds(name, "cpu"), models_after_rounds(name, "cuda")
    if codec is not None and codec.unbiased:  # the devices draw different random numbers
        assert all(bool(model.isfinite().all()) for model in on_gpu)
        return
    for a, b in zip(on_cpu, on_gpu, strict=True):
        torch.testing.assert_close(a, b, atol=0.05 if codec is not None else 1e-3, rtol=0)


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_encodes_and_decodes_on_the_gpu(name: str) -> None:
    codec, given = CODECS[name](), random_values(5000).cuda()
    coded = codec.encode(given, torch.Generator("cuda").manual_seed(1))
    assert all(tensor.is_cuda for tensor in coded.values())
    decoded = codec.decode(coded, 5000, given.dtype)
    assert decoded.is_cuda and bool(decoded.isfinite().all())


def test_the_largest_entries_and_their_coded_indices_are_those_of_the_cpu() -> None:
    scores = random_values(1_000_003).abs()
    for count in (10, 10_000, 400_000):
        on_cpu, on_gpu = select.largest(scores, count), select.largest(scores.cuda(), count)
        assert torch.equal(on_cpu, on_gpu.cpu())
        stream = indices.encode(on_gpu, scores.numel())
        assert stream.is_cuda and torch.equal(stream.cpu(), indices.encode(on_cpu, scores.numel()))
        assert torch.equal(indices.decode(stream, scores.numel()), on_gpu)


@pytest.mark.parametrize("sizes", [(4096,), (5000,), (700, 1024, 3276)], ids=["equal", "the last shorter", "divided"])
def test_sums_of_blocks_are_those_of_the_cpu(sizes: tuple[int, ...]) -> None:
    count, division = sum(sizes), Division.of(sizes, 1024)
    blocks, given = division.blocks(0, count), random_values(count)
    for actual, expected in ((blocks.sums(given.cuda()), blocks.sums(given)),
                          (blocks.largest(given.cuda()), blocks.largest(given)),
                          (blocks.times(given.cuda(), torch.arange(len(blocks)).float().cuda()),
                           blocks.times(given, torch.arange(len(blocks)).float()))):  # fmt: skip
        torch.testing.assert_close(actual.cpu(), expected)
    assert division.blocks(0, count) is blocks  # cached, so that in later rounds the sizes lie on the GPU already
