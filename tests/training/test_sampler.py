from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentnode.training.sampler import Sampler


@given(
    num_samples=st.integers(1, 40), batch=st.integers(1, 50), drop_last=st.booleans(), shuffle=st.booleans(),
    takes=st.lists(st.integers(0, 7), max_size=12),
)
def test_steps_in_any_rounds_pass_through_whole_epochs(
    num_samples: int, batch: int, drop_last: bool, shuffle: bool, takes: list[int]
) -> None:
    keys = {"seed": 1, "uid": 2, "shuffle": shuffle, "drop_last": drop_last}
    if drop_last and num_samples < batch:
        with pytest.raises(ValueError, match="drop_last needs at least one whole batch"):
            Sampler(num_samples, batch, **keys)
        return
    rounds, whole = Sampler(num_samples, batch, **keys), Sampler(num_samples, batch, **keys)
    pieces = [rounds.take(steps) for steps in takes]
    indices, sizes = whole.take(sum(takes))
    assert [size for _, some in pieces for size in some] == sizes and sum(sizes) == len(indices)
    assert np.array_equal(np.concatenate([i for i, _ in pieces] or [indices]), indices)
    assert len(sizes) == sum(takes) and all(0 < size <= batch for size in sizes)
    per_epoch = num_samples // batch * batch if drop_last else num_samples
    for start in range(0, len(indices), per_epoch):
        epoch = indices[start : start + per_epoch]
        assert len(np.unique(epoch)) == len(epoch)
        if not shuffle:
            assert np.array_equal(epoch, np.arange(len(epoch)))
    resumed = Sampler(num_samples, batch, **keys)
    resumed.epoch, resumed.cursor = rounds.epoch, rounds.cursor
    assert np.array_equal(resumed.take(3)[0], rounds.take(3)[0])


def test_orders_differ_between_epochs_uids_and_seeds() -> None:
    def order(seed: int, uid: int) -> tuple[bytes, bytes]:
        sampler = Sampler(50, 50, seed=seed, uid=uid)
        return sampler.take(1)[0].tobytes(), sampler.take(1)[0].tobytes()

    orders = [one for seed in (1, 2) for uid in (0, 1) for one in order(seed, uid)]
    assert len(set(orders)) == 8


def test_an_empty_share_is_refused() -> None:
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        Sampler(0, 4, seed=1, uid=0)
