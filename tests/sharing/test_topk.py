"""What topk promises beyond the contract; wavelet, which is built on it, where they are alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decentnode.graph.base import view
from tests.graph.contract import make
from tests.sharing.contract import bound, draw, one_round, rule

RING, RING4 = make("ring", nodes=8), make("ring", nodes=4)


def test_topk_accumulates_as_told() -> None:
    """One entry changes much in round 0, others change steadily: who goes when depends on `accumulate`."""
    for accumulate, expected in (("none", [0, 1, 1]), ("training", [0, 1, 2]), ("all", [0, 1, 2])):
        models = [torch.zeros(3, dtype=torch.float64)]
        each = bound(rule("topk", fraction=1 / 3, accumulate=accumulate), models)[0]
        chosen = []
        steps = ([5.0, 1.0, 0.8], [0.1, 1.0, 0.8], [0.1, 1.0, 0.8])
        for r, step in enumerate(steps):
            seen = view(make("ring", nodes=1), 0, r, 1)
            each.begin(models[0], seen)
            models[0] += torch.tensor(step, dtype=torch.float64)
            each.outgoing(models[0], seen)
            chosen.append(int(each._sent))  # type: ignore[attr-defined]
            each.mix(models[0], {}, seen)
        assert chosen == expected, accumulate


@pytest.mark.parametrize("name", ["topk", "wavelet", "fft", "jwins"])
def test_the_largest_values_are_sent_whatever_changed(name: str) -> None:
    """Against the choice written out: those coefficients of the model itself whose magnitude is largest."""
    models = [torch.randn(70, generator=torch.Generator().manual_seed(4), dtype=torch.float64)]
    options = {"fractions": [0.2]} if name == "jwins" else {"fraction": 0.2}
    each: Any = bound(rule(name, scored="value", **options), models)[0]
    for r in range(4):
        seen = view(make("ring", nodes=1), 0, r, 1)
        each.begin(models[0], seen)
        models[0][r * 9 : r * 9 + 9] += 0.01  # which is all that changes
        own = each.transform(models[0]).clone()
        each.outgoing(models[0], seen)
        count = round(0.2 * own.numel())
        assert each._sent.tolist() == sorted(own.abs().argsort(descending=True)[:count].tolist())
        each.mix(models[0], {}, seen)
        assert not each.state_dict(), "nothing is remembered"
    for refused in ({"accumulate": "none"}, {"cleared": "before_mixing"}):
        with pytest.raises(ValueError, match=r"must have (accumulate all|scored change)"):
            rule(name, scored="value", **refused)()


@pytest.mark.parametrize("name", ["topk", "wavelet"])
def test_the_score_of_what_was_sent_is_cleared_before_or_after_mixing(name: str) -> None:
    """Against both orders written out: scores A; sent S = top |x - x' + A|; A[S] = 0 before, or after, A += x'' - x',
    with x' the model before the round and x'' after it."""
    chosen: dict[str, list[Tensor]] = {}
    for cleared in ("after_mixing", "before_mixing"):
        models = [torch.zeros(64, dtype=torch.float64) for _ in range(4)]
        rules = bound(rule(name, fraction=0.2, cleared=cleared), models)
        scores, draws = torch.zeros(64, dtype=torch.float64), torch.Generator().manual_seed(1)
        steps = torch.randn(12, 4, 64, generator=draws, dtype=torch.float64)
        for r in range(12):
            transform: Callable[[Tensor], Tensor] = rules[0].transform  # type: ignore[attr-defined]
            before = transform(models[0]).clone()
            expected = (transform(models[0] + steps[r, 0]) - before + scores).abs().topk(13).indices.sort().values
            one_round(rules, models, RING4, r, step=lambda uid, model, now=steps[r]: model.add_(now[uid]))
            sent = _last_sent(rules[0])
            assert torch.equal(sent, expected)
            chosen.setdefault(cleared, []).append(sent)
            if cleared == "before_mixing":
                scores[sent] = 0
            scores += transform(models[0]) - before
            if cleared == "after_mixing":
                scores[sent] = 0
    assert any(not torch.equal(a, b) for a, b in zip(*chosen.values(), strict=True))


def _last_sent(each: object) -> Tensor:
    sent: Tensor = each._sent  # type: ignore[attr-defined]
    return sent


def test_an_order_without_accumulated_scores_is_refused() -> None:
    with pytest.raises(ValueError, match="accumulate all with cleared before_mixing"):
        rule("topk", accumulate="none", cleared="before_mixing")()


@pytest.mark.parametrize("name", ["topk", "wavelet", "fft"])
def test_scores_begin_with_the_initial_model_whatever_the_schedule(name: str) -> None:
    """An overlapped schedule asks for what leaves without `begin`: what was large at the start has not changed."""
    start, payloads = draw(1, 300)[0], []
    for begins in (True, False):
        each, model = bound(rule(name, fraction=0.1), [start.clone()])[0], start.clone()
        for r in range(2):
            seen = view(RING, 0, r, 1)
            if begins:
                each.begin(model, seen)
            payload = each.outgoing(model, seen)[1]
            each.mix(model, {}, seen.without(seen.sources))
            model.add_(draw(2, 300)[1], alpha=0.1)
        payloads.append(payload)
    assert all(torch.equal(tensor, payloads[1].tensors[key]) for key, tensor in payloads[0].tensors.items())
