"""Properties of leader beyond the contract."""

from __future__ import annotations

import pytest
import torch

from decentnode.graph.base import view
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_round


def test_neighbors_move_toward_the_leader_which_keeps_its_model() -> None:
    models = random_models(4, 5, torch.float64)
    rules = [rule("leader", every=1, pull=0.5, average=0)() for _ in models]
    before = [m.clone() for m in models]
    run_round(rules, models, make("complete", nodes=4), 0, pull=0.0)  # the loss of node u is u
    assert torch.equal(models[0], before[0])
    for uid in (1, 2, 3):
        torch.testing.assert_close(models[uid], (before[uid] + before[0]) / 2)


@pytest.mark.parametrize(("every", "mean"), [(1, 2.0), (2, 1.5), (3, 4.0)])
def test_a_node_sends_the_mean_of_its_losses_since_the_last_exchange(every: int, mean: float) -> None:
    leader, round_view = rule("leader", every=every)(), view(make("ring", nodes=4), 0, 0, 1)
    for loss in (50.0, 9.0, 1.0, 2.0):
        leader.adjust(torch.zeros(1), round_view, loss)
    (payload,) = {id(p): p for p in leader.outgoing(torch.zeros(1), round_view).values()}.values()
    assert payload.scalars["loss"] == mean
