"""What attackers send and train on, and the figures that leave them out."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decentnode import Experiment
from decentnode.build import build_in_process, samples_of, step_all
from decentnode.config.component import load_class
from decentnode.data.poisoned import poisoned
from decentnode.errors import ConfigError, DataError, Diverged
from decentnode.experiment import load
from decentnode.graph.base import RoundView, view
from decentnode.node.node import Node
from decentnode.payload import Payload
from decentnode.sharing.attacks import ATTACKS
from decentnode.sharing.attacks.attacked import Attacked
from decentnode.sharing.attacks.base import Attack, AttackConfig
from tests.graph.contract import make
from tests.sharing.contract import (
    RULES,
    RuleFactory,
    random_models,
    run_round,
    set_up_rules,
    suitable_graph,
)

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
SIX_NODES = ["graph={name: complete, nodes: 6}", "mapping={machines: 1, nodes_per_machine: 6}", "communication=inproc",
         "node.rounds=4", "node.evaluate_every=2"]  # fmt: skip


def make_attack(name: str, **options: Any) -> Attack:
    attack_class = load_class(name, ATTACKS, "attack")
    attack: Attack = attack_class(attack_class.Config.model_validate({"name": name, "count": 1, **options}))
    return attack


def forged_model(attack: Attack, model: Tensor, received: Sequence[Tensor] = (), round: int = 0) -> Tensor:
    """Returns what node 0 sends as an attacker; asserts that its own model is not changed."""
    before = model.clone()
    forged = attack.forged(model, received, view(make("complete", nodes=4), 0, round))
    assert torch.equal(model, before)
    return forged


def small_experiment(*changes: str) -> Experiment:
    """Returns the quickstart on a complete graph of six nodes, with other changes."""
    return load(QUICKSTART, [*SIX_NODES, *changes])


def test_formulas_of_sign_flip_label_flip_and_alie() -> None:
    model, *others = random_models(4, 50, torch.float64)
    assert torch.equal(forged_model(make_attack("sign_flip", scale=3.0), model), -3 * model)
    assert torch.equal(forged_model(make_attack("label_flip"), model, others), model)
    known = np.stack([known_model.numpy() for known_model in (model, *others)])
    expected = torch.from_numpy(known.mean(0) - 2.0 * known.std(0))
    torch.testing.assert_close(forged_model(make_attack("alie", z=2.0), model, others), expected)
    assert torch.equal(forged_model(make_attack("alie"), model), model), "before the first exchange it forges nothing"


def test_noise_is_relative_to_the_size_of_the_model_and_differs_by_round() -> None:
    model = 0.01 * random_models(1, 20_000)[0]
    attack = make_attack("noise", scale=2.0)
    first, second = (forged_model(attack, model, round=r) - model for r in (0, 1))
    for noise in (first, second):
        assert float(noise.square().mean().sqrt()) == pytest.approx(0.02, rel=0.05)
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.05
    assert torch.equal(forged_model(attack, model, round=1) - model, second), "the same round has the same noise"


def test_inner_product_manipulation_reverses_the_last_change_of_the_mean() -> None:
    """It needs the means of two exchanges; the first one is in its checkpoint state."""
    model, *others = random_models(5, 20, torch.float64)
    attack = make_attack("ipm", epsilon=0.5)
    assert torch.equal(forged_model(attack, model), model)
    assert torch.equal(forged_model(attack, model, others[:2]), model)
    first_mean, second_mean = (others[0] + others[1]) / 2, (others[2] + others[3]) / 2
    restored = make_attack("ipm", epsilon=0.5)
    restored.load_state_dict(attack.state_dict())
    for ipm in (attack, restored):
        expected = first_mean - 0.5 * (second_mean - first_mean)
        torch.testing.assert_close(forged_model(ipm, model, others[2:]), expected)


@pytest.mark.sampled(one=["name"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kind", ["sign_flip", "noise"])
def test_an_attacker_sends_the_forged_model_and_mixes_into_its_own(name: str, kind: str) -> None:
    """With every rule: all models are those of a round without Attacked in which the attacker's `outgoing` alone gets
    the forged model. Without attackers, Attacked changes nothing."""
    attacker, graph = 3, suitable_graph(RULES[name](), 4)

    def models_after_round(make_rule: RuleFactory, forges: bool = False) -> Tensor:
        models = random_models(4, 60)
        rules = set_up_rules(make_rule, models)
        if forges:
            outgoing, attack = rules[attacker].outgoing, make_attack(kind)

            def outgoing_of_attacker(model: Tensor, view: RoundView) -> dict[int, Payload]:
                return outgoing(attack.forged(model, [], view) if view.neighbors else model, view)

            rules[attacker].outgoing = outgoing_of_attacker  # type: ignore[method-assign]
        for round in range(2):  # some rules mix nothing in round 0
            run_round(rules, models, graph, round, pull=0.0)
        return torch.stack(models)

    honest = models_after_round(RULES[name])
    without_attackers = models_after_round(lambda: Attacked(RULES[name](), make_attack(kind), [], graph))
    torch.testing.assert_close(without_attackers, honest, atol=1e-5, rtol=1e-5)
    attacked = models_after_round(lambda: Attacked(RULES[name](), make_attack(kind), [attacker], graph))
    torch.testing.assert_close(attacked, models_after_round(RULES[name], forges=True), atol=1e-5, rtol=1e-5)
    assert bool(attacked.isfinite().all())
    has_effect = not torch.allclose(attacked[:attacker], honest[:attacker], atol=1e-4)
    assert has_effect == (name != "elastic"), "with force: before, for which an attack is refused, it sends no model"


@pytest.mark.parametrize("first_round", [0, 2])
def test_an_attack_begins_in_its_first_round(first_round: int) -> None:
    graph = make("complete", nodes=3)
    attacked = Attacked(RULES["full"](), make_attack("sign_flip", first_round=first_round), [1], graph)
    model = random_models(1, 9)[0]
    for round in range(4):
        for uid in (0, 1):
            sent = attacked.outgoing(model, view(graph, uid, round))
            factor = -1 if uid == 1 and round >= first_round else 1
            assert all(torch.equal(payload.tensors["x"], factor * model) for payload in sent.values())


def test_the_checkpoint_state_of_an_attacker_has_the_models_that_it_received() -> None:
    models, graph = random_models(3, 8), make("complete", nodes=3)
    round_view = view(graph, 0, 0)
    attacked = set_up_rules(lambda: Attacked(RULES["full"](), make_attack("alie"), [0], graph), models)[0]
    attacked.mix(models[0].clone(), {uid: Payload({"x": models[uid]}) for uid in (1, 2)}, round_view)
    restored = set_up_rules(lambda: Attacked(RULES["full"](), make_attack("alie"), [0], graph), models)[0]
    restored.load_state_dict(attacked.state_dict())
    next_view = view(make("complete", nodes=3), 0, 1)
    expected = torch.stack(models).mean(0) - 1.5 * torch.stack(models).std(0, correction=0)
    for attacker in (attacked, restored):
        torch.testing.assert_close(attacker.outgoing(models[0], next_view)[1].tensors["x"], expected)


@pytest.mark.parametrize("name", ["local_sgd", "slowmo", "diloco"])
@pytest.mark.parametrize("kind", ["alie", "ipm"])
def test_with_periodic_rules_an_attacker_forges_from_the_models_of_the_last_exchange(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rounds without an exchange nothing arrives, and nothing is forged."""
    attack_class = load_class(kind, ATTACKS, "attack")
    plain, calls = attack_class.forged, []

    def recording(self: Attack, model: Tensor, received: Sequence[Tensor], view: RoundView) -> Tensor:
        forged: Tensor = plain(self, model, received, view)
        calls.append((view.round, not torch.equal(forged, model)))
        return forged

    monkeypatch.setattr(attack_class, "forged", recording)
    periodic = f"sharing={{name: {name}, every: 2}}"
    run_and_record(small_experiment(f"attack={{name: {kind}, nodes: [2]}}", periodic, "node.rounds=8"))
    first = 1 if kind == "alie" else 2
    assert calls == [(round, index >= first) for index, round in enumerate((1, 3, 5, 7))]


def test_an_attacker_keeps_its_state_in_a_new_generation() -> None:
    models, graph = random_models(3, 8), make("complete", nodes=3)
    round_view = view(graph, 0, 0)
    former, later = (set_up_rules(lambda: Attacked(RULES["full"](), make_attack("ipm"), [0], graph), models)[0]
                     for _ in range(2))  # fmt: skip
    for _ in range(2):
        former.mix(models[0].clone(), {uid: Payload({"x": models[uid]}) for uid in (1, 2)}, round_view)
        former.outgoing(models[0], round_view)
    later.succeed(former)
    sent = later.outgoing(models[0], round_view)[1].tensors["x"]
    torch.testing.assert_close(sent, (models[1] + models[2]) / 2)


class SendsOnes(Attack):
    """An attack as a user may write it: sends ones."""

    def forged(self, model: Tensor, received: Sequence[Tensor], view: RoundView) -> Tensor:
        return torch.ones_like(model)


def run_and_record(experiment: Experiment) -> tuple[list[Node], dict[int, list[dict[str, Any]]]]:
    """Runs an experiment in this process; returns its nodes, and their records by uid."""
    records: dict[int, list[dict[str, Any]]] = {}
    nodes = build_in_process(experiment, lambda uid, record: records.setdefault(uid, []).append(record))
    step_all(nodes)
    return nodes, records


def last_evaluation(records: list[dict[str, Any]]) -> dict[str, Any]:
    return [record for record in records if record["kind"] == "evaluation"][-1]


def test_means_over_nodes_the_merged_model_and_the_consensus_distance_leave_attackers_out() -> None:
    experiment = small_experiment("attack={name: sign_flip, nodes: [1, 4], scale: 100}", "sharing=trimmed_mean",
                       "sharing.byzantine=2")  # fmt: skip
    nodes, records = run_and_record(experiment)
    honest = [0, 2, 3, 5]
    last = {uid: last_evaluation(records[uid]) for uid in range(6)}
    assert all("accuracy" not in last[uid] for uid in (1, 4))
    mean = sum(last[uid]["accuracy"] for uid in honest) / 4
    models = torch.stack([nodes[uid].training.model.parameters for uid in honest]).double()
    merged = nodes[0].merged
    assert merged is not None
    torch.testing.assert_close(merged[: models.shape[1]].double(), models.mean(0), atol=1e-6, rtol=0)
    consensus_distance = float((models - models.mean(0)).square().sum(1).mean().sqrt() / models.mean(0).norm())
    for evaluation in last.values():
        assert evaluation["accuracy_mean"] == pytest.approx(mean) and evaluation["accuracy_merged"] > 0.2
        assert evaluation["consensus_distance"] == pytest.approx(consensus_distance, rel=1e-4)


def test_the_merged_model_is_not_evaluated_with_the_private_layers_of_an_attacker() -> None:
    """Nodes evaluate the merged model with their private layers, each on a part of the test set. Those of an attacker
    are trained on wrong labels, so that honest nodes share the whole test set."""
    nodes, records = run_and_record(small_experiment(
        "attack={name: label_flip, nodes: [0]}", "parameters={share: ['1.*']}", "training.validation={fraction: .2}"
    ))  # fmt: skip
    last = {uid: last_evaluation(records[uid]) for uid in range(6)}
    assert not [key for key in last[0] if key.startswith("validation")] and "validation_accuracy" in last[1]
    correct = 0.0
    for index, uid in enumerate(range(1, 6)):
        training, merged = nodes[uid].training, nodes[uid].merged
        assert merged is not None
        training.model.parameters.copy_(merged[: training.model.num_parameters])
        correct += training.evaluate("test", (index, 5)).sums["correct"]
    assert last[1]["accuracy_merged"] == pytest.approx(correct / 360)


def test_nan_in_the_model_of_an_attacker_is_in_no_figure() -> None:
    nodes, records = run_and_record(
        small_experiment("attack={name: sign_flip, nodes: [1]}", "sharing=trimmed_mean", "node.rounds=2")
    )
    nodes[1].training.model.parameters.fill_(float("nan"))
    evaluations = [node.evaluate() for node in nodes]
    while any([next(each, "over") != "over" for each in evaluations]):  # noqa: C419, a list: every node makes a step
        pass
    for uid in range(6):
        last = last_evaluation(records[uid])
        assert 0 < last["consensus_distance"] < 1 and last["accuracy_merged"] > 0.2


def test_robust_rules_learn_despite_an_attack_of_an_own_class_and_full_does_not() -> None:
    own_attack = f"attack={{name: '{__name__}:SendsOnes', count: 1}}"
    for sharing, low, high in (("full", 0.0, 0.6), ("clipped_gossip", 0.7, 1.0), ("trimmed_mean", 0.7, 1.0)):
        _, records = run_and_record(small_experiment(own_attack, f"sharing={sharing}", "node.rounds=20"))
        assert low <= last_evaluation(records[0])["accuracy_mean"] <= high, sharing


def test_the_own_class_that_the_page_about_attackers_shows_attacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the page's command (docs/howto/attacks.rst), which runs in the folder above that of the YAML file and the
    module."""
    root, folder = QUICKSTART.parents[1], tmp_path / "configs"
    page = (root / "docs" / "howto" / "attacks.rst").read_text()
    shown = re.search(r":name: (configs/my_attack\.py)\n\n((?:   .*\n|\n)+)", page)
    command = re.search(r"run (configs/byzantine\.yaml) --set '(attack=.*my_attack:Zeros.*)'", page)
    assert shown is not None and command is not None
    folder.mkdir()
    for name in ("quickstart.yaml", "byzantine.yaml"):
        shutil.copy(QUICKSTART.parent / name, folder)
    (tmp_path / shown[1]).write_text(textwrap.dedent(shown[2]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # loading adds the folder of the YAML file
    experiment = load(Path(command[1]), [command[2], *SIX_NODES, "node.rounds=2", "sharing.byzantine=2"])
    nodes, _ = run_and_record(experiment)
    sent = [each.sharing.outgoing(each.training.model.parameters, view(each.graph, each.uid, 2)) for each in nodes]
    zeros = [uid for uid, payloads in enumerate(sent)
             if not any(payload.tensors["x"].any() for payload in payloads.values())]  # fmt: skip
    assert zeros == [*experiment.attackers()] and len(zeros) == 2


def test_label_flip_changes_the_training_labels_of_the_attacker_alone() -> None:
    experiment, honest = small_experiment("attack={name: label_flip, nodes: [2]}"), small_experiment()
    for uid in (1, 2):
        before, after = honest.open_data().of(uid), samples_of(experiment, uid)
        expected = 9 - before.train.targets if uid == 2 else before.train.targets  # type: ignore[union-attr]
        assert np.array_equal(after.train.targets, expected)  # type: ignore[union-attr]
        assert np.array_equal(after.test.targets, before.test.targets)  # type: ignore[union-attr]
        assert after.deal_again is not None and before.deal_again is not None
        dealt, flipped = before.deal_again(1).targets, after.deal_again(1).targets  # type: ignore[union-attr]
        assert np.array_equal(flipped, 9 - dealt if uid == 2 else dealt)


def test_labels_that_are_read_with_each_batch_cannot_be_flipped() -> None:
    samples = small_experiment().open_data().of(0)
    with pytest.raises(DataError, match="labels of this data are read with each batch"):
        poisoned(type(samples)(object(), samples.test), lambda labels: labels)  # type: ignore[arg-type]


@pytest.mark.parametrize(("changes", "problem"), [
    (["attack=sign_flip"], "must have either nodes or count"),
    (["attack={name: sign_flip, nodes: [1], count: 2}"], "must have either nodes or count"),
    (["attack={name: sign_flip, nodes: [1, 1]}"], r"must name each node once, got 1 twice"),
    (["attack={name: sign_flip, nodes: [1, 6]}"], r"attack.nodes\[1\] must be uids below 6, got 6"),
    (["attack={name: sign_flip, count: 6}"], "all 6 nodes would be attackers"),
    (["attack={name: alie, count: 1}", "sharing=topk"], "do not send whole models; use full"),
    (["attack={name: alie, count: 1}", "sharing={name: hierarchical, groups: [[0, 1, 2], [3, 4, 5]], "
                                       "compression: {name: int8}}"], "do not send whole models"),
    (["attack={name: ipm, count: 1}", "sharing={name: full, compression: {name: int8}}"], "do not send whole models"),
    (["attack={name: noise, count: 1}", "node.schedule=gossip_async"], "needs nodes that are in the same round"),
    (["attack={name: noise, nodes: [0]}", "graph={name: star, nodes: 6}", "sharing=fedavg"], "node 0 is a server"),
    (["attack={name: noise, count: 1}", "sharing=elastic"], "no effect with force: before.*use force: after"),
    (["attack='decentnode.models.mlp:Mlp'"], "must name a class derived from"),
])  # fmt: skip
def test_invalid_attack_sections_are_refused(changes: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        small_experiment(*changes)


@pytest.mark.parametrize(("changes", "warning"), [
    (["attack={name: noise, count: 1, first_round: 4}"], "attack.first_round: the run has only rounds 0 to 3, so that"),
    (["attack={name: noise, nodes: [1, 4]}", "sharing=trimmed_mean"],
     "sharing.byzantine is 1, but node 0 has 2 attackers among its neighbors in exchange 0"),
    (["attack={name: noise, nodes: [1, 4]}", "sharing=trimmed_mean", "graph={name: line, nodes: 6}",
      "parameters={fragments: {name: random, count: 2, degree: 5}}"],
     "sharing.byzantine is 1, but node 0 has 2 attackers among its neighbors in exchange 0 of fragment 0"),
    (["attack={name: noise, nodes: [1, 4]}", "sharing=trimmed_mean", "graph={name: complete, nodes: 6}",
      "parameters={fragments: [{parameters: '*', graph: {name: regular, nodes: 6, degree: 3, seed: 5}}]}"], ""),
    (["attack={name: noise, nodes: [1, 4]}", "sharing={name: clipped_gossip, byzantine: 2}"], ""),
    (["attack={name: noise, nodes: [1, 4]}", "sharing={name: clipped_gossip, radius: 1}"], ""),
    (["attack={name: noise, nodes: [1, 4]}", "sharing={name: trimmed_mean, byzantine: most}"], ""),
    (["attack={name: noise, nodes: [1, 2]}", "graph={name: regular, nodes: 6, degree: 4, seed: 1}",
      "sharing={name: clipped_gossip, form: he}"], "sharing.byzantine is 1, but node "),
    (["attack={name: label_flip, count: 1}", "sharing=elastic"], ""),
])  # fmt: skip
def test_attacks_without_effect_or_with_too_many_attackers_give_a_warning(changes: list[str], warning: str) -> None:
    warnings = [text for text in small_experiment(*changes).config_warnings if "weights" not in text]
    assert (warning in warnings[0] and len(warnings) == 1) if warning else not warnings


def test_labels_of_data_without_classes_cannot_be_flipped() -> None:
    with pytest.raises(ConfigError, match="this data has no classes; use an attack that forges models"):
        load(QUICKSTART.parent / "own" / "waves.yaml", ["attack={name: label_flip, count: 1}"])


def test_attackers_are_drawn_with_the_seed() -> None:
    draws = {small_experiment("attack={name: noise, count: 2}", f"seed={seed}").attackers() for seed in range(1, 9)}
    assert len(draws) > 3 and all(len(uids) == 2 and uids == tuple(sorted(uids)) for uids in draws)
    assert small_experiment("attack={name: noise, nodes: [5, 1]}").attackers() == (1, 5)


def test_every_attack_has_the_common_keys() -> None:
    for name in ATTACKS:
        assert issubclass(load_class(name, ATTACKS, "attack").Config, AttackConfig)


@pytest.mark.parametrize(("changes", "named"), [
    (["attack.scale=1e20"], True),
    (["attack=null", "training.optimizer.lr=1e20"], False),
    (["attack.first_round=2", "training.optimizer.lr=1e20"], False),
])  # fmt: skip
def test_a_model_that_diverges_names_attackers_that_have_sent_models(changes: list[str], named: bool) -> None:
    with pytest.raises(Diverged) as caught:
        run_and_record(small_experiment("attack={name: noise, nodes: [1, 4]}", "sharing=full", *changes))
    assert ("; nodes 1, 4 attack, which can be the cause" in str(caught.value)) == named
