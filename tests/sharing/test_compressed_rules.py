"""Properties of rules that send fewer bytes than whole models, beyond the contract."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decentnode.build import build_in_process, step_all
from decentnode.errors import PeerFault
from decentnode.experiment import load
from decentnode.graph.base import view
from decentnode.payload import Payload
from decentnode.sharing.decoding import decode
from tests.graph.contract import make
from tests.sharing.contract import RuleFactory, random_models, rule, run_round, run_rounds, set_up_rules

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["topk", "fft", "wavelet", "jwins", "subsample"])
@pytest.mark.parametrize("elements", [1, 2, 3, 37, 1001])
def test_nodes_with_partial_models_come_closer_for_any_model_size(name: str, elements: int) -> None:
    """Models begin equal, local steps move them apart for five rounds, and then nodes only mix."""
    models = [torch.zeros(elements, dtype=torch.float64) for _ in range(8)]
    rules, graph = set_up_rules(rule(name), models), make("complete", nodes=8)
    generator = torch.Generator().manual_seed(2)
    for r in range(5):
        run_round(rules, models, graph, r,
                  step=lambda _, model: model.add_(torch.randn(model.shape, generator=generator).double()))  # fmt: skip
    before = float((torch.stack(models) - torch.stack(models).mean(0)).norm())
    low, high = torch.stack(models).amin(0), torch.stack(models).amax(0)
    for r in range(5, 80):
        run_round(rules, models, graph, r, pull=0.0)
    assert float((torch.stack(models) - torch.stack(models).mean(0)).norm()) <= 0.2 * before + 1e-9
    if name in ("topk", "subsample"):
        assert all(bool(((m >= low - 1e-9) & (m <= high + 1e-9)).all()) for m in models)


def test_sending_all_entries_equals_full() -> None:
    for name in ("topk", "fft", "wavelet", "subsample"):
        models, expected = random_models(6, 101, torch.float64), random_models(6, 101, torch.float64)
        run_rounds(rule(name, fraction=1.0), make("ring", nodes=6), models, 5)
        run_rounds(rule("full"), make("ring", nodes=6), expected, 5)
        for model, other in zip(models, expected, strict=True):
            torch.testing.assert_close(model, other, atol=1e-9, rtol=0)


def test_a_payload_has_four_bytes_per_chosen_value_and_its_indices_as_metadata() -> None:
    model = random_models(1, 10_000)[0]
    graph = make("ring", nodes=4)
    for name, count in (("topk", 1000), ("fft", 3000), ("wavelet", 1000), ("choco", 1000)):
        partial_rule = set_up_rules(rule(name), [model])[0]
        payload = next(iter(partial_rule.outgoing(model, view(graph, 0, 0, 1)).values()))
        data = sum(t.numel() * t.element_size() for k, t in payload.tensors.items() if k not in payload.metadata)
        assert data == 4 * count, name
        assert payload.metadata == {"indices"} and payload.tensors["indices"].numel() < 1.6 * count


@pytest.mark.parametrize("make_rule", [rule("topk"), rule("jwins"), rule("choco"), rule("stc"), rule("deepsqueeze"),
                                       rule("subsample"), rule("fft"), rule("qsgd"), rule("powergossip", rank=2),
                                       rule("full", compression={"name": "int8"}),
                                       rule("topk", compression={"name": "int8"})])  # fmt: skip
def test_truncated_payloads_are_refused_and_change_neither_model_nor_state(make_rule: RuleFactory) -> None:
    """Each tensor cut to its half is refused before it is mixed. The round then ends like one in which nothing arrived:
    a copy of the rule that never saw the truncated payloads has the same model and state."""
    models = random_models(4, 300)
    graph, rules = make("ring", nodes=4), set_up_rules(make_rule, models)
    views = [view(graph, uid, 0, 1) for uid in range(4)]
    for rule_of_node, model, round_view in zip(rules, models, views, strict=True):
        rule_of_node.begin(model, round_view)
    twin, twin_model = copy.deepcopy(rules[0]), models[0].clone()
    sent = [rule_of_node.outgoing(model, round_view)
            for rule_of_node, model, round_view in zip(rules, models, views, strict=True)]  # fmt: skip
    twin.outgoing(twin_model, views[0])
    payload, before = sent[1][0], models[0].clone()
    names = [name for name, tensor in payload.tensors.items() if tensor.numel() > 1]
    assert names
    for name in names:
        tensor = payload.tensors[name]
        truncated = Payload({**payload.tensors, name: tensor[: tensor.numel() // 2]}, payload.scalars)
        with pytest.raises(PeerFault, match="malformed_payload"):
            decode(rules[0], truncated, 1, views[0])
    assert torch.equal(models[0], before)
    rules[0].mix(models[0], {}, views[0].without((1, 3)))
    twin.mix(twin_model, {}, views[0].without((1, 3)))
    assert torch.equal(models[0], twin_model)
    assert _same(rules[0].state_dict(), twin.state_dict())


def _same(a: object, b: object) -> bool:
    """Returns whether two states, of tensors and numbers in dicts and lists, are equal bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


def test_models_of_zeros_stay_zero_and_nan_in_a_model_is_not_hidden() -> None:
    for name in ("topk", "fft", "wavelet", "jwins", "subsample", "choco", "qsgd", "sign", "stc", "deepsqueeze",
                 "beer", "lead", "powergossip"):  # fmt: skip
        zeros = [torch.zeros(33) for _ in range(4)]
        run_rounds(rule(name), make("ring", nodes=4), zeros, 3)
        assert all(torch.equal(model, torch.zeros(33)) for model in zeros), name
        models = random_models(4, 33)
        models[1][5] = float("nan")
        run_rounds(rule(name), make("ring", nodes=4), models, 2)
        assert bool(models[1].isnan().any()), name


def test_sending_all_entries_equals_full_in_the_overlapped_schedule() -> None:
    """Where the model changes after it was sent: a rule must mix with the values that it sent."""
    models = []
    for sharing in ("{name: full}", "{name: topk, fraction: 1.0}", "{name: wavelet, fraction: 1.0}"):
        sets = [f"sharing={sharing}", "graph={name: ring, nodes: 4}", "mapping.nodes_per_machine=4",
                "node={rounds: 8, evaluate_every: 0, schedule: overlapped}"]  # fmt: skip
        nodes = build_in_process(load(ROOT / "configs" / "quickstart.yaml", sets))
        step_all(nodes)
        models.append(torch.stack([node.training.model.parameters for node in nodes]))
    for other in models[1:]:
        torch.testing.assert_close(other, models[0], atol=1e-4, rtol=0)
