"""What subsample promises beyond the contract."""

from __future__ import annotations

from decentnode.graph.base import view
from tests.graph.contract import make
from tests.sharing.contract import rule


def test_subsample_draws_layers_apart() -> None:
    each = rule("subsample", fraction=0.5, layerwise=True)()
    each.set_parameter_shapes([(10,), (4, 5), (1,)])
    at = each.chosen(31, 3, view(make("ring", nodes=4), 0, 0, 1))  # type: ignore[attr-defined]
    assert [int(((at >= a) & (at < b)).sum()) for a, b in ((0, 10), (10, 30), (30, 31))] == [5, 10, 1]
