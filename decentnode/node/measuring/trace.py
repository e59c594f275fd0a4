"""When a node trained, sent, waited, mixed and evaluated, as spans in trace.jsonl, and torch's profile of one round."""

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
"""Times of a round that have spans; of waiting and mixing slice after slice there is one for each slice."""


class NodeTrace:
    """One node's. Used by its training thread.

    A line per traced round: {"kind": "trace", "round", "spans": [[name, seconds since 1970, seconds], ...]};
    evaluations have lines of their own.
    """

    def __init__(self, folder: Path, every: int, profiled: int | None = None) -> None:
        """every: rounds from one that is traced to the next; 0: none. profiled: the round whose torch profile goes to
        profile_round_<round>.json in the folder. Raises OSError when trace.jsonl cannot be opened."""
        self._folder, self._every, self._profiled = folder, every, profiled
        self._writer = MetricsWriter(folder / "trace.jsonl") if every else None
        self._spans: list[tuple[str, float, float]] = []
        self._profiler: Any = None

    def begin(self, round: int) -> Callable[[], RoundTimes]:
        """A round begins. Returns what makes its times."""
        self._spans = []
        if round == self._profiled:
            self._begin_profile()
        if self._writer is None or round % self._every:
            return RoundTimes
        return lambda: TracedTimes(self._add)

    def end(self, round: int) -> None:
        """The round is over and recorded."""
        if self._profiler is not None:
            self._end_profile(round)
        if self._spans:
            self._write(round)

    def evaluated(self, round: int, started: float) -> None:
        """An evaluation after so many rounds is over that began at `started` (clock.now())."""
        if self._writer is not None:
            self._spans = []
            self._add("evaluate", clock.now() - started)
            self._write(round)

    def close(self) -> None:
        """Idempotent."""
        if self._profiler is not None:
            self._end_profile(None)
        if self._writer is not None:
            self._writer.close()

    def _add(self, name: str, seconds: float) -> None:
        """A span ends now."""
        self._spans.append((name, clock.wall() - seconds, seconds))

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
        """round: None where the node ended within the round, whose profile is then no whole one and is left out."""
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        if round is not None:
            try:
                profiler.export_chrome_trace(str(self._folder / f"profile_round_{round}.json"))
            except (OSError, RuntimeError) as error:
                logger.warning("the profile of round %d was not written: %s", round, error)


class TracedTimes(RoundTimes):
    """Tells of every time that is added, when it is added: at the end of what took it."""

    def __init__(self, tell: Callable[[str, float], None]) -> None:
        object.__setattr__(self, "_tell", tell)
        super().__init__()

    def __setattr__(self, name: str, value: float) -> None:
        before = getattr(self, name, 0.0)
        super().__setattr__(name, value)
        if name in TRACED and value > before:
            self._tell(name, value - before)  # type: ignore[attr-defined]
