"""The course of a run's evaluations: which was the best, and whether the run ends early because none is better any
more. Figures that all nodes have alike decide, so that all nodes decide alike without a message."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from decentnode.checkpoint.config import FIGURE, BestConfig
from decentnode.errors import UsageError
from decentnode.node.config import EarlyStopConfig, NodeConfig
from decentnode.training.base import Training


class Best:
    """The best value of one figure so far."""

    def __init__(self, figure: str, better: str, key: str) -> None:
        """better: higher or lower. key: of the config that names the figure, for errors; "" where none does."""
        self.figure, self.better, self._key = figure, better, key
        self.value: float | None = None
        self.round = -1
        """After how many rounds it was; -1 before the first."""

    @classmethod
    def of(cls, config: BestConfig, training: Training, key: str) -> Best:
        """What the config names, with the metric's own direction where the config gives none."""
        return cls(config.figure, config.better or training.better(config.metric), key)

    def read(self, figures: Mapping[str, float]) -> float | None:
        """Returns the figure's value; None where it is none. Raises UsageError where the figure is not measured."""
        value = figures.get(self.figure)
        if value is None and self._key:
            known = ", ".join(name for name in figures if FIGURE.fullmatch(name))
            raise UsageError(f"{self._key} must be a figure of the evaluations ({known}), got {self.figure!r}")
        return None if value is None or math.isnan(value) else value

    def improves(self, value: float, than: float | None, by: float = 0.0) -> bool:
        """Returns whether a value is better than another one, by more than `by`."""
        return than is None or (value > than + by if self.better == "higher" else value < than - by)

    def take(self, figures: Mapping[str, float], round: int) -> bool:
        """Take in an evaluation after so many rounds. Returns whether it is the best so far."""
        value = self.read(figures)
        if value is None or not self.improves(value, self.value):
            return False
        self.value, self.round = value, round
        return True


class Course:
    """Follows `node.early_stop.figure`; without it that of the best checkpoint, or the main metric of the merged
    model."""

    def __init__(self, config: NodeConfig, training: Training) -> None:
        self._stop = config.early_stop
        checkpoint = config.checkpoint
        if self._stop is not None:
            self.best = Best.of(self._stop, training, "node.early_stop.figure")
        elif checkpoint is not None and checkpoint.best is not None:
            self.best = Best.of(checkpoint.best, training, "node.checkpoint.best")
        else:
            main = training.task.all_metrics[0]
            self.best = Best(f"{main.name}_merged", main.better, "")
        self._reference: float | None = None
        """The value that the next ones have to be better than by `min_delta`."""
        self.evaluations_since = 0
        """Evaluations after that one."""
        self._last = -1
        """The round of the last evaluation."""

    @property
    def over(self) -> bool:
        """Whether the run ends early."""
        return self._stop is not None and self.evaluations_since >= self._stop.patience

    def take(self, figures: Mapping[str, float], round: int) -> None:
        """Take in an evaluation after so many rounds; a repeated one counts once. Raises UsageError."""
        if round == self._last:
            return
        self._last = round
        self.best.take(figures, round)
        value, least = self.best.read(figures), self._stop.min_delta if self._stop is not None else 0.0
        if value is not None and self.best.improves(value, self._reference, least):
            self._reference, self.evaluations_since = value, 0
        elif self._stop is not None and round > self._stop.after:
            self.evaluations_since += 1

    def figures(self) -> dict[str, float | int | str]:
        """Returns what a node's closing figures say of it."""
        if self.best.value is None:
            return {}
        found: dict[str, float | int | str] = {
            "best_figure": self.best.figure, "best_value": self.best.value, "best_round": self.best.round,
        }
        return found if self._stop is None else {
            **found, "evaluations_since_best": self.evaluations_since, "stopped_early": int(self.over),
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run goes on from."""
        return {"figure": self.best.figure, "numbers": self.numbers()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restores what `state_dict` returned; begins anew where another figure was followed."""
        if state is not None and state["figure"] == self.best.figure:
            self.load_numbers(state["numbers"])

    def numbers(self) -> list[float]:
        """Returns the state as SIZE finite numbers, for the nodes to share."""
        known = float(self.best.value is not None), float(self._reference is not None)
        return [*known, self.best.value or 0.0, self._reference or 0.0, float(self.best.round),
                float(self.evaluations_since), float(self._last)]  # fmt: skip

    def load_numbers(self, numbers: Sequence[float]) -> None:
        """Takes over what `numbers` returned, up to rounding."""
        has_best, has_reference, best, reference, *rest = numbers
        self.best.value = best if round(has_best) else None
        self._reference = reference if round(has_reference) else None
        self.best.round, self.evaluations_since, self._last = (round(each) for each in rest)


SIZE = 7
"""Of `Course.numbers`."""


def ended_early(config: EarlyStopConfig, best: Mapping[str, Any]) -> str:
    """Returns why a run that has such a `best` in its summary ends early under this config; "" where it goes on."""
    if best.get("figure") != config.figure or (best.get("evaluations_since") or 0) < config.patience:
        return ""
    return (f"{best['figure']} was best after round {best['round']} ({best['value']:.6g}) and not better in "
            f"{best['evaluations_since']} evaluations since")  # fmt: skip
