"""What attackers send and train on, and which figures they are left out of."""

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
from decentnode.errors import ConfigError, DataError
from decentnode.experiment import load
from decentnode.graph.base import RoundView, view
from decentnode.node.node import Node
from decentnode.payload import Payload
from decentnode.sharing.attacks import ATTACKS
from decentnode.sharing.attacks.attacked import Attacked
from decentnode.sharing.attacks.base import Attack, AttackConfig
from tests.graph.contract import make
from tests.sharing.contract import RULES, random_models, run_round, set_up_rules, suitable_graph

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
SMALL = ["graph={name: complete, nodes: 6}", "mapping={machines: 1, nodes_per_machine: 6}", "communication=inproc",
         "node.rounds=4", "node.evaluate_every=2"]  # fmt: skip


def attack(name: str, **options: Any) -> Attack:
    found = load_class(name, ATTACKS, "attack")
    made: Attack = found(found.Config.model_validate({"name": name, "count": 1, **options}))
    return made


def forged(each: Attack, model: Tensor, received: Sequence[Tensor] = (), round: int = 0) -> Tensor:
    before = model.clone()
    found = each.forged(model, received, view(make("complete", nodes=4), 0, round))
    assert torch.equal(model, before), "the attacker's own model stays as it is"
    return found


def small(*changes: str) -> Experiment:
    return load(QUICKSTART, [*SMALL, *changes])


def test_formulas() -> None:
    model, *others = random_models(4, 50, torch.float64)
    assert torch.equal(forged(attack("sign_flip", scale=3.0), model), -3 * model)
    assert torch.equal(forged(attack("label_flip"), model, others), model)
    known = np.stack([each.numpy() for each in (model, *others)])
    wanted = torch.from_numpy(known.mean(0) - 2.0 * known.std(0))
    torch.testing.assert_close(forged(attack("alie", z=2.0), model, others), wanted)
    assert torch.equal(forged(attack("alie"), model), model), "nothing is known before the first exchange"


def test_noise_has_the_size_of_the_model_and_is_drawn_anew() -> None:
    model = 0.01 * random_models(1, 20_000)[0]
    each = attack("noise", scale=2.0)
    first, second = (forged(each, model, round=r) - model for r in (0, 1))
    for noise in (first, second):
        assert float(noise.square().mean().sqrt()) == pytest.approx(0.02, rel=0.05)
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.05
    assert torch.equal(forged(each, model, round=1) - model, second), "a seed repeats a run"


def test_inner_product_manipulation_goes_back() -> None:
    model, *others = random_models(5, 20, torch.float64)
    each = attack("ipm", epsilon=0.5)
    assert torch.equal(forged(each, model), model)
    assert torch.equal(forged(each, model, others[:2]), model)
    before, now = (others[0] + others[1]) / 2, (others[2] + others[3]) / 2
    again = attack("ipm", epsilon=0.5)
    again.load_state_dict(each.state_dict())
    for one in (each, again):
        torch.testing.assert_close(forged(one, model, others[2:]), before - 0.5 * (now - before))


@pytest.mark.sampled(one=["name"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kind", ["sign_flip", "noise"])
def test_honest_nodes_get_what_the_attack_forges(name: str, kind: str) -> None:
    """With every rule: honest nodes mix as if the attacker's model were the forged one, and the attacker mixes into its
    own."""
    def rules(models: list[Tensor], attackers: list[int]) -> list[Any]:
        return set_up_rules(lambda: Attacked(RULES[name](), attack(kind), attackers), models)

    graph, honest, attacked = suitable_graph(RULES[name](), 4), random_models(4, 60), random_models(4, 60)
    plain = [each.clone() for each in honest]
    run_round(rules(honest, []), honest, graph, 0, pull=0.0)
    run_round(set_up_rules(RULES[name], plain), plain, graph, 0, pull=0.0)
    for a, b in zip(honest, plain, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    run_round(rules(attacked, [3]), attacked, graph, 0, pull=0.0)
    assert all(bool(model.isfinite().all()) for model in attacked)


@pytest.mark.parametrize("first_round", [0, 2])
def test_an_attack_begins_in_its_round(first_round: int) -> None:
    each = Attacked(RULES["full"](), attack("sign_flip", first_round=first_round), [1])
    model = random_models(1, 9)[0]
    for round in range(4):
        for uid in (0, 1):
            sent = each.outgoing(model, view(make("complete", nodes=3), uid, round))
            factor = -1 if uid == 1 and round >= first_round else 1
            assert all(torch.equal(payload.tensors["x"], factor * model) for payload in sent.values())


def test_models_that_an_attacker_received_are_in_its_state() -> None:
    models = random_models(3, 8)
    round_view = view(make("complete", nodes=3), 0, 0)
    each = set_up_rules(lambda: Attacked(RULES["full"](), attack("alie"), [0]), models)[0]
    each.mix(models[0].clone(), {uid: Payload({"x": models[uid]}) for uid in (1, 2)}, round_view)
    again = set_up_rules(lambda: Attacked(RULES["full"](), attack("alie"), [0]), models)[0]
    again.load_state_dict(each.state_dict())
    later = view(make("complete", nodes=3), 0, 1)
    expected = torch.stack(models).mean(0) - 1.5 * torch.stack(models).std(0, correction=0)
    for one in (each, again):
        torch.testing.assert_close(one.outgoing(models[0], later)[1].tensors["x"], expected)


@pytest.mark.parametrize("name", ["local_sgd", "slowmo", "diloco"])
@pytest.mark.parametrize("kind", ["alie", "ipm"])
def test_models_are_kept_from_one_exchange_to_the_next(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rounds of periodic rules without an exchange nothing arrives, and nothing is forged."""
    made = load_class(kind, ATTACKS, "attack")
    plain, calls = made.forged, []

    def noting(self: Attack, model: Tensor, received: Sequence[Tensor], view: RoundView) -> Tensor:
        found: Tensor = plain(self, model, received, view)
        calls.append((view.round, not torch.equal(found, model)))
        return found

    monkeypatch.setattr(made, "forged", noting)
    run(small(f"attack={{name: {kind}, nodes: [2]}}", f"sharing={{name: {name}, every: 2}}", "node.rounds=8"))
    first = 1 if kind == "alie" else 2
    assert calls == [(round, index >= first) for index, round in enumerate((1, 3, 5, 7))]


def test_a_new_generation_keeps_what_an_attacker_knows() -> None:
    models, round_view = random_models(3, 8), view(make("complete", nodes=3), 0, 0)
    former, later = (set_up_rules(lambda: Attacked(RULES["full"](), attack("ipm"), [0]), models)[0] for _ in range(2))
    for _ in range(2):
        former.mix(models[0].clone(), {uid: Payload({"x": models[uid]}) for uid in (1, 2)}, round_view)
        former.outgoing(models[0], round_view)
    later.succeed(former)
    sent = later.outgoing(models[0], round_view)[1].tensors["x"]
    torch.testing.assert_close(sent, (models[1] + models[2]) / 2)


class Silly(Attack):
    """Sends ones, as a user's own class."""

    def forged(self, model: Tensor, received: Sequence[Tensor], view: RoundView) -> Tensor:
        return torch.ones_like(model)


def run(experiment: Experiment) -> tuple[list[Node], dict[int, list[dict[str, Any]]]]:
    records: dict[int, list[dict[str, Any]]] = {}
    nodes = build_in_process(experiment, lambda uid, record: records.setdefault(uid, []).append(record))
    step_all(nodes)
    return nodes, records


def evaluated(records: list[dict[str, Any]]) -> dict[str, Any]:
    return [each for each in records if each["kind"] == "evaluation"][-1]


def test_attackers_are_in_no_figure_over_the_nodes() -> None:
    """The means over the nodes and the merged model are those of honest nodes."""
    experiment = small("attack={name: sign_flip, nodes: [1, 4], scale: 100}", "sharing=trimmed_mean",
                       "sharing.byzantine=2")  # fmt: skip
    nodes, records = run(experiment)
    honest = [0, 2, 3, 5]
    last = {uid: evaluated(records[uid]) for uid in range(6)}
    assert all("accuracy" not in last[uid] for uid in (1, 4))
    mean = sum(last[uid]["accuracy"] for uid in honest) / 4
    models = torch.stack([nodes[uid].training.model.parameters for uid in honest]).double()
    merged = nodes[0].merged
    assert merged is not None
    torch.testing.assert_close(merged[: models.shape[1]].double(), models.mean(0), atol=1e-6, rtol=0)
    spread = float((models - models.mean(0)).square().sum(1).mean().sqrt() / models.mean(0).norm())
    for each in last.values():
        assert each["accuracy_mean"] == pytest.approx(mean) and each["accuracy_merged"] > 0.2
        assert each["consensus_distance"] == pytest.approx(spread, rel=1e-4)


def test_layers_that_an_attacker_keeps_are_in_no_figure() -> None:
    """The merged model is evaluated with each node's private layers, and those of an attacker are trained on wrong
    labels: honest nodes share the whole test set among them."""
    private = "parameters={share: ['1.*']}"
    nodes, records = run(small("attack={name: label_flip, nodes: [0]}", private, "training.validation={fraction: .2}"))
    last = {uid: evaluated(records[uid]) for uid in range(6)}
    assert not [key for key in last[0] if key.startswith("validation")] and "validation_accuracy" in last[1]
    correct = 0.0
    for index, uid in enumerate(range(1, 6)):
        training, merged = nodes[uid].training, nodes[uid].merged
        assert merged is not None
        training.model.parameters.copy_(merged[: training.model.num_parameters])
        correct += training.evaluate("test", (index, 5)).sums["correct"]
    assert last[1]["accuracy_merged"] == pytest.approx(correct / 360)


def test_an_attacker_without_a_finite_model_is_in_no_figure() -> None:
    """Its distance from the merged model has no weight, also if it is NaN."""
    nodes, records = run(small("attack={name: sign_flip, nodes: [1]}", "sharing=trimmed_mean", "node.rounds=2"))
    nodes[1].training.model.parameters.fill_(float("nan"))
    steps = [node.evaluate() for node in nodes]
    while any([next(each, "over") != "over" for each in steps]):  # noqa: C419, a list: every node makes a step
        pass
    for uid in range(6):
        last = evaluated(records[uid])
        assert 0 < last["consensus_distance"] < 1 and last["accuracy_merged"] > 0.2


def test_an_own_class_attacks_and_robust_rules_learn_all_the_same() -> None:
    mine = f"attack={{name: '{__name__}:Silly', count: 1}}"
    for sharing, low, high in (("full", 0.0, 0.6), ("clipped_gossip", 0.7, 1.0), ("trimmed_mean", 0.7, 1.0)):
        _, records = run(small(mine, f"sharing={sharing}", "node.rounds=20"))
        assert low <= evaluated(records[0])["accuracy_mean"] <= high, sharing


def test_the_own_class_of_the_page_attacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its commands do: in the folder above that of the YAML file and the module."""
    root, folder = QUICKSTART.parents[1], tmp_path / "configs"
    page = (root / "docs" / "howto" / "attacks.rst").read_text()
    shown = re.search(r":name: (configs/my_attack\.py)\n\n((?:   .*\n|\n)+)", page)
    given_ = re.search(r"run (configs/byzantine\.yaml) --set '(attack=.*my_attack:Zeros.*)'", page)
    assert shown is not None and given_ is not None
    folder.mkdir()
    for name in ("quickstart.yaml", "byzantine.yaml"):
        shutil.copy(QUICKSTART.parent / name, folder)
    (tmp_path / shown[1]).write_text(textwrap.dedent(shown[2]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # loading adds the folder of the YAML file
    experiment = load(Path(given_[1]), [given_[2], *SMALL, "node.rounds=2", "sharing.byzantine=2"])
    nodes, _ = run(experiment)
    sent = [each.sharing.outgoing(each.training.model.parameters, view(each.graph, each.uid, 2)) for each in nodes]
    zeros = [uid for uid, found in enumerate(sent) if not any(payload.tensors["x"].any() for payload in found.values())]
    assert zeros == [*experiment.attackers()] and len(zeros) == 2


def test_flipped_labels_are_those_of_the_attacker_alone() -> None:
    experiment, honest = small("attack={name: label_flip, nodes: [2]}"), small()
    for uid in (1, 2):
        before, after = honest.open_data().of(uid), samples_of(experiment, uid)
        wanted = 9 - before.train.targets if uid == 2 else before.train.targets  # type: ignore[union-attr]
        assert np.array_equal(after.train.targets, wanted)  # type: ignore[union-attr]
        assert np.array_equal(after.test.targets, before.test.targets)  # type: ignore[union-attr]
        assert after.deal_again is not None and before.deal_again is not None
        dealt, given = before.deal_again(1).targets, after.deal_again(1).targets  # type: ignore[union-attr]
        assert np.array_equal(given, 9 - dealt if uid == 2 else dealt)


def test_labels_that_are_read_with_each_batch_cannot_be_changed() -> None:
    samples = small().open_data().of(0)
    with pytest.raises(DataError, match="labels of this data are read with each batch"):
        poisoned(type(samples)(object(), samples.test), lambda labels: labels)  # type: ignore[arg-type]


@pytest.mark.parametrize(("changes", "problem"), [
    (["attack=sign_flip"], "must have either nodes or count"),
    (["attack={name: sign_flip, nodes: [1], count: 2}"], "must have either nodes or count"),
    (["attack={name: sign_flip, nodes: [1, 1]}"], r"must name each node once, got 1 twice"),
    (["attack={name: sign_flip, nodes: [1, 6]}"], r"attack.nodes\[1\] must be uids below 6, got 6"),
    (["attack={name: sign_flip, count: 6}"], "all 6 nodes would be attackers"),
    (["attack={name: alie, count: 1}", "sharing=topk"], "do not send whole models; use full"),
    (["attack={name: ipm, count: 1}", "sharing={name: full, compression: {name: int8}}"], "do not send whole models"),
    (["attack={name: noise, count: 1}", "node.schedule=gossip_async"], "needs nodes that are in the same round"),
    (["attack={name: noise, nodes: [0]}", "graph={name: star, nodes: 6}", "sharing=fedavg"], "node 0 is a server"),
    (["attack={name: noise, count: 1}", "sharing=elastic"], "no effect with force: before.*use force: after"),
    (["attack='decentnode.models.mlp:Mlp'"], "must name a class derived from"),
])  # fmt: skip
def test_mistakes_are_told_at_their_place(changes: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        small(*changes)


@pytest.mark.parametrize(("changes", "warning"), [
    (["attack={name: noise, count: 1, first_round: 4}"], "attack.first_round: the run has only rounds 0 to 3, so that"),
    (["attack={name: noise, nodes: [1, 4]}", "sharing=trimmed_mean"],
     "sharing.byzantine is 1, but node 0 has 2 attackers among its neighbors in round 0"),
    (["attack={name: noise, nodes: [1, 4]}", "sharing={name: clipped_gossip, byzantine: 2}"], ""),
    (["attack={name: noise, nodes: [1, 4]}", "sharing={name: clipped_gossip, radius: 1}"], ""),
    (["attack={name: noise, nodes: [1, 4]}", "sharing={name: trimmed_mean, byzantine: most}"], ""),
    (["attack={name: noise, nodes: [1, 2]}", "graph={name: regular, nodes: 6, degree: 4, seed: 1}",
      "sharing={name: clipped_gossip, form: he}"], "sharing.byzantine is 1, but node "),
    (["attack={name: label_flip, count: 1}", "sharing=elastic"], ""),
])  # fmt: skip
def test_attacks_that_show_little_are_warned_about(changes: list[str], warning: str) -> None:
    found = [each for each in small(*changes).config_warnings if "weights" not in each]
    assert (warning in found[0] and len(found) == 1) if warning else not found


def test_labels_of_data_without_classes_cannot_be_flipped() -> None:
    with pytest.raises(ConfigError, match="this data has no classes; use an attack that forges models"):
        load(QUICKSTART.parent / "own" / "waves.yaml", ["attack={name: label_flip, count: 1}"])


def test_attackers_are_drawn_with_the_seed() -> None:
    drawn = {small("attack={name: noise, count: 2}", f"seed={seed}").attackers() for seed in range(1, 9)}
    assert len(drawn) > 3 and all(len(each) == 2 and each == tuple(sorted(each)) for each in drawn)
    assert small("attack={name: noise, nodes: [5, 1]}").attackers() == (1, 5)


def test_every_attack_has_the_common_keys() -> None:
    for name in ATTACKS:
        assert issubclass(load_class(name, ATTACKS, "attack").Config, AttackConfig)
