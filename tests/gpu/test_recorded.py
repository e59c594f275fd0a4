"""Recorded trainings of ranks whose models lie on GPUs are resumed from checkpoints with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from decentnode.metrics.reader import read
from tests.gpu.test_ranks import BACKENDS, on_gpus
from tests.parallel.work import recording

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("n", "backend"), [pytest.param(1, "nccl", id="alone"), *BACKENDS])
@pytest.mark.parametrize("variant", ["plain", "decent_dp", "faithful", "stateful rule"])
def test_a_failed_run_is_resumed_with_the_same_bits(n: int, backend: str, variant: str, tmp_path: Path) -> None:
    for results, error in on_gpus(n, backend, recording.stop_and_resume, str(tmp_path), variant):
        (_, all_epochs, whole), (failed_path, first_epochs, _), (path, last_epochs, resumed) = results
        assert all_epochs == [0, 1, 2, 3] and first_epochs == [0, 1, 2] and last_epochs == [2, 3]
        assert path == failed_path and whole == resumed
        assert "seed" in error and "continues with its own config" in error
    for uid in range(n):
        whole_records, parts = ([
            tuple(record.get(key) for key in ("kind", "round", "loss", "accuracy_merged", "consensus_distance"))
            for record in read(tmp_path / runs / f"script/latest/nodes/{uid:03d}/metrics.jsonl")
        ] for runs in ("whole", "parts"))  # fmt: skip
        assert whole_records == parts


@pytest.mark.parametrize("work", [recording.accumulate_across_epochs, recording.draw_random_numbers],
                         ids=["gradients", "generators"])  # fmt: skip
def test_unused_gradients_and_random_generators_survive_a_resume(work: object, tmp_path: Path) -> None:
    """Of the gradients that no step has used yet, one is sparse."""
    for whole, parts in on_gpus(2, "gloo", work, str(tmp_path)):
        assert whole == parts
