"""What samples look like: what readers, partitions, tasks, models and training agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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


PADDING = -100
"""The target of places in a row that are not there; no loss counts it (torch's `ignore_index`)."""
