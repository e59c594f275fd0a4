"""Rules and codecs on a GPU: the same numbers as on the CPU, up to rounding, without leaving the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decentnode.compression import indices, select
from decentnode.compression.division import Division
from tests.compression.contract import CODECS, values
from tests.graph.contract import make
from tests.sharing.contract import RULES, codec_of, random_models, run_round, set_up_rules

pytestmark = pytest.mark.gpu


def after_rounds(name: str, device: str) -> list[Tensor]:
    models = [model.to(device) for model in random_models(4, 500)]
    graph = make("line" if RULES[name]().requirements.tree else "ring", nodes=4)
    rules = set_up_rules(RULES[name], models)
    for r in range(3):
        run_round(rules, models, graph, r)
    assert all(model.device.type == device for model in models)
    return [model.cpu() for model in models]


@pytest.mark.parametrize("name", RULES)
def test_rules(name: str) -> None:
    codec = codec_of(RULES[name]())
    here, there = after_rounds(name, "cpu"), after_rounds(name, "cuda")
    if codec is not None and codec.unbiased:
        return  # the two draw differently
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(a, b, atol=0.05 if codec is not None else 1e-3, rtol=0)


@pytest.mark.parametrize("name", CODECS)
def test_codecs(name: str) -> None:
    each, given = CODECS[name](), values(5000).cuda()
    coded = each.encode(given, torch.Generator("cuda").manual_seed(1))
    assert all(tensor.is_cuda for tensor in coded.values())
    back = each.decode(coded, 5000, given.dtype)
    assert back.is_cuda and bool(back.isfinite().all())


def test_choosing_and_coding() -> None:
    scores = values(1_000_003).abs()
    for count in (10, 10_000, 400_000):
        here, there = select.largest(scores, count), select.largest(scores.cuda(), count)
        assert torch.equal(here, there.cpu())
        stream = indices.encode(there, scores.numel())
        assert stream.is_cuda and torch.equal(stream.cpu(), indices.encode(here, scores.numel()))
        assert torch.equal(indices.decode(stream, scores.numel()), there)


@pytest.mark.parametrize("sizes", [(4096,), (5000,), (700, 1024, 3276)], ids=["equal", "the last shorter", "divided"])
def test_sums_of_blocks_are_those_of_the_cpu(sizes: tuple[int, ...]) -> None:
    count, division = sum(sizes), Division.of(sizes, 1024)
    blocks, given = division.blocks(0, count), values(count)
    for found, wanted in ((blocks.sums(given.cuda()), blocks.sums(given)),
                          (blocks.largest(given.cuda()), blocks.largest(given)),
                          (blocks.times(given.cuda(), torch.arange(len(blocks)).float().cuda()),
                           blocks.times(given, torch.arange(len(blocks)).float()))):  # fmt: skip
        torch.testing.assert_close(found.cpu(), wanted)
    assert division.blocks(0, count) is blocks  # a round later its sizes lie on the GPU already
