"""Properties of topk beyond the contract, and of the rules built on it (wavelet, fft, jwins)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decentnode.graph.base import view
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_round, set_up_rules

RING, RING4 = make("ring", nodes=8), make("ring", nodes=4)


def test_accumulate_decides_in_which_order_entries_are_sent() -> None:
    """Entry 0 changes much in round 0, the others change steadily; one entry is sent per round."""
    for accumulate, expected in (("none", [0, 1, 1]), ("training", [0, 1, 2]), ("all", [0, 1, 2])):
        models = [torch.zeros(3, dtype=torch.float64)]
        each = set_up_rules(rule("topk", fraction=1 / 3, accumulate=accumulate), models)[0]
        chosen = []
        steps = ([5.0, 1.0, 0.8], [0.1, 1.0, 0.8], [0.1, 1.0, 0.8])
        for r, step in enumerate(steps):
            round_view = view(make("ring", nodes=1), 0, r, 1)
            each.begin(models[0], round_view)
            models[0] += torch.tensor(step, dtype=torch.float64)
            each.outgoing(models[0], round_view)
            chosen.append(int(each._sent))  # type: ignore[attr-defined]
            each.mix(models[0], {}, round_view)
        assert chosen == expected, accumulate


@pytest.mark.parametrize("name", ["topk", "wavelet", "fft", "jwins"])
def test_scored_by_value_the_coefficients_of_largest_magnitude_are_sent(name: str) -> None:
    """Not those that changed most."""
    models = [torch.randn(70, generator=torch.Generator().manual_seed(4), dtype=torch.float64)]
    options = {"fractions": [0.2]} if name == "jwins" else {"fraction": 0.2}
    each: Any = set_up_rules(rule(name, scored="value", **options), models)[0]
    for r in range(4):
        round_view = view(make("ring", nodes=1), 0, r, 1)
        each.begin(models[0], round_view)
        models[0][r * 9 : r * 9 + 9] += 0.01  # the only change
        own = each.transform(models[0]).clone()
        each.outgoing(models[0], round_view)
        count = round(0.2 * own.numel())
        assert each._sent.tolist() == sorted(own.abs().argsort(descending=True)[:count].tolist())
        each.mix(models[0], {}, round_view)
        assert not each.state_dict()
    for refused in ({"accumulate": "none"}, {"cleared": "before_mixing"}):
        with pytest.raises(ValueError, match=r"must have (accumulate all|scored change)"):
            rule(name, scored="value", **refused)()


@pytest.mark.parametrize("name", ["topk", "wavelet"])
def test_scores_of_sent_entries_are_cleared_before_or_after_mixing_as_configured(name: str) -> None:
    """With scores A, x' the model before the round, x that after the local step and x'' that after the round: the
    entries S with the largest |x - x' + A| are sent, and A[S] = 0 is set before, or after, A += x'' - x'."""
    chosen: dict[str, list[Tensor]] = {}
    for cleared in ("after_mixing", "before_mixing"):
        models = [torch.zeros(64, dtype=torch.float64) for _ in range(4)]
        rules = set_up_rules(rule(name, fraction=0.2, cleared=cleared), models)
        scores, draws = torch.zeros(64, dtype=torch.float64), torch.Generator().manual_seed(1)
        steps = torch.randn(12, 4, 64, generator=draws, dtype=torch.float64)
        for r in range(12):
            transform: Callable[[Tensor], Tensor] = rules[0].transform  # type: ignore[attr-defined]
            before = transform(models[0]).clone()
            expected = (transform(models[0] + steps[r, 0]) - before + scores).abs().topk(13).indices.sort().values
            run_round(rules, models, RING4, r, step=lambda uid, model, now=steps[r]: model.add_(now[uid]))
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


def test_cleared_before_mixing_is_refused_without_accumulated_scores() -> None:
    with pytest.raises(ValueError, match="accumulate all with cleared before_mixing"):
        rule("topk", accumulate="none", cleared="before_mixing")()


@pytest.mark.parametrize("name", ["topk", "wavelet", "fft"])
def test_scores_are_changes_from_the_initial_model_also_without_begin(name: str) -> None:
    """The overlapped schedule does not call `begin` before `outgoing`: entries that are large in the initial model must
    not count as changes."""
    start, payloads = random_models(1, 300)[0], []
    for begins in (True, False):
        each, model = set_up_rules(rule(name, fraction=0.1), [start.clone()])[0], start.clone()
        for r in range(2):
            round_view = view(RING, 0, r, 1)
            if begins:
                each.begin(model, round_view)
            payload = each.outgoing(model, round_view)[1]
            each.mix(model, {}, round_view.without(round_view.sources))
            model.add_(random_models(2, 300)[1], alpha=0.1)
        payloads.append(payload)
    assert all(torch.equal(tensor, payloads[1].tensors[key]) for key, tensor in payloads[0].tensors.items())
