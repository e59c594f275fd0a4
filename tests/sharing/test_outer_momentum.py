"""The momentum of slowmo and diloco is also one of the mixing: on which graphs it drives nodes apart."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from decentnode.errors import ConfigError
from decentnode.experiment import load
from tests.graph.contract import make
from tests.sharing.helpers import error_on_quadratics

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
TOO_LARGE = [
    ("{name: diloco}", "{name: one_peer_exponential, nodes: 16}"),
    ("{name: slowmo, outer_momentum: 0.7}", "{name: exponential, nodes: 16}"),
    ("{name: slowmo, outer_momentum: 0.9}", "{name: random_matching, nodes: 16}"),
    ("{name: diloco, outer_lr: 1.0}", "{name: torus, nodes: 16}"),
]
SMALL_ENOUGH = [
    ("{name: diloco, outer_momentum: 0.8}", "{name: one_peer_exponential, nodes: 16}"),
    ("{name: diloco}", "{name: ring, nodes: 16}"),
    ("{name: slowmo}", "{name: one_peer_exponential, nodes: 16}"),
    ("{name: slowmo, outer_momentum: 0.9}", "{name: torus, nodes: 16}"),
    ("{name: slowmo, outer_momentum: 0.9}", "{name: complete, nodes: 16}"),
]


@pytest.mark.parametrize(("sharing", "graph", "diverges"), [
    *((*each, True) for each in TOO_LARGE), *((*each, False) for each in SMALL_ENOUGH),
])  # fmt: skip
def test_a_momentum_that_drives_models_apart_is_refused(sharing: str, graph: str, diverges: bool) -> None:
    refused = pytest.raises(ConfigError, match="drives the models apart on this graph with outer_lr")
    with refused if diverges else nullcontext():
        load(QUICKSTART, [f"sharing={sharing}", f"graph={graph}", "weights=null"])


def test_what_the_refusal_says_happens_in_training() -> None:
    """With the default, 0.5, nodes are about as close to the optimum as with local_sgd."""
    graph = make("one_peer_exponential", nodes=16)
    errors = [error_on_quadratics("slowmo", graph, 600, 0.05, outer_momentum=each) for each in (0.5, 0.7)]
    assert errors[0] < 1.5 * error_on_quadratics("local_sgd", graph, 600, 0.05) and errors[1] > 1e6
