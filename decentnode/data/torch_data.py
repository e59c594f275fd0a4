"""Adapts a torch Dataset, or an iterable of batches: `data: {name: package.module:Class, ...}`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from decentnode import rng
from decentnode.config.component import Config
from decentnode.config.signature import arguments, config_of, parameters_of
from decentnode.data.base import Dataset, DatasetConfig
from decentnode.data.transforms import ARGUMENTS, transform_of
from decentnode.errors import DataError, SampleFailed, describe_error
from decentnode.samples import AnySamples, DataSpec, LazySamples, Samples

FILLED = frozenset({"train", "split"})
"""Constructor arguments that select the split."""
SPLITS = {"train": {"train": True, "split": "train"}, "test": {"train": False, "split": "test"}}
"""The values of these arguments for each split."""


class TorchDataConfig(DatasetConfig):
    name: str = ""
    num_classes: int | None = Field(None, ge=2)
    """Number of classes of a classification. Default: the length of the Dataset's `classes`, else the highest training
    target + 1."""
    vocabulary: int | None = Field(None, ge=1)
    """Number of different ids, if the inputs are integers."""
    test_fraction: float = Field(0.1, gt=0, lt=1)
    """Fraction of the samples to test on, if the constructor takes neither `train` nor `split`."""


class TorchData(Dataset):
    """The samples of the class in `data.name`, unchanged: `(input, target)` for every index below its length, or, if it
    has no length, batches of them, which are read once, to their end.

    Its constructor gets the remaining keys, and `train` (true, false) or `split` ("train", "test") if it takes one of
    them. Samples of a Dataset are made anew for every batch, so that transforms may be random. `transform`,
    `target_transform` and `transforms` are objects that `transforms.py` makes from what YAML can write.
    """

    Config: ClassVar[type[Config]] = TorchDataConfig
    adapted_class: ClassVar[Any]
    """The class that is adapted."""

    def __init__(self, config: TorchDataConfig, base_dir: Path) -> None:
        self.config = config
        given = {key: base_dir / value if isinstance(value, Path) else
                 transform_of(value, f"data.{key}") if key in ARGUMENTS else value
                 for key, value in arguments(config, type(self).adapted_class, FILLED).items()}  # fmt: skip
        self._made: dict[str, Any] = {}
        self._given = given
        self._split_argument = next((key for key in ("train", "split") if key in parameters_of(type(self).adapted_class)
                            and key not in given), None)  # fmt: skip
        self._labels: np.ndarray | None = None
        train = self._split("train")
        if not len(train):
            raise DataError(f"data {config.name}: it has no training samples")
        self._first = train.fetch(np.zeros(1, np.int64))

    # -- samples of the class ---------------------------------------------------------------------------------

    def _split(self, split: Literal["train", "test"]) -> LazySamples:
        name = type(self).adapted_class.__name__
        try:
            if self._split_argument is None:
                whole = self._whole()
                order = rng.stream(0, rng.GLOBAL, "test samples").permutation(len(whole))
                aside = max(1, round(self.config.test_fraction * len(whole)))
                return whole.take(np.sort(order[:aside] if split == "test" else order[aside:]))
            if split not in self._made:
                made = type(self).adapted_class(**self._given, **self._split_arguments(split))
                self._made[split] = as_lazy(made, name)
            found: LazySamples = self._made[split]
        except DataError:
            raise
        except Exception as error:  # a user's own constructor may raise anything
            raise DataError(f"data {self.config.name}: making {name} raised {describe_error(error)}") from error
        return found

    @property
    def hint(self) -> str:
        """A hint for errors about samples that may really be batches; see `batch_hint`."""
        return batch_hint(self._any_made())

    def _split_arguments(self, split: str) -> dict[str, Any]:
        assert self._split_argument is not None
        return {self._split_argument: SPLITS[split][self._split_argument]}

    def _whole(self) -> LazySamples:
        if "whole" not in self._made:
            self._made["whole"] = as_lazy(type(self).adapted_class(**self._given), type(self).adapted_class.__name__)
        found: LazySamples = self._made["whole"]
        return found

    # -- methods of Dataset -----------------------------------------------------------------------------------

    @functools.cached_property
    def spec(self) -> DataSpec:
        inputs, targets = _arrays(self._first)
        whole = targets.dtype.kind in "iub"
        tokens = self._first.ids and targets.shape == inputs.shape and whole
        vocabulary = self._fact("vocabulary") if self._first.ids else None
        if tokens and vocabulary is None:
            raise DataError("data.vocabulary must be given for inputs that are tokens")
        task = "next_token" if tokens else "classification" if whole and targets.ndim == 1 else "regression"
        return DataSpec(
            tuple(inputs.shape[1:]), "ids" if self._first.ids else "values",
            str(getattr(self._any_made(), "task", task)),
            self._classes() if task == "classification" else None, vocabulary, self._fact("users"), self._fact("items"),
            tuple(targets.shape[1:]),
        )  # fmt: skip

    def _any_made(self) -> Any:
        made = next(iter(self._made.values()))
        return getattr(made, "dataset", made)

    def _fact(self, name: str) -> int | None:
        given = getattr(self.config, name, None)
        found = given if given is not None else getattr(self._any_made(), name, None)
        return None if found is None else int(found)

    def _classes(self) -> int:
        found, listed = self._fact("num_classes"), getattr(self._any_made(), "classes", None)
        if found is not None:
            return found
        if listed is not None:
            return len(listed)
        labels = self.train_targets()
        assert labels is not None
        return int(labels.max()) + 1

    def num_train(self) -> int:
        return len(self._split("train"))

    def num_test(self) -> int:
        return len(self._split("test"))

    def train_targets(self) -> np.ndarray | None:
        """Returns the Dataset's `targets` or `labels`; without them, makes every sample once to get its target."""
        targets = _arrays(self._first)[1]
        if targets.dtype.kind not in "iub" or targets.ndim != 1:
            return None
        if self._labels is None:
            self._labels = _targets_of(self._split("train"))
        return self._labels

    def train(self, indices: np.ndarray) -> AnySamples:
        return self._split("train").take(indices)

    def test(self) -> AnySamples:
        return self._split("test")

    def test_part(self, indices: np.ndarray) -> AnySamples:
        return self._split("test").take(indices)

    def test_labels(self) -> np.ndarray | None:
        return None if self.train_targets() is None else _targets_of(self._split("test"))


class DatasetSamples(LazySamples):
    """Samples of a map-style Dataset."""

    def __init__(self, dataset: Any, indices: np.ndarray) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, indices: np.ndarray) -> DatasetSamples:
        return DatasetSamples(self.dataset, self.indices[indices])

    def fetch(self, indices: np.ndarray) -> Samples:
        pairs = []
        for index in self.indices[indices].tolist():
            item = self._item(index)
            if not isinstance(item, tuple | list) or len(item) != 2:
                raise DataError(f"{type(self.dataset).__name__}[{index}] must be (input, target), got "
                                f"{type(item).__name__}")  # fmt: skip
            pairs.append(item)
        return batch([x for x, _ in pairs], [y for _, y in pairs], type(self.dataset).__name__)

    def _item(self, index: int) -> Any:
        """Returns one sample. Raises SampleFailed for any error that the Dataset raises."""
        try:
            return self.dataset[index]
        except Exception as error:
            of = type(self.dataset)
            raise SampleFailed(
                f"data {of.__module__}:{of.__qualname__}: {of.__name__}[{index}] raised {describe_error(error)}"
            ) from error


class InMemorySamples(LazySamples):
    """Samples in memory, which were read from an iterable or given as arrays."""

    def __init__(self, samples: Samples, dataset: Any) -> None:
        self.samples, self.dataset = samples, dataset

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, indices: np.ndarray) -> InMemorySamples:
        return InMemorySamples(self.samples.take(indices), self.dataset)

    def fetch(self, indices: np.ndarray) -> Samples:
        return self.samples.take(indices)


def batch(inputs: list[Any] | np.ndarray, targets: list[Any] | np.ndarray, where: str) -> Samples:
    """Returns inputs and targets as Samples; integer inputs of more than 8 bits are ids.

    Raises DataError if samples have unequal shapes.
    """
    try:
        x, y = (each if isinstance(each, np.ndarray) else np.stack([_array(one) for one in each])
                for each in (inputs, targets))  # fmt: skip
    except (ValueError, TypeError) as error:
        raise DataError(f"{where}: the inputs, and the targets, of all samples must have one shape: {error}") from error
    if x.dtype.kind not in "iubf" or y.dtype.kind not in "iubf":
        raise DataError(f"{where}: inputs and targets must be numbers, arrays or tensors, got {x.dtype} and {y.dtype}")
    ids = x.dtype.kind in "iu" and x.dtype.itemsize > 1
    scale = 1 / 255 if x.dtype == np.uint8 else 1.0
    kept = x if ids or x.dtype == np.uint8 else x.astype(np.float32, copy=False)
    return Samples(kept, y.astype(np.float32 if y.dtype.kind == "f" else np.int64, copy=False), scale, ids=ids)


def as_lazy(made: Any, where: str) -> LazySamples:
    """Returns the samples of a map-style Dataset, or of an iterable of batches, read to its end. Raises DataError."""
    streamed = any(base.__name__ == "IterableDataset" for base in type(made).__mro__)  # it has __getitem__, too
    if hasattr(made, "__getitem__") and hasattr(made, "__len__") and not streamed:
        if len(shapes := _shapes_of_ends(made)) == 2 and shapes[0] != shapes[1] and (hint := batch_hint(made)):
            raise DataError(f"{where}: samples must have one shape, got {_shapes_text(shapes[0])} first and "
                            f"{_shapes_text(shapes[1])} last; {hint}")  # fmt: skip
        return DatasetSamples(made, np.arange(len(made)))
    if not isinstance(made, Iterable):
        raise DataError(f"{where} must have __getitem__ and __len__, or be an iterable of batches")
    inputs, targets = [], []
    for number, (x, y) in enumerate(_batches(made, where)):
        if len(x) != len(y):
            raise DataError(f"{where}: batch {number} has {len(x)} inputs and {len(y)} targets")
        inputs.append(_array(x))
        targets.append(_array(y))
    if not inputs:
        raise DataError(f"{where} gave no batch")
    return InMemorySamples(batch(np.concatenate(inputs), np.concatenate(targets), where), made)


Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape of an input and of its target."""


def _shapes_of_ends(made: Any) -> list[Shapes]:
    """Returns the shapes of the first and last item of a list of pairs of arrays or tensors; [] for anything else."""
    if not isinstance(made, list | tuple) or not made:
        return []
    ends = made[0], made[-1]
    if not all(isinstance(each, tuple | list) and len(each) == 2 for each in ends):
        return []
    if not all(isinstance(one, np.ndarray | torch.Tensor) for each in ends for one in each):
        return []
    return [(tuple(x.shape), tuple(y.shape)) for x, y in ends]


def batch_hint(made: Any) -> str:
    """Returns a hint if the items of a list, which are taken for samples, look like batches; else "".

    They look like batches if each has as many inputs as targets, more than one, and they are not sequences whose next
    tokens are to be predicted. A sample with a target for each of its rows looks the same.
    """
    shapes = _shapes_of_ends(made)
    if not shapes or any(not x or not y or x[0] != y[0] for x, y in shapes) or shapes[0][0] == shapes[0][1]:
        return ""
    count = shapes[0][0][0]
    return "" if count < 2 else f"if each item is a batch, of {count} samples the first, give iter(...) of the list"


def _shapes_text(shapes: Shapes) -> str:
    return f"({list(shapes[0])}, {list(shapes[1])})"


def _batches(made: Iterable[Any], where: str) -> Iterator[tuple[Any, Any]]:
    for each in made:
        if not isinstance(each, tuple | list) or len(each) != 2:
            raise DataError(f"{where}: a batch must be (inputs, targets), got {type(each).__name__}")
        yield each[0], each[1]


def _array(given: Any) -> np.ndarray:
    """Returns an item of a Dataset as an array. A tensor may be on a GPU; a Pillow image gets its channels first, as in
    torchvision's ToTensor."""
    if isinstance(given, torch.Tensor):
        return given.detach().cpu().numpy()
    found = np.asarray(given)
    if not type(given).__module__.startswith("PIL."):
        return found
    if found.dtype.kind == "b":
        found = found * np.uint8(255)
    elif found.dtype != np.uint8:
        found = found.astype(np.float32)
    return found.transpose(2, 0, 1) if found.ndim == 3 else found[None]


def _arrays(samples: Samples) -> tuple[np.ndarray, np.ndarray]:
    assert isinstance(samples.inputs, np.ndarray) and isinstance(samples.targets, np.ndarray)
    return samples.inputs, samples.targets


def _targets_of(samples: LazySamples) -> np.ndarray:
    if isinstance(samples, DatasetSamples):
        for name in ("targets", "labels"):
            found = getattr(samples.dataset, name, None)
            if found is not None and len(found) == len(samples.dataset):
                return _array(found).astype(np.int64)[samples.indices]
    if isinstance(samples, InMemorySamples):
        return _arrays(samples.samples)[1]
    blocks = (np.arange(start, min(start + 1024, len(samples))) for start in range(0, len(samples), 1024))
    return np.concatenate([_arrays(samples.fetch(block))[1] for block in blocks])


@functools.cache
def adapted(chosen: type[Any]) -> type[Dataset] | None:
    """Returns the dataset that adapts a class; None if the class is neither a Dataset nor an iterable."""
    if not (hasattr(chosen, "__getitem__") or hasattr(chosen, "__iter__")):
        return None
    config = config_of(chosen, TorchDataConfig, FILLED & parameters_of(chosen).keys(), ARGUMENTS)
    return type(chosen.__name__, (TorchData,), {"Config": config, "adapted_class": chosen, "__doc__": chosen.__doc__})
