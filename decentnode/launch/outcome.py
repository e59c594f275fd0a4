"""What became of a run: exit code, first failure, summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decentnode.launch.messages import Facts, Failed, Finished
from decentnode.metrics import summary as summaries
from decentnode.metrics.figures import PURPOSES

Figures = dict[str, Any]
BYTES = tuple(f"bytes_{purpose}" for purpose in PURPOSES)
"""Keys of nodes' figures that are counted up from the start of a process."""


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    run_dir: Path | None
    summary: dict[str, Any]
    """The figures of summary.json; on machines other than 0 those of the local nodes."""
    failure: Failed | None = None
    followers: tuple[int, ...] = ()
    """Nodes that failed or were stopped only because of `failure`."""
    silent: tuple[int, ...] = ()
    """Those among them that did not answer any more and had to be killed: where to look when all others timed out."""


def first_cause(failures: list[Failed]) -> Failed | None:
    """The failure to print: the first that is not the echo of another's."""
    return next((failed for failed in failures if not failed.follower), failures[0] if failures else None)


@dataclass
class Ledger:
    """What the nodes have told so far."""

    latest: dict[int, Figures] = field(default_factory=dict)
    """Last known figures by uid, from evaluations and rounds: what is left when a node dies."""
    finished: dict[int, Finished] = field(default_factory=dict)
    failures: list[Failed] = field(default_factory=list)
    lost: dict[int, Failed] = field(default_factory=dict)
    """Local nodes that the others went on without."""
    restarts: dict[int, int] = field(default_factory=dict)
    """How often each was started again."""
    _members: dict[int, list[int]] = field(default_factory=dict)
    """By node: those of the last generation that it took part in; the one that was told last comes last."""
    _earlier: Counter[str] = field(default_factory=Counter)
    """Bytes by figure that processes had sent whose nodes were started again."""

    def restarted(self, uid: int) -> None:
        """A node is started again: its new process counts from 0."""
        self.restarts[uid] = self.restarts.get(uid, 0) + 1
        known = self.latest.get(uid, {})
        self._earlier.update({key: known.pop(key) for key in BYTES if key in known})

    def bytes_beside(self) -> Counter[str]:
        """Last known bytes that no node's closing figures tell: of earlier processes, and of nodes that left."""
        told, found = self.figures(), Counter(self._earlier)
        for uid, figures in self.latest.items():
            if uid not in told:
                found.update({key: figures[key] for key in BYTES if key in figures})
        return found

    @property
    def members(self) -> list[int]:
        """Who took part to the end, as far as it is known; empty where there was but one generation.

        After a stop nodes that lost each other close in generations of their own: the figures of all of them count.
        """
        if not self._members:
            return []
        if not self.finished:
            return next(reversed(self._members.values()))
        return sorted({*self.finished}.union(*(self._members.get(uid, ()) for uid in self.finished)))

    def progress(self, uid: int, record: Mapping[str, Any]) -> None:
        """Keep what a closing figure could be made of."""
        known = self.latest.setdefault(uid, {"uid": uid, "rounds": 0})
        if record.get("kind") == "round":
            known["rounds"] = record.get("round", -1) + 1
            known |= {f"bytes_{purpose}": record.get(f"{purpose}_bytes_sent", 0) for purpose in PURPOSES}
        elif record.get("kind") == "generation":
            self._members.pop(uid, None)
            self._members[uid] = record.get("members", [])
        elif record.get("kind") == "evaluation":
            known |= {key: record[key] for key in record if key not in ("kind", "round", "time")}
            known["evaluated_round"] = record.get("round")

    def figures(self) -> dict[int, Figures]:
        """By uid: closing figures of every node that has told them, else the last known ones."""
        found = dict(self.latest)
        for uid, finished in self.finished.items():
            found[uid] = finished.figures
        for finished in self.finished.values():
            found |= {int(uid): figures for uid, figures in finished.reports.items()}
        if self.finished and self.members:
            found = {uid: figures for uid, figures in found.items() if uid in self.members}
        return found

    @property
    def stopped(self) -> bool:
        """Whether a node ended before its last round because somebody asked the run to stop."""
        return any(finished.stopped for finished in self.finished.values())


def summary(
    facts: Facts, ledger: Ledger, exit_code: int, run_dir: Path | None, start_seconds: float | None, wall_seconds: float
) -> dict[str, Any]:
    """summary.json of a run.

    start_seconds: from the command until all nodes were connected; wall_seconds: from the command to the end.
    """
    failure = first_cause(ledger.failures)
    status = "finished" if exit_code == 0 else "failed" if failure is not None else "interrupted"
    found: dict[str, Any] = {
        "name": facts.name,
        "run": run_dir.name if run_dir else None,
        "digest": facts.digest,
        "status": status,
        "exit_code": exit_code,
        "num_nodes": facts.num_nodes,
        "rounds_planned": facts.rounds,
        "start_seconds": start_seconds,
        "wall_seconds": wall_seconds,
        **summaries.combine(ledger.figures(), ledger.bytes_beside()),
    }
    if ledger.lost or ledger.members:
        members = ledger.members or [uid for uid in range(facts.num_nodes) if uid not in ledger.lost]
        found["lost"] = {str(uid): failed.title for uid, failed in sorted(ledger.lost.items())}
        found["restarts"] = {str(uid): count for uid, count in sorted(ledger.restarts.items())}
        found["members"] = members
    if failure is not None:
        found["failure"] = {"node": failure.uid, "title": failure.title, "exit_code": failure.exit_code}
    return found
