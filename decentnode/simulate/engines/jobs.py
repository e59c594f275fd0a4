"""Jobs of nodes that are computed one by one: functions of a node whose arguments and results are plain data, because
another process may execute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from decentnode.training.base import Evaluation, Training, Update

Job = Callable[[int, Training, Tensor, Any], Any]
"""job(uid, training, merged, argument) -> result. The training's model is bound to the node's row; merged: a model [P +
B] that the population holds besides the rows."""


def local_steps(_uid: int, training: Training, _merged: Tensor, round: int) -> Any:
    """Makes the local steps of a round. Returns loss, steps, samples and the further figures to report."""
    return plain_update(training.local_update(round))


def rest(_uid: int, training: Training, _merged: Tensor, round: int) -> None:
    """Passes over a round without local steps."""
    training.rest(round)


def evaluate(_uid: int, training: Training, _merged: Tensor, split: str) -> Any:
    """Evaluates the node's model. Returns the parts of an Evaluation."""
    return _plain(training.evaluate(split))


def evaluate_merged(uid: int, training: Training, merged: Tensor, argument: Any) -> Any:
    """Evaluates the model `merged` with the node's own parameters from index `shared` on, for each split; of a split
    that all nodes have, on every `count`-th sample. Returns the parts of an Evaluation per split. argument: (shared,
    count, splits), where each split is its name and whether all nodes have it."""
    shared, count, splits = argument
    model = training.model
    own = model.parameters.clone(), model.buffers.clone()
    model.parameters[:shared].copy_(merged[:shared])
    model.buffers.copy_(merged[model.num_parameters :])
    found = [_plain(training.evaluate(name, (uid, count) if everybodys else (0, 1))) for name, everybodys in splits]
    model.parameters.copy_(own[0])
    model.buffers.copy_(own[1])
    return found


def plain_update(update: Update) -> tuple[float, int, int, dict[str, float]]:
    """Returns loss, steps, samples and the further figures to report, without the learning rate."""
    return update.loss, update.steps, update.samples, {k: v for k, v in update.report.items() if k != "lr"}


def _plain(found: Evaluation) -> tuple[int, dict[str, float], dict[str, float]]:
    return found.samples, dict(found.sums), dict(found.metrics)


def evaluation_of(plain: Sequence[Any]) -> Evaluation:
    """Returns the evaluation whose parts a job returned."""
    samples, sums, metrics = plain
    return Evaluation(samples, sums, metrics)


JOBS: dict[str, Job] = {
    "local_steps": local_steps, "rest": rest, "evaluate": evaluate, "evaluate_merged": evaluate_merged,
}  # fmt: skip
