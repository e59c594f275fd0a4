"""DecentralizedDataParallel over gloo: equal to D-PSGD for every topology, and what scripts do with it."""

from __future__ import annotations

import logging
import os
import re
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decentnode.communication.shared_memory.segment import FOLDER, PAGE
from decentnode.errors import UsageError
from decentnode.graph.base import Graph
from decentnode.parallel.advance import exact, loops
from decentnode.parallel.plan import Plan, sharing_named
from decentnode.parallel.topology_names import make_topology
from decentnode.sharing.ac import AdaptiveConsensus
from decentnode.sharing.full import Full
from tests.parallel import work
from tests.parallel.ranks import run_ranks, run_ranks_raw

CASES = [
    (1, "complete"), (2, "complete"), (2, "ring"), (2, "exp"), (3, "ring"), (3, "one-peer-exp"), (4, "complete"),
    (4, "alternating-exp-ring"), (4, {"name": "ring"}), (4, "one-peer-exp"),
    (4, {"name": "directed_one_peer_exponential"}), (4, {"name": "random_matching"}),
    (5, {"name": "base_k_plus_1"}),
]  # fmt: skip


@pytest.mark.parametrize("transport", ["collective", "auto"])
@pytest.mark.parametrize(("n", "topology"), CASES)
def test_equals_d_psgd(n: int, topology: object, transport: str) -> None:
    views = not isinstance(topology, dict)
    options = {"param_as_bucket_view": views, "bucket_size_in_mb": 25 if views else 0, "transport": transport}
    for _, difference, metrics in run_ranks(n, work.train, topology, 7, options):
        assert difference < 1e-6
        assert metrics["steps"] == 7 and (metrics["bytes_sent"] > 0) == (n > 1)
        if topology in ("exp", "one-peer-exp") and n != 3:
            assert metrics["memory_passes"] == 3, "two snapshots are read to mix and one is written"


@pytest.mark.parametrize(("n", "local", "copies"), [(6, 3, 4 * 4 / 3 + 4 * 10 / 6), (8, 2, 4 * 1 + 4 * 6 / 4)])
def test_groups_average_by_all_reduce(n: int, local: int, copies: float) -> None:
    """Over machines of 3 ranks: twos of machines and machines by turns; of 2: pairs exchange, fours all-reduce."""
    options = {"local_world_size": local, "transport": "collective"}
    parameters = sum(p.numel() for p in work.model().parameters())
    for _, difference, metrics in run_ranks(n, work.train, "alternating-exp-ring", 7, options):
        assert difference < 1e-6
        assert metrics["bytes_sent"] == pytest.approx(4 * parameters * copies, rel=1e-3)


def test_cliques_are_the_same_for_everybody() -> None:
    graph = make_topology("alternating-exp-ring", 12, 3)
    plans = [Plan(graph, sharing_named({"name": "ac", "factor": 0.5, "final": 0.5}), rank) for rank in range(12)]
    machines, both = [(0, 1, 2), (3, 4, 5)], (0, 1, 2, 3, 4, 5)
    assert len({tuple(plan.cliques()) for plan in plans}) == 1 and {*machines, both} < {*plans[0].cliques()}
    for step in range(8):
        for rank, plan in enumerate(plans):
            clique = plan.clique(step)
            assert clique is not None and clique.strength == pytest.approx(0.5) and rank in clique.members
            assert all(plans[other].clique(step) == clique for other in clique.members)
    for topology in ("ring", "exp", {"name": "random_matching"}, {"name": "ring"}):
        assert not Plan(make_topology(topology, 8, 8), sharing_named("full"), 0).cliques()


@pytest.mark.parametrize(("transport", "compiled"), [("collective", True), ("auto", True), ("auto", False)])
@pytest.mark.parametrize("name", work.OPTIMIZERS)
def test_a_step_by_parts_is_a_step_at_once(name: str, transport: str, compiled: bool) -> None:
    for same, parts, even, calls in run_ranks(2, work.by_parts, name, transport, compiled):
        assert same and parts > 2 and (even == 2) == (compiled and loops() is not None)
        without = 4 * even if name == "adamw" and compiled and exact() else 0  # in one pass, once there is a state
        assert calls == [5 * (parts + 1) - without, 5]


@pytest.mark.parametrize(("name", "n", "local", "says"), [
    ("ring", 5, 5, "odd"), ("exp", 6, 6, "no power of two"), ("alternating-exp-ring", 4, 4, "on one machine"),
    ("alternating-exp-ring", 4, 1, "every machine has one rank"),
    ("alternating-exp-ring", 6, 2, "unequal|power of two"),
])  # fmt: skip
def test_fallbacks_are_said_once(
    name: str, n: int, local: int, says: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decentnode.parallel.topology_names._told", set())
    with caplog.at_level(logging.WARNING):
        graph: Graph = make_topology(name, n, local)
        make_topology(name, n, local)
    assert len(set(caplog.messages)) == len(caplog.messages) and re.search(says, caplog.text)
    product = np.eye(n)
    for r in range(3 * (graph.period or 8)):
        matrix = graph.matrix(r)
        assert np.allclose(matrix.sum(0), 1) and np.allclose(matrix.sum(1), 1)
        product = matrix @ product
    assert np.abs(product - 1 / n).max() < 0.3


def test_no_fallback_where_none_is_needed(caplog: pytest.LogCaptureFixture) -> None:
    for name, n, local in (("ring", 4, 4), ("exp", 8, 8), ("alternating-exp-ring", 8, 2), ("complete", 3, 3)):
        make_topology(name, n, local)
    assert not caplog.messages
    with pytest.raises(ValueError, match="must have 4 nodes"):
        make_topology(make_topology("ring", 6, 6), 4, 4)


def test_averages_reverting_and_writing_between_steps() -> None:
    results = run_ranks(4, work.features)
    for found in results:
        assert found["averaged"] == pytest.approx(results[0]["averaged"]) and found["reverted"]
        assert found["still_averaged"] and found["went_on"] == 5 and found["distance"] > 0
        assert found["stays"] < 1e-6
        assert found["d2c"] == pytest.approx(found["off_center"], rel=1e-4) and found["d2c"] > 0
        assert found["written"][0] > 6.5 and found["written"][1] < 7.5


@pytest.mark.parametrize("where", [0, 2])
def test_an_exception_in_the_backward_pass_costs_no_later_step(where: int) -> None:
    for steps, difference in run_ranks(2, work.exception, where):
        assert steps == 4 and difference == 0.0


def test_a_backward_pass_with_others_inside_is_one_step() -> None:
    for steps, difference in run_ranks(2, work.checkpointed):
        assert steps == [3, 3] and difference < 1e-6


@pytest.mark.parametrize("n", [2, 3])
def test_what_a_script_writes_is_never_lost(n: int) -> None:
    for found in run_ranks(n, work.writes):
        for way, (gained, difference) in found.items():
            assert gained == pytest.approx(3.0 / n, abs=1e-3) and difference < 1e-5, way


RULES = [
    (3, "complete", "full", "collective"), (3, "complete", {"name": "ac", "rounds": 4}, "collective"),
    (3, "ring", {"name": "ac", "factor": 0.8, "final": 0.3}, "auto"), (2, "exp", {"name": "local_sgd"}, "collective"),
    (4, "ring", {"name": "moshpit", "dimensions": 2}, "auto"), (2, "complete", {"name": "slowmo"}, "auto"),
    (3, "ring", "object", "collective"),
]  # fmt: skip


@pytest.mark.parametrize(("n", "topology", "rule", "transport"), RULES)
def test_a_rule_does_what_it_does_in_a_simulation(n: int, topology: str, rule: Any, transport: str) -> None:
    for difference, moved in run_ranks(n, work.shared_rule, topology, rule, transport, 3):
        assert difference < 1e-6 < moved


@pytest.mark.parametrize(("rule", "says"), [
    ({"name": "noloco"}, "NoLoCo, which is not elementwise"), ("leader", "Leader, which is not elementwise"),
    ("relaysgd", "must be an elementwise rule"), ("push_sum", "must be an elementwise rule"),
    ("full_", "did you mean 'full'"), ({"name": "ac", "factor": 2}, "factor"), (type("Mine", (Full,), {
        "adjust": lambda *_: None}), "needs the loss"), (type("Tree", (Full,), {"phases": 2}), "2 exchanges"),
])  # fmt: skip
def test_rules_that_do_not_fit_are_refused(rule: Any, says: str) -> None:
    with pytest.raises((ValueError, UsageError), match=says):
        sharing_named(rule)


def test_a_rule_says_what_it_needs_of_the_topology() -> None:
    picky = type("Picky", (Full,), {"needs_static": True})
    with pytest.raises(ValueError, match="topology must be static for Picky"):
        Plan(make_topology("ring", 4, 4), sharing_named(picky), 0)
    assert Plan(make_topology("complete", 4, 4), sharing_named(AdaptiveConsensus), 0).view(0, 0.5).weights[0] == 0.625


def test_accumulation() -> None:
    assert max(run_ranks(2, work.accumulation)) < 1e-6


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_frozen_tied_unused_reordered_and_channels_last_parameters(clip: float) -> None:
    for spread, moved, frozen in run_ranks(3, work.oddities, clip):
        assert spread < 1e-5 and frozen
        if clip:
            assert moved == pytest.approx(0.1 * clip, rel=0.02), "the global norm, over all buckets"


@pytest.mark.parametrize("what", ["autocast", "mixed", "compiled inside", "compiled outside", "channels_last"])
def test_kinds_of_models(what: str) -> None:
    for difference, kept in run_ranks(2, work.variant, what):
        assert difference < 1e-6 and kept


@pytest.mark.parametrize("transport", ["collective", "auto"])
def test_resume_is_no_interruption(transport: str, tmp_path: Path) -> None:
    assert all(run_ranks(4, work.resume, transport, str(tmp_path)))
    assert not list(tmp_path.iterdir()), "shared memory has no name once everybody has it"


def test_one_decision_of_the_gradient_scaler_per_step() -> None:
    for rank, (moved, steps, finite) in enumerate(run_ranks(2, work.scaled)):
        assert (moved == 0) == (rank == 0) and steps == 5 and finite


@pytest.mark.parametrize(("what", "says"), [
    ("shape", r"rank 1 has another list of parameters than rank 0: 'weight \(5, 4\)"), ("frozen", "rank 1 .*frozen"),
    ("more", "rank 2 .*extra"), ("topology", "rank 1 has another topology"),
])  # fmt: skip
def test_ranks_that_differ_are_named(what: str, says: str) -> None:
    for ok, text in run_ranks_raw(4, work.differing, what):
        assert not ok and re.search(says, text), text


@pytest.mark.parametrize("transport", ["collective", "auto"])
def test_a_rank_that_vanishes_is_named(transport: str, tmp_path: Path) -> None:
    results = run_ranks_raw(2, work.vanish, transport, str(tmp_path / "noticed"))
    assert not results[0][0] and re.search("PeerLost: rank 0: the exchange of step 2 with rank 1", results[0][1])


GONE = "the process of rank 1 is gone, after 5 steps"
ENDED = "rank 1 has ended its training after 5 steps, this one has taken [678]"


@pytest.mark.parametrize(("how", "n", "says"), [
    ("killed", 3, GONE), ("worker left", 2, GONE), ("done", 4, ENDED),
    ("average", 3, "rank 1 waits in an average over all ranks after 5 steps, this one has taken [678]"),
])  # fmt: skip
def test_a_rank_that_leaves_early_is_named_long_before_the_time_out(how: str, n: int, says: str) -> None:
    """Also by ranks that wait for another one, which waits for it."""
    results = run_ranks_raw(n, work.leave, how, "shared_memory")
    for rank in set(range(n)) - {1}:
        ok, text = results[rank]
        assert not ok and re.search(f"PeerLost: rank {rank}: the exchange of step . with rank . failed: {says}", text)


def test_over_gloo_a_rank_that_is_killed_is_named_by_its_neighbors() -> None:
    results = run_ranks_raw(2, work.leave, "killed", "collective")
    ok, text = results[0]
    assert not ok and re.search("PeerLost: rank 0: the exchange of step [56] with rank 1 failed", text)


def test_a_rank_that_is_killed_before_an_average_is_named() -> None:
    for ok, text in run_ranks_raw(3, work.killed_in_average)[:2]:
        assert not ok and re.search("PeerLost: rank .: global_avg failed: the process of rank 2 is gone", text)


@pytest.mark.parametrize(("what", "says"), [
    ("os.posix_fallocate", "could not make shared memory: DiskFull: .*No space left"),
    ("os.open", "could not map shared memory: DiskFull: .*No space left"),
    ("mmap.mmap", "could not make shared memory: DiskFull: .*No space left"),
    ("model", "could not wrap the model: ValueError: model must have parameters"),
    ("optimizer", "could not make the optimizer: DiskFull: .*No space left"),
])  # fmt: skip
def test_a_rank_that_cannot_start_is_named_on_all_at_once(what: str, says: str) -> None:
    """And whatever the ranks do together next meets its like."""
    results = run_ranks(3, work.refuses, what)
    for rank, (told, total) in enumerate(results):
        assert total == 3
        assert re.search("^DiskFull|^ValueError" if rank == 1 else f"AssemblyError: rank 1 {says}", told), told


@pytest.mark.parametrize(("how", "says"), [
    ("stays", "^$"), ("closed", "rank 1 has ended its training after 4 steps"),
    ("forgotten", "rank 1 has ended its training after 4 steps"), ("forgotten by a child", "^$"),
])  # fmt: skip
def test_only_a_process_that_is_gone_is_called_so(how: str, says: str, tmp_path: Path) -> None:
    assert re.search(says, run_ranks(2, work.present, how, str(tmp_path))[0])


def test_memory_that_killed_ranks_left_under_a_name_is_removed_by_the_next() -> None:
    left = FOLDER / f"decentnode-ddp-{secrets.token_hex(8)}-0"
    left.write_bytes(bytes(PAGE))
    try:
        os.utime(left, (0, 0))
        run_ranks(2, work.train, "ring", 1, {"transport": "shared_memory"})
        assert not left.exists()
    finally:
        left.unlink(missing_ok=True)
