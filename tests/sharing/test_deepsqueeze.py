"""Properties of deepsqueeze beyond the contract."""

from __future__ import annotations

import pytest
import torch

from decentnode.graph.base import view
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_rounds, set_up_rules
from tests.sharing.helpers import distance_from_consensus

RING = make("ring", nodes=8)


@pytest.mark.slow
def test_deepsqueeze_keeps_the_mean_and_brings_nodes_closer() -> None:
    models = random_models(8, 50, torch.float64)
    mean, before = torch.stack(models).mean(0), distance_from_consensus(models)
    run_rounds(rule("deepsqueeze", fraction=0.5, step_size=0.1), RING, models, 500)
    torch.testing.assert_close(torch.stack(models).mean(0), mean, atol=1e-10, rtol=0)
    assert distance_from_consensus(models) < 0.1 * before


@pytest.mark.parametrize("options", [
    {"choose": "all", "compression": {"name": "int4"}}, {"choose": "all", "compression": {"name": "sign"}},
    {"fraction": 0.3}, {"fraction": 0.3, "compression": {"name": "int4"}}, {"fraction": 0.3, "choose": "random"},
])  # fmt: skip
def test_deepsqueeze_adds_what_it_does_not_send_to_its_error(options: dict[str, object]) -> None:
    """sent + error == model + the error before, in every round and for every compressor."""
    (model,) = random_models(1, 300)
    deepsqueeze = set_up_rules(rule("deepsqueeze", **options), [model])[0]  # type: ignore[arg-type]
    error = torch.zeros(300)
    for r in range(4):
        round_view = view(RING, 0, r, 1)
        payload = deepsqueeze.outgoing(model, round_view)[1]
        arrived = deepsqueeze.unpack(payload, 1, round_view).tensors
        sent = torch.zeros(300).index_add_(0, arrived["at"], arrived["values"])
        new_error = deepsqueeze.state_dict()["error"]
        torch.testing.assert_close(sent + new_error, model + error, atol=1e-5, rtol=0)
        assert float(new_error.abs().max()) > 0.01
        error = new_error
        deepsqueeze.mix(model, {}, round_view.without(round_view.sources))
