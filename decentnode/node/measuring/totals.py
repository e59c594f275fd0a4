"""Sums up the seconds, overlap and missing neighbors of a node's rounds, and computes what changed on its edges since
the previous record."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch

from decentnode.communication.counters import Counters
from decentnode.metrics.figures import packed_counts
from decentnode.node.schedules.fragment_exchange import RoundTimes

_NOTHING = (0, 0, 0, 0, 0.0, 0)


class RoundTotals:
    """The totals (seconds, overlap, missing neighbors) of one node's rounds so far, and its edges' counters at the last
    record."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._seconds: list[float] = []
        self._train_seconds = 0.0
        self._wait_seconds = 0.0
        self._overlaps = 0.0
        self._rounds_without = 0
        self._without: Counter[int] = Counter()
        """uid -> the number of rounds that continued without it."""
        self._edges: dict[int, tuple[int, int, int, int, float, int]] = {}
        """uid -> its counters at the last record; the last one counts late payloads."""

    def add(self, seconds: float, times: RoundTimes, lost: Collection[int]) -> None:
        """Count a round. seconds: the duration of the whole round. lost: the neighbors without which it continued."""
        self._seconds.append(seconds)
        self._train_seconds += times.train
        self._wait_seconds += times.wait
        self._overlaps += times.overlap
        self._rounds_without += bool(lost)
        self._without.update(lost)

    def edge_changes(self) -> dict[str, Any]:
        """Returns what happened on the edges since the last call, as entries of a round's record: `edges`, peer ->
        [bytes of payloads sent, received, chunks sent, resends, seconds waited]; `waited_for` and `waited_seconds`, the
        neighbor that this node waited longest for, if it waited; `late`, uid -> number of payloads that arrived too
        late, if there were any."""
        changes: dict[str, list[float]] = {}
        late: dict[str, int] = {}
        longest, whom = 0.0, -1
        for uid, edge in self._counters.known():  # one pass, and few calls: every round's record calls this
            sent = edge.data_bytes_sent + edge.metadata_bytes_sent
            received, frames, resends, seconds = (edge.payload_bytes_received, edge.frames_sent, edge.resends,
                                                  edge.wait_seconds)  # fmt: skip
            last = self._edges.get(uid, _NOTHING)
            now = self._edges[uid] = sent, received, frames, resends, seconds, edge.late_payloads
            waited = seconds - last[4]
            if waited > longest:
                longest, whom = waited, uid
            if now[:5] != last[:5]:
                changes[str(uid)] = [sent - last[0], received - last[1], frames - last[2], resends - last[3],
                                     round(waited, 6)]  # fmt: skip
            if now[5] != last[5]:
                late[str(uid)] = now[5] - last[5]
        return {
            "edges": changes, **({"waited_for": whom, "waited_seconds": longest} if whom >= 0 else {}),
            **({"late": late} if late else {}),
        }

    def figures(self) -> dict[str, float | int | str]:
        """Returns the closing figures about rounds, with the names of summary.json."""
        # leaves out nodes without a wait of their own, such as those of a group of which only the sum is received
        known = [item for item in self._counters.known() if item[1].wait_seconds > 0]
        waited = max(known, key=lambda item: item[1].wait_seconds, default=None)
        return {
            "round_seconds_median": statistics.median(self._seconds) if self._seconds else 0.0,
            "round_seconds_total": sum(self._seconds), "train_seconds": self._train_seconds,
            "wait_seconds": self._wait_seconds, "overlap": self._overlaps / max(1, len(self._seconds)),
            "waited_for": waited[0] if waited else -1, "waited_seconds": waited[1].wait_seconds if waited else 0.0,
            "rounds_without": self._rounds_without, "late_payloads": self._counters.late_payloads,
            **({"without": packed_counts(self._without)} if self._without else {}),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the state from which a resumed run continues."""
        return {
            "round_seconds": torch.tensor(self._seconds, dtype=torch.float64),
            "train_seconds": self._train_seconds, "wait_seconds": self._wait_seconds, "overlaps": self._overlaps,
            "rounds_without": self._rounds_without, "without": dict(self._without),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._seconds = state["round_seconds"].tolist()
        self._train_seconds, self._wait_seconds = state["train_seconds"], state["wait_seconds"]
        self._overlaps = state["overlaps"]
        self._rounds_without, self._without = state["rounds_without"], Counter(state["without"])
