"""Rules on graphs that change over the rounds: all nodes are connected over time, however often a rule exchanges."""

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
from decentnode.sharing.rounds import exchange_rounds, find_unreached_pair, rule_view
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, rule_traits, run_round, set_up_rules

ROOT = Path(__file__).parents[2]
CHANGING_GRAPHS = {
    "one_peer_exponential": {"nodes": 8}, "directed_one_peer_exponential": {"nodes": 8},
    "alternating_ring": {"nodes": 8}, "alternating_exponential_ring": {"nodes": 8, "nodes_per_machine": 2},
    "base_k_plus_1": {"nodes": 7}, "random_matching": {"nodes": 8}, "random_regular": {"nodes": 8, "degree": 2},
    "od_equidyn": {"nodes": 7}, "ou_equidyn": {"nodes": 8},
    "gossip_pga": {"nodes": 8, "base": {"name": "ring", "nodes": 8}, "every": 3},
    "grouped": {"nodes": 8, "between": {"name": "one_peer_exponential", "nodes": 4}},
    "matcha": {"nodes": 8, "base": {"name": "regular", "nodes": 8, "degree": 3}},
}  # fmt: skip
EVERY = {name for name in AMONG_EQUALS if hasattr(rule(name)(), "every")}
CASES = [(name, every) for name in AMONG_EQUALS for every in (range(1, 9) if name in EVERY else [None])]
MIXING_ONLY = {
    "slowmo": {"outer_momentum": 0.0}, "diloco": {"outer_momentum": 0.0, "outer_lr": 1.0}, "noloco": {"momentum": 0.0},
    "ac": {"final": 1.0}, "hierarchical": {"groups": [[0, 1], [2, 3], [4, 5], [6, 7]]}, "topk": {"fraction": 1.0},
    "fft": {"fraction": 1.0}, "wavelet": {"fraction": 1.0}, "subsample": {"fraction": 1.0},
    "jwins": {"fractions": [1.0]}, "clipped_gossip": {"byzantine": 0}, "trimmed_mean": {"byzantine": 0},
    "deepsqueeze": {"choose": "all", "step_size": 1.0},
}  # fmt: skip
"""Options with which a rule only mixes, so that the distance from consensus depends on the graph alone."""


def remaining_distance(name: str, every: int | None, family: str, exchanges: int) -> float:
    """Returns ||x - mean|| after so many exchanges without gradients, as a fraction of what it was before."""
    options = MIXING_ONLY.get(name, {}) | ({} if every is None else {"every": every})
    graph = make(family, **CHANGING_GRAPHS[family])  # type: ignore[arg-type]
    models = random_models(graph.num_nodes, 6, torch.float64)
    before = torch.stack(models)
    rules = set_up_rules(rule(name, **options), models)
    for r in range(exchanges * (every or 1)):
        run_round(rules, models, graph, r, pull=0.0)
    after = torch.stack(models)
    return float((after - after.mean(0)).norm() / (before - before.mean(0)).norm())


def is_allowed(name: str, family: str) -> bool:
    """Returns whether a run of this rule on this graph passes the checks before its start."""
    graph = make(family, **CHANGING_GRAPHS[family])  # type: ignore[arg-type]
    requirements = rule(name, **MIXING_ONLY.get(name, {}))().requirements
    groups = Groups(((0, 1), (2, 3), (4, 5), (6, 7)))
    if name == "hierarchical" and (graph.num_nodes % 2 or groups.describe_mismatch(graph)):
        return False
    return not list(unmet_requirements(requirements, graph))


ALLOWED = [(name, family) for name in AMONG_EQUALS for family in CHANGING_GRAPHS if is_allowed(name, family)]


def test_only_rules_with_requirements_on_the_graph_are_refused_on_changing_graphs() -> None:
    refused = {name for name in AMONG_EQUALS for family in CHANGING_GRAPHS if not is_allowed(name, family)}
    assert refused == {"d2", "exact_diffusion", "decentlam", "relaysgd", "hierarchical", "powergossip",
                       "choco", "beer", "lead", "qsgd", "sign", "stc", "secure_aggregation"}  # fmt: skip
    assert {family for name, family in ALLOWED if name == "hierarchical"} == {
        "grouped", "one_peer_exponential", "alternating_exponential_ring"}


@pytest.mark.sampled(of=rule_traits)
@pytest.mark.parametrize(("name", "family"), ALLOWED)
def test_the_distance_from_consensus_depends_on_the_number_of_exchanges_alone(name: str, family: str) -> None:
    """Not on the rounds without an exchange between them."""
    distances = [remaining_distance(name, every, family, 16) for each, every in CASES if each == name]
    assert max(distances) < 0.2, f"{name} on {family}, every 1 to {len(distances)}: {distances}"
    if name != "noloco":  # it draws its pairs by the round
        assert np.ptp(distances) < 1e-9, f"{name} on {family}, every 1 to {len(distances)}: {distances}"


@pytest.mark.parametrize("every", range(1, 9))
def test_nodes_have_the_exact_mean_after_one_period_of_exchanges(every: int) -> None:
    """On one_peer_exponential of 8 nodes a period has three exchanges."""
    assert remaining_distance("local_sgd", every, "one_peer_exponential", 3) < 1e-12


def test_rounds_without_an_exchange_have_no_neighbors_and_do_not_advance_the_graph() -> None:
    local_sgd, graph = rule("local_sgd", every=3)(), make("one_peer_exponential", nodes=8)
    views = [rule_view(local_sgd, graph, 0, r) for r in range(12)]
    assert [v.neighbors for v in views if v.neighbors] == [(1,), (2,), (4,), (1,)]
    assert [v.round for v in views if v.neighbors] == [2, 5, 8, 11]
    assert list(itertools.islice(exchange_rounds(local_sgd, 3), 3)) == [5, 8, 11]
    assert views[0].weights == {0: 1.0} and views[0].members == tuple(range(8))


class EveryThirdConfig(SharingConfig):
    pass


class EveryThird(Full):
    """Skips two of three exchanges in `plan`, not in `exchange_number`, so that the graph advances in every round: of a
    graph with a period of three it uses the same edges for ever."""

    Config: ClassVar[type[component.Config]] = EveryThirdConfig

    def plan(self, view: RoundView) -> RoundView:
        return view if view.round % 3 == 2 else view.alone()


class Never(Full):
    """Never exchanges."""

    Config: ClassVar[type[component.Config]] = EveryThirdConfig

    def exchange_number(self, round: int) -> int | None:
        return None


def refusal_of(*sets: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(ROOT / "configs" / "quickstart.yaml", ["mapping.nodes_per_machine=8", *sets])
    return str(caught.value)


def test_rounds_that_never_connect_all_nodes_are_refused_with_a_graph_that_does() -> None:
    every_third = "sharing={name: 'tests.sharing.test_periodic:EveryThird'}"
    message = refusal_of(every_third, "graph={name: one_peer_exponential, nodes: 8}")
    assert "joins all nodes over the rounds in which it exchanges, node 0 never hears of node 1" in message
    assert "; use graph: {name: ring, nodes: 8}" in message
    load(ROOT / "configs" / "quickstart.yaml",
         [every_third, "graph={name: ring, nodes: 8}", "mapping.nodes_per_machine=8"])  # fmt: skip
    load(ROOT / "configs" / "quickstart.yaml",
         [every_third, "graph={name: alternating_ring, nodes: 8}", "mapping.nodes_per_machine=8"])  # fmt: skip
    message = refusal_of("sharing={name: 'tests.sharing.test_periodic:Never'}", "graph={name: ring, nodes: 8}")
    assert "; use sharing: {name: full} on a connected graph" in message


@pytest.mark.parametrize("name", ["full", "gradient_tracking", "choco", "local_sgd"])
def test_weights_that_separate_the_nodes_into_two_groups_are_refused(name: str, tmp_path: Path) -> None:
    """Edges of weight zero connect no nodes, except with push_sum, which has its own weights."""
    np.savetxt(tmp_path / "w.txt", np.kron(np.eye(2), np.full((4, 4), 0.25)))
    sets = ["graph={name: complete, nodes: 8}", f"weights={{name: file, path: {tmp_path}/w.txt}}"]
    message = refusal_of(f"sharing={{name: {name}}}", *sets)
    assert "node 0 never hears of node 4; use graph: {name: ring, nodes: 8}" in message
    load(ROOT / "configs" / "quickstart.yaml", ["mapping.nodes_per_machine=8", "sharing={name: push_sum}", *sets])


@pytest.mark.parametrize(("step", "expected"), [(1, (0, 1)), (-1, (1, 0))], ids=["0 hears no node", "no node hears 0"])
def test_one_way_edges_alone_do_not_connect_the_nodes(step: int, expected: tuple[int, int]) -> None:
    """In a directed line, in which every node sends to the next one or to the one before."""

    class OneWay:
        num_nodes, period, directed, servers = 3, 1, True, dict[int, tuple[int, ...]]()

        def sources(self, uid: int, round: int, members: object = None) -> tuple[int, ...]:
            return tuple({uid - step} & {0, 1, 2})

        def neighbors(self, uid: int, round: int, members: object = None) -> tuple[int, ...]:
            return tuple({uid + step} & {0, 1, 2})

        def weights(self, uid: int, round: int, members: object = None) -> dict[int, float]:
            row = (*self.sources(uid, round), uid)
            return dict.fromkeys(row, 1 / len(row))

        out_weights = weights

    assert find_unreached_pair(rule("full")(), OneWay()) == expected  # type: ignore[arg-type]


def test_wrappers_for_scripts_refuse_steps_that_never_connect_all_ranks() -> None:
    with pytest.raises(ValueError, match=r"connect all ranks .* rank 0 never hears of rank 1"):
        Plan(make("one_peer_exponential", nodes=8), EveryThird(EveryThird.Config()), 0)
    plan = Plan(make("alternating_exponential_ring", nodes=8, nodes_per_machine=2),
                rule("local_sgd", every=2)(), 0)  # fmt: skip
    assert [plan.clique(step) is None for step in range(4)] == [True, True, True, False]
    assert plan.view(1).neighbors == (1,) and plan.view(3).neighbors == (1, 2, 3)
    assert (0, 1, 2, 3) in plan.cliques()


def test_a_run_that_ends_before_the_first_exchange_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    sets = ["sharing={name: diloco}", "node.rounds=9"]
    load(ROOT / "configs" / "quickstart.yaml", sets)
    assert "diloco exchanges for the first time in round 9, but the run has only rounds 0 to 8" in caplog.text
    caplog.clear()
    load(ROOT / "configs" / "quickstart.yaml", [*sets[:1], "node.rounds=10"])
    assert not caplog.text
