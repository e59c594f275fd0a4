"""Batches of arrays, rows and lazily made samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decentnode.samples import PADDING, LazySamples, Rows, Samples
from decentnode.training.source import Source

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_windows_of_a_mapped_file_are_not_copied(tmp_path: Path, dtype: Any) -> None:
    np.arange(100, dtype=dtype).tofile(tmp_path / "tokens")
    tokens = np.memmap(tmp_path / "tokens", dtype, mode="c")
    starts = np.arange(0, 90, 3)
    samples = Samples(Rows(tokens, starts, 5), Rows(tokens, starts + 1, 5), ids=True)
    assert samples.inputs.shape == (30, 5) and len(samples) == 30
    source = Source(samples.take(np.array([4, 1, 7])), CPU)
    inputs, targets = source.take(torch.tensor([2, 0]))
    assert inputs.dtype == targets.dtype == torch.int64 and source.sample_elements == 5
    assert inputs.tolist() == [[21, 22, 23, 24, 25], [12, 13, 14, 15, 16]] and torch.equal(targets, inputs + 1)


def test_rows_of_unequal_length_are_padded_to_the_longest_of_their_batch() -> None:
    values, starts, lengths = np.arange(10, dtype=np.uint8), np.array([0, 2, 7]), np.array([2, 5, 3])
    rows, targets = Rows(values, starts, lengths), Rows(values, starts, lengths, PADDING)
    source = Source(Samples(rows, targets, ids=True), CPU)
    inputs, expected = source.take(torch.tensor([2, 0]))
    assert inputs.tolist() == [[7, 8, 9], [0, 1, 0]] and expected.tolist() == [[7, 8, 9], [0, 1, PADDING]]
    assert source.take(torch.arange(3))[0].shape == (3, 5) and rows.shape == (3, 5) and source.sample_elements == 5
    assert np.array_equal(source.take(torch.arange(3))[1].numpy(), targets.padded())
    assert rows[np.array([0, 2])].longest == 3


@pytest.mark.parametrize(("kind", "ready"), [(np.float64, torch.float32), (np.int32, torch.int64), (bool, torch.int64)])
def test_targets_are_converted_to_float32_or_int64(kind: Any, ready: torch.dtype) -> None:
    source = Source(Samples(np.zeros((4, 2), np.float32), np.ones((4, 3), kind)), CPU)
    inputs, targets = source.take(torch.tensor([0, 3]))
    assert targets.dtype == ready and targets.shape == (2, 3) and inputs.dtype == torch.float32


class NumberedSamples(LazySamples):
    def __init__(self, indices: np.ndarray) -> None:
        self.indices, self.made = indices, 0

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, indices: np.ndarray) -> NumberedSamples:
        return NumberedSamples(self.indices[indices])

    def fetch(self, indices: np.ndarray) -> Samples:
        self.made += len(indices)
        x = self.indices[indices].astype(np.uint8)
        return Samples(x[:, None], x.astype(np.int64), scale=0.5)


def test_lazy_samples_are_made_for_every_batch_anew() -> None:
    samples = NumberedSamples(np.arange(10, 20))
    source = Source(samples, CPU)
    inputs, targets = source.take(torch.tensor([3, 1]))
    assert inputs.tolist() == [[6.5], [5.5]] and targets.tolist() == [13, 11] and len(source) == 10
    source.take(torch.tensor([3]))
    assert samples.made == 3


@pytest.mark.parametrize("fixed", [True, False])
def test_sources_of_rows_of_one_sequence_are_joined(fixed: bool) -> None:
    values = np.arange(40, dtype=np.int32)
    places, lengths = np.arange(6) * 5, 4 if fixed else np.array([2, 5, 3, 1, 4, 2])
    rows = Rows(values, places, lengths, 0)
    samples = Samples(rows, Rows(values, places, lengths, PADDING), ids=True)
    parts = [Source(samples.take(each), CPU) for each in (np.array([4, 1]), np.array([3]), np.array([0, 5]))]
    joined, order = Source.joined(parts), torch.tensor([4, 1, 3, 0, 5])
    assert joined is not None and len(joined) == 5 and joined.unequal is not fixed
    for one, other in zip(joined.take(torch.arange(5)), Source(samples, CPU).take(order), strict=True):
        assert torch.equal(one, other)
    assert [each.tolist() for each in parts[1].take(torch.tensor([0]))] == \
        [each.tolist() for each in Source(samples, CPU).take(torch.tensor([3]))]  # fmt: skip
    other = Samples(Rows(values.copy(), places, lengths, 0), Rows(values, places, lengths, PADDING), ids=True)
    assert Source.joined([parts[0], Source(other, CPU)]) is None, "rows of different sequences cannot be joined"
