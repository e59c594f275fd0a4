"""What stc promises beyond the contract."""

from __future__ import annotations

import torch

from decentnode.graph.base import view
from decentnode.sharing.stc import Ternary
from tests.graph.contract import make
from tests.sharing.contract import bound, draw, rule


def test_stc_sends_signs_of_one_size_and_loses_nothing() -> None:
    """sent + residual == update, where update is what neighbors did not know before."""
    models = draw(6, 300, torch.float64)
    graph = make("ring", nodes=6)
    rules = bound(rule("stc", fraction=0.05), models)
    for r in range(5):
        seen = view(graph, 0, r, 1)
        rules[0].begin(models[0], seen)
        known = rules[0].public.clone()  # type: ignore[attr-defined]
        model = models[0] + 0.1 * draw(1, 300, torch.float64)[0].roll(r)
        payload = rules[0].outgoing(model, seen)[1]
        at, sent = rules[0].operator.decode(payload.tensors, 300, torch.float64)  # type: ignore[attr-defined]
        residual = model - rules[0].public  # type: ignore[attr-defined]
        residual[at] += sent
        torch.testing.assert_close(residual, model - known, atol=1e-15, rtol=0)
        assert at.numel() == 15 and sent.abs().unique().numel() == 1
        rules[0].mix(models[0].copy_(model), {}, seen.without(seen.sources))
    ternary = Ternary(0.01)
    coded, at, _ = ternary.encode(draw(1, 100_000)[0], view(graph, 0, 0))
    size = sum(tensor.numel() * tensor.element_size() for tensor in coded.values())
    assert at.numel() == 1000 and size < 1000 * (0.081 / 0.01 / 8 * 1.05 + 1 / 8) + 16  # entropy of .01 is .081 bits


def test_the_size_of_stc_counts_as_other_scales_do() -> None:
    made = rule("stc", fraction=0.1)()
    model = torch.randn(100, generator=torch.Generator().manual_seed(1))
    made.begin(torch.zeros(100), view(make("ring", nodes=4), 0, 0))
    payload = made.outgoing(model, view(make("ring", nodes=4), 0, 0))[1]
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in payload.tensors.items()}
    assert sizes["signs"] == 2 and sizes["size"] == 4
    assert sum(size for name, size in sizes.items() if name not in payload.metadata) == 2, "a bit each"
