"""What the rules with few bytes promise beyond the contract."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from decentnode.build import build_in_process, step_all
from decentnode.compression import indices
from decentnode.config.component import load_class
from decentnode.errors import ConfigError, PeerFault
from decentnode.experiment import load
from decentnode.graph.base import view
from decentnode.payload import Payload
from decentnode.sharing import SHARINGS
from decentnode.sharing.decoding import decode
from decentnode.sharing.operator import Operator
from decentnode.sharing.stc import Ternary
from tests.compression.contract import codec
from tests.graph.contract import make
from tests.sharing.contract import Make, bound, draw, gossip, one_round, rule

ROOT = Path(__file__).parents[2]
RING, RING4 = make("ring", nodes=8), make("ring", nodes=4)


def spread(models: list[Tensor]) -> float:
    stacked = torch.stack(models).double()
    return float((stacked - stacked.mean(0)).norm() / stacked.norm())


def test_choco_keeps_the_mean_that_naive_compression_loses() -> None:
    """With a gap of the ring of 8, step .2: at most (1 - .2 * .195)^600 < 1e-10 of the spread is left
    (docs/explanation/algorithms.rst, "Steps of compressed rules")."""
    models = draw(8, 50, torch.float64)
    mean = torch.stack(models).mean(0)
    gossip(rule("choco", fraction=0.2, step_size=0.2), RING, models, 600)
    assert spread(models) < 1e-10
    torch.testing.assert_close(torch.stack(models).mean(0), mean, atol=1e-12, rtol=0)
    naive = draw(8, 50, torch.float64)
    gossip(rule("full", compression={"name": "int4"}), RING, naive, 300)
    assert float((torch.stack(naive).mean(0) - mean).abs().max()) > 1e-2


@pytest.mark.parametrize("options", [
    {"name": "qsgd"}, {"name": "sign"}, {"name": "stc", "fraction": 0.2, "step_size": 0.1},
    {"name": "choco", "choose": "all", "compression": {"name": "int4", "unbiased": True}},
    {"name": "choco", "choose": "random", "fraction": 0.3, "step_size": 0.2},
])  # fmt: skip
def test_every_operator_under_choco_agrees_and_keeps_the_mean(options: dict[str, object]) -> None:
    models = draw(8, 50, torch.float64)
    mean = torch.stack(models).mean(0)
    gossip(rule(**options), RING, models, 500)  # type: ignore[arg-type]
    assert spread(models) < 1e-3
    torch.testing.assert_close(torch.stack(models).mean(0), mean, atol=1e-9, rtol=0)


def test_choco_recovers_from_a_lost_message() -> None:
    models = draw(6, 40, torch.float64)
    graph, rules = make("ring", nodes=6), bound(rule("choco", fraction=0.3, step_size=0.2), models)
    for r in range(20):
        one_round(rules, models, graph, r, pull=0.0)
    one_round(rules, models, graph, 20, pull=0.0, missing=frozenset({2}))
    assert 2 not in rules[1].copies and 2 not in rules[3].copies  # type: ignore[attr-defined]
    for r in range(21, 400):
        one_round(rules, models, graph, r, pull=0.0)
    for uid in (1, 3):
        assert torch.equal(rules[uid].copies[2], rules[2].public)  # type: ignore[attr-defined]
    assert spread(models) < 1e-4


def test_stc_sends_signs_of_one_size_and_loses_nothing() -> None:
    """sent + residual == update, where update is what neighbors did not know before."""
    models = draw(6, 300, torch.float64)
    graph = make("ring", nodes=6)
    rules = bound(rule("stc", fraction=0.05), models)
    for r in range(5):
        seen = view(graph, 0, r, 1)
        rules[0].begin(models[0], seen)
        known = rules[0].public.clone()  # type: ignore[attr-defined]
        model = models[0] + 0.1 * draw(1, 300, torch.float64)[0].roll(r)
        payload = rules[0].outgoing(model, seen)[1]
        at, sent = rules[0].operator.decode(payload.tensors, 300, torch.float64)  # type: ignore[attr-defined]
        residual = model - rules[0].public  # type: ignore[attr-defined]
        residual[at] += sent
        torch.testing.assert_close(residual, model - known, atol=1e-15, rtol=0)
        assert at.numel() == 15 and sent.abs().unique().numel() == 1
        rules[0].mix(models[0].copy_(model), {}, seen.without(seen.sources))
    ternary = Ternary(0.01)
    coded, at, _ = ternary.encode(draw(1, 100_000)[0], view(graph, 0, 0))
    size = sum(tensor.numel() * tensor.element_size() for tensor in coded.values())
    assert at.numel() == 1000 and size < 1000 * (0.081 / 0.01 / 8 * 1.05 + 1 / 8) + 16  # entropy of .01 is .081 bits


def test_deepsqueeze_loses_nothing_and_nears_agreement() -> None:
    models = draw(8, 50, torch.float64)
    mean, before = torch.stack(models).mean(0), spread(models)
    gossip(rule("deepsqueeze", fraction=0.5, step_size=0.1), RING, models, 500)
    torch.testing.assert_close(torch.stack(models).mean(0), mean, atol=1e-10, rtol=0)
    assert spread(models) < 0.1 * before


@pytest.mark.parametrize("options", [
    {"choose": "all", "compression": {"name": "int4"}}, {"choose": "all", "compression": {"name": "sign"}},
    {"fraction": 0.3}, {"fraction": 0.3, "compression": {"name": "int4"}}, {"fraction": 0.3, "choose": "random"},
])  # fmt: skip
def test_deepsqueeze_keeps_what_it_does_not_send(options: dict[str, object]) -> None:
    """sent + error == model + the error before, in every round and for every kind of choice."""
    each, model = bound(rule("deepsqueeze", **options), draw(1, 300))[0], draw(1, 300)[0]  # type: ignore[arg-type]
    error = torch.zeros(300)
    for r in range(4):
        seen = view(RING, 0, r, 1)
        payload = each.outgoing(model, seen)[1]
        arrived = each.unpack(payload, 1, seen).tensors
        sent = torch.zeros(300).index_add_(0, arrived["at"], arrived["values"])
        now = each.state_dict()["error"]
        torch.testing.assert_close(sent + now, model + error, atol=1e-5, rtol=0)
        assert float(now.abs().max()) > 0.01
        error = now
        each.mix(model, {}, seen.without(seen.sources))


def test_powergossip_agrees_on_matrices_and_keeps_the_mean() -> None:
    models = draw(8, 20 * 12 + 7, torch.float64)
    mean = torch.stack(models).mean(0)
    rules = [rule("powergossip", rank=1)() for _ in models]
    for each in rules:
        each.set_parameter_shapes([(20, 3, 4), (7,)])
        assert each.payload_schema(247, torch.float64)["products"].max_elements == 20
    graph = make("ring", nodes=8)
    for r in range(800):
        one_round(rules, models, graph, r, pull=0.0)
        if r == 5:
            torch.testing.assert_close(torch.stack(models).mean(0), mean, atol=1e-12, rtol=0)
    torch.testing.assert_close(torch.stack(models).mean(0), mean, atol=1e-10, rtol=0)
    assert spread(models) < 1e-5


def test_powergossip_finds_a_difference_of_its_rank_at_once() -> None:
    u, v = draw(2, 15, torch.float64)
    models = [torch.zeros(225, dtype=torch.float64), torch.outer(u, v).reshape(-1)]
    rules = [rule("powergossip", rank=1)() for _ in models]
    for each in rules:
        each.set_parameter_shapes([(15, 15)])
    for r in range(2):
        one_round(rules, models, make("ring", nodes=2), r, pull=0.0)
    assert spread(models) < 0.51, "the second exchange uses the factor that the first one found"
    for r in range(2, 40):
        one_round(rules, models, make("ring", nodes=2), r, pull=0.0)
    assert spread(models) < 1e-10


def test_powergossip_begins_an_edge_anew_after_a_lost_message() -> None:
    models = draw(4, 100, torch.float64)
    rules = [rule("powergossip", rank=2)() for _ in models]
    for each in rules:
        each.set_parameter_shapes([(10, 10)])
    graph = make("ring", nodes=4)
    for r in range(120):
        one_round(rules, models, graph, r, pull=0.0, missing=frozenset({1}) if r == 7 else frozenset())
    assert spread(models) < 1e-4


@pytest.mark.parametrize("name", ["topk", "fft", "wavelet", "jwins", "subsample"])
@pytest.mark.parametrize("elements", [1, 2, 3, 37, 1001])
def test_partial_rules_agree_for_any_length(name: str, elements: int) -> None:
    """Nodes start alike and drift apart for some rounds, as in training; then they come together again."""
    models = [torch.zeros(elements, dtype=torch.float64) for _ in range(8)]
    rules, graph = bound(rule(name), models), make("complete", nodes=8)
    generator = torch.Generator().manual_seed(2)
    for r in range(5):
        one_round(rules, models, graph, r,
                  step=lambda _, model: model.add_(torch.randn(model.shape, generator=generator).double()))  # fmt: skip
    before = float((torch.stack(models) - torch.stack(models).mean(0)).norm())
    low, high = torch.stack(models).amin(0), torch.stack(models).amax(0)
    for r in range(5, 80):
        one_round(rules, models, graph, r, pull=0.0)
    assert float((torch.stack(models) - torch.stack(models).mean(0)).norm()) <= 0.2 * before + 1e-9
    if name in ("topk", "subsample"):
        assert all(bool(((m >= low - 1e-9) & (m <= high + 1e-9)).all()) for m in models)


def test_sending_everything_is_full_sharing() -> None:
    for name in ("topk", "fft", "wavelet", "subsample"):
        models, reference = draw(6, 101, torch.float64), draw(6, 101, torch.float64)
        gossip(rule(name, fraction=1.0), make("ring", nodes=6), models, 5)
        gossip(rule("full"), make("ring", nodes=6), reference, 5)
        for ours, theirs in zip(models, reference, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)


def test_topk_accumulates_as_told() -> None:
    """One entry changes much in round 0, others change steadily: who goes when depends on `accumulate`."""
    for accumulate, expected in (("none", [0, 1, 1]), ("training", [0, 1, 2]), ("all", [0, 1, 2])):
        models = [torch.zeros(3, dtype=torch.float64)]
        each = bound(rule("topk", fraction=1 / 3, accumulate=accumulate), models)[0]
        chosen = []
        steps = ([5.0, 1.0, 0.8], [0.1, 1.0, 0.8], [0.1, 1.0, 0.8])
        for r, step in enumerate(steps):
            seen = view(make("ring", nodes=1), 0, r, 1)
            each.begin(models[0], seen)
            models[0] += torch.tensor(step, dtype=torch.float64)
            each.outgoing(models[0], seen)
            chosen.append(int(each._sent))  # type: ignore[attr-defined]
            each.mix(models[0], {}, seen)
        assert chosen == expected, accumulate


@pytest.mark.parametrize("name", ["topk", "wavelet"])
def test_the_score_of_what_was_sent_is_cleared_before_or_after_mixing(name: str) -> None:
    """Against both orders written out: scores A; sent S = top |x - x' + A|; A[S] = 0 before, or after, A += x'' - x',
    with x' the model before the round and x'' after it."""
    chosen: dict[str, list[Tensor]] = {}
    for cleared in ("after_mixing", "before_mixing"):
        models = [torch.zeros(64, dtype=torch.float64) for _ in range(4)]
        rules = bound(rule(name, fraction=0.2, cleared=cleared), models)
        scores, draws = torch.zeros(64, dtype=torch.float64), torch.Generator().manual_seed(1)
        steps = torch.randn(12, 4, 64, generator=draws, dtype=torch.float64)
        for r in range(12):
            transform: Callable[[Tensor], Tensor] = rules[0].transform  # type: ignore[attr-defined]
            before = transform(models[0]).clone()
            expected = (transform(models[0] + steps[r, 0]) - before + scores).abs().topk(13).indices.sort().values
            one_round(rules, models, RING4, r, step=lambda uid, model, now=steps[r]: model.add_(now[uid]))
            sent = _last_sent(rules[0])
            assert torch.equal(sent, expected)
            chosen.setdefault(cleared, []).append(sent)
            if cleared == "before_mixing":
                scores[sent] = 0
            scores += transform(models[0]) - before
            if cleared == "after_mixing":
                scores[sent] = 0
    assert any(not torch.equal(a, b) for a, b in zip(*chosen.values(), strict=True))


def _last_sent(each: object) -> Tensor:
    sent: Tensor = each._sent  # type: ignore[attr-defined]
    return sent


def test_an_order_without_accumulated_scores_is_refused() -> None:
    with pytest.raises(ValueError, match="accumulate all with cleared before_mixing"):
        rule("topk", accumulate="none", cleared="before_mixing")()


def test_subsample_draws_layers_apart() -> None:
    each = rule("subsample", fraction=0.5, layerwise=True)()
    each.set_parameter_shapes([(10,), (4, 5), (1,)])
    at = each.chosen(31, 3, view(make("ring", nodes=4), 0, 0, 1))  # type: ignore[attr-defined]
    assert [int(((at >= a) & (at < b)).sum()) for a, b in ((0, 10), (10, 30), (30, 31))] == [5, 10, 1]


def test_bytes_are_those_of_the_formula() -> None:
    """Per neighbor: values of 4 bytes, and coded indices apart as metadata."""
    model = draw(1, 10_000)[0]
    graph = make("ring", nodes=4)
    for name, count in (("topk", 1000), ("fft", 3000), ("wavelet", 1000), ("choco", 1000)):
        each = bound(rule(name), [model])[0]
        payload = next(iter(each.outgoing(model, view(graph, 0, 0, 1)).values()))
        data = sum(t.numel() * t.element_size() for k, t in payload.tensors.items() if k not in payload.metadata)
        assert data == 4 * count, name
        assert payload.metadata == {"indices"} and payload.tensors["indices"].numel() < 1.6 * count


@pytest.mark.parametrize("make_rule", [rule("topk"), rule("jwins"), rule("choco"), rule("stc"), rule("deepsqueeze"),
                                       rule("subsample"), rule("fft"), rule("qsgd"), rule("powergossip", rank=2),
                                       rule("full", compression={"name": "int8"}),
                                       rule("topk", compression={"name": "int8"})])  # fmt: skip
def test_bytes_that_no_rule_made_are_refused_and_touch_nothing(make_rule: Make) -> None:
    """Each tensor cut to its half is refused before it is mixed; the round ends as one in which nothing came."""
    models = draw(4, 300)
    graph, rules = make("ring", nodes=4), bound(make_rule, models)
    seen = [view(graph, uid, 0, 1) for uid in range(4)]
    for each, model, now in zip(rules, models, seen, strict=True):
        each.begin(model, now)
    twin, twin_model = copy.deepcopy(rules[0]), models[0].clone()
    sent = [each.outgoing(model, now) for each, model, now in zip(rules, models, seen, strict=True)]
    twin.outgoing(twin_model, seen[0])
    payload, before = sent[1][0], models[0].clone()
    cuts = [name for name, tensor in payload.tensors.items() if tensor.numel() > 1]
    assert cuts
    for name in cuts:
        tensor = payload.tensors[name]
        cut = Payload({**payload.tensors, name: tensor[: tensor.numel() // 2]}, payload.scalars)
        with pytest.raises(PeerFault, match="malformed_payload"):
            decode(rules[0], cut, 1, seen[0])
    assert torch.equal(models[0], before)
    rules[0].mix(models[0], {}, seen[0].without((1, 3)))
    twin.mix(twin_model, {}, seen[0].without((1, 3)))
    assert torch.equal(models[0], twin_model)
    assert _same(rules[0].state_dict(), twin.state_dict())


def _same(a: object, b: object) -> bool:
    """Whether two states, of tensors and numbers in dicts and lists, are equal bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


def test_nan_and_zeros_go_through() -> None:
    """A model with NaN shows it, one of zeros stays; nothing hangs or indexes beyond."""
    for name in ("topk", "fft", "wavelet", "jwins", "subsample", "choco", "qsgd", "sign", "stc", "deepsqueeze",
                 "powergossip"):  # fmt: skip
        zeros = [torch.zeros(33) for _ in range(4)]
        gossip(rule(name), make("ring", nodes=4), zeros, 3)
        assert all(torch.equal(model, torch.zeros(33)) for model in zeros), name
        models = draw(4, 33)
        models[1][5] = float("nan")
        gossip(rule(name), make("ring", nodes=4), models, 2)
        assert bool(models[1].isnan().any()), name


def test_half_values_are_mixed_in_single_precision() -> None:
    models, reference = draw(4, 1000), draw(4, 1000)
    gossip(rule("full", compression={"name": "bfloat16"}), make("complete", nodes=4), models, 1)
    expected = (reference[0] + sum(m.bfloat16().float() for m in reference[1:])) / 4
    torch.testing.assert_close(models[0], expected, atol=1e-6, rtol=0)


def test_elementwise_codecs_keep_the_slices() -> None:
    each = rule("full", compression={"name": "float16"})()
    assert each.requirements.elementwise and each.payload_schema(10, torch.float32)["x"].dtype == torch.float16
    assert not rule("full", compression={"name": "int8"})().requirements.elementwise


def test_an_operator_with_a_codec_decodes_what_it_encodes() -> None:
    vector, seen = draw(1, 501)[0], view(RING, 3, 2, 1)
    for choose in ("largest", "random", "all"):
        for name in (None, "int4", "qsgd", "zlib"):
            operator = Operator(0.2, choose, codec(name)() if name else None)
            coded, at, values = operator.encode(vector, seen)
            back_at, back = operator.decode(coded, 501, vector.dtype)
            assert torch.equal(at, back_at) and torch.equal(values, back)
            if choose == "largest":
                assert torch.equal(at, indices.decode(coded["indices"], 501)) and at.numel() == 100


def test_unknown_compression_is_named() -> None:
    with pytest.raises(ConfigError, match="compression"):
        load(ROOT / "configs" / "quickstart.yaml", ["sharing={name: full, compression: {name: int9}}"])


@pytest.mark.parametrize("sharing", [
    "{name: full, compression: {name: bfloat16}}", "{name: jwins, compression: {name: zlib}}",
    "{name: choco, compression: {name: int8}}", "{name: topk, compression: {name: int8, unbiased: true}}",
])  # fmt: skip
def test_compressed_runs_learn_and_count_their_bytes(sharing: str) -> None:
    sets = [f"sharing={sharing}", "graph={name: ring, nodes: 8}", "mapping.nodes_per_machine=8",
            "node={rounds: 20, evaluate_every: 0}"]  # fmt: skip
    nodes = build_in_process(load(ROOT / "configs" / "quickstart.yaml", sets))
    step_all(nodes)
    accuracy = float(np.mean([node.figures()["accuracy"] for node in nodes]))  # type: ignore[arg-type]
    counters = nodes[0].communication.counters
    full = 20 * 2 * 4 * nodes[0].training.model.num_parameters
    sent = counters.bytes_sent()
    assert accuracy > 0.7 and 0 < sent["data"] + sent["metadata"] < 0.6 * full


def test_overlapped_rules_mix_what_they_sent() -> None:
    """Sending everything equals full sharing under an overlapped schedule too, where training goes on meanwhile."""
    models = []
    for sharing in ("{name: full}", "{name: topk, fraction: 1.0}", "{name: wavelet, fraction: 1.0}"):
        sets = [f"sharing={sharing}", "graph={name: ring, nodes: 4}", "mapping.nodes_per_machine=4",
                "node={rounds: 8, evaluate_every: 0, schedule: overlapped}"]  # fmt: skip
        nodes = build_in_process(load(ROOT / "configs" / "quickstart.yaml", sets))
        step_all(nodes)
        models.append(torch.stack([node.training.model.parameters for node in nodes]))
    for other in models[1:]:
        torch.testing.assert_close(other, models[0], atol=1e-4, rtol=0)


def test_the_table_of_rules_is_sorted_by_file() -> None:
    for name, target in SHARINGS.items():
        found: Callable[..., object] = load_class(name, SHARINGS, "sharing")
        assert found.__module__ == target.partition(":")[0] and (found.__doc__ or "").strip(), name


def test_the_size_of_stc_counts_as_other_scales_do() -> None:
    made = rule("stc", fraction=0.1)()
    model = torch.randn(100, generator=torch.Generator().manual_seed(1))
    made.begin(torch.zeros(100), view(make("ring", nodes=4), 0, 0))
    payload = made.outgoing(model, view(make("ring", nodes=4), 0, 0))[1]
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in payload.tensors.items()}
    assert sizes["signs"] == 2 and sizes["size"] == 4
    assert sum(size for name, size in sizes.items() if name not in payload.metadata) == 2, "a bit each"


@pytest.mark.parametrize("name", ["topk", "wavelet", "fft"])
def test_scores_begin_with_the_initial_model_whatever_the_schedule(name: str) -> None:
    """An overlapped schedule asks for what leaves without `begin`: what was large at the start has not changed."""
    start, payloads = draw(1, 300)[0], []
    for begins in (True, False):
        each, model = bound(rule(name, fraction=0.1), [start.clone()])[0], start.clone()
        for r in range(2):
            seen = view(RING, 0, r, 1)
            if begins:
                each.begin(model, seen)
            payload = each.outgoing(model, seen)[1]
            each.mix(model, {}, seen.without(seen.sources))
            model.add_(draw(2, 300)[1], alpha=0.1)
        payloads.append(payload)
    assert all(torch.equal(tensor, payloads[1].tensors[key]) for key, tensor in payloads[0].tensors.items())
