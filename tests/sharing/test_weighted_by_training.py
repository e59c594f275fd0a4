"""Weights by samples or tokens: a payload's weight is proportional to what its sender has trained on."""

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
    MAX_TRAINED,
    TRAINED,
    Unit,
    WeightedByTraining,
    reason_against_weights,
)
from tests.graph.contract import make
from tests.sharing.contract import RULES, rule_traits, run_round, set_up_rules, suitable_graph

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
N, SIZE = 6, 40
WEIGHTABLE = sorted(name for name, make_rule in RULES.items() if not reason_against_weights(make_rule().requirements))
TRAINED_SAMPLES = [0, 3, 1, 0, 7, 40]
FOUR_NODES = ["graph={name: ring, nodes: 4}", "mapping={machines: 1, nodes_per_machine: 4}", "communication=inproc"]


def weighted(name: str, unit: Unit = "samples") -> Callable[[], Sharing]:
    return lambda: WeightedByTraining(RULES[name](), unit)


def models() -> list[Tensor]:
    return [torch.randn(SIZE, generator=torch.Generator().manual_seed(uid)) for uid in range(N)]


@pytest.mark.parametrize("unit", ["samples", "tokens"])
@pytest.mark.parametrize("missing", [frozenset(), frozenset({2}), frozenset({1, 3})], ids=str)
def test_a_payloads_weight_is_proportional_to_what_its_sender_has_trained_on(
    unit: Unit, missing: frozenset[int]
) -> None:
    """Compared with the weighted mean of the payloads that arrived, whose weights sum to one."""
    graph, mixed = make("complete", nodes=N), models()
    before = [model.double() for model in mixed]
    rules = set_up_rules(weighted("full", unit), mixed)
    for full, count in zip(rules, TRAINED_SAMPLES, strict=True):
        full.trained(*((count, 99) if unit == "samples" else (99, count)))
    run_round(rules, mixed, graph, 0, 0.0, missing)
    for uid in range(N):
        round_view = view(graph, uid, 0).without(missing - {uid})
        parts = {j: weight * TRAINED_SAMPLES[j] for j, weight in round_view.weights.items()}
        expected = sum(before[j] * part for j, part in parts.items()) / sum(parts.values())
        torch.testing.assert_close(mixed[uid].double(), expected, atol=1e-6, rtol=0)


@pytest.mark.sampled(of=rule_traits)
@pytest.mark.parametrize("name", WEIGHTABLE)
@pytest.mark.parametrize("count", [0, 5])
def test_equal_counts_on_all_nodes_change_nothing(name: str, count: int) -> None:
    """Also in rounds in which a node is missing, and if no node has trained (count 0)."""
    plain, counted = models(), models()
    rules, others = set_up_rules(weighted(name), counted), set_up_rules(RULES[name], plain)
    graph = suitable_graph(others[0], N)
    for round in range(4):
        missing = frozenset({2}) if round == 1 else frozenset[int]()
        for each in rules:
            each.trained(count, count)
        run_round(rules, counted, graph, round, 0.1, missing)
        run_round(others, plain, graph, round, 0.1, missing)
    for a, b in zip(counted, plain, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in WEIGHTABLE if "+" not in name])
def test_equal_models_stay_equal_with_unequal_counts(name: str) -> None:
    """The weights of a node sum to one. Rules with a codec are left out, as a lossy codec changes models by itself."""
    common = torch.randn(SIZE, generator=torch.Generator().manual_seed(9))
    mixed = [common.clone() for _ in range(N)]
    rules = set_up_rules(weighted(name), mixed)
    graph = suitable_graph(rules[0], N)
    for round in range(3):
        for rule, count in zip(rules, TRAINED_SAMPLES, strict=True):
            rule.trained(count, count)
        run_round(rules, mixed, graph, round, 0.0, frozenset({5}) if round else frozenset())
    for model in mixed:
        torch.testing.assert_close(model, common, atol=1e-5, rtol=1e-5)


def test_a_payload_reports_what_was_trained_on_since_the_last_payload() -> None:
    """Also after a checkpoint."""
    graph, model = make("ring", nodes=4), torch.zeros(SIZE)
    (rule,) = set_up_rules(weighted("full"), [model])
    reported = []
    for round, count in enumerate((3, 4, 5)):
        rule.trained(count, 0)
        round_view = view(graph, 0, round)
        outgoing = rule.outgoing(model, round_view.alone() if round == 0 else round_view)
        reported.append({payload.scalars[TRAINED] for payload in outgoing.values()})
        assert len({id(payload) for payload in outgoing.values()}) <= 1, "neighbors get different payload objects"
    assert reported == [set(), {7}, {5}]
    (restored,) = set_up_rules(weighted("full"), [model])
    rule.trained(6, 0)
    restored.load_state_dict(rule.state_dict())
    assert next(iter(restored.outgoing(model, view(graph, 0, 3)).values())).scalars[TRAINED] == 6


@pytest.mark.parametrize("reported", [-1, MAX_TRAINED + 1, 1.5, True, None])
def test_impossible_counts_are_refused(reported: Any) -> None:
    rule, round_view = weighted("full")(), view(make("ring", nodes=4), 0, 0)
    scalars = {} if reported is None else {TRAINED: reported}
    with pytest.raises(PeerFault, match=f"{TRAINED} of"):
        decode(rule, Payload({"x": torch.zeros(SIZE)}, scalars), 1, round_view)


@pytest.mark.parametrize("name", sorted(RULES))
def test_only_rules_without_requirements_on_the_weights_are_weighted_by_training(name: str) -> None:
    needs = RULES[name]().requirements
    if name in WEIGHTABLE:
        assert needs.tolerates_missing
        weighted_rule = weighted(name)()
        assert not weighted_rule.requirements.elementwise and not weighted_rule.requirements.linear
    else:
        needs_more = needs.symmetric or needs.doubly_stochastic or needs.column_stochastic or needs.star \
            or needs.unweighted  # fmt: skip
        assert needs_more or needs.overrides_topology or not needs.tolerates_missing


@pytest.mark.parametrize("name", ["push_sum", "d2", "choco", "moshpit"])
@pytest.mark.slow
def test_weights_by_samples_are_refused_for_rules_with_requirements_on_the_weights(name: str) -> None:
    keys = [*FOUR_NODES, f"sharing={name}", "node={missing: return_weight, quorum: {weights: samples}}"]
    with pytest.raises(ConfigError, match=rf"node\.quorum\.weights|weights: {name}|: {name} "):
        load(QUICKSTART, keys, {})


@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
def test_a_run_with_weights_by_samples_computes_the_weighted_mixing_of_both_schedules(schedule: str) -> None:
    """Beside the same training mixed by hand, on unequal numbers of samples. In the overlapped schedule a model is sent
    before the steps of its round, and reports what was trained on before that: nothing in round 0."""
    keys = [*FOUR_NODES, "model={name: logistic}", "training.batch_size=64", "training.local_steps=null",
            "training.local_epochs=1", f"node={{rounds: 3, evaluate_every: 0, schedule: {schedule}, "
            "missing: return_weight, quorum: {weights: samples, grace_seconds: 0}}"]  # fmt: skip
    experiment = load(QUICKSTART, keys, {})
    nodes, by_hand = build_in_process(experiment), build_in_process(experiment)
    counts = [node.training.num_samples for node in nodes]
    assert len(set(counts)) > 1
    step_all(nodes)
    graph, reported = experiment.make_graph(), [0] * 4
    for round in range(3):
        x = [node.training.model.parameters.clone() for node in by_hand]
        for node in by_hand:
            node.training.local_update(round)
        y = [node.training.model.parameters.clone() for node in by_hand]
        reported = counts if schedule == "sequential" or round else [0] * 4
        for uid, node in enumerate(by_hand):
            row = graph.weights(uid, round)
            parts = {j: weight * (reported[j] or 1) for j, weight in row.items()}
            sent = y if schedule == "sequential" else x
            mixed = sum(sent[j] * (part / sum(parts.values())) for j, part in parts.items())
            node.training.model.parameters.copy_(mixed if schedule == "sequential" else mixed + y[uid] - x[uid])
            node.training.finish_round()
    for node, other in zip(nodes, by_hand, strict=True):
        torch.testing.assert_close(node.training.model.parameters, other.training.model.parameters, atol=1e-5, rtol=0)
