"""Weights by samples and tokens: what is mixed counts as much as its sender has trained on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decentnode.build import build_in_process, step_all
from decentnode.errors import ConfigError, PeerFault
from decentnode.experiment import load
from decentnode.graph.base import view
from decentnode.payload import Payload
from decentnode.sharing.base import Sharing
from decentnode.sharing.decoding import decode
from decentnode.sharing.weighted_by_training import (
    MOST_TRAINED,
    TRAINED,
    Unit,
    WeightedByTraining,
    reason_against_weights,
)
from tests.graph.contract import make
from tests.sharing.contract import RULES, bound, by_rule, one_round, suited

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
N, SIZE = 6, 40
SUITED = sorted(name for name, make_rule in RULES.items() if not reason_against_weights(make_rule().requirements))
COUNTS = [0, 3, 1, 0, 7, 40]
SMALL = ["graph={name: ring, nodes: 4}", "mapping={machines: 1, nodes_per_machine: 4}", "communication=inproc"]


def weighed(name: str, unit: Unit = "samples") -> Callable[[], Sharing]:
    return lambda: WeightedByTraining(RULES[name](), unit)


def models() -> list[Tensor]:
    return [torch.randn(SIZE, generator=torch.Generator().manual_seed(uid)) for uid in range(N)]


@pytest.mark.parametrize("unit", ["samples", "tokens"])
@pytest.mark.parametrize("missing", [frozenset(), frozenset({2}), frozenset({1, 3})], ids=str)
def test_a_payload_counts_what_its_sender_has_trained_on(unit: Unit, missing: frozenset[int]) -> None:
    """By hand, beside the rule: a row sums to one over what came, whoever is missing."""
    graph, now = make("complete", nodes=N), models()
    before = [model.double() for model in now]
    rules = bound(weighed("full", unit), now)
    for each, count in zip(rules, COUNTS, strict=True):
        each.trained(*((count, 99) if unit == "samples" else (99, count)))
    one_round(rules, now, graph, 0, 0.0, missing)
    for uid in range(N):
        seen = view(graph, uid, 0).without(missing - {uid})
        parts = {j: weight * COUNTS[j] for j, weight in seen.weights.items()}
        wanted = sum(before[j] * part for j, part in parts.items()) / sum(parts.values())
        torch.testing.assert_close(now[uid].double(), wanted, atol=1e-6, rtol=0)


@pytest.mark.sampled(of=by_rule)
@pytest.mark.parametrize("name", SUITED)
@pytest.mark.parametrize("count", [0, 5])
def test_with_one_count_everywhere_a_rule_does_what_it_does(name: str, count: int) -> None:
    """Also in rounds in which a node is missing; where nobody has trained, too."""
    plain, counted = models(), models()
    rules, others = bound(weighed(name), counted), bound(RULES[name], plain)
    graph = suited(others[0], N)
    for round in range(4):
        missing = frozenset({2}) if round == 1 else frozenset[int]()
        for each in rules:
            each.trained(count, count)
        one_round(rules, counted, graph, round, 0.1, missing)
        one_round(others, plain, graph, round, 0.1, missing)
    for a, b in zip(counted, plain, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in SUITED if "+" not in name])
def test_nodes_that_agree_stay_as_they_are(name: str) -> None:
    """Rows sum to one: whatever nodes count, mixing moves nobody away from what all have. A lossy codec does that by
    itself."""
    one = torch.randn(SIZE, generator=torch.Generator().manual_seed(9))
    now = [one.clone() for _ in range(N)]
    rules = bound(weighed(name), now)
    graph = suited(rules[0], N)
    for round in range(3):
        for each, count in zip(rules, COUNTS, strict=True):
            each.trained(count, count)
        one_round(rules, now, graph, round, 0.0, frozenset({5}) if round else frozenset())
    for each in now:
        torch.testing.assert_close(each, one, atol=1e-5, rtol=1e-5)


def test_what_is_said_is_what_was_trained_on_since_the_payload_before() -> None:
    graph, model = make("ring", nodes=4), torch.zeros(SIZE)
    (rule,) = bound(weighed("full"), [model])
    told = []
    for round, count in enumerate((3, 4, 5)):
        rule.trained(count, 0)
        seen = view(graph, 0, round)
        found = rule.outgoing(model, seen.alone() if round == 0 else seen)
        told.append({payload.scalars[TRAINED] for payload in found.values()})
        assert len({id(payload) for payload in found.values()}) <= 1, "encoded once"
    assert told == [set(), {7}, {5}]
    (again,) = bound(weighed("full"), [model])
    rule.trained(6, 0)
    again.load_state_dict(rule.state_dict())
    assert next(iter(again.outgoing(model, view(graph, 0, 3)).values())).scalars[TRAINED] == 6


@pytest.mark.parametrize("told", [-1, MOST_TRAINED + 1, 1.5, True, None])
def test_numbers_that_nobody_can_have_are_refused(told: Any) -> None:
    rule, seen = weighed("full")(), view(make("ring", nodes=4), 0, 0)
    scalars = {} if told is None else {TRAINED: told}
    with pytest.raises(PeerFault, match=f"{TRAINED} of"):
        decode(rule, Payload({"x": torch.zeros(SIZE)}, scalars), 1, seen)


@pytest.mark.parametrize("name", sorted(RULES))
def test_rules_that_need_other_weights_do_not_get_them(name: str) -> None:
    needs = RULES[name]().requirements
    if name in SUITED:
        assert needs.tolerates_missing
        made = weighed(name)()
        assert not made.requirements.elementwise and not made.requirements.linear
    else:
        needs_more = needs.symmetric or needs.doubly_stochastic or needs.column_stochastic or needs.star \
            or needs.unweighted  # fmt: skip
        assert needs_more or needs.overrides_topology or not needs.tolerates_missing


@pytest.mark.parametrize("name", ["push_sum", "d2", "choco", "moshpit"])
@pytest.mark.slow
def test_the_config_says_so_before_anything_begins(name: str) -> None:
    keys = [*SMALL, f"sharing={name}", "node={missing: return_weight, quorum: {weights: samples}}"]
    with pytest.raises(ConfigError, match=rf"node\.quorum\.weights|weights: {name}|: {name} "):
        load(QUICKSTART, keys, {})


@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
def test_a_whole_run_is_repeated_by_hand(schedule: str) -> None:
    """Nodes train on unequally many samples. What x(r) counts is what was trained on before it was sent."""
    keys = [*SMALL, "model={name: logistic}", "training.batch_size=64", "training.local_steps=null",
            "training.local_epochs=1", f"node={{rounds: 3, evaluate_every: 0, schedule: {schedule}, "
            "missing: return_weight, quorum: {weights: samples, grace_seconds: 0}}"]  # fmt: skip
    experiment = load(QUICKSTART, keys, {})
    nodes, by_hand = build_in_process(experiment), build_in_process(experiment)
    counts = [node.training.num_samples for node in nodes]
    assert len(set(counts)) > 1
    step_all(nodes)
    graph, told = experiment.make_graph(), [0] * 4
    for round in range(3):
        x = [node.training.model.parameters.clone() for node in by_hand]
        for node in by_hand:
            node.training.local_update(round)
        y = [node.training.model.parameters.clone() for node in by_hand]
        told = counts if schedule == "sequential" or round else [0] * 4
        for uid, node in enumerate(by_hand):
            row = graph.weights(uid, round)
            parts = {j: weight * (told[j] or 1) for j, weight in row.items()}
            sent = y if schedule == "sequential" else x
            mixed = sum(sent[j] * (part / sum(parts.values())) for j, part in parts.items())
            node.training.model.parameters.copy_(mixed if schedule == "sequential" else mixed + y[uid] - x[uid])
            node.training.finish_round()
    for made, wanted in zip(nodes, by_hand, strict=True):
        torch.testing.assert_close(made.training.model.parameters, wanted.training.model.parameters, atol=1e-5, rtol=0)
