"""The contracts of `Dataset` and `Partition`: checks that every implementation must pass."""

from __future__ import annotations

import numpy as np
import pytest

from decentnode.data.base import Dataset, Partition, Samples
from decentnode.errors import DataError
from decentnode.samples import AnySamples, Rows


def check_dataset(dataset: Dataset) -> None:
    """Checks that samples fit the specification, and that parts, orders and repetitions give the same samples."""
    targets, spec, count = dataset.train_targets(), dataset.spec, dataset.num_train()
    everything, test = fetch_all(dataset.train(np.arange(count))), fetch_all(dataset.test())
    check_samples(everything, dataset)
    check_samples(test, dataset)
    assert len(everything) == count > 0 and len(test) == dataset.num_test() > 0
    assert (targets is None) == (spec.num_classes is None)
    if targets is not None:
        assert targets.dtype == np.int64 and targets.shape == (count,)
        assert targets.min() >= 0 and targets.max() < dataset.num_classes
        assert np.array_equal(targets, dataset.train_targets()) and np.array_equal(everything.targets, targets)
    chosen = np.array([count - 1, 0, count // 2, 0])  # any order, with a repetition
    some = fetch_all(dataset.train(chosen))
    check_samples(some, dataset)
    assert arrays_equal(some.inputs, everything.inputs[chosen])
    assert arrays_equal(some.targets, everything.targets[chosen])
    lazy = dataset.train(np.arange(count)).take(chosen)
    assert len(lazy) == len(chosen) and arrays_equal(fetch_all(lazy).inputs, some.inputs)
    labels = dataset.test_labels()
    assert (labels is None) == (targets is None) and (labels is None or np.array_equal(labels, test.targets))
    part = fetch_all(dataset.test_part(np.array([len(test) - 1, 0])))
    assert arrays_equal(part.inputs, test.inputs[np.array([len(test) - 1, 0])])
    none = fetch_all(dataset.train(np.empty(0, np.int64)))
    assert len(none) == 0 and (isinstance(none.inputs, Rows) or none.inputs.shape == (0, *spec.input_shape))
    for wrong in (-1, count):
        with pytest.raises(DataError, match=rf"indices must lie in 0\.\.{count - 1}, got {wrong}"):
            dataset.train(np.array([wrong]))
    taken = everything.take(chosen)
    assert arrays_equal(taken.inputs, some.inputs) and (taken.scale, taken.offset) == (some.scale, some.offset)
    for keys, length in ((dataset.train_keys(), count), (dataset.test_keys(), len(test))):
        assert keys is None or (keys.shape == (length,) and keys.dtype.kind in "iu")


def fetch_all(samples: AnySamples) -> Samples:
    """Returns the samples as `Samples`, fetching them if they are lazy."""
    return samples if isinstance(samples, Samples) else samples.fetch(np.arange(len(samples)))


def check_samples(samples: Samples, dataset: Dataset) -> None:
    """Checks shapes, dtypes and ranges of samples against the specification of their dataset."""
    spec = dataset.spec
    if isinstance(samples.inputs, Rows):
        check_rows(samples, dataset)
        return
    assert samples.inputs.shape == (len(samples), *spec.input_shape)
    assert samples.targets.shape == (len(samples), *spec.target_shape)
    assert samples.targets.dtype == (np.float32 if spec.task in ("rating", "regression") else np.int64)
    assert samples.ids == (spec.inputs == "ids")
    if samples.ids:
        assert samples.inputs.dtype.kind in "iu" and (not len(samples) or samples.inputs.min() >= 0)
        most = [spec.users, spec.items] if spec.users is not None else spec.vocabulary
        assert (samples.inputs < most).all() and (spec.vocabulary is None or samples.targets.max(initial=0) < most)
        return
    assert samples.inputs.dtype in (np.uint8, np.float32)
    scale, offset = (np.array(each)[:, None, None] if isinstance(each, tuple) else each
                     for each in (samples.scale, samples.offset))  # fmt: skip
    ready = samples.inputs.astype(np.float32) * scale + offset
    assert np.isfinite(ready).all() and np.abs(ready).max(initial=0) < 100


def check_rows(samples: Samples, dataset: Dataset) -> None:
    """Checks samples whose inputs are rows of unequal length."""
    spec, inputs, targets = dataset.spec, samples.inputs, samples.targets
    assert isinstance(inputs, Rows) and len(inputs) == len(targets) and inputs.longest <= spec.input_shape[0]
    assert samples.ids and spec.inputs == "ids" and spec.vocabulary is not None
    assert (inputs.padded() < spec.vocabulary).all() and (spec.target_shape != ()) == isinstance(targets, Rows)


def arrays_equal(one: np.ndarray | Rows, other: np.ndarray | Rows) -> bool:
    """Compares arrays, or rows of unequal length with their padding."""
    if isinstance(one, Rows) and isinstance(other, Rows):
        one, other = one.padded(), other.padded()
    return np.array_equal(one, other)  # type: ignore[arg-type]


def check_split(
    partition: Partition, targets: np.ndarray, num_nodes: int, covers: bool = True, keys: np.ndarray | None = None
) -> list[np.ndarray]:
    """Checks that the parts are disjoint, sorted, not empty and determined by the seed, and that they contain all
    samples if `covers`. Returns them."""
    parts = list(partition.split(targets, num_nodes, np.random.default_rng(3), keys))
    again = partition.split(targets, num_nodes, np.random.default_rng(3), keys)
    assert len(parts) == num_nodes
    for part, arrays_equal in zip(parts, again, strict=True):
        assert part.dtype == np.int64 and len(part) > 0
        assert (np.diff(part) > 0).all()
        assert np.array_equal(part, arrays_equal)
    dealt = np.concatenate(parts)
    assert len(np.unique(dealt)) == len(dealt)
    assert dealt.min() >= 0 and dealt.max() < len(targets)
    if covers:
        assert len(dealt) == len(targets)
    return parts


def check_seed_matters(partition: Partition, targets: np.ndarray, num_nodes: int, keys: np.ndarray | None) -> None:
    """Checks that four seeds do not all give the same shares."""
    draws = [partition.split(targets, num_nodes, np.random.default_rng(seed), keys) for seed in range(4)]
    assert any(
        not np.array_equal(a, b) for other in draws[1:] for a, b in zip(draws[0], other, strict=True)
    ), "the shares must depend on the generator"
