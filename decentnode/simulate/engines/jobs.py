"""What nodes that are computed one by one are asked to do: functions of a node, whose arguments and results are plain
data, as another process may be the one that computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from decentnode.training.base import Evaluation, Training, Update

Job = Callable[[int, Training, Tensor, Any], Any]
"""(uid, its training, whose model is bound to the node's row; a model [P + B] that the population holds beside the
rows; the argument) -> the result."""


def local_steps(_uid: int, training: Training, _whole: Tensor, round: int) -> Any:
    """Make the local steps of a round. Returns loss, steps, samples and what else there is to report."""
    return plain_update(training.local_update(round))


def evaluate(_uid: int, training: Training, _whole: Tensor, split: str) -> Any:
    """Evaluate the node's model. Returns the parts of an Evaluation."""
    return _plain(training.evaluate(split))


def evaluate_merged(uid: int, training: Training, whole: Tensor, argument: Any) -> Any:
    """Evaluate the model `whole` with the node's own parameters from the `shared`-th on, by splits: of those that all
    nodes have, every `count`-th sample. Returns the parts of an Evaluation per split. argument: (shared, count, splits:
    names, and whether all nodes have them)."""
    shared, count, splits = argument
    model = training.model
    own = model.parameters.clone(), model.buffers.clone()
    model.parameters[:shared].copy_(whole[:shared])
    model.buffers.copy_(whole[model.num_parameters :])
    found = [_plain(training.evaluate(name, (uid, count) if everybodys else (0, 1))) for name, everybodys in splits]
    model.parameters.copy_(own[0])
    model.buffers.copy_(own[1])
    return found


def plain_update(update: Update) -> tuple[float, int, int, dict[str, float]]:
    """Returns loss, steps, samples and what else there is to report, without the learning rate."""
    return update.loss, update.steps, update.samples, {k: v for k, v in update.report.items() if k != "lr"}


def _plain(found: Evaluation) -> tuple[int, dict[str, float], dict[str, float]]:
    return found.samples, dict(found.sums), dict(found.metrics)


def evaluation_of(plain: Sequence[Any]) -> Evaluation:
    """Returns the evaluation that a job gave the parts of."""
    samples, sums, metrics = plain
    return Evaluation(samples, sums, metrics)


JOBS: dict[str, Job] = {"local_steps": local_steps, "evaluate": evaluate, "evaluate_merged": evaluate_merged}
