"""Plans: topologies by name, and the sharing rules that buckets can use."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from decentnode.errors import UsageError
from decentnode.graph.base import Graph, RoundView
from decentnode.parallel.planning.differences import Differences
from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.planning.rules import make_sharing
from decentnode.parallel.planning.topologies import make_topology
from decentnode.payload import Payload
from decentnode.sharing.ac import AdaptiveConsensus
from decentnode.sharing.choco import Choco, ChocoConfig
from decentnode.sharing.full import Full


def test_all_ranks_compute_the_same_cliques() -> None:
    graph = make_topology("alternating-exp-ring", 12, 3)
    plans = [Plan(graph, make_sharing({"name": "ac", "factor": 0.5, "final": 0.5}), rank) for rank in range(12)]
    machines, both = [(0, 1, 2), (3, 4, 5)], (0, 1, 2, 3, 4, 5)
    assert len({tuple(plan.cliques()) for plan in plans}) == 1 and {*machines, both} < {*plans[0].cliques()}
    for step in range(8):
        for rank, plan in enumerate(plans):
            clique = plan.clique(step)
            assert clique is not None and clique.strength == pytest.approx(0.5) and rank in clique.members
            assert all(plans[other].clique(step) == clique for other in clique.members)
    for topology in ("ring", "exp", {"name": "random_matching"}, {"name": "ring"}):
        assert not Plan(make_topology(topology, 8, 8), make_sharing("full"), 0).cliques()


@pytest.mark.parametrize(("name", "n", "local", "message"), [
    ("ring", 5, 5, "odd"), ("exp", 6, 6, "no power of two"), ("alternating-exp-ring", 4, 4, "on one machine"),
    ("alternating-exp-ring", 4, 1, "every machine has one rank"),
    ("alternating-exp-ring", 6, 2, "unequal|power of two"),
])  # fmt: skip
def test_a_fallback_to_another_topology_is_logged_once_and_still_averages(
    name: str, n: int, local: int, message: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decentnode.parallel.planning.topologies._warned", set())
    with caplog.at_level(logging.WARNING):
        graph: Graph = make_topology(name, n, local)
        make_topology(name, n, local)
    assert len(set(caplog.messages)) == len(caplog.messages) and re.search(message, caplog.text)
    product = np.eye(n)
    for r in range(3 * (graph.period or 8)):
        matrix = graph.matrix(r)
        assert np.allclose(matrix.sum(0), 1) and np.allclose(matrix.sum(1), 1)
        product = matrix @ product
    assert np.abs(product - 1 / n).max() < 0.3


def test_a_topology_that_fits_is_used_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for name, n, local in (("ring", 4, 4), ("exp", 8, 8), ("alternating-exp-ring", 8, 2), ("complete", 3, 3)):
        make_topology(name, n, local)
    assert not caplog.messages
    with pytest.raises(ValueError, match="must have 4 nodes"):
        make_topology(make_topology("ring", 6, 6), 4, 4)


def test_an_invalid_section_is_refused_in_one_line_with_the_keys_it_takes() -> None:
    with pytest.raises(ValueError, match=r"^topology regular \(takes .*degree.*\): degree: [^\n]*$"):
        make_topology({"name": "regular", "degree": "x"}, 4, 4)
    with pytest.raises(UsageError, match=r"^topology must be one of .*, got 'rnig'; did you mean 'ring'"):
        make_topology("rnig", 4, 4)


@pytest.mark.parametrize(("rule", "message"), [
    ("qg_momentum", "QuasiGlobalMomentum, which has a method adjust, which scripts do not call"),
    ({"name": "noloco"}, "NoLoCo, which is not elementwise"), ("leader", "Leader, which is not elementwise"),
    ("relaysgd", "must be an elementwise rule"), ("push_sum", "must be an elementwise rule"),
    ("full_", "did you mean 'full'"), ({"name": "ac", "factor": 2}, "factor"), (type("Mine", (Full,), {
        "adjust": lambda *_: None}), "has a method adjust, which scripts do not call"), (type("Tree", (Full,), {
        "requirements": replace(Full.requirements, phases=2)}), "2 exchanges"),
    (type("Mine", (Full,), {"finish": lambda *_: None}), "Mine, which has a method finish, which is only called where"),
    (type("Mine", (Full,), {"begin": lambda *_: None}), "has a method begin, .* requirements have sequential=True"),
    (type("Mine", (Full,), {"direction": lambda *_: None}), "has a method direction, which scripts do not call"),
    (type("Noisy", (Full,), {"outgoing": lambda _, x, view: {uid: Payload({"x": x + 1e-3}) for uid in view.neighbors}}),
     "Noisy, which sends something other than the parameters"),
    (type("Rare", (Full,), {"outgoing": lambda _, x, view: {uid: Payload({"x": x}) for uid in view.neighbors
                                                            if view.round % 2}}), "which sends something other"),
])  # fmt: skip
def test_rules_that_buckets_cannot_use_are_refused(rule: Any, message: str) -> None:
    with pytest.raises((ValueError, UsageError), match=message):
        make_sharing(rule)


def test_a_rules_requirements_of_the_topology_are_checked() -> None:
    picky = type("Picky", (Full,), {"requirements": replace(Full.requirements, static=True)})
    with pytest.raises(ValueError, match="topology must be static for Picky"):
        Plan(make_topology("ring", 4, 4), make_sharing(picky), 0)
    assert Plan(make_topology("complete", 4, 4), make_sharing(AdaptiveConsensus), 0).view(0, 0.5).weights[0] == 0.625


def test_a_rule_whose_ranks_wait_for_ranks_that_do_not_send_is_refused() -> None:
    """In training, the operations of the ranks would not match, and the process group would hang."""
    def plan(_: Full, view: RoundView) -> RoundView:
        return replace(view, neighbors=()) if view.uid == 2 else view

    silent = type("Silent", (Full,), {"plan": plan})
    with pytest.raises(ValueError, match="plans of Silent in round 0 rank 3 waits for rank 2, which sends to no rank"):
        Plan(make_topology("ring", 4, 4), make_sharing(silent), 0)


def test_a_robust_rule_with_too_few_neighbors_is_refused() -> None:
    """It would trim all neighbors, so that every rank trained alone without a warning."""
    for topology in ("ring", "one-peer-exp"):
        with pytest.raises(ValueError, match="at least 3 neighbors in every step for TrimmedMean, rank 0 has 1; use "
                           "topology='complete'"):  # fmt: skip
            Plan(make_topology(topology, 4, 4), make_sharing("trimmed_mean"), 0).check_neighbors()
    for topology, ranks in (("complete", 4), ("complete", 1)):
        Plan(make_topology(topology, ranks, ranks), make_sharing("trimmed_mean"), 0).check_neighbors()
    Plan(make_topology("ring", 4, 4), make_sharing({"name": "trimmed_mean", "byzantine": "most"}), 0).check_neighbors()


def test_choco_given_as_a_class_an_object_or_a_section_is_the_rule_of_differences() -> None:
    config = ChocoConfig(name="choco", choose="all", compression={"name": "int8"})  # type: ignore[arg-type]
    for given in (Choco, Choco(config), config.model_dump()):
        assert type(make_sharing(given)) is Differences
    with pytest.raises(ValueError, match="every: Input should be greater than or equal to 1"):
        make_sharing({"name": "choco", "every": 0})


def test_choco_that_exchanges_every_second_step_visits_all_rounds_of_the_topology() -> None:
    plan = Plan(make_topology("one-peer-exp", 4, 4), make_sharing({"name": "choco", "every": 2, "step_size": 1.0}), 0)
    assert [(plan.view(step).sources, plan.phase(step)) for step in (1, 3, 5)] == [((1,), 0), ((2,), 1), ((1,), 0)]
    assert not plan.view(2).sources and not plan.exchanges_after(2) and plan.exchanges_after(3)


def test_choco_chooses_its_step_size_again_for_each_graph() -> None:
    """With missing="regroup", the object that the script gave is used again for other numbers of ranks."""
    rule = Differences.of(ChocoConfig(name="choco", fraction=0.1))
    step_sizes = []
    for graph in (make_topology("complete", 1, 1), make_topology({"name": "ring"}, 3, 1)):
        rule.choose_step(graph)
        step_sizes.append(rule.step_size)
    assert step_sizes[1] is not None and step_sizes[1] < 0.9 and step_sizes[0] == 1.0
