"""Recorded trainings of ranks whose models lie on GPUs: checkpoints, and going on from them with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from decentnode.metrics.reader import read
from tests.gpu.test_ranks import WAYS, on_gpus
from tests.parallel.work import recording

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("n", "backend"), [pytest.param(1, "nccl", id="alone"), *WAYS])
@pytest.mark.parametrize("there", [False, True, "faithful", "remembers"])
def test_a_run_that_failed_goes_on_with_the_same_bits(n: int, backend: str, there: bool | str, tmp_path: Path) -> None:
    for results, told in on_gpus(n, backend, recording.stopped_and_resumed, str(tmp_path), there):
        (_, all_of_them, whole), (failed, before, _), (path, rest, resumed) = results
        assert all_of_them == [0, 1, 2, 3] and before == [0, 1, 2] and rest == [2, 3]
        assert path == failed and whole == resumed
        assert "seed" in told and "continues with its own config" in told
    for uid in range(n):
        whole_records, parts = ([
            (each["kind"], each["round"], each.get("loss"), each.get("accuracy_merged"), each.get("consensus_distance"))
            for each in read(tmp_path / runs / f"script/latest/nodes/{uid:03d}/metrics.jsonl")
        ] for runs in ("whole", "parts"))  # fmt: skip
        assert whole_records == parts


@pytest.mark.parametrize("work", [recording.added_up, recording.drawing], ids=["gradients", "generators"])
def test_what_steps_left_goes_on(work: object, tmp_path: Path) -> None:
    """Gradients of passes before the next step, of which one is sparse; what a script draws."""
    for whole, parts in on_gpus(2, "gloo", work, str(tmp_path)):
        assert whole == parts
