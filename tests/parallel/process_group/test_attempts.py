"""Ranks that torchrun restarts do not meet the processes of the attempt before."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from decentnode.parallel.process_group.attempts import KEY, attempt_store

ROOT = Path(__file__).parents[3]

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from decentnode.parallel import initialize_dist

rank, n = initialize_dist("gloo", 60, missing=sys.argv[1])
total = torch.ones(1)
dist.all_reduce(total)
if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("the first attempt fails")
dist.all_reduce(total)
sys.stdout.write(f"rank {rank}: {total.item():g}\\n")  # in one piece, as both ranks write to one pipe
"""


def meet(store: dist.Store, ranks: list[int], seconds: float = 20.0) -> dict[int, dist.Store | Exception]:
    """Returns what `attempt_store` returns or raises for each of these three ranks, which call it at once."""
    found: dict[int, dist.Store | Exception] = {}

    def call(rank: int) -> None:
        try:
            found[rank] = attempt_store(store, rank, 3, seconds)
        except RuntimeError as error:
            found[rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_each_attempt_has_a_store_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = dist.HashStore()
    for attempt in range(3):
        stores = meet(store, [0, 1, 2])
        for rank, own in stores.items():
            assert isinstance(own, dist.Store), own
            assert not own.check([f"rank {rank}"]), "a key of an earlier attempt"
        for rank, own in stores.items():
            own.set(f"rank {rank}", str(attempt))  # type: ignore[union-attr]
        assert all(own.get("rank 2") == str(attempt).encode() for own in stores.values())  # type: ignore[union-attr]
        store.set(f"{KEY}/1/word", "of a process that ended while it waited")


def test_a_rank_that_does_not_come_ends_the_wait_of_rank_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    found = meet(dist.HashStore(), [0, 1], 0.5)
    assert "not all ranks have asked" in str(found[0]) and isinstance(found[1], dist.Store)
    assert "rank 0 has not answered" in str(meet(dist.HashStore(), [1], 0.2)[1])


def test_a_store_that_ends_with_the_ranks_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    store = dist.HashStore()
    assert attempt_store(store, 0, 3, 0.0) is store


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["fail", "regroup"])
def test_ranks_meet_again_after_torchrun_has_restarted_them(missing: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*torchrun, "--max-restarts=1", str(script), missing],
                           env=environment, capture_output=True, text=True, timeout=120)  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split("\n")) == ["", "rank 0: 4", "rank 1: 4"]
