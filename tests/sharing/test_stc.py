"""Properties of stc beyond the contract."""

from __future__ import annotations

import torch

from decentnode.graph.base import view
from decentnode.sharing.stc import Ternary
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, set_up_rules


def test_stc_sends_values_of_one_magnitude_and_keeps_the_residual() -> None:
    """sent + residual == update, where the update is the difference of the model from its public copy before."""
    models = random_models(6, 300, torch.float64)
    graph = make("ring", nodes=6)
    rules = set_up_rules(rule("stc", fraction=0.05), models)
    for r in range(5):
        round_view = view(graph, 0, r, 1)
        rules[0].begin(models[0], round_view)
        known = rules[0].public.clone()  # type: ignore[attr-defined]
        model = models[0] + 0.1 * random_models(1, 300, torch.float64)[0].roll(r)
        payload = rules[0].outgoing(model, round_view)[1]
        at, sent = rules[0].operator.decode(payload.tensors, 300, torch.float64)  # type: ignore[attr-defined]
        residual = model - rules[0].public  # type: ignore[attr-defined]
        residual[at] += sent
        torch.testing.assert_close(residual, model - known, atol=1e-15, rtol=0)
        assert at.numel() == 15 and sent.abs().unique().numel() == 1
        rules[0].mix(models[0].copy_(model), {}, round_view.without(round_view.sources))
    ternary = Ternary(0.01)
    coded, at, _ = ternary.encode(random_models(1, 100_000)[0], view(graph, 0, 0))
    size = sum(tensor.numel() * tensor.element_size() for tensor in coded.values())
    assert at.numel() == 1000 and size < 1000 * (0.081 / 0.01 / 8 * 1.05 + 1 / 8) + 16  # entropy of .01 is .081 bits


def test_the_magnitude_that_stc_sends_is_counted_as_metadata() -> None:
    """As the scales of codecs are."""
    stc = rule("stc", fraction=0.1)()
    model = torch.randn(100, generator=torch.Generator().manual_seed(1))
    stc.begin(torch.zeros(100), view(make("ring", nodes=4), 0, 0))
    payload = stc.outgoing(model, view(make("ring", nodes=4), 0, 0))[1]
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in payload.tensors.items()}
    assert sizes["signs"] == 2 and sizes["size"] == 4
    assert sum(size for name, size in sizes.items() if name not in payload.metadata) == 2, "a bit for each of 10 signs"
