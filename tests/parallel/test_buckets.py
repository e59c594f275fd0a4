"""Buckets by themselves: mixing, what a script wrote meanwhile, and the count of passes over memory."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from decentnode.component import Config
from decentnode.graph.base import RoundView
from decentnode.parallel import buckets
from decentnode.parallel.buckets import Bucket, make_buckets
from decentnode.sharing.full import Full

VIEW = RoundView(0, 0, (1, 2), (1, 2), {0: 0.5, 1: 0.2, 2: 0.3}, {}, (0, 1, 2))
PAIR = RoundView(0, 0, (1,), (1,), {0: 0.75, 1: 0.25}, {}, (0, 1))


def bucket(hashes: bool, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """40 elements in blocks of 16 (or in one, as on other devices), and the payloads of two neighbors."""
    monkeypatch.setattr(buckets, "BLOCK_BYTES", 64)
    torch.manual_seed(0)
    made = Bucket(0, [Parameter(torch.randn(3, 10)), Parameter(torch.randn(10))], True, Full(Config()))
    if not hashes:
        made._hashes, made._block = False, 40
    for peer in (1, 2):
        made.received[peer] = torch.randn(40)
    made.snapshot(made.sent_buffer())
    return made


@pytest.mark.parametrize("hashes", [True, False])
@pytest.mark.parametrize("way", ["nobody", "in place", "other memory", "data"])
@pytest.mark.parametrize("view", [VIEW, PAIR])
def test_what_was_written_is_kept_whole(
    hashes: bool, way: str, view: RoundView, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bucket(hashes, monkeypatch)
    p, start = made.params[0], made.flat.clone()
    with torch.no_grad():
        if way == "in place":
            p[2, 3] += 3.0
        elif way == "other memory":
            p.data = p.data + 3.0
        elif way == "data":
            p.data[2, 3] += 3.0
    written = p.detach() - start[:30].view(3, 10)
    made.gather()
    made.mix(view)
    expected = view.weights[0] * start + sum(view.weights[j] * made.received[j] for j in view.sources)
    if way != "data" or hashes:
        expected[:30] += written.flatten()
    else:  # the write is mixed like everything else: nothing but a counter could have told
        expected[:30] += view.weights[0] * written.flatten()
    torch.testing.assert_close(made.flat, expected)
    assert p.data_ptr() == made.flat.data_ptr()


@pytest.mark.parametrize("hashes", [True, False])
@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_the_mean_of_all(hashes: bool, strength: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for write in (0.0, 3.0):
        made = bucket(hashes, monkeypatch)
        start, total = made.flat.clone(), torch.randn(40)
        mean = total / 3
        with torch.no_grad():
            made.params[1][4] += write
        made.mix_mean(total, 3, strength)
        expected = start + strength * (mean - start)
        expected[34] += write
        torch.testing.assert_close(made.flat, expected)


def test_passes_over_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bucket(True, monkeypatch)
    made.mix(PAIR)
    assert made.moved_bytes == 5 * made.size_bytes == 5 * 160
    made.snapshot(made.sent_buffer())
    made.mix(VIEW)
    assert made.moved_bytes == (5 + 6) * 160
    made.snapshot(made.sent_buffer())
    with torch.no_grad():
        made.params[0][0, 0] += 1  # the first block of 16 is compared and mixed with what was sent
    made.mix(PAIR)
    assert made.moved_bytes == (5 + 6 + 5) * 160 + 64


def test_types_sizes_and_order() -> None:
    params = [Parameter(torch.zeros(4)), Parameter(torch.zeros(6).bfloat16()), Parameter(torch.zeros(8))]
    made = make_buckets(params, 16, False, iter([Full(Config())] * 9))
    assert [[p.numel() for p in b.params] for b in made] == [[8], [4], [6]]
    assert [b.flat.dtype for b in made] == [torch.float32, torch.float32, torch.bfloat16]
