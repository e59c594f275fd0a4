"""The default `step_size` of error-feedback rules: without gradients, nodes reach consensus with every compressor."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decentnode.build import build_in_process
from decentnode.config.component import load_class
from decentnode.experiment import load
from decentnode.graph.base import view
from decentnode.sharing import SHARINGS, step_size
from decentnode.sharing.step_size import (
    OWN_MATRIX,
    STEPS,
    Search,
    distance_left,
    largest_step,
    matrices_of,
    with_spectrum,
)
from tests.conftest import scale
from tests.graph.contract import make
from tests.sharing.contract import rule, run_round, set_up_rules

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
COMPRESSORS: dict[str, dict[str, Any]] = {
    "choco": {"name": "choco"},
    "choco, 1 %": {"name": "choco", "fraction": 0.01},
    "choco, 30 %": {"name": "choco", "fraction": 0.3},
    "choco at random": {"name": "choco", "choose": "random"},
    "choco int8": {"name": "choco", "compression": {"name": "int8"}},
    "choco of all in int4": {"name": "choco", "choose": "all", "compression": {"name": "int4"}},
    "choco of all in unbiased int4": {"name": "choco", "choose": "all",
                                      "compression": {"name": "int4", "unbiased": True}},
    "choco of all in bfloat16": {"name": "choco", "choose": "all", "compression": {"name": "bfloat16"}},
    "choco of zstd": {"name": "choco", "compression": {"name": "zstd", "of": {"name": "truncate", "bits": 12}}},
    "beer": {"name": "beer"},
    "lead": {"name": "lead"},
    "lead at random": {"name": "lead", "choose": "random", "compression": None},
    "lead of three levels": {"name": "lead", "compression": {"name": "qsgd", "levels": 1, "block": 16}},
    "qsgd": {"name": "qsgd"},
    "qsgd of three levels": {"name": "qsgd", "compression": {"name": "qsgd", "levels": 1, "block": 16}},
    "sign": {"name": "sign"},
    "stc": {"name": "stc"},
    "stc, 20 %": {"name": "stc", "fraction": 0.2},
    "deepsqueeze": {"name": "deepsqueeze"},
    "deepsqueeze, 10 %": {"name": "deepsqueeze", "fraction": 0.1},
    "deepsqueeze of all in int8": {"name": "deepsqueeze", "choose": "all", "compression": {"name": "int8"}},
    "deepsqueeze of all in sign": {"name": "deepsqueeze", "choose": "all", "compression": {"name": "sign"}},
}  # fmt: skip
GRAPHS = {"ring of 8": ("ring", 8), "ring of 16": ("ring", 16), "torus": ("torus", 16),
          "star of 8": ("star", 8)}  # fmt: skip
ON_OTHER_GRAPHS = {("choco", "torus"), ("stc", "torus"), ("stc", "ring of 16"), ("choco", "star of 8"),
                   ("stc", "star of 8")}  # fmt: skip
"""Cases on graphs other than the ring of 8 that a run without --stress tests; --stress tests all others too, with more
rounds."""


def cases() -> list[Any]:
    """Returns every compressor on every graph; slow unless on the ring of 8 or in ON_OTHER_GRAPHS."""
    fast = {(name, "ring of 8") for name in COMPRESSORS} | ON_OTHER_GRAPHS
    return [pytest.param(name, graph, marks=[] if (name, graph) in fast else pytest.mark.slow)
            for name in COMPRESSORS for graph in GRAPHS]  # fmt: skip


def class_config_search(options: dict[str, Any]) -> tuple[Any, Any, Search]:
    """Returns the class of the rule with these options, its config, and the search of its step."""
    rule_class = load_class(options["name"], SHARINGS, "sharing")
    config = rule_class.Config.model_validate(options)
    return rule_class, config, rule_class.step_search(config)


@functools.cache
def default_step_on(name: str, graph: str) -> float:
    rule_class, config, search = class_config_search(COMPRESSORS[name])
    largest = largest_step(rule_class, config, make(GRAPHS[graph][0], nodes=GRAPHS[graph][1]))
    assert largest in STEPS
    return search.default(largest)


@pytest.mark.sampled(of=lambda name, graph: {COMPRESSORS[name]["name"]})
@pytest.mark.parametrize(("name", "graph"), cases())
def test_nodes_reach_consensus_with_the_default_step(name: str, graph: str) -> None:
    """In rounds of the rules themselves. Models begin equal, and the local step of round 0 moves them apart."""
    if graph != "ring of 8" and (name, graph) not in ON_OTHER_GRAPHS and not scale(0, 1):
        pytest.skip("without --stress this compressor is tested on the ring of 8 only")
    family, n = GRAPHS[graph]
    topology, options = make(family, nodes=n), COMPRESSORS[name]
    step = default_step_on(name, graph)
    _, _, search = class_config_search(options)
    rounds = scale(40, 500)
    draws = torch.Generator().manual_seed(5)
    apart = torch.randn(n, 300, generator=draws)
    common = search.common * torch.randn(300, generator=draws)
    models = [common.clone() for _ in range(n)]
    rules = set_up_rules(rule(**{**options, "step_size": step}), models)
    mean, start = (apart + common).mean(0), distance_from_mean(list(apart))
    for r in range(rounds):
        run_round(rules, models, topology, r, pull=0.0,
                  step=(lambda uid, model: model.add_(apart[uid])) if r == 0 else lambda *_: None)  # fmt: skip
        if r % 20 == 19:
            assert distance_from_mean(models) < start
    torch.testing.assert_close(torch.stack(models).mean(0), mean, atol=1e-4, rtol=0)
    expected = distance_left(search, matrices_of(topology), step) if rounds == 500 else 0.9
    assert distance_from_mean(models) / start <= max(0.03, 2 * expected)


def distance_from_mean(models: list[Tensor]) -> float:
    stacked = torch.stack(models)
    return float((stacked - stacked.mean(0)).norm())


SAFE_ON = {"pair": ("ring", 2), "ring": ("ring", 8), "star": ("star", 8), "torus": ("torus", 9),
           "complete": ("complete", 6), "random": ("erdos_renyi", 8)}  # fmt: skip


@pytest.mark.sampled(of=lambda name, graph: {COMPRESSORS[name]["name"]})
@pytest.mark.parametrize("graph", SAFE_ON)
@pytest.mark.parametrize("name", ["beer", "lead", "lead at random", "lead of three levels"])
def test_the_default_is_safe_where_local_steps_are_corrected(name: str, graph: str) -> None:
    """Without gradients, where nothing but mixing damps the correction, and then toward a target that moves."""
    topology = make(SAFE_ON[graph][0], nodes=SAFE_ON[graph][1])
    found, config, search = class_config_search(COMPRESSORS[name])
    largest = largest_step(found, config, topology)
    assert largest
    n = topology.num_nodes
    apart = torch.randn(n, 300, generator=torch.Generator().manual_seed(5))
    models = [torch.zeros(300) for _ in range(n)]
    rules = set_up_rules(rule(**{**COMPRESSORS[name], "step_size": search.default(largest)}), models)
    rounds = 400 if (name, graph) == ("lead of three levels", "star") else 250  # its step is small: 0.59 after 250
    for r in range(rounds):
        run_round(rules, models, topology, r, lr=0.1,
                  step=(lambda uid, model: model.add_(apart[uid])) if r == 0 else lambda *_: None)  # fmt: skip
    assert distance_from_mean(models) < 0.5 * distance_from_mean(list(apart))
    for r in range(rounds, rounds + 350):
        def toward(uid: int, model: Tensor, r: int = r) -> None:
            model.sub_(model - apart[uid] - 0.01 * r, alpha=0.1)

        run_round(rules, models, topology, r, step=toward, lr=0.1)
    target = apart.mean(0) + 0.01 * (rounds + 349)
    assert float((torch.stack(models).mean(0) - target).abs().mean()) < 0.2
    assert distance_from_mean(models) < 0.5 * distance_from_mean(list(apart))


@pytest.mark.parametrize(("options", "step"), [({"name": "stc", "fraction": 0.05}, 0.4), ({"name": "choco"}, 0.4),
                                               ({"name": "choco", "choose": "random"}, 0.4)])  # fmt: skip
@pytest.mark.slow
def test_steps_larger_than_the_largest_do_not_reach_consensus(options: dict[str, Any], step: float) -> None:
    rule_class, config, search = class_config_search(options)
    ring = make("ring", nodes=8)
    largest = largest_step(rule_class, config, ring)
    assert largest is not None and search.default(largest) < largest < step
    assert distance_left(search, matrices_of(ring), largest) <= 0.02
    assert distance_left(search, matrices_of(ring), step) > 0.02


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_search_simulates_in_float32_whatever_the_default_dtype_is(
    dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """A script may have set another default dtype."""
    _, _, search = class_config_search({"name": "choco", "fraction": 0.5})
    matrices = matrices_of(make("ring", nodes=4))
    results = []
    for default in ("float32", "another"):
        if default == "another":
            request.getfixturevalue("default_dtype")
        results.append((distance_left(search, matrices, 0.5), search.operator.lost(), search.common))
    assert results[0] == results[1]


@pytest.mark.slow
def test_the_step_depends_on_the_compressor_and_the_spectrum_of_the_graph_alone() -> None:
    """It is larger with finer compression and on graphs that mix slower; the order of the nodes does not matter."""
    def largest(**options: Any) -> float:
        graph = options.pop("graph", ("ring", 8))
        rule_class, config, _ = class_config_search({"name": "choco", **options})
        step = largest_step(rule_class, config, make(graph[0], nodes=graph[1]))
        assert step is not None
        return step

    by_fraction = [largest(fraction=fraction) for fraction in (0.03, 0.1, 0.3, 1.0)]
    assert by_fraction == sorted(by_fraction) and by_fraction[0] < by_fraction[-1] == STEPS[0]
    assert largest(graph=("complete", 16)) < largest(graph=("ring", 16))
    w = make("torus", nodes=16).matrix(0)
    order = np.random.default_rng(1).permutation(16)
    _, _, search = class_config_search({"name": "choco"})
    spectra = [with_spectrum(np.linalg.eigvalsh(each)) for each in (w, w[order][:, order])]
    np.testing.assert_allclose(spectra[0], spectra[1], atol=1e-9)
    assert search.largest([spectra[0]]) == largest(graph=("torus", 16))


def test_with_spectrum_returns_a_mixing_matrix_with_the_same_spectrum() -> None:
    """Of large graphs with fewer eigenvalues, among them the second largest and the smallest."""
    for family, n in (("ring", 8), ("ring", 9), ("torus", 16), ("star", 7), ("complete", 2)):
        w = make(family, nodes=n).matrix(0)
        other = with_spectrum(np.linalg.eigvalsh(w))
        np.testing.assert_allclose(np.linalg.eigvalsh(other), np.linalg.eigvalsh(w), atol=1e-12)
        np.testing.assert_allclose(other.sum(0), 1, atol=1e-12)
        if family == "ring":
            np.testing.assert_allclose(other, w, atol=1e-12)
    large = np.linalg.eigvalsh(make("ring", nodes=64).matrix(0))
    reduced = np.linalg.eigvalsh(with_spectrum(large))
    assert len(reduced) == 17 and reduced[0] == pytest.approx(large[0]) and reduced[-2] == pytest.approx(large[-2])


@pytest.mark.parametrize("name", COMPRESSORS)
def test_the_searchs_compressor_of_many_vectors_compresses_each_as_the_operator_does(name: str) -> None:
    operator = class_config_search(COMPRESSORS[name])[2].operator
    vectors = torch.randn(4, 1024, generator=torch.Generator().manual_seed(2))
    together = operator.compressor()(vectors)
    codec = operator.codec.lossy if operator.codec else None
    if operator.choose == "random" or (codec is not None and codec.unbiased):
        error = float((together - vectors).norm() / vectors.norm())
        assert 0 < error < 1
        return
    for row, vector in zip(together, vectors, strict=True):
        _, at, values = operator.encode(vector, view(make("ring", nodes=4), 0, 0))
        alone = torch.zeros(1024).index_add_(0, at, values)
        if codec is None or operator.fraction == 1:
            torch.testing.assert_close(row, alone, atol=1e-6, rtol=0)
        else:
            assert float((row - alone).norm() / alone.norm()) < 0.02, "blocks span vectors"


@pytest.mark.slow
def test_the_step_of_a_rule_that_knows_no_graph_converges_on_all_graphs() -> None:
    for options in COMPRESSORS.values():
        search = class_config_search(options)[2]
        feedback_rule: Any = rule(**options)()
        assert feedback_rule.step_size == search.without_graph() > 0
        for family, n in (("ring", 8), ("torus", 16), ("complete", 8)):
            assert distance_left(search, matrices_of(make(family, nodes=n)), feedback_rule.step_size) < 0.3


@pytest.mark.sampled(one=["family"])
@pytest.mark.parametrize("family", ["one_peer_exponential", "random_matching", "directed_one_peer_exponential"])
def test_a_step_that_converges_is_found_on_graphs_that_change(family: str) -> None:
    options = {"name": "deepsqueeze", "choose": "all", "compression": {"name": "int8"}}
    rule_class, config, search = class_config_search(options)
    graph = make(family, nodes=8)
    largest = largest_step(rule_class, config, graph)
    assert largest is not None
    assert distance_left(search, matrices_of(graph), search.default(largest)) <= 0.1


def test_the_resolved_experiment_has_the_default_step_and_larger_steps_give_a_warning(
    caplog: pytest.LogCaptureFixture
) -> None:
    sets = ["graph={name: ring, nodes: 8}", "mapping.nodes_per_machine=8", "data.partition={name: iid}"]
    experiment = load(QUICKSTART, ["sharing={name: stc}", *sets])
    chosen: Any = experiment.sharing
    assert chosen.step_size == default_step_on("stc", "ring of 8") and not caplog.records
    assert f"step_size: {chosen.step_size}" in experiment.resolved_yaml()
    stc: Any = build_in_process(experiment)[0].sharing
    assert stc.step_size == chosen.step_size
    same = load(QUICKSTART, [f"sharing={{name: stc, step_size: {chosen.step_size}}}", *sets])
    assert same.digest() == experiment.digest() and not caplog.records
    with caplog.at_level(logging.WARNING):
        load(QUICKSTART, ["sharing={name: stc, fraction: 0.05, step_size: 0.4}", *sets])
    assert "step_size 0.4 of stc is more than 0.2" in caplog.text and "without the key it is 0.16" in caplog.text


def test_a_large_star_takes_the_step_of_a_rule_without_a_graph() -> None:
    """On a regular graph with the eigenvalues of the star, the largest step is several times that of the star."""
    rule_class, config, search = class_config_search({"name": "choco"})
    star = make("star", nodes=OWN_MATRIX + 1)
    largest = largest_step(rule_class, config, star)
    assert largest is not None and largest == search.without_graph() < search.largest(matrices_of(star))
    assert search.default(largest) < largest


@pytest.mark.slow
def test_a_small_star_takes_the_step_of_its_own_matrix() -> None:
    """It is smaller than on a regular graph, and larger than the step of a rule that knows no graph."""
    rule_class, config, search = class_config_search({"name": "choco"})
    star = make("star", nodes=8)
    largest = largest_step(rule_class, config, star)
    assert largest == search.largest(matrices_of(star)) > search.without_graph()


def test_a_step_is_searched_once_for_all_processes_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    searches: list[Search] = []

    def largest(search: Search, matrices: object) -> float:
        """Returns another step for every search, so that the step tells whether there was one."""
        searches.append(search)
        return STEPS[len(searches)]

    monkeypatch.setattr(Search, "largest", largest)

    def step_in_new_process(graph: str = "ring", **options: Any) -> float | None:
        step_size._largest.cache_clear()
        rule_class, config, _ = class_config_search({"name": "choco", **options})
        return largest_step(rule_class, config, make(graph, nodes=8))

    try:
        steps = [step_in_new_process(), step_in_new_process(), step_in_new_process("star"),
                 step_in_new_process(fraction=0.3), step_in_new_process()]  # fmt: skip
        assert steps == [STEPS[k] for k in (1, 1, 2, 3, 1)]
        cached = sorted((tmp_path / "decentnode").glob("step-*"))
        assert len(cached) == 3
        for path in cached:
            path.write_text("0.123")  # none of the steps that a search may find
        assert step_in_new_process() == STEPS[4] == step_in_new_process()
        monkeypatch.setattr(step_size, "_sources", lambda: "changed")
        assert step_in_new_process() == STEPS[5]

        class Own(load_class("choco", SHARINGS, "sharing")):  # type: ignore[misc]
            pass

        _, config, _ = class_config_search({"name": "choco"})
        for k in (6, 7):  # the cache does not know the source of this class
            step_size._largest.cache_clear()
            assert largest_step(Own, config, make("ring", nodes=8)) == STEPS[k]
    finally:
        step_size._largest.cache_clear()


def test_rules_without_a_step_have_none_and_the_step_on_a_single_node_is_one() -> None:
    rule_class, config, search = class_config_search({"name": "choco"})
    assert largest_step(load_class("full", SHARINGS, "sharing"), rule("full")().config, make("ring", nodes=8)) is None
    alone = largest_step(rule_class, config, make("ring", nodes=1))
    assert alone is not None and search.default(alone) == 1.0
