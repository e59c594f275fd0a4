"""The GPU that a rank uses, and the devices whose tensors its process group sends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from decentnode.parallel.membership import founding
from decentnode.parallel.process_group.default_group import CPU, backend_of, device_of_group, local_device


@pytest.mark.parametrize(("rank", "count", "index"), [(0, 4, 0), (3, 4, 3), (3, 1, 0), (0, 1, 0)])
def test_a_rank_uses_the_gpu_of_its_local_rank_or_the_only_one_it_sees(
    rank: int, count: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert local_device() == torch.device("cuda", index)


def test_a_local_rank_beyond_the_visible_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="local rank 3 must see one GPU, its own, or more than 3, got 2"):
        local_device()


def test_backends_are_found_whatever_the_process_group_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(founding, "found_job", lambda _settings: "job")
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_backend() == "cpu:gloo"
        assert (backend_of(CPU), device_of_group()) == ("gloo", CPU)
        assert founding.job_for("regroup", 30.0) == "job"
    finally:
        dist.destroy_process_group()
