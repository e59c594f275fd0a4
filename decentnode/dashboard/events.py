"""Collects a run's events other than rounds for the time line: deaths, returns, refusals, faults and users' orders."""

from __future__ import annotations

import sys
from typing import Any

from decentnode.metrics.history_kinds import HISTORY

MAX_EVENTS = 4000
MAX_PEERS, MAX_TEXT = 64, 300

GROUPS = {
    "dead": ("failed", "peer_lost", "suspected", "diverged", "outside"),
    "back": ("knocked",),
    "refused": ("stranger", "wrong_identity", "handshake_failed", "refused", "turned_away", "wrong_config",
                "wrong_seat", "not_encrypted", "replayed_login", "hello_flood"),
    "fault": ("fault", "checksum_mismatch", "non_finite", "malformed_payload", "loss_overflowed"),
    "control": ("control", "stopped", "early_stop"),
}  # fmt: skip
"""Group on the time line -> kinds of events. A generation is "back" if nodes joined, "dead" if nodes only
left."""
_GROUP_OF = {kind: group for group, kinds in GROUPS.items() for kind in kinds}
QUIET = frozenset({"joined", "finished", "recording", "generation_over"})
"""Kinds that every node has, which are not shown on the time line."""


class EventList:
    """The first MAX_EVENTS events of a run; later ones are only counted, in `more`."""

    def __init__(self) -> None:
        self.more = 0
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._generations: set[tuple[str, str]] = set()
        self._controls: set[tuple[str, str]] = set()

    def take(self, uid: int, record: dict[str, Any], version: int) -> None:
        """Adds a record of events.jsonl, or one of metrics.jsonl that is neither a round nor an evaluation."""
        kind, time = record.get("kind"), record.get("time")
        if not isinstance(kind, str) or kind in QUIET or kind in HISTORY:
            return
        # An integer too large for a float cannot be a time either.
        if not isinstance(time, int | float) or not abs(time) <= sys.float_info.max:
            return
        if kind == "generation" and not isinstance(record.get("members"), list):
            return
        if len(self._events) >= MAX_EVENTS:
            self.more += 1
            return
        event = self._describe(kind, record)
        if event is not None:
            self._events.append((version, {"time": time, "uid": uid, "kind": kind[:40], **event}))

    def _describe(self, kind: str, record: dict[str, Any]) -> dict[str, Any] | None:
        if kind == "generation":
            key = str(record.get("generation")), str(record.get("origin"))
            if key in self._generations:
                return None
            self._generations.add(key)
            left, joined = _uids(record.get("left")), _uids(record.get("joined"))
            group = "dead" if left and not joined else "back" if joined else "other"
            return {"group": group, "left": left, "joined": joined,
                    "detail": f"generation {key[0][:20]} from round {record.get('round')}"}  # fmt: skip
        if kind == "control":
            key = str(record.get("what")), str(record.get("round"))
            if key in self._controls:
                return None
            self._controls.add(key)
            return {"group": "control", "detail": f"{key[0][:20]}, {key[1][:20]} rounds"}
        peer = record.get("peer")
        return {"group": _GROUP_OF.get(kind, "other"), "detail": str(record.get("detail") or "")[:MAX_TEXT],
                **({"peer": peer} if isinstance(peer, int) else {})}  # fmt: skip

    def after(self, version: int) -> list[dict[str, Any]]:
        """Returns the events that were added after this version."""
        return [event for added_at, event in self._events if added_at > version]


def _uids(found: Any) -> list[int]:
    return [uid for uid in found if isinstance(uid, int)][:MAX_PEERS] if isinstance(found, list) else []
