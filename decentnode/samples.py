"""What samples look like: what readers, partitions, tasks, models and training agree on."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

PADDING = -100
"""The target of places in a row that are not there; no loss counts it (torch's `ignore_index`)."""
UNKNOWN, BEGIN, END = 1, 2, 3
"""Tokens of pairs of sequences: what is not in the vocabulary, before the target, behind it."""
FIRST_WORD = 4
"""The first token of pairs that is part of a text."""


FACTS = frozenset({"input_shape", "num_classes", "vocabulary", "users", "items"})
"""What constructors of modules of one's own may take by name."""


@dataclass(frozen=True)
class DataSpec:
    """What a model and a task must know of a dataset. It is known before any sample is read, and the same on all
    nodes."""

    input_shape: tuple[int, ...]
    """Of one sample; of rows of unequal length, that of the longest."""
    inputs: Literal["values", "ids"] = "values"
    """values: float32 numbers, such as pixels. ids: int64 numbers of things, such as tokens or users."""
    task: str = "classification"
    """The task that the data is for, when the experiment names none."""
    num_classes: int | None = None
    """Of a classification."""
    vocabulary: int | None = None
    """How many different tokens there are; ids are less than it."""
    users: int | None = None
    """Of ratings; the first id of an input is less than it."""
    items: int | None = None
    """Of ratings; the second id of an input is less than it."""
    target_shape: tuple[int, ...] = ()
    """Of the target of one sample: () for a class or a number, (T,) for a token behind each of T."""
    padding: int | None = None
    """Of rows of unequal length: the token behind the end of shorter ones, which no other place has; models that know
    of it do not look there."""
    pairs: bool = False
    """Whether inputs [T, 2] are the tokens of a source, and of a target from BEGIN on; targets [T] are then the tokens
    that follow in the target, END behind the last."""
    pieces: int = 0
    """Of pairs: so many tokens from FIRST_WORD on are pieces that the token behind them goes on, as parts of a word."""

    def facts(self) -> dict[str, Any]:
        """Returns what is known of `FACTS`, by name."""
        return {name: value for name in FACTS if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Rows:
    """Rows of a long sequence: token sequences of unequal length, or windows that overlap. No row is copied before a
    batch is taken, so that the sequence may be a memory-mapped file that all nodes of a machine share."""

    values: np.ndarray  # [V, *shape of one place]
    starts: np.ndarray  # [N] int64, of each row
    lengths: np.ndarray | int  # [N] int64, or the same for all rows
    padding: float = 0
    """Behind the end of rows that are shorter than the longest of their batch."""

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, indices: Any) -> Rows:
        """The rows at `indices`, without copying any."""
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
        """As of the array in which all rows are as long as the longest."""
        return (len(self), self.longest, *self.values.shape[1:])

    def padded(self) -> np.ndarray:
        """All rows as one array [N, longest, ...], a copy."""
        places = self.starts[:, None] + np.arange(self.longest)
        if isinstance(self.lengths, int):
            return self.values[places]
        there = np.arange(self.longest) < self.lengths[:, None]
        kind = np.result_type(self.values.dtype, np.int64) if self.padding < 0 else self.values.dtype
        found = self.values[np.where(there, places, 0)].astype(kind, copy=False)
        found[~there] = self.padding
        return found


@dataclass(frozen=True)
class Samples:
    """Arrays or rows of equal number; the model gets `inputs * scale + offset` as float32, or ids as they are.

    8-bit images stay uint8 (a quarter of the memory; a share is converted batch by batch), and may be views of a
    memory-mapped file, which all nodes of a machine then share.
    """

    inputs: np.ndarray | Rows  # [N, *input_shape] uint8 or float32; whole numbers where they are ids
    targets: np.ndarray | Rows  # [N, *target_shape] whole numbers or floats: int64 or float32 for the task
    scale: float | tuple[float, ...] = 1.0
    offset: float | tuple[float, ...] = 0.0
    """Of all numbers, or of each channel."""
    ids: bool = False
    """Whether inputs are numbers of things (tokens, users), which the model gets as int64."""

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: np.ndarray) -> Samples:
        """A copy of the samples at `indices` [M], in that order; of rows, which are never copied, their places."""
        return replace(self, inputs=self.inputs[indices], targets=self.targets[indices])


class LazySamples(abc.ABC):
    """Samples that are made when a batch is taken, every time anew: what a torch Dataset gives, whose transforms may
    draw at random."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def take(self, indices: np.ndarray) -> LazySamples:
        """The samples at `indices` [M], none of them made yet."""

    @abc.abstractmethod
    def fetch(self, indices: np.ndarray) -> Samples:
        """Makes the samples at `indices` [M], in that order."""


Box = tuple[int, int, int, int]
"""A part of an image: left, upper, right and lower, in pixels; the last two are the first ones behind it."""
Crop = Callable[[int, int, int], Box]
"""Called with the place of an image in its batch, its width and its height; returns the part to take."""


class Reading(abc.ABC):
    """A batch that is being read."""

    @abc.abstractmethod
    def result(self) -> Samples:
        """Waits for the batch (blocking). Raises SampleFailed for the first sample in it that cannot be read."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Nobody waits for the batch: what is not begun of it is not read."""


class ImageFiles(LazySamples):
    """Images that are read from their files when a batch is taken."""

    input_shape: tuple[int, int, int]
    scale: tuple[float, ...]
    offset: tuple[float, ...]
    """Of each channel, as `Samples` has them."""
    threads: int
    """How many images of a process are read at the same time."""

    @abc.abstractmethod
    def begin(self, indices: np.ndarray, crop: Crop | None = None) -> Reading:
        """Begins to read the images at `indices` [M] on threads, in that order; not blocking.

        crop: the part of each that is scaled to `input_shape`. None: as `fetch`, the middle.
        """


AnySamples = Samples | LazySamples


@dataclass(frozen=True)
class NodeSamples:
    """What one node trains and is tested on."""

    train: AnySamples
    test: AnySamples
    own: AnySamples | None = None
    """Test samples that are distributed as the node's own, beside those of `test`."""
    shared_test: bool = True
    """Whether all nodes have the same test samples; then each evaluates the merged model on its part of them."""
    deal_again: Callable[[int], AnySamples] | None = None
    """Gives the node's training samples when all are dealt anew for the epoch of a number; 0 gives `train`."""
    deal_among: Callable[[tuple[int, ...]], tuple[AnySamples, int]] | None = None
    """Gives the node's training samples and its part of those of all that are not these members, and how many samples
    that part has. None where a node cannot read the samples of others."""
    trains: bool = True
    """Whether the node trains at all; `train` is empty where it does not."""
    pooled: bool = False
    """Whether figures over the nodes are those of all their test samples together, of which each has a part."""
