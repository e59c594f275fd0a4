"""Every rule on every graph that changes over the rounds: nobody is left out, however often the rule exchanges."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from decentnode.config import component
from decentnode.errors import ConfigError
from decentnode.experiment import load
from decentnode.experiment.crosschecks.sharing import unmet_requirements
from decentnode.graph.base import RoundView
from decentnode.graph.groups import Groups
from decentnode.parallel.planning.plan import Plan
from decentnode.sharing import AMONG_EQUALS
from decentnode.sharing.base import SharingConfig
from decentnode.sharing.full import Full
from decentnode.sharing.rounds import exchange_rounds, rule_view, unheard
from tests.graph.contract import make
from tests.sharing.contract import bound, by_rule, draw, one_round, rule

ROOT = Path(__file__).parents[2]
PERIODIC = {
    "one_peer_exponential": {"nodes": 8}, "directed_one_peer_exponential": {"nodes": 8},
    "alternating_ring": {"nodes": 8}, "alternating_exponential_ring": {"nodes": 8, "nodes_per_machine": 2},
    "base_k_plus_1": {"nodes": 7}, "random_matching": {"nodes": 8}, "random_regular": {"nodes": 8, "degree": 2},
    "grouped": {"nodes": 8, "between": {"name": "one_peer_exponential", "nodes": 4}},
    "matcha": {"nodes": 8, "base": {"name": "regular", "nodes": 8, "degree": 3}},
}  # fmt: skip
EVERY = {name for name in AMONG_EQUALS if hasattr(rule(name)(), "every")}
CASES = [(name, every) for name in AMONG_EQUALS for every in (range(1, 9) if name in EVERY else [None])]
QUIET = {
    "slowmo": {"outer_momentum": 0.0}, "diloco": {"outer_momentum": 0.0, "outer_lr": 1.0}, "noloco": {"momentum": 0.0},
    "ac": {"final": 1.0}, "hierarchical": {"groups": [[0, 1], [2, 3], [4, 5], [6, 7]]}, "topk": {"fraction": 1.0},
    "fft": {"fraction": 1.0}, "wavelet": {"fraction": 1.0}, "subsample": {"fraction": 1.0},
    "jwins": {"fractions": [1.0]}, "clipped_gossip": {"byzantine": 0}, "trimmed_mean": {"byzantine": 0},
    "deepsqueeze": {"choose": "all", "step_size": 1.0},
}  # fmt: skip
"""Options with which a rule only mixes, so that how close nodes come is the graph's doing."""


def spread_after(name: str, every: int | None, family: str, exchanges: int) -> float:
    """||x - mean|| after so many exchanges at zero gradient, as part of what it was."""
    options = QUIET.get(name, {}) | ({} if every is None else {"every": every})
    graph = make(family, **PERIODIC[family])  # type: ignore[arg-type]
    models = draw(graph.num_nodes, 6, torch.float64)
    before = torch.stack(models)
    rules = bound(rule(name, **options), models)
    for r in range(exchanges * (every or 1)):
        one_round(rules, models, graph, r, pull=0.0)
    after = torch.stack(models)
    return float((after - after.mean(0)).norm() / (before - before.mean(0)).norm())


def suits(name: str, family: str) -> bool:
    """Whether the run would not be refused before it starts."""
    graph, each = make(family, **PERIODIC[family]), rule(name, **QUIET.get(name, {}))()  # type: ignore[arg-type]
    if name == "hierarchical" and (graph.num_nodes % 2 or Groups(((0, 1), (2, 3), (4, 5), (6, 7))).misfit(graph)):
        return False
    return not list(unmet_requirements(each.requirements, graph))


SUITED = [(name, family) for name in AMONG_EQUALS for family in PERIODIC if suits(name, family)]


def test_only_rules_for_static_graphs_are_left_out() -> None:
    refused = {name for name in AMONG_EQUALS for family in PERIODIC if not suits(name, family)}
    assert refused == {"d2", "exact_diffusion", "decentlam", "relaysgd", "hierarchical", "powergossip",
                       "choco", "beer", "qsgd", "sign", "stc"}  # fmt: skip
    assert {family for name, family in SUITED if name == "hierarchical"} == {
        "grouped", "one_peer_exponential", "alternating_exponential_ring"}


@pytest.mark.sampled(of=by_rule)
@pytest.mark.parametrize(("name", "family"), SUITED)
def test_nodes_agree_however_often_a_rule_exchanges(name: str, family: str) -> None:
    """The number of exchanges alone decides how close nodes come, not the rounds of rest between them."""
    spreads = [spread_after(name, every, family, 16) for each, every in CASES if each == name]
    assert max(spreads) < 0.2, f"{name} on {family}, every 1 to {len(spreads)}: {spreads}"
    if name != "noloco":  # whose pairs are drawn by the round
        assert np.ptp(spreads) < 1e-9, f"{name} on {family}, every 1 to {len(spreads)}: {spreads}"


@pytest.mark.parametrize("every", range(1, 9))
def test_a_period_of_exchanges_is_exact_where_a_period_of_rounds_is(every: int) -> None:
    """Three exchanges of one_peer_exponential over 8 nodes, whatever lies between them."""
    assert spread_after("local_sgd", every, "one_peer_exponential", 3) < 1e-12


def test_a_round_of_rest_has_nobody_and_the_exchanges_are_counted() -> None:
    each, graph = rule("local_sgd", every=3)(), make("one_peer_exponential", nodes=8)
    seen = [rule_view(each, graph, 0, r) for r in range(12)]
    assert [v.neighbors for v in seen if v.neighbors] == [(1,), (2,), (4,), (1,)]
    assert [v.round for v in seen if v.neighbors] == [2, 5, 8, 11]
    assert list(itertools.islice(exchange_rounds(each, 3), 3)) == [5, 8, 11]
    assert seen[0].weights == {0: 1.0} and seen[0].members == tuple(range(8))


class EveryThirdConfig(SharingConfig):
    pass


class EveryThird(Full):
    """Rests by its `plan`, so that the graph is asked by the round: with a period of three one edge set for ever."""

    Config: ClassVar[type[component.Config]] = EveryThirdConfig

    def plan(self, view: RoundView) -> RoundView:
        return view if view.round % 3 == 2 else view.alone()


class Never(Full):
    Config: ClassVar[type[component.Config]] = EveryThirdConfig

    def exchange_number(self, round: int) -> int | None:
        return None


def refusal(*sets: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(ROOT / "configs" / "quickstart.yaml", ["mapping.nodes_per_machine=8", *sets])
    return str(caught.value)


def test_who_never_hears_of_others_is_told_with_a_setting_that_would_do() -> None:
    third = "sharing={name: 'tests.sharing.test_periodic:EveryThird'}"
    said = refusal(third, "graph={name: one_peer_exponential, nodes: 8}")
    assert "joins all nodes over the rounds in which it exchanges, node 0 never hears of node 1" in said
    assert "; use graph: {name: ring, nodes: 8}" in said
    load(ROOT / "configs" / "quickstart.yaml",
         [third, "graph={name: ring, nodes: 8}", "mapping.nodes_per_machine=8"])  # fmt: skip
    load(ROOT / "configs" / "quickstart.yaml",
         [third, "graph={name: alternating_ring, nodes: 8}", "mapping.nodes_per_machine=8"])  # fmt: skip
    said = refusal("sharing={name: 'tests.sharing.test_periodic:Never'}", "graph={name: ring, nodes: 8}")
    assert "; use sharing: {name: full} on a connected graph" in said


@pytest.mark.parametrize("name", ["full", "gradient_tracking", "choco", "local_sgd"])
def test_weights_in_two_parts_are_refused_for_every_rule_that_mixes_by_them(name: str, tmp_path: Path) -> None:
    """Edges without weight join nobody, except under push-sum, whose shares are its own."""
    np.savetxt(tmp_path / "w.txt", np.kron(np.eye(2), np.full((4, 4), 0.25)))
    sets = ["graph={name: complete, nodes: 8}", f"weights={{name: file, path: {tmp_path}/w.txt}}"]
    said = refusal(f"sharing={{name: {name}}}", *sets)
    assert "node 0 never hears of node 4; use graph: {name: ring, nodes: 8}" in said
    load(ROOT / "configs" / "quickstart.yaml", ["mapping.nodes_per_machine=8", "sharing={name: push_sum}", *sets])


@pytest.mark.parametrize(("step", "told"), [(1, (0, 1)), (-1, (1, 0))], ids=["0 hears of nobody", "nobody of 0"])
def test_one_way_edges_alone_do_not_join(step: int, told: tuple[int, int]) -> None:
    """A chain: every node sends to the next one, or to the one before."""

    class OneWay:
        num_nodes, period, directed, servers = 3, 1, True, dict[int, tuple[int, ...]]()

        def sources(self, uid: int, round: int, members: object = None) -> tuple[int, ...]:
            return tuple({uid - step} & {0, 1, 2})

        def neighbors(self, uid: int, round: int, members: object = None) -> tuple[int, ...]:
            return tuple({uid + step} & {0, 1, 2})

        def weights(self, uid: int, round: int, members: object = None) -> dict[int, float]:
            heard = (*self.sources(uid, round), uid)
            return dict.fromkeys(heard, 1 / len(heard))

        out_weights = weights

    assert unheard(rule("full")(), OneWay()) == told  # type: ignore[arg-type]


def test_wrapped_scripts_refuse_it_too() -> None:
    with pytest.raises(ValueError, match=r"connect all ranks .* rank 0 never hears of rank 1"):
        Plan(make("one_peer_exponential", nodes=8), EveryThird(EveryThird.Config()), 0)
    plan = Plan(make("alternating_exponential_ring", nodes=8, nodes_per_machine=2),
                rule("local_sgd", every=2)(), 0)  # fmt: skip
    assert [plan.clique(step) is None for step in range(4)] == [True, True, True, False]
    assert plan.view(1).neighbors == (1,) and plan.view(3).neighbors == (1, 2, 3)
    assert (0, 1, 2, 3) in plan.cliques()


def test_a_run_shorter_than_the_first_exchange_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    sets = ["sharing={name: diloco}", "node.rounds=9"]
    load(ROOT / "configs" / "quickstart.yaml", sets)
    assert "diloco exchanges for the first time in round 9, but the run has only rounds 0 to 8" in caplog.text
    caplog.clear()
    load(ROOT / "configs" / "quickstart.yaml", [*sets[:1], "node.rounds=10"])
    assert not caplog.text
