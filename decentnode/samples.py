"""The format of samples and datasets that readers, partitions, tasks, models and training agree on."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

PADDING = -100
"""The target of positions past the end of a row; losses ignore it (torch's `ignore_index`)."""
UNKNOWN, BEGIN, END = 1, 2, 3
"""Tokens of sequence pairs: a word outside the vocabulary, the start of the target, and its end."""
FIRST_WORD = 4
"""The first token of sequence pairs that is part of a text."""


FACTS = frozenset({"input_shape", "num_classes", "vocabulary", "users", "items"})
"""The fields of `DataSpec` that the constructor of a user's own module may take as parameters of these names."""


@dataclass(frozen=True)
class DataSpec:
    """What a model and a task must know about a dataset. It is known before any sample is read, and the same on all
    nodes."""

    input_shape: tuple[int, ...]
    """The shape of one sample's input; for rows of unequal length, of the longest."""
    inputs: Literal["values", "ids"] = "values"
    """values: float32 numbers, such as pixels. ids: int64 numbers of things, such as tokens or users."""
    task: str = "classification"
    """The task that is used if the experiment names none."""
    num_classes: int | None = None
    """The number of classes of a classification."""
    vocabulary: int | None = None
    """The number of different tokens; all ids are smaller."""
    users: int | None = None
    """The number of users in ratings; the first id of every input is smaller."""
    items: int | None = None
    """The number of items in ratings; the second id of every input is smaller."""
    target_shape: tuple[int, ...] = ()
    """The shape of one sample's target: () for a class or a number, (T,) for a next token at each of T positions."""
    padding: int | None = None
    """For rows of unequal length, the token that fills the end of shorter rows and occurs nowhere else; models that
    support it mask those positions."""
    pairs: bool = False
    """Whether inputs [T, 2] are the tokens of a source sequence and of a target sequence that starts with BEGIN; the
    targets [T] are then the next tokens of the target sequence, which END follows."""
    pieces: int = 0
    """For pairs, how many tokens from FIRST_WORD on are word pieces that the following token continues."""

    def facts(self) -> dict[str, Any]:
        """Returns the fields in `FACTS` that are known, by name."""
        return {name: value for name in FACTS if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Rows:
    """Rows of one long sequence: token sequences of unequal length, or overlapping windows. A row is copied only when a
    batch is taken, so that the sequence may be a memory-mapped file that all nodes of a machine share."""

    values: np.ndarray  # [V, *shape of one position]
    starts: np.ndarray  # [N] int64, the position in `values` where each row starts
    lengths: np.ndarray | int  # [N] int64, or one number for all rows
    padding: float = 0
    """The value that fills rows that are shorter than the longest of their batch."""

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, indices: Any) -> Rows:
        """Returns the rows at `indices` without copying any."""
        lengths = self.lengths if isinstance(self.lengths, int) else self.lengths[indices]
        return replace(self, starts=self.starts[indices], lengths=lengths)

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    @property
    def longest(self) -> int:
        return self.lengths if isinstance(self.lengths, int) else int(self.lengths.max(initial=0))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array in which all rows are padded to the longest."""
        return (len(self), self.longest, *self.values.shape[1:])

    def padded(self) -> np.ndarray:
        """Returns all rows as one array [N, longest, ...], a copy."""
        positions = self.starts[:, None] + np.arange(self.longest)
        if isinstance(self.lengths, int):
            return self.values[positions]
        is_inside = np.arange(self.longest) < self.lengths[:, None]
        kind = np.result_type(self.values.dtype, np.int64) if self.padding < 0 else self.values.dtype
        found = self.values[np.where(is_inside, positions, 0)].astype(kind, copy=False)
        found[~is_inside] = self.padding
        return found


@dataclass(frozen=True)
class Samples:
    """Inputs and targets in equal number; the model gets `inputs * scale + offset` as float32, or unchanged ids.

    8-bit images stay uint8, which takes a quarter of the memory; they are converted batch by batch. The arrays may be
    views of a memory-mapped file, which all nodes of a machine then share.
    """

    inputs: np.ndarray | Rows  # [N, *input_shape] uint8 or float32; integers if they are ids
    targets: np.ndarray | Rows  # [N, *target_shape] integers or floats, which the task gets as int64 or float32
    scale: float | tuple[float, ...] = 1.0
    offset: float | tuple[float, ...] = 0.0
    """One number for all values, or one per channel; likewise `scale`."""
    ids: bool = False
    """Whether inputs are ids (of tokens, users), which the model gets as int64."""

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: np.ndarray) -> Samples:
        """Returns the samples at `indices` [M], in that order: a copy of arrays; of `Rows` only the positions."""
        return replace(self, inputs=self.inputs[indices], targets=self.targets[indices])


class LazySamples(abc.ABC):
    """Samples that are made anew every time a batch is taken, such as those of a torch Dataset, whose transforms may be
    random."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def take(self, indices: np.ndarray) -> LazySamples:
        """Returns the samples at `indices` [M] without making any of them yet."""

    @abc.abstractmethod
    def fetch(self, indices: np.ndarray) -> Samples:
        """Makes and returns the samples at `indices` [M], in that order. Blocking."""


Box = tuple[int, int, int, int]
"""A part of an image: left, upper, right and lower in pixels; right and lower are exclusive."""
Crop = Callable[[int, int, int], Box]
"""A function of an image's index in its batch, its width and its height that returns the part to take."""


class Reading(abc.ABC):
    """A batch that is being read in the background."""

    @abc.abstractmethod
    def result(self) -> Samples:
        """Blocks until the batch is read, and returns it. Raises SampleFailed for its first sample that is
        unreadable."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Drops the parts of the batch whose reading has not begun; nobody will ask for the result."""


class ImageFiles(LazySamples):
    """Images that are read from their files when a batch is taken."""

    input_shape: tuple[int, int, int]
    scale: tuple[float, ...]
    offset: tuple[float, ...]
    """One per channel, as in `Samples`."""
    threads: int
    """How many images one process reads at the same time."""

    @abc.abstractmethod
    def begin(self, indices: np.ndarray, crop: Crop | None = None) -> Reading:
        """Starts reading the images at `indices` [M] on threads and returns at once. The batch keeps their order.

        crop: chooses the part of each image that is scaled to `input_shape`. None: the center, as in `fetch`.
        """


AnySamples = Samples | LazySamples


@dataclass(frozen=True)
class NodeSamples:
    """The samples that one node trains and is tested on."""

    train: AnySamples
    test: AnySamples
    own: AnySamples | None = None
    """Test samples with the node's own distribution, in addition to `test`."""
    shared_test: bool = True
    """Whether all nodes have the same test samples; then each node evaluates the merged model on a part of them."""
    deal_again: Callable[[int], AnySamples] | None = None
    """Returns the node's training samples for an epoch in which all samples are dealt again; epoch 0 gives `train`."""
    deal_among: Callable[[tuple[int, ...]], tuple[AnySamples, int]] | None = None
    """Takes the members of a generation, and returns the node's training samples together with its part of the samples
    of all nodes that are not members, and the size of that part. None if a node cannot read the samples of others."""
    trains: bool = True
    """Whether the node trains at all; if not, `train` is empty."""
    pooled: bool = False
    """Whether metrics over the nodes are computed on the test samples of all nodes together, each of which has a
    part."""
