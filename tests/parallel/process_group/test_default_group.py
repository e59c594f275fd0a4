"""The GPU that a rank uses."""

from __future__ import annotations

import pytest
import torch

from decentnode.parallel.process_group.default_group import local_device


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
