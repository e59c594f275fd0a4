"""Interfaces between a node and its checkpoints, each as far as the other uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from decentnode.communication.base import Communication
from decentnode.communication.run_state import Steps
from decentnode.graph.base import Graph, RoundView
from decentnode.node.config import NodeConfig
from decentnode.node.measuring.early_stopping import EarlyStopping
from decentnode.node.schedules.schedule import Schedule
from decentnode.sharing.base import Sharing
from decentnode.training.base import Training
from decentnode.wire.generation import Generation


class Resumable(Protocol):
    """The part of `Node` that its checkpoints use; see `Node` for the docstrings."""

    uid: int
    config: NodeConfig
    graph: Graph
    training: Training
    communication: Communication
    generation: Generation
    early_stopping: EarlyStopping
    shared: int
    round: int
    doing: str
    evaluation: dict[str, float]
    evaluated: int

    @property
    def sharing(self) -> Sharing: ...

    @property
    def schedule(self) -> Schedule: ...

    def trains_in(self, round: int, /) -> bool: ...

    def record(self, record: dict[str, Any], /) -> None: ...

    def renew_rules(self, without: frozenset[int] = ..., /) -> Sequence[tuple[Sharing, Tensor, RoundView]]: ...

    def evaluate_between(self) -> Steps[None]: ...

    def sharing_state(self) -> list[dict[str, Any]]: ...

    def load_sharing_state(self, state: Sequence[dict[str, Any]]) -> None: ...

    def progress(self) -> dict[str, Any]: ...

    def load_progress(self, state: Mapping[str, Any]) -> None: ...


class NodeCheckpoints(Protocol):
    """The part of `Checkpoints` that a node uses; see `Checkpoints` for the docstrings."""

    @property
    def resuming(self) -> bool: ...

    def closing_figures(self) -> Mapping[str, float | int | str]: ...

    def begin_generation(self) -> Steps[None]: ...

    def between_rounds(self) -> Steps[None]: ...

    def after_the_last(self) -> None: ...

    def finish(self) -> None: ...

    def close(self, timeout_seconds: float, /) -> None: ...

    def resume(self) -> Steps[None]: ...

    def restore_own_checkpoint(self, first_round: int, /) -> bool: ...
