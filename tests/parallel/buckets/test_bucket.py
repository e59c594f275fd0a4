"""Buckets: mixing, what a script wrote into parameters since the snapshot, and the count of passes over memory.

A bucket detects writes by marks of the compiled loops, by hashes of blocks, or by torch's version counters.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from decentnode.config.component import Config
from decentnode.graph.base import RoundView
from decentnode.mixing import mix_into
from decentnode.parallel.buckets import bucket as buckets
from decentnode.parallel.buckets.advance import GRAIN_BYTES, loops
from decentnode.parallel.buckets.bucket import Bucket, make_buckets
from decentnode.parallel.planning.plan import Plan
from decentnode.sharing.full import Full
from decentnode.sharing.slowmo import SlowMo
from tests.graph.contract import make

VIEW = RoundView(0, 0, (1, 2), (1, 2), {0: 0.5, 1: 0.2, 2: 0.3}, {}, (0, 1, 2))
PAIR = RoundView(0, 0, (1,), (1,), {0: 0.75, 1: 0.25}, {}, (0, 1))


DETECTIONS = [
    pytest.param("compiled", marks=pytest.mark.skipif(loops() is None, reason="no C compiler")), "hashes", "versions",
]  # fmt: skip


def make_bucket(detection: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Returns a bucket of 4000 elements in blocks of 2048 (with "versions" in one block, as on other devices), after a
    snapshot, with models of two neighbors."""
    monkeypatch.setattr(buckets, "BLOCK_BYTES", GRAIN_BYTES)
    if detection != "compiled":
        monkeypatch.setattr(buckets, "loops", lambda: None)
    torch.manual_seed(0)
    made = Bucket(0, [Parameter(torch.randn(3, 1000)), Parameter(torch.randn(1000))], True, Full(Config()))
    if detection == "versions":
        made._hashes, made._block = False, 4000
    for peer in (1, 2):
        made.received[peer] = torch.randn(4000)
    made.snapshot(made.send_buffer())
    return made


@pytest.mark.parametrize("detection", DETECTIONS)
@pytest.mark.parametrize("way", ["nothing", "in place", "other memory", "shared memory", "data"])
@pytest.mark.parametrize("view", [VIEW, PAIR])
def test_what_a_script_writes_is_not_scaled_by_mixing(
    detection: str, way: str, view: RoundView, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_bucket(detection, monkeypatch)
    p, start = made.params[0], made.flat.clone()
    with torch.no_grad():
        if way == "in place":
            p[2, 3] += 3.0
        elif way == "other memory":
            p.data = p.data + 3.0
        elif way == "shared memory":
            p.share_memory_()  # moves all parameters of the bucket
            p[2, 3] += 3.0
        elif way == "data":
            p.data[2, 3] += 3.0
    written = p.detach() - start[:3000].view(3, 1000)
    made.gather()
    made.mix(view)
    expected = view.weights[0] * start + sum(view.weights[j] * made.received[j] for j in view.sources)
    if way != "data" or detection != "versions":
        expected[:3000] += written.flatten()
    else:  # a write through .data does not change the version counter, so it is mixed like everything else
        expected[:3000] += view.weights[0] * written.flatten()
    torch.testing.assert_close(made.flat, expected)
    assert p.data_ptr() == made.flat.data_ptr()


@pytest.mark.parametrize("detection", DETECTIONS)
@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_mixing_with_the_mean_keeps_what_a_script_writes(
    detection: str, strength: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for write in (0.0, 3.0):
        made = make_bucket(detection, monkeypatch)
        start, total = made.flat.clone(), torch.randn(4000)
        mean = total / 3
        with torch.no_grad():
            made.params[1][4] += write
        made.mix_mean(total, 3, strength)
        expected = start + strength * (mean - start)
        expected[3004] += write
        torch.testing.assert_close(made.flat, expected)


@pytest.mark.parametrize("detection", DETECTIONS[:2])
def test_moved_bytes_count_the_passes_over_memory(detection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_bucket(detection, monkeypatch)
    made.mix(PAIR)
    assert made.moved_bytes == 5 * made.size_bytes == 5 * 16000
    made.snapshot(made.send_buffer())
    made.mix(VIEW)
    assert made.moved_bytes == (5 + 6) * 16000
    made.snapshot(made.send_buffer())
    with torch.no_grad():
        made.params[0][0, 0] += 1  # the first block of 2048 is compared and mixed with what was sent
    made.mix(PAIR)
    assert made.moved_bytes == (5 + 6 + 5) * 16000 + (8192 if detection == "hashes" else 0)


@pytest.mark.parametrize("written", [False, True])
def test_a_gpu_mixes_all_arrived_models_in_one_launch(written: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a script wrote into the parameters: a launch for each model would read and write the bucket again."""
    made, calls = make_bucket("versions", monkeypatch), list[tuple[float, list[float]]]()

    def record_and_mix(
        out: torch.Tensor, model: torch.Tensor, own: float, given: list[tuple[torch.Tensor, float]]
    ) -> None:
        calls.append((own, [weight for _, weight in given]))
        mix_into(out, model, own, given)

    monkeypatch.setattr(buckets, "mix_into", record_and_mix)
    if written:
        with torch.no_grad():
            made.params[0][0, 0] += 1
    before = made.moved_bytes
    made.mix(VIEW)
    assert calls == [(1.0, [-0.5, 0.2, 0.3]) if written else (0.5, [0.2, 0.3])]
    assert made.moved_bytes - before == (4 + written) * 16000


def test_buckets_hold_parameters_of_one_dtype_in_reverse_order_up_to_the_size() -> None:
    params = [Parameter(torch.zeros(4)), Parameter(torch.zeros(6).bfloat16()), Parameter(torch.zeros(8))]
    made = make_buckets(params, 16, False, iter([Full(Config())] * 9))
    assert [[p.numel() for p in b.params] for b in made] == [[8], [4], [6]]
    assert [b.flat.dtype for b in made] == [torch.float32, torch.float32, torch.bfloat16]


def test_rules_of_buckets_get_the_learning_rate() -> None:
    """SlowMo on one rank, u <- u / 2 + (x0 - x') / lr, whose learning rate falls to a tenth at the second exchange."""
    rule = SlowMo(SlowMo.Config.model_validate({"every": 1}))
    plan = Plan(make("ring", nodes=1), rule, 0)
    parameter = Parameter(torch.full((4,), 8.0))
    made = Bucket(0, [parameter], True, rule)
    made.next_round(plan, -1, 0.5)
    made.flat.sub_(1.0)
    made.next_round(plan, 0, 0.5)
    assert made.flat.tolist() == [7.0] * 4, "u = 1 / .5"
    made.flat.sub_(0.1)
    made.next_round(plan, 1, 0.05)
    torch.testing.assert_close(made.flat, torch.full((4,), 7.0 - 0.05 * (2 / 2 + 0.1 / 0.05)))
