"""Attackers that tell each neighbor something else: the formulas of the papers, what they know, and where it works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decentnode.errors import ConfigError, UsageError
from decentnode.graph.base import RoundView, view
from decentnode.payload import Payload
from decentnode.sharing.attacks.attacked import Attacked, may_differ_by_neighbor
from decentnode.sharing.attacks.base import Attack, AttackConfig, Knowledge
from decentnode.sharing.attacks.spectral import slowest_direction
from decentnode.sharing.base import Sharing
from decentnode.sharing.rounds import plan_mismatch
from decentnode.simulate.traffic import Traffic
from tests.graph.contract import make
from tests.sharing.attacks.test_attacks import last_evaluation, make_attack, run_and_record, small_experiment
from tests.sharing.contract import RULES, random_models, rule, run_round, set_up_rules

GRAPHS: dict[str, dict[str, Any]] = {
    "torus": {"nodes": 9}, "regular": {"nodes": 10, "degree": 4}, "random_regular": {"nodes": 10, "degree": 4},
    "exponential": {"nodes": 8}, "random_matching": {"nodes": 7}, "ring": {"nodes": 2},
}  # fmt: skip
BY_NEIGHBOR = ["full", "ac", "clipped_gossip", "local_sgd", "moshpit", "trimmed_mean", "full+float16", "full+bfloat16"]


class LiesByUid(Attack):
    """An attack as a user may write it: tells every neighbor but the lowest a constant model of the neighbor's uid."""

    NEEDS_MODELS = True
    known: Knowledge

    def forged_by_neighbor(self, model: Tensor, known: Knowledge, view: RoundView) -> Mapping[int, Tensor]:
        self.known = known
        return {uid: torch.full_like(model, uid, dtype=torch.float64) for uid in view.neighbors[1:]}


def attacked_rules(models: list[Tensor], attack: str, attackers: list[int], graph: Any, sharing: str = "full",
                   **options: Any) -> list[Sharing]:  # fmt: skip
    return set_up_rules(lambda: Attacked(RULES[sharing](), make_attack(attack, **options), attackers, graph), models)


def after_plain_gossip(models: np.ndarray, w: np.ndarray, forged: dict[tuple[int, int], np.ndarray]) -> np.ndarray:
    """Returns W X, where node i received forged[b, i] from attacker b."""
    found = w @ models
    for (attacker, receiver), model in forged.items():
        found[receiver] += w[receiver, attacker] * (model - models[attacker])
    return found


def expected_by_paper(kind: str, models: np.ndarray, w: np.ndarray, attackers: list[int], epsilon: float) -> np.ndarray:
    """Returns the models after a round of plain gossip, with the forged models in NumPy."""
    honest = [i for i in range(len(models)) if i not in attackers]
    among = w[np.ix_(honest, honest)]
    laplace = np.diag(among.sum(1)) - among
    if kind == "dissensus":
        away = laplace @ models[honest]
    else:
        values, vectors = np.linalg.eigh(laplace)
        assert values[2] - values[1] > 1e-3, "the eigenvector is determined"
        away = values[1] * np.outer(vectors[:, 1], vectors[:, 1] @ models[honest])
    forged = {}
    for row, i in enumerate(honest):
        for b in attackers:
            if w[i, b] > 0:
                forged[b, i] = models[i] + epsilon * away[row] / w[i, attackers].sum()
    return after_plain_gossip(models, w, forged)


@pytest.mark.parametrize("kind", ["dissensus", "spectral"])
@pytest.mark.parametrize("attackers", [[4], [1, 5]])
def test_formulas_of_the_papers(kind: str, attackers: list[int]) -> None:
    graph = make("erdos_renyi", nodes=9, probability=0.5, seed=3)
    models = random_models(9, 30, torch.float64)
    expected = expected_by_paper(kind, torch.stack(models).numpy(), graph.matrix(0), attackers, 1.7)
    before = [model.clone() for model in models]
    run_round(attacked_rules(models, kind, attackers, graph, epsilon=1.7), models, graph, 0, pull=0.0)
    torch.testing.assert_close(torch.stack(models), torch.from_numpy(expected), atol=1e-12, rtol=0)
    assert not np.allclose(torch.stack(models), graph.matrix(0) @ torch.stack(before).numpy())


def test_with_epsilon_1_dissensus_stops_plain_gossip_and_spectral_keeps_the_slowest_difference() -> None:
    """On a dumbbell of two cliques, whose nodes each have one attacker as a neighbor."""
    clique = {(i, j) for side in (0, 5) for i in range(side, side + 5) for j in range(i + 1, side + 5)}
    edges = sorted(clique | {(0, 5)} | {(i, 10 + i // 5) for i in range(10)})
    weights = np.zeros((12, 12))
    for i, j in edges:
        weights[i, j] = weights[j, i] = 0.1
    rows = {uid: {int(j): weights[uid, j] for j in np.flatnonzero(weights[uid])} for uid in range(12)}
    models = torch.from_numpy(np.random.default_rng(0).normal(size=(10, 6)))
    known = Knowledge(dict(enumerate(models)), frozenset({10, 11}), rows.__getitem__)
    honest = torch.from_numpy(weights[:10, :10])
    pull = honest @ models - honest.sum(1, keepdim=True) * models
    _, (*direction,) = slowest_direction(np.diag(honest.sum(1).numpy()) - honest.numpy())
    e = torch.from_numpy(np.array(direction))
    assert float(e[:5].min() * e[5:].max()) < 0, "the direction separates the cliques"
    for kind in ("dissensus", "spectral"):
        attack, after = make_attack(kind, epsilon=1.0), models + pull
        for attacker in (10, 11):
            receivers = tuple(range(5)) if attacker == 10 else tuple(range(5, 10))
            at = RoundView(attacker, 0, receivers, receivers, {attacker: 1.0}, {}, tuple(range(12)))
            for uid, forged in attack.forged_by_neighbor(torch.zeros(6).double(), known, at).items():
                after[uid] += 0.1 * (forged - models[uid])
        kept = after if kind == "dissensus" else e.T @ after
        torch.testing.assert_close(kept, models if kind == "dissensus" else e.T @ models)


def test_where_no_single_direction_is_slowest_spectral_uses_all_of_them() -> None:
    """On a complete graph, all differences from the mean."""
    graph, models = make("complete", nodes=6), random_models(6, 20, torch.float64)
    rules = attacked_rules(models, "spectral", [5], graph, epsilon=3.0)
    x, mean = torch.stack(models[:5]), torch.stack(models[:5]).mean(0)
    run_round(rules, models, graph, 0, pull=0.0)
    # all weights are 1/6: the eigenvalue is 5/6, and the attacker's weight 1/6
    torch.testing.assert_close(torch.stack(models[:5]), x + 5 / 6 * (mean - x) + 3.0 * 5 / 6 * (x - mean))


@pytest.mark.parametrize("family", GRAPHS)
@pytest.mark.parametrize("kind", ["dissensus", "spectral"])
@pytest.mark.parametrize("name", BY_NEIGHBOR)
def test_all_rules_on_all_graphs(name: str, kind: str, family: str) -> None:
    """Plans agree, honest nodes mix finite models, and models of narrow types stay near those of float64."""
    graph = make(family, **GRAPHS[family])
    n, results = graph.num_nodes, {}
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        models = [model.to(dtype) for model in random_models(n, 40, torch.float64)]
        rules = attacked_rules(models, kind, [0, 3][: max(1, n // 4)], graph, name)
        assert plan_mismatch(rules, graph) is None
        for round in range(3):
            run_round(rules, models, graph, round, pull=0.0)
        results[dtype] = torch.stack(models).double()
    assert bool(results[torch.float64].isfinite().all())
    for dtype, tolerance in ((torch.float16, 0.1), (torch.bfloat16, 0.8)):
        if not name.startswith("clipped_gossip"):  # the nearest neighbors may be others
            assert float((results[dtype] - results[torch.float64]).abs().max()) < tolerance


@pytest.mark.parametrize("name", RULES)
def test_rules_for_which_neighbors_may_get_different_models(name: str) -> None:
    """Those that send their model in one exchange, and keep no copies of it."""
    made = RULES[name]()
    made.set_machines([[0], [1]])
    made.set_parameter_shapes([(8, 8)])
    assert may_differ_by_neighbor(made, 64) == (name.removeprefix("ac+").removeprefix("local_sgd+") in {
        *BY_NEIGHBOR, "bfloat16", "float16", "clipped_gossip he", "clipped_gossip nearest",
        "clipped_gossip of a radius", "trimmed_mean most"})  # fmt: skip


def test_an_omniscient_attacker_learns_models_before_it_sends_and_only_in_rounds_of_the_attack() -> None:
    graph, models = make("regular", nodes=10, degree=4), random_models(10, 8)
    attackers, honest = (2, 7), (0, 1, 3, 4, 5, 6, 8, 9)
    rules = set_up_rules(lambda: Attacked(rule("local_sgd", every=2)(), make_attack("dissensus", first_round=3),
                                          attackers, graph), models)  # fmt: skip
    for round in range(6):
        views = [rules[uid].plan(view(graph, uid, round, at=round // 2)) for uid in range(10)]
        learns = round in (3, 5)  # rounds 1, 3, 5 exchange
        for uid in range(10):
            assert views[uid].neighbors == (attackers if learns and uid not in attackers else ())
            assert views[uid].sources == (honest if learns and uid in attackers else ())
            assert sum(views[uid].weights.values()) == 1 == views[uid].weights[uid]
        assert rules[0].outgoing(models[0], views[0]).keys() == {*views[0].neighbors}
    assert rules[0].requirements.phases == 2 and rules[0].requirements.overrides_topology


def test_what_arrives_before_the_attack_is_mixed_into_no_model_and_forgotten_after_the_round() -> None:
    graph, models = make("complete", nodes=4), random_models(4, 8)
    attacked = attacked_rules(models, "dissensus", [3], graph)[3]
    first, own, out = attacked.plan(view(graph, 3, 0)), models[3].clone(), torch.empty(8)
    received = {uid: Payload({"x": models[uid]}) for uid in range(3)}
    attacked.mix_into(out, own, received, first)
    assert torch.equal(out, own) and torch.equal(own, models[3])
    second = attacked.plan(replace(view(graph, 3, 0), phase=1))
    first_sent = attacked.outgoing(own, second)
    assert not torch.equal(first_sent[0].tensors["x"], first_sent[1].tensors["x"])
    attacked.mix(own, received, second)
    assert torch.equal(attacked.outgoing(own, second)[0].tensors["x"], own)
    # a model that did not arrive: that node gets the attacker's own, and counts for no other
    attacked.mix(own, {uid: received[uid] for uid in (0, 1)}, first)
    sent = attacked.outgoing(own, second)
    assert torch.equal(sent[2].tensors["x"], own)
    torch.testing.assert_close(sent[0].tensors["x"], models[0] - 1.5 * (models[1] - models[0]))


def test_an_own_attack_knows_what_it_received_and_the_weights_also_after_a_resume() -> None:
    graph, models = make("regular", nodes=8, degree=4, seed=1), random_models(8, 5)
    neighbors = graph.neighbors(2, 0)
    attack = LiesByUid(AttackConfig.model_validate({"name": "own", "count": 1}))
    attacked = set_up_rules(lambda: Attacked(RULES["full"](), attack, [2], graph), models)[2]
    attacked.load_state_dict(attacked.state_dict())  # knows nothing yet
    round_view = view(graph, 2, 0)
    attacked.mix(models[2].clone(), {uid: Payload({"x": models[uid]}) for uid in neighbors}, round_view)
    again = LiesByUid(attack.config)
    restored = set_up_rules(lambda: Attacked(RULES["full"](), again, [2], graph), models)[2]
    restored.load_state_dict(attacked.state_dict())
    for each, its_attack in ((attacked, attack), (restored, again)):
        sent = each.outgoing(models[2], round_view)
        assert [float(sent[uid].tensors["x"][0]) for uid in neighbors] == [float(models[2][0]), *neighbors[1:]]
        assert all(payload.tensors["x"].dtype == torch.float32 for payload in sent.values())
        known = its_attack.known
        assert [*known.models] == [*neighbors] and known.attackers == {2}
        assert all(torch.equal(known.models[uid], models[uid]) for uid in neighbors)
        assert known.weights_of(5) == graph.weights(5, 0)


def test_a_forged_model_of_another_shape_is_refused_in_the_name_of_the_attacker() -> None:
    class TooShort(Attack):
        def forged(self, model: Tensor, received: object, view: RoundView) -> Tensor:
            return model[1:]

    graph, models = make("complete", nodes=3), random_models(3, 8)
    attack = TooShort(AttackConfig.model_validate({"name": "own", "count": 1}))
    attacked = set_up_rules(lambda: Attacked(RULES["full"](), attack, [1], graph), models)[1]
    with pytest.raises(UsageError, match=r"node 1, an attacker, .* must forge models of shape \[8\], got \[7\]"):
        attacked.outgoing(models[1], view(graph, 1, 0))


def test_a_forged_model_that_is_too_large_to_be_masked_is_the_attackers_not_an_honest_nodes() -> None:
    experiment = small_experiment("attack={name: sign_flip, nodes: [4], scale: 1000}",
                                  "sharing={name: secure_aggregation, largest: 64}")  # fmt: skip
    with pytest.raises(UsageError, match=r"attack: node 4, an attacker, cannot send what it forged: sharing\.largest"):
        run_and_record(experiment)


@pytest.mark.parametrize("sharing", ["choco", "secure_aggregation", "gradient_tracking", "topk", "push_sum", "d2",
                                     "{name: hierarchical, groups: [[0, 1, 2], [3, 4, 5]]}",
                                     "{name: full, compression: {name: int8}}"])  # fmt: skip
def test_rules_that_do_not_just_send_a_model_to_all_are_refused(sharing: str) -> None:
    with pytest.raises(ConfigError, match="dissensus tells each neighbor something else, but with this section"):
        small_experiment("attack={name: dissensus, count: 1}", f"sharing={sharing}")


def test_weights_that_an_attacker_does_not_know_are_refused() -> None:
    with pytest.raises(ConfigError, match="dissensus needs weights that all nodes know, got samples"):
        small_experiment("attack={name: dissensus, count: 1}", "node.quorum={share: 0.5, weights: samples}",
                         "node.missing=return_weight")  # fmt: skip


def test_predicted_bytes_are_those_of_models_also_before_the_attack_begins() -> None:
    experiment = small_experiment("attack={name: dissensus, nodes: [1, 4], first_round: 2}")
    traffic = Traffic(experiment)
    assert set(traffic.exchanged[0].phase_bytes) == {traffic.model_bytes}
    sent = [[float(transfers.sizes.sum()) / traffic.model_bytes for transfers in traffic(round)] for round in (1, 2)]
    assert sent == [[0, 30], [8, 30]]


@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
@pytest.mark.parametrize("parameters", ["null", "{fragments: {name: random, count: 2, degree: 2}}"])
def test_a_run_with_dissensus_keeps_honest_models_apart(schedule: str, parameters: str) -> None:
    distances = {}
    for attack in ("null", "{name: dissensus, nodes: [2], epsilon: 3}"):
        _, records = run_and_record(small_experiment(f"attack={attack}", f"node.schedule={schedule}",
                                                     f"parameters={parameters}", "node.rounds=8"))  # fmt: skip
        distances[attack] = last_evaluation(records[0])["consensus_distance"]
    assert distances["{name: dissensus, nodes: [2], epsilon: 3}"] > 3 * distances["null"]
