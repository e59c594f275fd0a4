"""Map-style datasets and iterables of batches of PyTorch as `data`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from decentnode.config.component import load_class, section
from decentnode.data import DATASETS
from decentnode.data.opened import OpenedData
from decentnode.errors import DataError, NodeFailed, SampleFailed, UsageError
from decentnode.samples import LazySamples

HERE = __name__


class Points(Dataset[tuple[torch.Tensor, int]]):
    """A dataset with torchvision's interface: the argument `train`, and attributes `targets` and `classes`."""

    classes = ("left", "right", "none")

    def __init__(self, count: int, train: bool = True, noise: float = 0.0, folder: Path | None = None) -> None:
        self.count, self.noise, self.folder = (count if train else 8), noise, folder
        self.targets = [index % 2 for index in range(self.count)]
        self.indices_read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.indices_read.append(index)
        return torch.full((2, 2), float(index)) + self.noise * torch.randn(2, 2), self.targets[index]


class Numbers:
    """A dataset without labels and without a test part; targets are numbers."""

    def __init__(self, count: int = 20) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, float]:
        return np.array([index], np.float32), 2.0 * index


class Tokens(Numbers):
    vocabulary = 50

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return torch.arange(index, index + 4), torch.arange(index + 1, index + 5)


class Batches(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, split: str) -> None:
        self.batches = 3 if split == "train" else 1

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(self.batches):
            yield torch.full((4, 3), float(number)), torch.arange(4) % 2


class Triples(Numbers):
    def __getitem__(self, index: int) -> Any:
        return 1, 2, 3


class Ragged(Numbers):
    def __getitem__(self, index: int) -> Any:
        return np.zeros(index + 1), 0


class Unreadable(Numbers):
    """A dataset whose sample `bad` raises."""

    def __init__(self, bad: int = 7, count: int = 20) -> None:
        super().__init__(count)
        self.bad = bad

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) if index != self.bad else self.read(index)

    def read(self, index: int) -> Any:
        raise OSError(f"image {index} is cut short")


class Raises(Numbers):
    def __init__(self) -> None:
        raise RuntimeError("no such disk")


def open_data(name: str, nodes: int = 2, folder: Path = Path(), **keys: Any) -> OpenedData:
    config = load_class(f"{HERE}:{name}", DATASETS, "data").Config.model_validate({"name": f"{HERE}:{name}", **keys})
    return OpenedData(config, DATASETS, folder, [0] * nodes, 1)


def test_a_map_style_dataset_is_read_for_every_batch_and_only_in_the_share() -> None:
    data = open_data("Points", count=10, noise=1.0)
    assert (data.spec.task, data.spec.num_classes, data.spec.input_shape) == ("classification", 3, (2, 2))
    mine, share = data.of(1), data.shares()[1]
    assert isinstance(mine.train, LazySamples) and len(mine.train) == 5 and len(mine.test) == 8
    dataset = mine.train.dataset  # type: ignore[attr-defined]
    dataset.indices_read.clear()
    first, second = mine.train.fetch(np.array([2, 0])), mine.train.fetch(np.array([2, 0]))
    assert dataset.indices_read == [share[2], share[0]] * 2 and not np.array_equal(first.inputs, second.inputs)
    assert first.inputs.dtype == np.float32 and first.targets.tolist() == [share[2] % 2, share[0] % 2]


@pytest.mark.parametrize("keys", [{}, {"noise": 0.0}])
def test_a_resolved_section_opens_the_same_train_and_test_parts(keys: dict[str, Any]) -> None:
    """A resolved section also has `train` with its default, which must not change how the two parts are opened."""
    def parts(**given: Any) -> tuple[int, int]:
        samples = open_data("Points", nodes=1, **given).of(0)
        return len(samples.train), len(samples.test)

    made_of = load_class(f"{HERE}:Points", DATASETS, "data").Config
    written = made_of.model_validate({"name": f"{HERE}:Points", "count": 10, **keys})
    resolved = {key: value for key, value in written.model_dump(mode="json").items() if key != "name"}
    assert "train" in resolved
    for given in ({"count": 10, **keys}, resolved):
        assert parts(**given) == (10, 8)
    assert parts(count=10, train=True) == (9, 1), "a written `train` must not be overridden"


class Transformed(Numbers):
    """A dataset with torchvision's arguments `transform` and `target_transform`."""

    def __init__(
        self, transform: Callable | None = None, target_transform: Any = None,  # type: ignore[type-arg]
    ) -> None:
        super().__init__()
        self.transform, self.target_transform = transform, target_transform

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        x, y = super().__getitem__(index)
        return self.transform(x) if callable(self.transform) else x, self.target_transform(y)


class Multiply:
    def __init__(self, factor: float, inner: Callable[[Any], Any] | None = None) -> None:
        self.factor, self.inner = factor, inner

    def __call__(self, value: Any) -> Any:
        return self.factor * (value if self.inner is None else self.inner(value))


def minus(value: Any, other: float = 1.0) -> Any:
    return value - other


def test_transforms_are_given_by_module_and_name() -> None:
    section = [f"{HERE}:minus", {"name": f"{HERE}:Multiply", "factor": "1e1", "inner": {"name": f"{HERE}:minus",
                                                                                     "other": 3}}]  # fmt: skip
    data = open_data("Transformed", transform=section, target_transform=f"{HERE}:minus")
    found, share = data.of(0).train.fetch(np.arange(3)), data.shares()[0][:3]  # type: ignore[union-attr]
    assert np.array_equal(found.inputs[:, 0], 10.0 * (share - 1.0 - 3.0))
    assert np.array_equal(found.targets, 2.0 * share - 1)
    assert open_data("Transformed", transform="left", target_transform=f"{HERE}:minus").spec.input_shape == (1,)


@pytest.mark.parametrize(("transform", "says"), [
    (f"{HERE}:mnius", "data.transform '.*:mnius': module .* has no function or class 'mnius'; did you mean 'minus'"),
    ([f"{HERE}:minus", {"name": f"{HERE}:Multiply"}],
     r"data.transform\[1\]: making .*:Multiply raised TypeError: .*factor"),
    ([f"{HERE}:minus", "left"], "data.transform must contain 'package.module:Name' of callables, .* got 'left'"),
    ("nothing.there:X", "no module named 'nothing'"), (f"{HERE}:HERE", "must be something to call with a sam"),
])  # fmt: skip
def test_transforms_that_cannot_be_made_are_refused(transform: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        open_data("Transformed", transform=transform).spec  # noqa: B018


class Pictures(Numbers):
    """A dataset of Pillow images, as torchvision's datasets return without a transform."""

    def __init__(self, mode: str = "RGB") -> None:
        super().__init__(8)
        self.pixels = np.random.default_rng(1).integers(0, 256, (4, 5, 3), np.uint8)
        self.image = pytest.importorskip("PIL.Image").fromarray(self.pixels).convert(mode)

    def __getitem__(self, index: int) -> Any:
        return self.image, index % 2


@pytest.mark.parametrize("mode, channels", [("RGB", 3), ("L", 1), ("1", 1), ("I", 1)])
def test_images_have_their_channels_first(mode: str, channels: int) -> None:
    data = open_data("Pictures", mode=mode)
    assert data.spec.input_shape == (channels, 4, 5) and data.spec.inputs == "values"
    train = data.of(0).train
    assert isinstance(train, LazySamples)
    found = train.fetch(np.arange(1))
    pixels = np.asarray(Pictures(mode).image.convert("L" if channels == 1 else "RGB")).reshape(4, 5, channels)
    assert np.array_equal(np.asarray(found.inputs)[0], pixels.transpose(2, 0, 1))
    assert found.scale == (1.0 if mode == "I" else 1 / 255)


def test_shards_and_own_tests_of_a_map_style_dataset_follow_its_labels() -> None:
    data = open_data("Points", count=40, partition={"name": "shards", "shards": 1}, test="own")
    found = [data.of(uid) for uid in range(2)]
    for each in found:
        assert isinstance(each.train, LazySamples) and isinstance(each.test, LazySamples)
        label = set(each.train.fetch(np.arange(len(each.train))).targets)
        assert len(label) == 1 and set(each.test.fetch(np.arange(len(each.test))).targets) == label


def test_a_test_part_is_set_aside_for_classes_without_one() -> None:
    data = open_data("Numbers", test_fraction=0.25)
    assert data.spec.task == "regression" and data.spec.target_shape == ()
    mine = data.of(0)
    assert isinstance(mine.test, LazySamples)
    tested = mine.test.fetch(np.arange(5)).inputs[:, 0].tolist()  # type: ignore[union-attr]
    trained = [value for uid in range(2) for value in all_inputs(data.of(uid).train)]
    assert sorted(tested + trained) == list(range(20)) and len(mine.test) == 5


def all_inputs(samples: Any) -> list[float]:
    return [float(value) for value in samples.fetch(np.arange(len(samples))).inputs[:, 0]]


def test_integer_inputs_are_tokens() -> None:
    data = open_data("Tokens")
    assert (data.spec.task, data.spec.inputs, data.spec.vocabulary) == ("next_token", "ids", 50)
    assert data.spec.input_shape == data.spec.target_shape == (4,)


def test_an_iterable_dataset_of_batches_is_read_completely() -> None:
    data = open_data("Batches")
    assert data.spec.num_classes == 2 and data.spec.input_shape == (3,)
    assert sorted(all_inputs(data.of(0).train) + all_inputs(data.of(1).train)) == [0] * 4 + [1] * 4 + [2] * 4
    assert len(data.of(0).test) == 4


@pytest.mark.parametrize(("name", "keys", "text"), [
    ("Triples", {}, r"Triples\[\d+\] must be \(input, target\), got tuple"),
    ("Raises", {}, r"making Raises raised RuntimeError: no such disk \(.*test_torch_data.py:"),
    ("Points", {"count": 0}, "has no training samples"),
])  # fmt: skip
def test_classes_without_valid_samples_are_refused(name: str, keys: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        open_data(name, **keys).spec  # noqa: B018


def test_samples_of_unequal_shapes_are_refused() -> None:
    data = open_data("Ragged")
    with pytest.raises(DataError, match="Ragged: the inputs, and the targets, of all samples must have one shape"):
        all_inputs(data.of(0).train)


def test_keys_of_a_dataset_are_the_arguments_of_its_constructor() -> None:
    with pytest.raises(Exception, match="count\n  Input should be a valid integer"):
        open_data("Points", count="many")
    with pytest.raises(Exception, match="count\n  Field required"):
        open_data("Points")
    with pytest.raises(Exception, match="noisy\n  Extra inputs are not permitted"):
        open_data("Points", count=3, noisy=1)


def test_a_class_that_is_no_dataset_is_refused() -> None:
    with pytest.raises(UsageError, match="must name a class whose Config is a component"):
        section(DATASETS, "data").config_of("pathlib:Path")


def test_an_exception_of_a_dataset_is_reported_with_the_index_of_the_sample() -> None:
    data = open_data("Unreadable")
    share = next(each for each in (data.of(0), data.of(1)) if 7 in each.train.indices)  # type: ignore[union-attr]
    assert isinstance(share.train, LazySamples)
    place = share.train.indices.tolist().index(7)  # type: ignore[attr-defined]
    with pytest.raises(SampleFailed) as caught:
        share.train.fetch(np.array([place]))
    assert str(caught.value).startswith(f"data {HERE}:Unreadable: Unreadable[7] raised OSError: image 7 is cut short (")
    assert "test_torch_data.py:" in str(caught.value) and isinstance(caught.value.__cause__, OSError)
    assert caught.value.exit_code == NodeFailed.exit_code, "samples of other nodes may be readable"


def test_an_exception_for_the_first_sample_is_raised_when_the_data_is_opened() -> None:
    with pytest.raises(DataError, match=r"Unreadable\[\d+\] raised OSError"):
        for bad in range(20):
            open_data("Unreadable", bad=bad).spec  # noqa: B018
