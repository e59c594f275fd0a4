"""Tracks a run's evaluations: which was the best, and whether the run ends early because they have stopped improving.
Only figures that are the same on all nodes are used, so that all nodes decide the same without communication."""

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
        """better: "higher" or "lower". key: the config key that names the figure, for error messages; "" if there is
        none."""
        self.figure, self.better, self._key = figure, better, key
        self.value: float | None = None
        self.round = -1
        """The number of finished rounds at the best evaluation; -1 before the first one."""

    @classmethod
    def of(cls, config: BestConfig, training: Training, key: str) -> Best:
        """Returns a tracker of the figure that the config names, with the metric's own direction unless the config sets
        one."""
        return cls(config.figure, config.better or training.better(config.metric), key)

    def read(self, figures: Mapping[str, float]) -> float | None:
        """Returns the figure's value; None if it is NaN, or if it is not measured and no config key names it. Raises
        UsageError if a figure that a config key names is not measured."""
        value = figures.get(self.figure)
        if value is None and self._key:
            known = ", ".join(name for name in figures if FIGURE.fullmatch(name))
            raise UsageError(f"{self._key} must be a figure of the evaluations ({known}), got {self.figure!r}")
        return None if value is None or math.isnan(value) else value

    def improves(self, value: float, than: float | None, by: float = 0.0) -> bool:
        """Returns whether `value` is better than `than` by more than `by`."""
        return than is None or (value > than + by if self.better == "higher" else value < than - by)

    def take(self, figures: Mapping[str, float], round: int) -> bool:
        """Record an evaluation after `round` finished rounds. Returns whether it is the best so far."""
        value = self.read(figures)
        if value is None or not self.improves(value, self.value):
            return False
        self.value, self.round = value, round
        return True


class EarlyStopping:
    """Tracks `node.early_stop.figure`; if that is not set, the figure of the best checkpoint, else the main metric of
    the merged model."""

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
        """The value than which later ones have to be better by more than `min_delta` to count as an improvement."""
        self.evaluations_since = 0
        """The number of evaluations since the reference value was measured, without those up to round `after`."""
        self._last = -1
        """The round of the last evaluation."""

    @property
    def over(self) -> bool:
        """Whether the run ends early."""
        return self._stop is not None and self.evaluations_since >= self._stop.patience

    def take(self, figures: Mapping[str, float], round: int) -> None:
        """Record an evaluation after `round` finished rounds; a repeated one counts once. Raises UsageError if the
        figure is not measured."""
        if round == self._last:
            return
        self._last = round
        self.best.take(figures, round)
        value, min_delta = self.best.read(figures), self._stop.min_delta if self._stop is not None else 0.0
        if value is not None and self.best.improves(value, self._reference, min_delta):
            self._reference, self.evaluations_since = value, 0
        elif self._stop is not None and round > self._stop.after:
            self.evaluations_since += 1

    def figures(self) -> dict[str, float | int | str]:
        """Returns the entries of the node's closing figures about the best evaluation and early stopping."""
        if self.best.value is None:
            return {}
        entries: dict[str, float | int | str] = {
            "best_figure": self.best.figure, "best_value": self.best.value, "best_round": self.best.round,
        }
        return entries if self._stop is None else {
            **entries, "evaluations_since_best": self.evaluations_since, "stopped_early": int(self.over),
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Returns the state from which a resumed run continues."""
        return {"figure": self.best.figure, "numbers": self.numbers()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restores what `state_dict` returned; keeps the initial state if another figure was tracked."""
        if state is not None and state["figure"] == self.best.figure:
            self.load_numbers(state["numbers"])

    def numbers(self) -> list[float]:
        """Returns the state as NUM_NUMBERS finite numbers, in a form that nodes can send to each other."""
        has_values = float(self.best.value is not None), float(self._reference is not None)
        return [*has_values, self.best.value or 0.0, self._reference or 0.0, float(self.best.round),
                float(self.evaluations_since), float(self._last)]  # fmt: skip

    def load_numbers(self, numbers: Sequence[float]) -> None:
        """Restores the state from what `numbers` returned, also if the integers in it are only correct up to
        rounding."""
        has_best, has_reference, best, reference, *rest = numbers
        self.best.value = best if round(has_best) else None
        self._reference = reference if round(has_reference) else None
        self.best.round, self.evaluations_since, self._last = (round(each) for each in rest)


NUM_NUMBERS = 7
"""The length of `EarlyStopping.numbers()`."""


def reason_for_early_end(config: EarlyStopConfig, best: Mapping[str, Any]) -> str:
    """Returns the reason why a run with this `best` section in its summary ends early under this config; "" if it
    continues."""
    if best.get("figure") != config.figure or (best.get("evaluations_since") or 0) < config.patience:
        return ""
    return (f"{best['figure']} was best after round {best['round']} ({best['value']:.6g}) and not better in "
            f"{best['evaluations_since']} evaluations since")  # fmt: skip
