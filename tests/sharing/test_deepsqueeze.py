"""What deepsqueeze promises beyond the contract."""

from __future__ import annotations

import pytest
import torch

from decentnode.graph.base import view
from tests.graph.contract import make
from tests.sharing.contract import bound, draw, gossip, rule
from tests.sharing.helpers import spread

RING = make("ring", nodes=8)


@pytest.mark.slow
def test_deepsqueeze_loses_nothing_and_nears_agreement() -> None:
    models = draw(8, 50, torch.float64)
    mean, before = torch.stack(models).mean(0), spread(models)
    gossip(rule("deepsqueeze", fraction=0.5, step_size=0.1), RING, models, 500)
    torch.testing.assert_close(torch.stack(models).mean(0), mean, atol=1e-10, rtol=0)
    assert spread(models) < 0.1 * before


@pytest.mark.parametrize("options", [
    {"choose": "all", "compression": {"name": "int4"}}, {"choose": "all", "compression": {"name": "sign"}},
    {"fraction": 0.3}, {"fraction": 0.3, "compression": {"name": "int4"}}, {"fraction": 0.3, "choose": "random"},
])  # fmt: skip
def test_deepsqueeze_keeps_what_it_does_not_send(options: dict[str, object]) -> None:
    """sent + error == model + the error before, in every round and for every kind of choice."""
    each, model = bound(rule("deepsqueeze", **options), draw(1, 300))[0], draw(1, 300)[0]  # type: ignore[arg-type]
    error = torch.zeros(300)
    for r in range(4):
        seen = view(RING, 0, r, 1)
        payload = each.outgoing(model, seen)[1]
        arrived = each.unpack(payload, 1, seen).tensors
        sent = torch.zeros(300).index_add_(0, arrived["at"], arrived["values"])
        now = each.state_dict()["error"]
        torch.testing.assert_close(sent + now, model + error, atol=1e-5, rtol=0)
        assert float(now.abs().max()) > 0.01
        error = now
        each.mix(model, {}, seen.without(seen.sources))
