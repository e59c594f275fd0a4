"""DecentralizedDataParallel over gloo equals D-PSGD for every topology, rule and kind of model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decentnode.parallel import DecentralizedDataParallel
from decentnode.parallel.buckets.advance import vector_length
from tests.parallel.ranks import run_ranks
from tests.parallel.work import models, training

CASES = [
    (1, "complete"), (2, "complete"), (2, "ring"), (2, "exp"), (3, "ring"), (3, "one-peer-exp"), (4, "complete"),
    (4, "alternating-exp-ring"), (4, {"name": "ring"}), (4, "one-peer-exp"),
    (4, {"name": "directed_one_peer_exponential"}), (4, {"name": "random_matching"}),
    (5, {"name": "base_k_plus_1"}), (4, {"name": "d_equistatic", "degree": 2}), (4, {"name": "od_equidyn"}),
    (3, {"name": "ou_equidyn"}), (4, {"name": "gossip_pga", "every": 3, "base": {"name": "ring", "nodes": 4}}),
]  # fmt: skip


@pytest.mark.sampled(of=lambda n, topology, transport: {n, transport, type(topology)})
@pytest.mark.parametrize("transport", ["collective", "auto"])
@pytest.mark.parametrize(("n", "topology"), CASES)
def test_equals_d_psgd(n: int, topology: object, transport: str) -> None:
    views = not isinstance(topology, dict)
    options = {"param_as_bucket_view": views, "bucket_size_in_mb": 25 if views else 0, "transport": transport}
    for _, difference, metrics in run_ranks(n, training.train, topology, 7, options):
        assert difference < 1e-6
        assert metrics["steps"] == 7 and (metrics["bytes_sent"] > 0) == (n > 1)
        if topology in ("exp", "one-peer-exp") and n != 3:
            assert metrics["memory_passes"] == 3, "two snapshots are read to mix and one is written"


@pytest.mark.sampled(one=["n", "local", "copies"])
@pytest.mark.parametrize(("n", "local", "copies"), [(6, 3, 4 * 4 / 3 + 4 * 10 / 6), (8, 2, 4 * 1 + 4 * 6 / 4)])
def test_alternating_topologies_average_groups_by_all_reduce(n: int, local: int, copies: float) -> None:
    """With 3 ranks per machine, groups of two machines and of one alternate; with 2, pairs exchange and fours
    all-reduce."""
    options = {"local_world_size": local, "transport": "collective"}
    parameters = sum(p.numel() for p in models.model().parameters())
    for _, difference, metrics in run_ranks(n, training.train, "alternating-exp-ring", 7, options):
        assert difference < 1e-6
        assert metrics["bytes_sent"] == pytest.approx(4 * parameters * copies, rel=1e-3)


@pytest.mark.sampled
@pytest.mark.parametrize(("transport", "compiled"), [("collective", True), ("auto", True), ("auto", False)])
@pytest.mark.parametrize("name", training.OPTIMIZERS)
def test_a_step_taken_part_by_part_has_the_bits_of_one_taken_at_once(name: str, transport: str, compiled: bool) -> None:
    for same, parts, calls in run_ranks(2, training.step_by_parts, name, transport, compiled):
        assert same and parts > 2
        in_one_pass = name == "adamw" and compiled and vector_length() is not None
        saved_calls = 4 * parts if in_one_pass else 0  # the compiled loop steps once the optimizer has a state
        assert calls == [5 * (parts + 1) - saved_calls, 5]


RULES = [
    (3, "complete", "full", "collective"), (3, "complete", {"name": "ac", "rounds": 4}, "collective"),
    (3, "ring", {"name": "ac", "factor": 0.8, "final": 0.3}, "auto"), (2, "exp", {"name": "local_sgd"}, "collective"),
    (4, "ring", {"name": "moshpit", "dimensions": 2}, "auto"), (2, "complete", {"name": "slowmo"}, "auto"),
    (3, "ring", "object", "collective"),
]  # fmt: skip


@pytest.mark.sampled(one=["n", "topology", "rule"])
@pytest.mark.parametrize(("n", "topology", "rule", "transport"), RULES)
def test_every_rule_equals_its_simulation(n: int, topology: str, rule: Any, transport: str) -> None:
    for difference, moved in run_ranks(n, training.train_with_rule, topology, rule, transport, 3):
        assert difference < 1e-6 < moved


@pytest.mark.sampled
@pytest.mark.parametrize(("topology", "transport"), [
    ("complete", "collective"), ("complete", "auto"), ("ring", "collective"), ("ring", "auto"),
])  # fmt: skip
def test_the_adaptive_factor_that_a_script_sets_scales_the_mixing(topology: str, transport: str) -> None:
    assert max(run_ranks(3, training.train_with_adaptive_factor, topology, transport)) < 1e-6


@pytest.mark.parametrize("factor", [-0.1, 1.1, float("nan")])
def test_an_adaptive_factor_out_of_range_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match=r"factor must be in \[0, 1\], got"):
        DecentralizedDataParallel.set_adaptive_factor(object.__new__(DecentralizedDataParallel), factor)


def test_accumulated_half_batches_equal_a_whole_batch() -> None:
    assert max(run_ranks(2, training.accumulate_gradients)) < 1e-6


@pytest.mark.sampled(one=["clip"])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_ranks_agree_on_frozen_tied_unused_reordered_and_channels_last_parameters(clip: float) -> None:
    for difference, moved, frozen_equal in run_ranks(3, training.train_unusual_parameters, clip):
        assert difference < 1e-5 and frozen_equal
        if clip:
            assert moved == pytest.approx(0.1 * clip, rel=0.02), "gradients are clipped by their norm over all buckets"


@pytest.mark.parametrize("what", ["autocast", "mixed", "compiled inside", "compiled outside", "channels_last"])
@pytest.mark.slow
def test_every_kind_of_model_equals_the_simulation_and_keeps_its_dtypes_and_strides(what: str) -> None:
    for difference, kept in run_ranks(2, training.train_kind_of_model, what):
        assert difference < 1e-6 and kept


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", ["collective", "auto"])
def test_a_resumed_training_has_the_same_bits(transport: str, tmp_path: Path) -> None:
    assert all(run_ranks(4, training.resume_and_compare, transport, str(tmp_path)))
    assert not list(tmp_path.iterdir()), "shared memory has no file name once all ranks have mapped it"


def test_an_overflow_on_one_rank_skips_the_update_there_alone() -> None:
    for rank, (moved, steps, finite) in enumerate(run_ranks(2, training.train_with_overflow_on_rank_0)):
        assert (moved == 0) == (rank == 0) and steps == 5 and finite
