"""Writes when a node trained, sent, waited, mixed and evaluated to trace.jsonl, and a torch profile of one round."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decentnode import clock
from decentnode.metrics.writer import MetricsWriter
from decentnode.node.schedules.fragment_exchange import RoundTimes

logger = logging.getLogger(__name__)

TRACED = ("train", "send", "wait", "mix")
"""The fields of `RoundTimes` that are traced as spans; waiting and mixing slice by slice give one span per slice."""


class NodeTrace:
    """The trace of one node. Used by its training thread.

    A line per traced round: {"kind": "trace", "round", "spans": [[name, seconds since 1970, seconds], ...]};
    evaluations have lines of their own.
    """

    def __init__(self, folder: Path, every: int, profiled: int | None = None) -> None:
        """every: one of this many rounds is traced; 0: none. profiled: the round whose torch profile is written to
        profile_round_<round>.json in the folder. Raises OSError if trace.jsonl cannot be opened."""
        self._folder, self._every, self._profiled = folder, every, profiled
        self._writer = MetricsWriter(folder / "trace.jsonl") if every else None
        self._spans: list[tuple[str, float, float]] = []
        self._profiler: Any = None

    def begin(self, round: int) -> Callable[[], RoundTimes]:
        """Begin a round. Returns the factory of the round's `RoundTimes`."""
        self._spans = []
        if round == self._profiled:
            self._begin_profile()
        if self._writer is None or round % self._every:
            return RoundTimes
        return lambda: TracedTimes(self._add)

    def end(self, round: int) -> None:
        """Write the spans and the profile of a finished round."""
        if self._profiler is not None:
            self._end_profile(round)
        if self._spans:
            self._write(round)

    def evaluated(self, round: int, started: float) -> None:
        """Write the span of an evaluation that ends now. round: the number of finished rounds. started: `clock.now()`
        at its beginning."""
        if self._writer is not None:
            self._spans = []
            self._add("evaluate", clock.now() - started)
            self._write(round)

    def close(self) -> None:
        """Close the files. Idempotent."""
        if self._profiler is not None:
            self._end_profile(None)
        if self._writer is not None:
            self._writer.close()

    def _add(self, name: str, seconds: float) -> None:
        """Add a span of `seconds` that ends now."""
        self._spans.append((name, clock.recorded() - seconds, seconds))

    def _write(self, round: int) -> None:
        spans, self._spans = self._spans, []
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.write({"kind": "trace", "round": round, "spans": spans})

    def _begin_profile(self) -> None:
        from torch.profiler import profile

        self._profiler = profile(record_shapes=True)
        self._profiler.start()

    def _end_profile(self, round: int | None) -> None:
        """round: None if the node ended during the round; its incomplete profile is then not written."""
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        if round is not None:
            try:
                profiler.export_chrome_trace(str(self._folder / f"profile_round_{round}.json"))
            except (OSError, RuntimeError) as error:
                logger.warning("the profile of round %d was not written: %s", round, error)


class TracedTimes(RoundTimes):
    """Times of a traced round: calls `tell(name, seconds)` whenever seconds are added to a traced field, at the end of
    the activity that took them."""

    def __init__(self, tell: Callable[[str, float], None]) -> None:
        object.__setattr__(self, "_tell", tell)
        super().__init__()

    def __setattr__(self, name: str, value: float) -> None:
        before = getattr(self, name, 0.0)
        super().__setattr__(name, value)
        if name in TRACED and value > before:
            self._tell(name, value - before)  # type: ignore[attr-defined]
