"""The step of error-feedback rules: without gradients nodes come together at the default, whatever the compressor."""

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
from tests.sharing.contract import bound, one_round, rule

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
QUICK = {("choco", "torus"), ("stc", "torus"), ("stc", "ring of 16"), ("choco", "star of 8"), ("stc", "star of 8")}
"""Of these the default run takes a sample; the others but on the ring of 8 are for --stress, and for all the rounds."""


def cases() -> list[Any]:
    """Every compressor on every graph; but on the ring of 8 and of QUICK all are slow."""
    return [pytest.param(name, graph, marks=[] if graph == "ring of 8" or (name, graph) in QUICK else pytest.mark.slow)
            for name in COMPRESSORS for graph in GRAPHS]  # fmt: skip


def parts(options: dict[str, Any]) -> tuple[Any, Any, Search]:
    found = load_class(options["name"], SHARINGS, "sharing")
    config = found.Config.model_validate(options)
    return found, config, found.step_search(config)


@functools.cache
def default_of(name: str, graph: str) -> float:
    found, config, search = parts(COMPRESSORS[name])
    largest = largest_step(found, config, make(GRAPHS[graph][0], nodes=GRAPHS[graph][1]))
    assert largest in STEPS
    return search.default(largest)


@pytest.mark.sampled(of=lambda name, graph: {COMPRESSORS[name]["name"]})
@pytest.mark.parametrize(("name", "graph"), cases())
def test_nodes_come_together_at_the_default(name: str, graph: str) -> None:
    """The rules themselves, node by node, from models that began alike and were then driven apart."""
    if graph != "ring of 8" and (name, graph) not in QUICK and not scale(0, 1):
        pytest.skip("other compressors are looked at on the ring of 8, but for --stress")
    family, n = GRAPHS[graph]
    topology, options = make(family, nodes=n), COMPRESSORS[name]
    step = default_of(name, graph)
    _, _, search = parts(options)
    rounds = scale(40, 500)
    draws = torch.Generator().manual_seed(5)
    apart = torch.randn(n, 300, generator=draws)
    common = search.common * torch.randn(300, generator=draws)
    models = [common.clone() for _ in range(n)]
    rules = bound(rule(**{**options, "step_size": step}), models)
    mean, start = (apart + common).mean(0), spread(list(apart))
    for r in range(rounds):
        one_round(rules, models, topology, r, pull=0.0,
                  step=(lambda uid, model: model.add_(apart[uid])) if r == 0 else lambda *_: None)  # fmt: skip
        if r % 20 == 19:
            assert spread(models) < start, "never further apart than at the start"
    torch.testing.assert_close(torch.stack(models).mean(0), mean, atol=1e-4, rtol=0)
    expected = distance_left(search, matrices_of(topology), step) if rounds == 500 else 0.9
    assert spread(models) / start <= max(0.03, 2 * expected)


def spread(models: list[Tensor]) -> float:
    stacked = torch.stack(models)
    return float((stacked - stacked.mean(0)).norm())


@pytest.mark.parametrize(("options", "step"), [({"name": "stc", "fraction": 0.05}, 0.4), ({"name": "choco"}, 0.4),
                                               ({"name": "choco", "choose": "random"}, 0.4)])  # fmt: skip
@pytest.mark.slow
def test_a_larger_step_does_not_bring_them_together(options: dict[str, Any], step: float) -> None:
    found, config, search = parts(options)
    ring = make("ring", nodes=8)
    largest = largest_step(found, config, ring)
    assert largest is not None and search.default(largest) < largest < step
    assert distance_left(search, matrices_of(ring), largest) <= 0.02
    assert distance_left(search, matrices_of(ring), step) > 0.02


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_simulation_is_of_float32_whatever_a_script_has_as_default(
    dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    _, _, search = parts({"name": "choco", "fraction": 0.5})
    matrices = matrices_of(make("ring", nodes=4))
    found = []
    for default in ("float32", "another"):
        if default == "another":
            request.getfixturevalue("default_dtype")
        found.append((distance_left(search, matrices, 0.5), search.operator.lost(), search.common))
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_step_is_of_the_compressor_the_fraction_and_the_spectrum_alone() -> None:
    """Finer compression and slower graphs take larger steps; names and order of nodes do not matter."""
    def largest(**options: Any) -> float:
        graph = options.pop("graph", ("ring", 8))
        found, config, _ = parts({"name": "choco", **options})
        found_step = largest_step(found, config, make(graph[0], nodes=graph[1]))
        assert found_step is not None
        return found_step

    by_fraction = [largest(fraction=fraction) for fraction in (0.03, 0.1, 0.3, 1.0)]
    assert by_fraction == sorted(by_fraction) and by_fraction[0] < by_fraction[-1] == STEPS[0]
    assert largest(graph=("complete", 16)) < largest(graph=("ring", 16))
    w = make("torus", nodes=16).matrix(0)
    order = np.random.default_rng(1).permutation(16)
    _, _, search = parts({"name": "choco"})
    spectra = [with_spectrum(np.linalg.eigvalsh(each)) for each in (w, w[order][:, order])]
    np.testing.assert_allclose(spectra[0], spectra[1], atol=1e-9)
    assert search.largest([spectra[0]]) == largest(graph=("torus", 16))


def test_a_matrix_with_the_same_spectrum() -> None:
    for family, n in (("ring", 8), ("ring", 9), ("torus", 16), ("star", 7), ("complete", 2)):
        w = make(family, nodes=n).matrix(0)
        alike = with_spectrum(np.linalg.eigvalsh(w))
        np.testing.assert_allclose(np.linalg.eigvalsh(alike), np.linalg.eigvalsh(w), atol=1e-12)
        np.testing.assert_allclose(alike.sum(0), 1, atol=1e-12)
        if family == "ring":
            np.testing.assert_allclose(alike, w, atol=1e-12)
    large = np.linalg.eigvalsh(make("ring", nodes=64).matrix(0))
    few = np.linalg.eigvalsh(with_spectrum(large))
    assert len(few) == 17 and few[0] == pytest.approx(large[0]) and few[-2] == pytest.approx(large[-2])


@pytest.mark.parametrize("name", COMPRESSORS)
def test_many_vectors_are_compressed_as_each_alone(name: str) -> None:
    operator = parts(COMPRESSORS[name])[2].operator
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
def test_rules_without_a_graph_take_a_careful_step() -> None:
    for options in COMPRESSORS.values():
        search = parts(options)[2]
        made: Any = rule(**options)()
        assert made.step_size == search.without_graph() > 0
        for family, n in (("ring", 8), ("torus", 16), ("complete", 8)):
            assert distance_left(search, matrices_of(make(family, nodes=n)), made.step_size) < 0.3


@pytest.mark.sampled(one=["family"])
@pytest.mark.parametrize("family", ["one_peer_exponential", "random_matching", "directed_one_peer_exponential"])
def test_graphs_that_change_have_a_step(family: str) -> None:
    found, config, search = parts({"name": "deepsqueeze", "choose": "all", "compression": {"name": "int8"}})
    graph = make(family, nodes=8)
    largest = largest_step(found, config, graph)
    assert largest is not None
    assert distance_left(search, matrices_of(graph), search.default(largest)) <= 0.1


def test_an_experiment_has_the_step_in_its_resolved_file(caplog: pytest.LogCaptureFixture) -> None:
    sets = ["graph={name: ring, nodes: 8}", "mapping.nodes_per_machine=8", "data.partition={name: iid}"]
    experiment = load(QUICKSTART, ["sharing={name: stc}", *sets])
    chosen: Any = experiment.sharing
    assert chosen.step_size == default_of("stc", "ring of 8") and not caplog.records
    assert f"step_size: {chosen.step_size}" in experiment.resolved_yaml()
    made: Any = build_in_process(experiment)[0].sharing
    assert made.step_size == chosen.step_size
    same = load(QUICKSTART, [f"sharing={{name: stc, step_size: {chosen.step_size}}}", *sets])
    assert same.digest() == experiment.digest() and not caplog.records
    with caplog.at_level(logging.WARNING):
        load(QUICKSTART, ["sharing={name: stc, fraction: 0.05, step_size: 0.4}", *sets])
    assert "step_size 0.4 of stc is more than 0.2" in caplog.text and "without the key it is 0.16" in caplog.text


def test_a_large_star_takes_the_step_of_a_rule_without_a_graph() -> None:
    """Its eigenvalues are those of a graph that bears several times as much."""
    found, config, search = parts({"name": "choco"})
    star = make("star", nodes=OWN_MATRIX + 1)
    largest = largest_step(found, config, star)
    assert largest is not None and largest == search.without_graph() < search.largest(matrices_of(star))
    assert search.default(largest) < largest


@pytest.mark.slow
def test_a_small_star_takes_the_step_of_its_own_matrix() -> None:
    """Which bears less than a regular graph, and more than a rule that knows no graph would dare."""
    found, config, search = parts({"name": "choco"})
    star = make("star", nodes=8)
    largest = largest_step(found, config, star)
    assert largest == search.largest(matrices_of(star)) > search.without_graph()


def test_a_step_is_searched_once_for_all_processes_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    searched: list[Search] = []

    def largest(search: Search, matrices: object) -> float:
        searched.append(search)
        return STEPS[len(searched)]

    monkeypatch.setattr(Search, "largest", largest)

    def found(graph: str = "ring", **options: Any) -> float | None:
        """As a new process finds it."""
        step_size._largest.cache_clear()
        known, config, _ = parts({"name": "choco", **options})
        return largest_step(known, config, make(graph, nodes=8))

    try:
        assert [found(), found(), found("star"), found(fraction=0.3), found()] == [STEPS[k] for k in (1, 1, 2, 3, 1)]
        kept = sorted((tmp_path / "decentnode").glob("step-*"))
        assert len(kept) == 3
        for path in kept:
            path.write_text("0.123")  # none of the steps that a search may find
        assert found() == STEPS[4] == found()
        monkeypatch.setattr(step_size, "_sources", lambda: "changed")
        assert found() == STEPS[5]

        class Own(load_class("choco", SHARINGS, "sharing")):  # type: ignore[misc]
            pass

        _, config, _ = parts({"name": "choco"})
        for k in (6, 7):  # its source is not known to the cache
            step_size._largest.cache_clear()
            assert largest_step(Own, config, make("ring", nodes=8)) == STEPS[k]
    finally:
        step_size._largest.cache_clear()


def test_no_step_where_there_is_nothing_to_find() -> None:
    found, config, search = parts({"name": "choco"})
    assert largest_step(load_class("full", SHARINGS, "sharing"), rule("full")().config, make("ring", nodes=8)) is None
    alone = largest_step(found, config, make("ring", nodes=1))
    assert alone is not None and search.default(alone) == 1.0
