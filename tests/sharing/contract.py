"""Checks for every sharing rule. To check another rule, add it to RULES."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from decentnode.compression import CODECS
from decentnode.compression.base import Codec
from decentnode.compression.lossless import Lossless
from decentnode.config.component import load_class
from decentnode.graph.base import RoundView, view
from decentnode.graph.topology import Topology
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing import SHARINGS, WITH_SERVERS
from decentnode.sharing.base import Sharing
from decentnode.sharing.compressed import Compressed, make_sharing
from decentnode.sharing.rounds import rule_view
from tests.graph.contract import make

RuleFactory = Callable[[], Sharing]


def rule(name: str, **options: object) -> RuleFactory:
    """Returns a function that makes a new rule, with a codec around it if `options` have `compression`."""
    rule_class = load_class(name, SHARINGS, "sharing")
    return lambda: make_sharing(rule_class.Config.model_validate({"name": name, **options}))


OPTIONS: dict[str, dict[str, object]] = {name: {"every": 1} for name in
                                         ("local_sgd", "slowmo", "diloco", "noloco", "elastic", "leader")}  # fmt: skip
OPTIONS |= {name: {"clients": 3} for name in WITH_SERVERS}
RULES: dict[str, RuleFactory] = {name: rule(name, **OPTIONS.get(name, {})) for name in SHARINGS}
RULES |= {f"full+{name}": rule("full", compression={"name": name}) for name in CODECS}
RULES |= {
    f"{name}+{codec}": rule(name, **OPTIONS.get(name, {}), compression={"name": codec})
    for name, codec in (("topk", "int8"), ("fft", "float16"), ("jwins", "zstd"), ("subsample", "int4"),
                        ("choco", "int8"), ("beer", "int8"), ("deepsqueeze", "int8"), ("gradient_tracking", "bfloat16"),
                        ("push_sum", "bfloat16"), ("ac", "bfloat16"), ("local_sgd", "float16"),
                        ("hierarchical", "bfloat16"), ("d2", "bfloat16"))
}  # fmt: skip
RULES["full+zstd of int4"] = rule("full", compression={"name": "zstd", "of": {"name": "int4", "unbiased": True}})
RULES |= {f"{name} {form}": rule(name, form=form) for name in ("gradient_tracking", "momentum_tracking")
          for form in ("dsgt", "atc")}  # fmt: skip
RULES["elastic after"] = rule("elastic", force="after")
RULES["topk cleared before"] = rule("topk", cleared="before_mixing")
RULES["topk by value"] = rule("topk", scored="value")
RULES["jwins by value"] = rule("jwins", scored="value")
RULES["subsample of whole models"] = rule("subsample", fraction=0.3, full_above=0.2)
RULES["powergossip of rank 1"] = rule("powergossip", rank=1)
RULES["deepsqueeze of all"] = rule("deepsqueeze", choose="all", compression={"name": "int4"}, step_size=0.1)
RULES["lead of random ones"] = rule("lead", choose="random", compression=None, step_size=0.1)
RULES["beer dsgt"] = rule("beer", form="dsgt", fraction=0.3)
RULES |= {f"clipped_gossip {form}": rule("clipped_gossip", form=form) for form in ("he", "nearest")}
RULES["clipped_gossip of a radius"] = rule("clipped_gossip", radius=3.0)
RULES["trimmed_mean most"] = rule("trimmed_mean", byzantine="most")
RULES["secure_aggregation of a part"] = rule("secure_aggregation", fraction=0.3)
RULES["choco of random ones"] = rule("choco", choose="random", fraction=0.3)
KEEPS_NO_MEAN = ("leader", "noloco", "diloco", "slowmo", "elastic", "relaysgd", "topk", "fft", "wavelet", "jwins",
                 "subsample", "clipped_gossip", "trimmed_mean", *WITH_SERVERS)  # fmt: skip
"""Rules that change the mean of the models in a round; what each keeps instead has a test of its own."""
NOT_CONVEX = ("fft", "wavelet", "jwins", "choco", "beer", "lead", "qsgd", "sign", "stc", "deepsqueeze",
              "powergossip")
"""Rules whose models move toward those of others, but may end outside of the range of all models."""

OWN_MOMENTUM = ("qg_momentum", "momentum_tracking", "decentlam", "slowmo", "diloco", "noloco", "elastic")
"""Rules that change the model of a node without neighbors, by a momentum or a center of their own."""


def rule_traits(name: str, **others: object) -> set[tuple[str, str]]:
    """Returns what a case covers, for samples (tests/products.py) of tests of all RULES: its rule, its codec and its
    other parameters."""
    rule_and_options, _, codec = name.partition("+")
    return {("rule", rule_and_options.partition(" ")[0]), *({("codec", codec)} if codec else ()),
            *((key, repr(value)) for key, value in others.items())}  # fmt: skip


def requirement_traits(**params: str) -> set[tuple[str, str]]:
    """Returns what a case covers, for samples (tests/products.py) of tests of nodes, which see only the requirements of
    a rule: the value of each requirement, whether there is a codec, and the other parameters. params: `name` or `rule`
    is a key of RULES."""
    rule = RULES[params.pop("name" if "name" in params else "rule")]()
    needs = {(field.name, repr(getattr(rule.requirements, field.name))) for field in fields(rule.requirements)}
    return {*needs, ("codec", str(codec_of(rule) is not None)), *((key, repr(value)) for key, value in params.items())}


def codec_of(rule: Sharing) -> Codec | None:
    """Returns the codec around the rule or in its compression operator; None if it has neither."""
    codec = rule.codec if isinstance(rule, Compressed) else getattr(getattr(rule, "operator", None), "codec", None)
    assert codec is None or isinstance(codec, Codec)
    return codec


def relative_codec_error(rule: Sharing) -> float:
    """Returns a bound of the error of a decoded value of `random_models`, relative to the largest value in its
    block."""
    if not isinstance(rule, Compressed) or (isinstance(rule.codec, Lossless) and rule.codec.inner is None):
        return 0.0
    name = rule.codec.inner.config.name if isinstance(rule.codec, Lossless) else rule.codec.config.name
    return {"float16": 2e-3, "bfloat16": 2e-2, "truncate": 1e-4, "int8": 2e-2, "int4": 0.15, "qsgd": 0.5,
            "sign": 0.9}[name]  # fmt: skip


def run_rounds(
    make_rule: RuleFactory, graph: Topology, models: list[Tensor], rounds: int, missing: frozenset[int] = frozenset()
) -> None:
    """Runs rounds of a rule without local steps; changes `models` in place. missing: nodes whose payloads are lost in
    every round."""
    rules = set_up_rules(make_rule, models)
    for round in range(rounds):
        run_round(rules, models, graph, round, 0.0, missing)


def set_up_rules(make_rule: RuleFactory, models: list[Tensor]) -> list[Sharing]:
    """Returns a rule per model, set up as nodes do before the first round: two machines if the number of models is
    even, else a machine per node."""
    rules = [make_rule() for _ in models]
    n = len(models)
    machines = [range(n // 2), range(n // 2, n)] if n % 2 == 0 else [range(u, u + 1) for u in range(n)]
    for rule, model in zip(rules, models, strict=True):
        rule.set_machines(machines)
        rule.set_parameter_shapes(example_shapes(model.numel()))
        rule.payload_schema(model.numel(), model.dtype)
    return rules


def example_shapes(elements: int) -> list[tuple[int, ...]]:
    """Returns shapes with this many elements in total: a vector, a wide matrix and a three-dimensional kernel, without
    those that would be empty."""
    third = elements // 3
    rows = max(1, math.isqrt(third // 2))
    columns, depth = third // rows, third // 6
    left = elements - rows * columns - 3 * 2 * depth
    shapes: list[tuple[int, ...]] = [(left,), (rows, columns), (3, 2, depth)]
    return [shape for shape in shapes if math.prod(shape)]


def suitable_graph(rule: Sharing, nodes: int, otherwise: str = "ring", **options: object) -> Topology:
    """Returns a graph that meets the rule's requirements: a star for servers, a line for a tree, a complete graph for
    many neighbors or groups, else `otherwise`."""
    if rule.requirements.star:
        return make("star", nodes=nodes)
    if rule.requirements.min_neighbors > 2:
        return make("complete", nodes=nodes)
    if rule.requirements.tree or rule.requirements.groups:
        return make("line" if rule.requirements.tree else "complete", nodes=nodes)
    return make(otherwise, nodes=nodes, **options)


def _checked_copy(payload: Payload, rule: Sharing) -> Payload:
    """Returns a copy as it arrives at a neighbor; asserts that its scalars are those that the rule declares."""
    specs = rule.requirements.scalars
    assert payload.scalars.keys() <= specs.keys()
    assert all(spec.accepts(payload.scalars.get(name)) for name, spec in specs.items())
    return Payload({k: t.clone() for k, t in payload.tensors.items()}, payload.scalars, payload.metadata)


def random_models(n: int, elements: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Returns n different models of standard normal values, the same in every call."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(elements, generator=generator).to(dtype) for _ in range(n)]


def check_identical_models_stay_identical(make_rule: RuleFactory) -> None:
    rule = make_rule()
    codec = codec_of(rule)
    if codec is not None and codec.unbiased:
        pytest.skip("every node rounds its own way")
    if getattr(getattr(rule, "operator", None), "choose", "") == "random":
        pytest.skip("every node chooses entries of its own")
    models = [random_models(1, 33)[0] for _ in range(6)]
    run_rounds(make_rule, suitable_graph(rule, 6), models, 5)
    for model in models[1:]:
        torch.testing.assert_close(model, models[0], atol=1e-6 if codec is None else 0.2, rtol=1e-6)


def rule_name(make_rule: RuleFactory) -> str:
    """Returns the rule's name in SHARINGS, also if the rule is compressed; for other classes, the name of the class."""
    rule = make_rule()
    rule = rule.rule if isinstance(rule, Compressed) else rule
    class_path = f"{type(rule).__module__}:{type(rule).__qualname__}"
    names = [name for name, path in SHARINGS.items() if path == class_path]  # a class may have several names
    configured = str(getattr(getattr(rule, "config", None), "name", ""))
    return configured if configured in names else names[0] if names else type(rule).__name__


def check_mean_is_kept(make_rule: RuleFactory) -> None:
    if rule_name(make_rule) in KEEPS_NO_MEAN:
        pytest.skip("changes the mean of the models; what it keeps instead has a test of its own")
    models = random_models(8, 41)
    before = torch.stack(models).double().mean(0)
    run_rounds(make_rule, suitable_graph(make_rule(), 8, "regular", degree=3), models, 6)
    codec_error = relative_codec_error(make_rule())
    torch.testing.assert_close(torch.stack(models).double().mean(0), before, atol=1e-6 + codec_error, rtol=0)


def check_a_single_node_keeps_its_model(make_rule: RuleFactory) -> None:
    models = random_models(1, 17)
    before = models[0].clone()
    run_rounds(make_rule, make("ring", nodes=1), models, 3)
    torch.testing.assert_close(models[0], before)


def check_a_single_node_trains_locally(make_rule: RuleFactory) -> None:
    """Checks that without neighbors only the local steps change the model, except for rules in OWN_MOMENTUM."""
    if rule_name(make_rule) in OWN_MOMENTUM:
        pytest.skip("changes the model by a momentum or a center of its own")
    if make_rule().requirements.star:
        pytest.skip("without a server no client trains")
    models = random_models(1, 17)
    expected = models[0].clone()
    rules, graph = set_up_rules(make_rule, models), make("ring", nodes=1)
    for round in range(5):
        run_round(rules, models, graph, round, step=lambda _, model: model.sub_(model - 3.0, alpha=0.1))
        expected.sub_(expected - 3.0, alpha=0.1)
    torch.testing.assert_close(models[0], expected, atol=1e-5, rtol=0)


def check_mixing_slices_equals_mixing_the_whole_model(make_rule: RuleFactory) -> None:
    models = random_models(4, 100)
    rule = set_up_rules(make_rule, models)[0]
    if not rule.requirements.elementwise:
        pytest.skip("mixes whole models only")
    round_view = view(make("complete", nodes=4), 0, 0, 1)
    wire = rule.payload_schema(100, torch.float32)["x"].dtype
    received = {j: Payload({"x": models[j].to(wire)}) for j in (1, 2, 3)}
    whole, sliced = models[0].clone(), models[0].clone()
    rule.mix(whole, received, round_view)
    for start, stop in ((0, 32), (32, 64), (64, 100)):
        part = {j: Payload({"x": payload.tensors["x"][start:stop]}) for j, payload in received.items()}
        rule.mix(sliced[start:stop], part, round_view)
    assert torch.equal(whole, sliced)


def check_payloads_fit_the_schema(make_rule: RuleFactory) -> None:
    for elements in (1, 2, 64, 101):
        for dtype in (torch.float32, torch.float64):
            rule = set_up_rules(make_rule, random_models(4, elements, dtype))[0]
            schema = rule.payload_schema(elements, dtype)
            for phase in range(rule.requirements.phases):
                round_view = rule.plan(replace(view(suitable_graph(rule, 4), 0, 0, 1), phase=phase))
                assert round_view.phase == phase and sum(round_view.weights.values()) == pytest.approx(1)
                if phase == 0:
                    rule.begin(random_models(1, elements, dtype)[0], round_view)
                outgoing = rule.outgoing(random_models(1, elements, dtype)[0], round_view)
                assert set(outgoing) == set(round_view.neighbors)
                for payload in outgoing.values():
                    check_payload_fits(payload, schema)


def check_payload_fits(payload: Payload, schema: dict[str, TensorSpec]) -> None:
    assert payload.tensors.keys() == schema.keys()
    for name, tensor in payload.tensors.items():
        spec = schema[name]
        assert tensor.dim() == 1 and tensor.dtype == spec.dtype and tensor.numel() <= spec.max_elements
        assert not spec.exact or tensor.numel() == spec.max_elements


def check_mixing_is_convex_when_a_neighbor_is_missing(make_rule: RuleFactory) -> None:
    """Checks that mixed models stay within the range of the models before: the weight of a missing neighbor is neither
    lost nor counted twice."""
    models = random_models(5, 20)
    low, high = torch.stack(models).amin(0), torch.stack(models).amax(0)
    if relative_codec_error(make_rule()) > 0.3:
        pytest.skip("the codec's error may be larger than the distances between the models")
    if rule_name(make_rule) in NOT_CONVEX:
        pytest.skip("moves models toward others, but not always to a point between them")
    needs = make_rule().requirements
    if needs.tree or needs.overrides_topology or needs.column_stochastic:
        pytest.skip("relays sums, chooses its own pairs, or takes lost shares back in `undelivered`")
    run_rounds(make_rule, make("complete", nodes=5), models, 1, frozenset({2}))
    for model in models:
        slack = 1e-5 + 4 * relative_codec_error(make_rule())
        assert (model >= low - slack).all() and (model <= high + slack).all()


def check_a_missing_payload_has_no_lasting_effect(make_rule: RuleFactory) -> None:
    """Checks that after 24 rounds the models are about as close to each other if the payloads of node 2 were missing in
    round 3 as if none were."""
    graph, distances = suitable_graph(make_rule(), 6), []
    for missing in (frozenset({2}), frozenset[int]()):
        models = random_models(6, 40)
        rules = set_up_rules(make_rule, models)
        for round in range(24):
            run_round(rules, models, graph, round, 0.0, missing if round == 3 else frozenset())
        stacked = torch.stack(models)
        assert bool(stacked.isfinite().all())
        distances.append(float((stacked - stacked.mean(0)).norm()))
    assert distances[0] <= 2 * distances[1] + 0.1


def check_nan_is_not_hidden(make_rule: RuleFactory) -> None:
    """Checks that NaN in one model raises nothing, and that this model does not become finite again."""
    if make_rule().requirements.star:
        pytest.skip("clients replace their models by that of the server")
    models = random_models(6, 33)
    models[1][5] = float("nan")
    run_rounds(make_rule, suitable_graph(make_rule(), 6), models, 3)
    assert bool(models[1].isnan().any())


def check_runs_repeat_bit_for_bit(make_rule: RuleFactory) -> None:
    runs = []
    for _ in range(2):
        models = random_models(6, 50)
        rule = make_rule()
        options = {} if rule.requirements.static else {"otherwise": "random_regular", "degree": 3}
        graph = suitable_graph(rule, 6, **options)  # type: ignore[arg-type]
        run_rounds(make_rule, graph, models, 4)
        runs.append(models)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def check_state_round_trip(make_rule: RuleFactory) -> None:
    """Checks that a run gives the same bits if the rules' states are saved after three of six rounds, and loaded into
    new rules as plain tensors and numbers."""
    rule = make_rule()
    graph = suitable_graph(rule, 6)
    uninterrupted, resumed = random_models(6, 30), random_models(6, 30)
    uninterrupted_rules, resumed_rules = set_up_rules(make_rule, uninterrupted), set_up_rules(make_rule, resumed)
    for round in range(6):
        run_round(uninterrupted_rules, uninterrupted, graph, round)
        if round == 3:
            file = io.BytesIO()
            torch.save([rule.state_dict() for rule in resumed_rules], file)
            for tensor in tensors_in([rule.state_dict() for rule in resumed_rules]):
                assert tensor.is_contiguous(), "files hold contiguous tensors"
            states = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            resumed_rules = set_up_rules(make_rule, resumed)
            for rule, state in zip(resumed_rules, states, strict=True):
                rule.load_state_dict(state)
        run_round(resumed_rules, resumed, graph, round)
    assert all(torch.equal(x, y) for x, y in zip(uninterrupted, resumed, strict=True))


def tensors_in(state: object) -> Iterator[Tensor]:
    """Yields the tensors in nested dicts, lists and tuples."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from tensors_in(value)


def run_round(
    rules: list[Sharing], models: list[Tensor], graph: Topology, round: int, pull: float = 0.1,
    missing: frozenset[int] = frozenset(), step: Callable[[int, Tensor], object] | None = None,
    lr: float | Sequence[float] = 1.0,
) -> None:
    """Runs one round of all nodes; changes `models` in place. lr: of all nodes, or of each.

    missing: nodes whose payloads are lost. step: the local step of a node, given its uid and its model. Default: model
    u moves by the fraction `pull` toward a model of which every entry is u. The training loss of node u is u.
    """
    rates = [lr] * len(rules) if isinstance(lr, float) else lr
    before_plan = [replace(rule_view(rule, graph, uid, round, 1), lr=rates[uid]) for uid, rule in enumerate(rules)]
    phases = [
        [rule.plan(replace(before, phase=phase)) for rule, before in zip(rules, before_plan, strict=True)]
        for phase in range(rules[0].requirements.phases)
    ]
    for rule, model, round_view in zip(rules, models, phases[0], strict=True):
        rule.begin(model, round_view)
    for phase, views in enumerate(phases):
        if phase == rules[0].requirements.steps_before:
            _local_steps(rules, models, phases[0], pull, step)
        run_phase(rules, models, views, missing)
    for rule, model, round_view in zip(rules, models, phases[-1], strict=True):
        rule.finish(model, round_view)


def _local_steps(
    rules: list[Sharing], models: list[Tensor], views: list[RoundView], pull: float,
    step: Callable[[int, Tensor], object] | None,
) -> None:
    for uid, (rule, model, round_view) in enumerate(zip(rules, models, views, strict=True)):
        if rule.trains(round_view):
            if step is not None:
                step(uid, model)
            elif pull:
                model.sub_(model - float(uid), alpha=pull)
        rule.adjust(model, round_view, float(uid))


def run_phase(
    rules: list[Sharing], models: list[Tensor], views: list[RoundView], missing: frozenset[int] = frozenset()
) -> None:
    """Lets all nodes exchange once and mix what arrives into `models`, in place."""
    sent = [
        {to: _checked_copy(payload, rule) for to, payload in rule.outgoing(model, round_view).items()}
        for rule, model, round_view in zip(rules, models, views, strict=True)
    ]
    for uid, (rule, model) in enumerate(zip(rules, models, strict=True)):
        received = {j: sent[j][uid] for j in views[uid].sources if j not in missing}
        if not rule.requirements.elementwise:
            received = {j: rule.unpack(payload, j, views[uid]) for j, payload in received.items()}
        rule.mix(model, received, views[uid].without(missing & set(views[uid].sources)))


def matrix_reference(graph: Topology, models: list[Tensor], rounds: int) -> np.ndarray:
    """Returns W(rounds - 1) ... W(0) X in float64."""
    x = torch.stack(models).double().numpy()
    for round in range(rounds):
        x = graph.matrix(round) @ x
    return x


def check_neighbors_outside_the_graph_are_declared(make_rule: RuleFactory) -> None:
    """Checks that rules exchange only with neighbors in the graph, because transports connect no others, unless their
    requirements declare `overrides_topology`; and that rules which declare it do choose others."""
    rules = set_up_rules(make_rule, random_models(6, 30))
    needs = rules[0].requirements
    graph, outside = make("line" if needs.tree else "ring", nodes=6), set()
    for round in range(6):
        for uid, rule in enumerate(rules):
            known = {*graph.neighbors(uid, 0), *graph.sources(uid, 0)}
            for phase in range(needs.phases):
                planned = rule.plan(replace(rule_view(rule, graph, uid, round, 1), phase=phase))
                outside |= {*planned.neighbors, *planned.sources} - known
    assert needs.overrides_topology == bool(outside)


CHECKS = [
    check_identical_models_stay_identical, check_mean_is_kept, check_a_single_node_keeps_its_model,
    check_a_single_node_trains_locally, check_mixing_slices_equals_mixing_the_whole_model,
    check_payloads_fit_the_schema, check_mixing_is_convex_when_a_neighbor_is_missing,
    check_a_missing_payload_has_no_lasting_effect, check_nan_is_not_hidden, check_runs_repeat_bit_for_bit,
    check_state_round_trip, check_neighbors_outside_the_graph_are_declared,
]  # fmt: skip

__all__ = ["CHECKS", "RULES", "RoundView", "matrix_reference", "random_models", "rule", "run_rounds"]
