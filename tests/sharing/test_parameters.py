"""The section `parameters`: which ranges of the flat model its patterns select, errors, runs with private layers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from decentnode.build import build_in_process, schemas_of, shared_model, step_all
from decentnode.errors import ConfigError
from decentnode.experiment import Experiment, load
from decentnode.launch.files.node_files import save_node
from decentnode.launch.reporting.header import estimate_traffic, header
from decentnode.node.node import Node
from decentnode.sharing.parameters import Layout, Named, ParametersConfig, layout_of, named, problems_of
from decentnode.tensors import FlatModel

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SMALL = ["graph.nodes=4", "graph.degree=2", "mapping.nodes_per_machine=4", "model.hidden=[6]", "node.rounds=4",
         "node.evaluate_every=0"]  # fmt: skip
HEAD = 6 * 10 + 10
"""Elements of the layer "3", the last one of the small model."""
BODY = 64 * 6 + 6
"""Elements of the layer "1", its other layer."""


def config(**section: Any) -> ParametersConfig:
    return ParametersConfig.model_validate(section)


def experiment(*sets: str) -> Experiment:
    return load(QUICKSTART, [*SMALL, *sets])


def run(*sets: str) -> list[Node]:
    built = build_in_process(experiment(*sets))
    step_all(built)
    return built


def parameters_named(built: list[Node], name: str) -> list[torch.Tensor]:
    """Returns the parameter of this name of every node."""
    return [dict(node.training.model.module.named_parameters())[name].detach() for node in built]


# -- from names to ranges

NAMES = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["weight", "bias"]), st.integers(0, 3)).map(
        lambda parts: f"{parts[0]}.{parts[2]}.{parts[1]}"), min_size=1, max_size=12, unique=True)  # fmt: skip
PATTERNS = st.lists(st.sampled_from(["a.*", "b.*", "*.weight", "c.1.*", "*.0.*", "[ab].2.*"]), max_size=3)


@pytest.mark.slow
@given(names=NAMES, keep=PATTERNS, patterns=PATTERNS, data=st.data())
def test_every_shared_parameter_lies_in_the_range_of_the_first_fragment_that_matches_it(
    names: list[str], keep: list[str], patterns: list[str], data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=len(names), max_size=len(names)))
    parameters = [Named((name,), (size, 2)) for name, size in zip(names, sizes, strict=True)]
    chosen = config(keep=keep, fragments=[*({"parameters": each} for each in patterns), {"parameters": "*"}])
    if list(problems_of(chosen, parameters, 4)):
        return
    layout = layout_of(chosen, parameters, 4)
    assert sorted(layout.order) == list(range(len(names)))
    assert [start for start, _ in layout.ranges] == [0, *(stop for _, stop in layout.ranges[:-1])]
    assert all(start < stop for start, stop in layout.ranges) and len(layout.ranges) == len(patterns) + 1
    at, fragment_of = 0, {}  # by the parameter's index; None for those that are kept
    for index in layout.order:
        fragments = [i for i, (start, stop) in enumerate(layout.ranges) if start <= at < stop]
        fragment_of[index] = fragments[0] if fragments else None
        at += parameters[index].elements
    for index, parameter in enumerate(parameters):
        first = next(i for i, pattern in enumerate([*patterns, "*"]) if parameter.matches([pattern]))
        assert fragment_of[index] == (None if parameter.matches(keep) else first)
    assert list(layout.order) == sorted(
        layout.order, key=lambda p: (math.inf if fragment_of[p] is None else fragment_of[p], p)
    )
    for i, (start, stop) in enumerate(layout.ranges):
        shapes = [parameters[p].shape for p in layout.order if fragment_of[p] == i]
        assert layout.shapes_in(start, stop) == shapes


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), count=st.integers(1, 8))
def test_random_fragments_have_equal_sizes_and_a_parameter_that_is_cut_counts_as_a_vector(
    sizes: list[int], count: int
) -> None:
    parameters = [Named((f"p{i}",), (size, 3)) for i, size in enumerate(sizes)]
    total = 3 * sum(sizes)
    chosen = config(fragments={"name": "random", "count": count, "degree": 1})
    if count > total:
        assert "cannot be cut into" in str(list(problems_of(chosen, parameters, 4)))
        return
    layout: Layout = layout_of(chosen, parameters, 4)
    lengths = [stop - start for start, stop in layout.ranges]
    assert sum(lengths) == layout.shared == total and max(lengths) - min(lengths) <= 1
    for start, stop in layout.ranges:
        shapes = layout.shapes_in(start, stop)
        assert sum(math.prod(shape) for shape in shapes) == stop - start
        assert all(shape in layout.shapes or len(shape) == 1 for shape in shapes)


def test_the_order_in_the_flat_model_does_not_change_the_module() -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    flat = FlatModel(module, order=[3, 0, 2, 1])
    assert list(module.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert flat.shapes == [(2,), (4, 3), (2, 4), (4,)]
    assert torch.equal(flat.parameters[:2], before["1.bias"])
    module(torch.ones(1, 3)).sum().backward()
    assert torch.equal(flat.gradients()[:2], module[1].bias.grad)
    flat.set_gradients(torch.arange(26.0))
    assert torch.equal(module[1].bias.grad, torch.tensor([0.0, 1.0]))
    assert flat.names_from(22) == ["0.bias"] and flat.names_from(26) == []
    with pytest.raises(ValueError, match="order must be a permutation of 4 parameters"):
        FlatModel(module, order=[0, 1, 2, 2])


def test_a_tied_parameter_matches_by_each_of_its_names_and_a_frozen_one_by_none() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    module["b"].weight = module["a"].weight
    module["c"].requires_grad_(False)
    found = named(module)
    assert [each.names for each in found] == [("a.weight", "b.weight"), ("a.bias",), ("b.bias",)]
    assert found[0].matches(["b.w*"]) and not found[1].matches(["b.*"])
    assert [p[0] for p in problems_of(config(keep=["c.*"]), found, 4)] == [("keep", 0)]


# -- errors

INVALID_SECTIONS = [
    ("share: [1.weigth]", "8:11", "parameters.share[0] must match the name of a trainable parameter, got '1.weigth'",
     "did you mean '1.weight'?"),
    ("keep: ['3']", "8:10", "parameters.keep[0] must match the name of a trainable parameter, got '3'",
     "did you mean '3.*'?"),
    ("keep: ['*']", "8:9", "parameters.keep must leave a parameter to share, got all 4 kept", ""),
    ("{share: [1.bias, 3.*], keep: [3.*]}", "7:30", "parameters.share[1] must match a parameter that is not kept, got",
     "keep overrides share"),
    ("fragments: [{parameters: 1.*}]", "8:14", "parameters.fragments must have every shared parameter, got none with "
     "3.weight and 1 more", 'add {parameters: "*"} as the last one, or keep them'),
    ("fragments: [{parameters: '*'}, {parameters: 3.*}]", "8:47", "must match a shared parameter that no fragment "
     "before has, got '3.*': all that it matches is in fragment 0, which comes first", ""),
    ("fragments: [{parameters: 1.*}, {parameters: [3.*, conv.*]}]", "8:53", "parameters.fragments[1].parameters[1] "
     "must match the name of a trainable parameter, got 'conv.*'", "names: 1.weight, 1.bias, 3.weight, 3.bias"),
    ("fragments: [{parameters: '*', every: 3, offset: 3}]", "8:51", "offset must be below every, 3, got 3", ""),
    ("fragments: [{parameters: '*', graph: {name: ring, nodes: 5}}]", "8:33", "the fragment's graph has 5 nodes but "
     "the run has 4", ""),
    ("fragments: {name: random, count: 2, degre: 1}", "8:39", "parameters.fragments.degre is not a known key",
     "did you mean"),
    ("fragments: {name: randon, count: 2, degree: 1}", "8:21", "parameters.fragments.name must be one of random",
     "did you mean 'random'?"),
    ("fragments: [{parameters: '*', evry: 2}]", "8:33", "parameters.fragments[0].evry is not a known key",
     "did you mean 'every'?"),
    ("fragments: {name: random, count: 2, degree: 3, every: 0}", "8:57", "parameters.fragments.every must be >= 1", ""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "place", "message", "hint"), INVALID_SECTIONS)
def test_an_invalid_section_is_refused_with_its_line_and_a_hint(
    text: str, place: str, message: str, hint: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.yaml"
    section = f"parameters: {text}" if text.startswith("{") else f"parameters:\n  {text}"
    path.write_text(f"extends: {QUICKSTART}\nname: a\ngraph: {{nodes: 4, degree: 2}}\nmapping: {{nodes_per_machine: 4}}"
                    f"\nmodel: {{hidden: [6]}}\nnode: {{rounds: 4}}\n{section}\n")  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        load(path)
    refusal = str(caught.value)
    assert message in refusal and hint in refusal, refusal
    assert f"a.yaml:{place}:" in refusal, refusal


@pytest.mark.parametrize(("rule", "graph", "message"), [
    ("{name: relaysgd}", "{name: ring, nodes: 4}", "relaysgd needs a tree, got 4 edges for 4 nodes"),
    ("{name: d2}", "{name: random_matching, nodes: 4}", "d2 needs a static graph"),
])  # fmt: skip
def test_a_rule_that_does_not_fit_the_graph_of_one_fragment_is_refused(rule: str, graph: str, message: str) -> None:
    fragments = f"[{{parameters: 1.*, graph: {{name: line, nodes: 4}}}}, {{parameters: '*', graph: {graph}}}]"
    with pytest.raises(ConfigError, match=message) as caught:
        experiment("graph={name: line, nodes: 4}", "weights={name: metropolis_hastings, lazy: true}",
                   f"sharing={rule}", f"parameters.fragments={fragments}")  # fmt: skip
    assert "parameters.fragments[1].graph" in str(caught.value)


def test_a_fragment_whose_graph_does_not_connect_all_nodes_is_refused(tmp_path: Path) -> None:
    """Also if it connects them, but not by the edges of the rounds in which the rule exchanges."""
    (tmp_path / "w.edges").write_text("4\n0 1\n2 3\n")
    parts = f"[{{parameters: 1.*}}, {{parameters: '*', graph: {{file: {tmp_path}/w.edges}}}}]"
    with pytest.raises(ConfigError, match=r"fragments\[1\].graph: .* node 2 cannot be reached from node 0"):
        experiment(f"parameters.fragments={parts}")
    parts = "[{parameters: 1.*}, {parameters: '*', graph: {name: one_peer_exponential, nodes: 8}}]"
    with pytest.raises(ConfigError, match=r"node 0 never hears of node 1") as caught:
        load(QUICKSTART, ["graph.nodes=8", "mapping.nodes_per_machine=8", f"parameters.fragments={parts}",
                          "sharing={name: 'tests.sharing.test_periodic:EveryThird'}"])  # fmt: skip
    assert "see parameters.fragments[1].graph" in str(caught.value)


# -- runs

def test_the_digest_depends_on_the_section_and_random_fragments_on_the_seed() -> None:
    """An experiment without the section has none in its resolved form, so that digests of older runs stay valid."""
    assert "parameters" not in experiment().resolved()
    assert experiment().digest() != experiment("parameters={keep: [3.*]}").digest()
    fragments = "parameters.fragments={name: random, count: 2, degree: 1}"
    assert experiment(fragments).digest() != experiment(fragments, "seed=2").digest()


@pytest.mark.parametrize("section", ["{}", "{share: ['*']}", "{fragments: [{parameters: '*'}]}"])
def test_sharing_all_parameters_in_one_fragment_equals_a_run_without_the_section(section: str) -> None:
    without, one_fragment = run(), run(f"parameters={section}")
    for a, b in zip(without, one_fragment, strict=True):
        assert torch.equal(a.training.model.parameters, b.training.model.parameters)
        assert a.figures()["bytes_data"] == b.figures()["bytes_data"]


def test_kept_layers_are_neither_sent_nor_mixed() -> None:
    chosen = experiment("parameters={keep: [3.*]}", "training.optimizer.lr=0.0")
    nodes = build_in_process(chosen)
    schemas = nodes[0].communication.schemas  # type: ignore[attr-defined]
    assert [schema.elements for schema in schemas] == [BODY]
    for uid, node in enumerate(nodes):
        node.training.model.parameters.fill_(float(uid))
    step_all(nodes)
    bodies, heads = parameters_named(nodes, "1.weight"), parameters_named(nodes, "3.weight")
    for uid, (body, head) in enumerate(zip(bodies, heads, strict=True)):
        assert head.unique().tolist() == [uid], "mixing changed a kept layer"
        assert 1.0 < float(body.mean()) < 2.0 or uid in (0, 3)
    assert nodes[0].figures()["bytes_data"] == 4 * 2 * 4 * BODY
    traffic = estimate_traffic(chosen, nodes[0].training.model.module)
    assert (traffic.message, traffic.sent) == (4 * BODY, 2 * 4 * BODY)
    assert ["parameters", f"{BODY} shared, {HEAD} local to each node"] in header(chosen, [0])


def test_only_parameters_that_match_share_are_sent() -> None:
    nodes = run("parameters={share: ['*.bias']}")
    assert len({float(bias.sum()) for bias in parameters_named(nodes, "1.weight")}) == 4
    assert [s.elements for s in nodes[0].communication.schemas] == [16]  # type: ignore[attr-defined]


def test_the_merged_model_is_saved_without_kept_layers(tmp_path: Path) -> None:
    nodes = run("parameters={keep: [3.*]}", "node.evaluate_every=2")
    (tmp_path / "models").mkdir()
    own = parameters_named(nodes, "3.weight")[0].clone()
    save_node(nodes[0], tmp_path)
    assert sorted(load_file(tmp_path / "models" / "merged.safetensors")) == ["1.bias", "1.weight"]
    assert torch.equal(load_file(tmp_path / "models" / "000.safetensors")["3.weight"], own.cpu())


def test_random_fragments_have_different_random_graphs_and_offsets() -> None:
    chosen = experiment("parameters.fragments={name: random, count: 3, degree: 1, every: 6}")
    parts = shared_model(chosen, nn.Linear(9, 10))
    assert [each.offset for each in parts.fragments] == [0, 2, 4]
    assert [each.elements for each in parts.fragments] == [33, 33, 34]
    pairs = [[each.graph.neighbors(0, r) for r in range(12)] for each in parts.fragments]
    assert len({tuple(each) for each in pairs}) == 3 and all(len({*each}) > 1 for each in pairs)
    schemas = schemas_of(parts.make_rules(), parts.model, parts.fragments)
    assert [schema.elements for schema in schemas] == [33, 33, 34]


@pytest.mark.slow
def test_one_random_fragment_equals_a_run_on_random_regular_graphs() -> None:
    graph = "graph={name: random_regular, nodes: 4, degree: 2}"
    whole = run(graph)
    one = run("parameters.fragments={name: random, count: 1, degree: 2}")
    many = run("parameters.fragments={name: random, count: 4, degree: 2}")
    models = [torch.stack([node.training.model.parameters for node in nodes]) for nodes in (whole, one, many)]
    assert torch.equal(models[0], models[1]) and not torch.equal(models[0], models[2])
    assert whole[0].figures()["bytes_data"] == many[0].figures()["bytes_data"], "the fragments together are a model"


def test_powergossip_compresses_the_matrices_of_each_fragment() -> None:
    nodes = run("graph={name: ring, nodes: 4}", "sharing={name: powergossip}", "training.optimizer.lr=0.0",
                "parameters.fragments=[{parameters: 3.*}, {parameters: '*'}]")  # fmt: skip
    matrices = [[(m.rows, m.columns) for m in each.rule.matrices] for each in nodes[0].schedule.fragments]  # type: ignore[attr-defined]
    assert matrices == [[(10, 6)], [(6, 64)]]
