"""Checks for every sharing rule. To check another rule, add it to RULES."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
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

Make = Callable[[], Sharing]


def rule(name: str, **options: object) -> Make:
    found = load_class(name, SHARINGS, "sharing")
    return lambda: make_sharing(found.Config.model_validate({"name": name, **options}))


OPTIONS: dict[str, dict[str, object]] = {name: {"every": 1} for name in
                                         ("local_sgd", "slowmo", "diloco", "noloco", "elastic", "leader")}  # fmt: skip
OPTIONS |= {name: {"clients": 3} for name in WITH_SERVERS}
RULES: dict[str, Make] = {name: rule(name, **OPTIONS.get(name, {})) for name in SHARINGS}
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
RULES["beer dsgt"] = rule("beer", form="dsgt", fraction=0.3)
RULES |= {f"clipped_gossip {form}": rule("clipped_gossip", form=form) for form in ("he", "nearest")}
RULES["clipped_gossip of a radius"] = rule("clipped_gossip", radius=3.0)
RULES["trimmed_mean most"] = rule("trimmed_mean", byzantine="most")
RULES["choco of random ones"] = rule("choco", choose="random", fraction=0.3)
KEEPS_NO_MEAN = ("leader", "noloco", "diloco", "slowmo", "elastic", "relaysgd", "topk", "fft", "wavelet", "jwins",
                 "subsample", "clipped_gossip", "trimmed_mean", *WITH_SERVERS)  # fmt: skip
"""Rules that do not keep the mean of the models in a round; the invariant of each has a test of its own."""
NOT_CONVEX = ("fft", "wavelet", "jwins", "choco", "beer", "qsgd", "sign", "stc", "deepsqueeze",
              "powergossip")
"""Rules whose models move toward those of others, but may end outside of their range."""

OWN_MOMENTUM = ("qg_momentum", "momentum_tracking", "decentlam", "slowmo", "diloco", "noloco", "elastic")


def by_rule(name: str, **others: object) -> set[tuple[str, str]]:
    """Returns what a case covers, for samples of tests of all RULES: its rule, its codec and its other parameters."""
    made, _, codec = name.partition("+")
    return {("rule", made.partition(" ")[0]), *({("codec", codec)} if codec else ()),
            *((key, repr(value)) for key, value in others.items())}  # fmt: skip


def by_needs(**params: str) -> set[tuple[str, str]]:
    """Returns what a case covers, for samples of tests of nodes, which see only the requirements of a rule: the value
    of each requirement, whether there is a codec, and the other parameters. params: `name` or `rule` is a key of
    RULES."""
    made = RULES[params.pop("name" if "name" in params else "rule")]()
    needs = {(each.name, repr(getattr(made.requirements, each.name))) for each in fields(made.requirements)}
    return {*needs, ("codec", str(codec_of(made) is not None)), *((key, repr(value)) for key, value in params.items())}


def codec_of(each: Sharing) -> Codec | None:
    found = each.codec if isinstance(each, Compressed) else getattr(getattr(each, "operator", None), "codec", None)
    assert found is None or isinstance(found, Codec)
    return found


def noise_of(each: Sharing) -> float:
    """Returns the largest error of a coded value, relative to the largest value near it."""
    if not isinstance(each, Compressed) or (isinstance(each.codec, Lossless) and each.codec.inner is None):
        return 0.0
    name = each.codec.inner.config.name if isinstance(each.codec, Lossless) else each.codec.config.name
    return {"float16": 2e-3, "bfloat16": 2e-2, "truncate": 1e-4, "int8": 2e-2}.get(name, 3.0)


def gossip(
    make_rule: Make, graph: Topology, models: list[Tensor], rounds: int, missing: frozenset[int] = frozenset()
) -> None:
    """Makes rounds of a rule without local steps and without nodes, in place."""
    rules = bound(make_rule, models)
    for r in range(rounds):
        one_round(rules, models, graph, r, 0.0, missing)


def bound(make_rule: Make, models: list[Tensor]) -> list[Sharing]:
    """Returns a rule per model, set up as nodes do before the first round."""
    rules = [make_rule() for _ in models]
    n = len(models)
    machines = [range(n // 2), range(n // 2, n)] if n % 2 == 0 else [range(u, u + 1) for u in range(n)]
    for each, model in zip(rules, models, strict=True):
        each.set_machines(machines)
        each.set_parameter_shapes(shapes_of(model.numel()))
        each.payload_schema(model.numel(), model.dtype)
    return rules


def shapes_of(elements: int) -> list[tuple[int, ...]]:
    """Returns the shapes of a vector, of a wide matrix and of a kernel of three dimensions with this many elements
    together, without those that would be empty."""
    third = elements // 3
    rows = max(1, math.isqrt(third // 2))
    columns, depth = third // rows, third // 6
    left = elements - rows * columns - 3 * 2 * depth
    shapes: list[tuple[int, ...]] = [(left,), (rows, columns), (3, 2, depth)]
    return [shape for shape in shapes if math.prod(shape)]


def suited(each: Sharing, nodes: int, otherwise: str = "ring", **options: object) -> Topology:
    """Returns a graph that meets the rule's requirements: a star for servers, a line for a tree, a complete graph for
    many neighbors or groups, else `otherwise`."""
    if each.requirements.star:
        return make("star", nodes=nodes)
    if each.requirements.min_neighbors > 2:
        return make("complete", nodes=nodes)
    if each.requirements.tree or each.requirements.groups:
        return make("line" if each.requirements.tree else "complete", nodes=nodes)
    return make(otherwise, nodes=nodes, **options)


def _copy(payload: Payload, rule: Sharing) -> Payload:
    specs = rule.requirements.scalars
    assert payload.scalars.keys() <= specs.keys()
    assert all(spec.accepts(payload.scalars.get(name)) for name, spec in specs.items())
    return Payload({k: t.clone() for k, t in payload.tensors.items()}, payload.scalars, payload.metadata)


def draw(n: int, elements: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(elements, generator=generator).to(dtype) for _ in range(n)]


def check_identical_stay_identical(make_rule: Make) -> None:
    each = make_rule()
    codec = codec_of(each)
    if codec is not None and codec.unbiased:
        pytest.skip("every node rounds its own way")
    if getattr(getattr(each, "operator", None), "choose", "") == "random":
        pytest.skip("every node chooses entries of its own")
    models = [draw(1, 33)[0] for _ in range(6)]
    gossip(make_rule, suited(each, 6), models, 5)
    for model in models[1:]:
        torch.testing.assert_close(model, models[0], atol=1e-6 if codec is None else 0.2, rtol=1e-6)


def name_of(make_rule: Make) -> str:
    """Returns the rule's name in SHARINGS, also if the rule is compressed; for other classes, the name of the class."""
    each = make_rule()
    each = each.rule if isinstance(each, Compressed) else each
    where = f"{type(each).__module__}:{type(each).__qualname__}"
    named = [name for name, path in SHARINGS.items() if path == where]
    chosen = str(getattr(getattr(each, "config", None), "name", ""))
    return chosen if chosen in named else named[0] if named else type(each).__name__


def check_mean_is_kept(make_rule: Make) -> None:
    if name_of(make_rule) in KEEPS_NO_MEAN:
        pytest.skip("keeps another mean than that of the models, which has a test of its own")
    models = draw(8, 41)
    before = torch.stack(models).double().mean(0)
    gossip(make_rule, suited(make_rule(), 8, "regular", degree=3), models, 6)
    noise = noise_of(make_rule())
    torch.testing.assert_close(torch.stack(models).double().mean(0), before, atol=1e-6 + noise, rtol=0)


def check_alone_nothing_happens(make_rule: Make) -> None:
    models = draw(1, 17)
    before = models[0].clone()
    gossip(make_rule, make("ring", nodes=1), models, 3)
    torch.testing.assert_close(models[0], before)


def check_alone_is_local_training(make_rule: Make) -> None:
    """Checks that without neighbors only the local steps change the model, except for rules in OWN_MOMENTUM."""
    if name_of(make_rule) in OWN_MOMENTUM:
        pytest.skip("has a momentum or a center of its own")
    if make_rule().requirements.star:
        pytest.skip("without a server nobody trains")
    models = draw(1, 17)
    expected = models[0].clone()
    rules, graph = bound(make_rule, models), make("ring", nodes=1)
    for r in range(5):
        one_round(rules, models, graph, r, step=lambda _, model: model.sub_(model - 3.0, alpha=0.1))
        expected.sub_(expected - 3.0, alpha=0.1)
    torch.testing.assert_close(models[0], expected, atol=1e-5, rtol=0)


def check_slices_equal_the_whole(make_rule: Make) -> None:
    models = draw(4, 100)
    each = bound(make_rule, models)[0]
    if not each.requirements.elementwise:
        pytest.skip("is never given slices")
    seen = view(make("complete", nodes=4), 0, 0, 1)
    wire = each.payload_schema(100, torch.float32)["x"].dtype
    received = {j: Payload({"x": models[j].to(wire)}) for j in (1, 2, 3)}
    whole, sliced = models[0].clone(), models[0].clone()
    each.mix(whole, received, seen)
    for a, b in ((0, 32), (32, 64), (64, 100)):
        each.mix(sliced[a:b], {j: Payload({"x": p.tensors["x"][a:b]}) for j, p in received.items()}, seen)
    assert torch.equal(whole, sliced)


def check_schema_fits(make_rule: Make) -> None:
    for elements in (1, 2, 64, 101):
        for dtype in (torch.float32, torch.float64):
            each = bound(make_rule, draw(4, elements, dtype))[0]
            schema = each.payload_schema(elements, dtype)
            for phase in range(each.requirements.phases):
                seen = each.plan(replace(view(suited(each, 4), 0, 0, 1), phase=phase))
                assert seen.phase == phase and sum(seen.weights.values()) == pytest.approx(1)
                if phase == 0:
                    each.begin(draw(1, elements, dtype)[0], seen)
                outgoing = each.outgoing(draw(1, elements, dtype)[0], seen)
                assert set(outgoing) == set(seen.neighbors)
                for payload in outgoing.values():
                    check_payload(payload, schema)


def check_payload(payload: Payload, schema: dict[str, TensorSpec]) -> None:
    assert payload.tensors.keys() == schema.keys()
    for name, tensor in payload.tensors.items():
        spec = schema[name]
        assert tensor.dim() == 1 and tensor.dtype == spec.dtype and tensor.numel() <= spec.max_elements
        assert not spec.exact or tensor.numel() == spec.max_elements


def check_missing_neighbors_leave_a_convex_combination(make_rule: Make) -> None:
    models = draw(5, 20)
    low, high = torch.stack(models).amin(0), torch.stack(models).amax(0)
    if noise_of(make_rule()) > 1:
        pytest.skip("a value may be further off after being coded than the models are apart")
    if name_of(make_rule) in NOT_CONVEX:
        pytest.skip("goes in the direction of others without ending among them")
    needs = make_rule().requirements
    if needs.tree or needs.overrides_topology or needs.column_stochastic:
        pytest.skip("relays sums, has pairs of its own, or shares that do not come back by themselves")
    gossip(make_rule, make("complete", nodes=5), models, 1, frozenset({2}))
    for model in models:
        slack = 1e-5 + 4 * noise_of(make_rule())
        assert (model >= low - slack).all() and (model <= high + slack).all()


def check_a_missing_neighbor_does_not_last(make_rule: Make) -> None:
    """Checks that the models come about as close to each other if one node's payloads are missing in one round."""
    graph, spreads = suited(make_rule(), 6), []
    for missing in (frozenset({2}), frozenset[int]()):
        models = draw(6, 40)
        rules = bound(make_rule, models)
        for r in range(24):
            one_round(rules, models, graph, r, 0.0, missing if r == 3 else frozenset())
        stacked = torch.stack(models)
        assert bool(stacked.isfinite().all())
        spreads.append(float((stacked - stacked.mean(0)).norm()))
    assert spreads[0] <= 2 * spreads[1] + 0.1


def check_nan_stays_visible(make_rule: Make) -> None:
    """Checks that NaN in one model raises nothing, and that the model does not become finite again."""
    if make_rule().requirements.star:
        pytest.skip("clients take the model of the server")
    models = draw(6, 33)
    models[1][5] = float("nan")
    gossip(make_rule, suited(make_rule(), 6), models, 3)
    assert bool(models[1].isnan().any())


def check_repeats_bit_for_bit(make_rule: Make) -> None:
    runs = []
    for _ in range(2):
        models = draw(6, 50)
        each = make_rule()
        graph = suited(each, 6) if each.requirements.static else suited(each, 6, "random_regular", degree=3)
        gossip(make_rule, graph, models, 4)
        runs.append(models)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def check_state_round_trip(make_rule: Make) -> None:
    """Checks that a run gives the same bits if the rules' states are saved after three of six rounds, and loaded into
    new rules as plain tensors and numbers."""
    each = make_rule()
    graph = suited(each, 6)
    straight, cut = draw(6, 30), draw(6, 30)
    a, b = bound(make_rule, straight), bound(make_rule, cut)
    for r in range(6):
        one_round(a, straight, graph, r)
        if r == 3:
            file = io.BytesIO()
            torch.save([each.state_dict() for each in b], file)
            for tensor in tensors_in([each.state_dict() for each in b]):
                assert tensor.is_contiguous(), "files have tensors in rows"
            states = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            b = bound(make_rule, cut)
            for each, state in zip(b, states, strict=True):
                each.load_state_dict(state)
        one_round(b, cut, graph, r)
    assert all(torch.equal(x, y) for x, y in zip(straight, cut, strict=True))


def tensors_in(state: object) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from tensors_in(value)


def one_round(
    rules: list[Sharing], models: list[Tensor], graph: Topology, r: int, pull: float = 0.1,
    missing: frozenset[int] = frozenset(), step: Callable[[int, Tensor], object] | None = None, lr: float = 1.0,
) -> None:
    """Makes one round in place. missing: nodes whose payloads are lost. step: the local step; by default `pull` toward
    a target that differs by node."""
    phases = [
        [each.plan(replace(rule_view(each, graph, uid, r, 1), phase=phase, lr=lr)) for uid, each in enumerate(rules)]
        for phase in range(rules[0].requirements.phases)
    ]
    for each, model, seen in zip(rules, models, phases[0], strict=True):
        each.begin(model, seen)
    for phase, views in enumerate(phases):
        if phase == rules[0].requirements.steps_before:
            _local_steps(rules, models, phases[0], pull, step)
        one_phase(rules, models, views, missing)
    for each, model, seen in zip(rules, models, phases[-1], strict=True):
        each.finish(model, seen)


def _local_steps(
    rules: list[Sharing], models: list[Tensor], views: list[RoundView], pull: float,
    step: Callable[[int, Tensor], object] | None,
) -> None:
    for uid, (each, model, seen) in enumerate(zip(rules, models, views, strict=True)):
        if each.trains(seen):
            if step is not None:
                step(uid, model)
            elif pull:
                model.sub_(model - float(uid), alpha=pull)
        each.adjust(model, seen, float(uid))


def one_phase(
    rules: list[Sharing], models: list[Tensor], views: list[RoundView], missing: frozenset[int] = frozenset()
) -> None:
    """Makes one exchange of all nodes and mixes it in place."""
    sent = [
        {to: _copy(p, each) for to, p in each.outgoing(model, seen).items()}
        for each, model, seen in zip(rules, models, views, strict=True)
    ]
    for uid, (each, model) in enumerate(zip(rules, models, strict=True)):
        here = [j for j in views[uid].sources if j not in missing]
        received = {j: sent[j][uid] for j in here}
        if not each.requirements.elementwise:
            received = {j: each.unpack(payload, j, views[uid]) for j, payload in received.items()}
        each.mix(model, received, views[uid].without(missing & set(views[uid].sources)))


def matrix_reference(graph: Topology, models: list[Tensor], rounds: int) -> np.ndarray:
    """Returns W(r) ... W(0) X in float64."""
    x = torch.stack(models).double().numpy()
    for r in range(rounds):
        x = graph.matrix(r) @ x
    return x


def check_other_neighbors_than_the_graphs_are_declared(make_rule: Make) -> None:
    """Checks that rules exchange only with neighbors in the graph, because transports connect no others, unless their
    requirements declare `overrides_topology`."""
    rules = bound(make_rule, draw(6, 30))
    needs = rules[0].requirements
    graph, strangers = make("line" if needs.tree else "ring", nodes=6), set()
    for r in range(6):
        for uid, each in enumerate(rules):
            known = {*graph.neighbors(uid, 0), *graph.sources(uid, 0)}
            for phase in range(needs.phases):
                planned = each.plan(replace(rule_view(each, graph, uid, r, 1), phase=phase))
                strangers |= {*planned.neighbors, *planned.sources} - known
    assert needs.overrides_topology == bool(strangers)


CHECKS = [
    check_identical_stay_identical, check_mean_is_kept, check_alone_nothing_happens, check_alone_is_local_training,
    check_slices_equal_the_whole, check_schema_fits,
    check_missing_neighbors_leave_a_convex_combination, check_a_missing_neighbor_does_not_last,
    check_nan_stays_visible, check_repeats_bit_for_bit,
    check_state_round_trip, check_other_neighbors_than_the_graphs_are_declared,
]  # fmt: skip

__all__ = ["CHECKS", "RULES", "RoundView", "draw", "gossip", "matrix_reference", "rule"]
