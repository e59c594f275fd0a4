"""Collects what nodes report and makes the outcome of a run from it: exit code, first failure, summary."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decentnode.launch.children.messages import Engine, Facts, Failed, Finished
from decentnode.launch.files.run_dir import node_dir
from decentnode.metrics import reader
from decentnode.metrics import summary as summaries
from decentnode.metrics.figures import PURPOSES, TaskMetrics, packed_counts, unpacked_counts
from decentnode.metrics.generation_samples import GenerationSamples, epochs, merged, packed, unpacked

Figures = dict[str, Any]
BYTES = tuple(f"bytes_{purpose}" for purpose in PURPOSES)
"""Keys of figures that count from the start of a node's process, and so restart at 0 with it."""


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    run_dir: Path | None
    summary: dict[str, Any]
    """The contents of summary.json; on machines other than 0 it covers only the local nodes."""
    failure: Failed | None = None
    followers: tuple[int, ...] = ()
    """Nodes that failed or were stopped only because of `failure`."""
    silent: tuple[int, ...] = ()
    """Those of the followers that did not end and had to be killed. When all others timed out, a node that hangs is
    among them."""
    error: BaseException | None = None
    """The exception of a node, if nodes ran in this process; None if they had their own processes."""


def finished_before(facts: Facts, notice: Callable[[str], None]) -> Outcome | None:
    """Returns the outcome of a run to resume that has nothing left to do, and passes a sentence about it to `notice`.
    Returns None for other runs."""
    if not facts.finished or not facts.resume:
        return None
    notice(facts.finished)
    run_dir = Path(facts.resume[0])
    return Outcome(0, run_dir, summaries.read(run_dir / "summary.json"))


def first_cause(failures: list[Failed]) -> Failed | None:
    """Returns the failure to report: the first that was not caused by another node's, else the first; None if none."""
    return next((failed for failed in failures if not failed.follower), failures[0] if failures else None)


@dataclass
class Ledger:
    """The reports of the local nodes so far, and what follows from them.

    Nodes send only some of their records of rounds to the supervisor; their files have all.
    """

    directory: Path | None = None
    """The run directory, whose metrics.jsonl files have the records that were not sent; None if nothing is written."""
    own_rounds: bool = False
    """As `Facts.own_rounds`."""
    latest: dict[int, Figures] = field(default_factory=dict)
    """uid -> last known figures, from evaluations and rounds; a node that dies has no others."""
    finished: dict[int, Finished] = field(default_factory=dict)
    failures: list[Failed] = field(default_factory=list)
    lost: dict[int, Failed] = field(default_factory=dict)
    """Local nodes that died while the others continued."""
    left: dict[int, Finished] = field(default_factory=dict)
    """Local nodes that left gracefully, because they were asked to."""
    restarts: dict[int, int] = field(default_factory=dict)
    """How often each node was restarted."""
    resumed: Mapping[str, Any] | None = None
    """The record of kind "resumed" of the first node that sent one."""
    checkpoint_problems: set[str] = field(default_factory=set)
    """Reasons for failed checkpoints that were reported to the user during the run."""
    engine: Engine | None = None
    """The engine of a simulated run."""
    _members: dict[int, list[int]] = field(default_factory=dict)
    """uid -> members of the last generation in which this node took part; the node that reported last is last."""
    _generations: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    """number -> (first round, members) of every reported generation, as the first node reported it."""
    _departed: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """uid -> (round from which the others continued without this node, whether it left gracefully), for nodes on all
    machines that are not back, as local nodes reported it."""
    _earlier_bytes: Counter[str] = field(default_factory=Counter)
    """figure -> bytes that earlier processes of restarted nodes had sent."""
    _before_restart: dict[int, tuple[int, Figures]] = field(default_factory=dict)
    """uid of a restarted node -> (number of records of earlier processes in metrics.jsonl, figures until then)."""

    def done(self, local: Collection[int]) -> bool:
        """Returns whether every node of this machine ended regularly, or was lost while the others continued."""
        ended = {*self.finished, *self.lost, *self.left}
        return bool(self.finished or self.left) and ended.issuperset(local) and not self.stopped

    def followers(self, local: Iterable[int], cause: Failed | None) -> tuple[int, ...]:
        """Returns the local nodes that ended only because of `cause`, another node's failure."""
        if cause is None:
            return ()
        together = {each.uid for each in self.failures if each.title == cause.title}
        return tuple(uid for uid in local if uid not in {*together, *self.finished, *self.left})

    def restarted(self, uid: int) -> None:
        """Notes that a node is restarted, and keeps its bytes so far, because its new process counts from 0."""
        records = self._catch_up(uid)
        self.restarts[uid] = self.restarts.get(uid, 0) + 1
        known = self.latest.get(uid, {})
        self._earlier_bytes.update({key: known.pop(key) for key in BYTES if key in known})
        self._before_restart[uid] = records, dict(known)

    def catch_up(self) -> None:
        """Reads the last figures of nodes that have not reported closing ones from their files."""
        for uid in self.latest.keys() - self.finished.keys() - self.left.keys():
            self._catch_up(uid)

    def _catch_up(self, uid: int) -> int:
        """Replaces a node's figures by those of its metrics.jsonl, unless these are older (after a full disk). Returns
        the number of records in the file."""
        count, (known_records, before) = 0, self._before_restart.get(uid, (0, {"uid": uid, "rounds": 0}))
        found = dict(before)
        with contextlib.suppress(OSError):
            if self.directory is not None:
                for record in reader.read(node_dir(self.directory, uid) / "metrics.jsonl"):
                    count += 1
                    if count > known_records:
                        _update_figures(found, record)
        known = self.latest.get(uid, {})
        newer = all(found.get(key, -1) >= known.get(key, -1) for key in ("rounds", "evaluated_round"))
        if count > known_records and newer:
            self.latest[uid] = found
        return count

    def unreported_bytes(self) -> Counter[str]:
        """Returns the last known bytes that no node's closing figures include: those of earlier processes, and of nodes
        that are not among `figures`."""
        reported, found = self.figures(), Counter(self._earlier_bytes)
        for uid, figures in (self.latest | {uid: each.figures for uid, each in self.left.items()}).items():
            if uid not in reported:
                found.update({key: figures[key] for key in BYTES if key in figures})
        return found

    @property
    def members(self) -> list[int]:
        """The nodes that are known to have taken part to the end; empty if there was only one generation.

        After a stop, nodes that lost each other end in separate generations; all of these count.
        """
        if not self._members:
            return []
        if not self.finished:
            return next(reversed(self._members.values()))
        return sorted({*self.finished}.union(*(self._members.get(uid, ()) for uid in self.finished)))

    def progress(self, uid: int, record: Mapping[str, Any]) -> None:
        """Keeps the figures of a record, for nodes that will not report closing figures, and changes of membership."""
        known = self.latest.get(uid, {})
        if record.get("kind") == "round" and any(
            record.get(f"{purpose}_bytes_sent", 0) < known.get(f"bytes_{purpose}", 0) for purpose in PURPOSES
        ):
            # A new process of the node, which counts from 0; in a simulated world no restart is reported.
            self._earlier_bytes.update({key: known[key] for key in BYTES if key in known})
        _update_figures(self.latest.setdefault(uid, {"uid": uid, "rounds": 0}), record)
        if record.get("kind") == "generation":
            self._members.pop(uid, None)
            self._members[uid] = record.get("members", [])
            first_report = int(record.get("round", 0)), self._members[uid]
            self._generations.setdefault(int(record.get("generation", 0)), first_report)
            for member in self._members[uid]:
                self._departed.pop(member, None)
            for gone in record.get("left", []):
                is_graceful = gone in record.get("departed", []) or self._departed.get(gone, (0, False))[1]
                self._departed[gone] = int(record.get("round", 0)), is_graceful

    def figures(self) -> dict[int, Figures]:
        """Returns uid -> closing figures of every node; the last known ones if it has not reported closing figures."""
        found = self.latest | {uid: each.figures for uid, each in self.left.items()}
        for uid, finished in self.finished.items():
            found[uid] = finished.figures
        for finished in self.finished.values():
            found |= {int(uid): figures for uid, figures in finished.reports.items()}
        if self.finished and self.members:
            found = {uid: figures for uid, figures in found.items() if uid in self.members}
        return found

    def newcomers(self, num_nodes: int) -> dict[int, list[list[int | None]]]:
        """Returns uid -> stays of each newcomer. A stay is [the round from which it was a member, the round from which
        the others continued without it, or None if it was a member to the end]."""
        found: dict[int, list[list[int | None]]] = {}
        for _, (round, members) in sorted(self._generations.items()):
            for uid, stays in found.items():
                if uid not in members and stays[-1][1] is None:
                    stays[-1][1] = round
            for uid in (uid for uid in members if uid >= num_nodes):
                stays = found.setdefault(uid, [])
                if not stays or stays[-1][1] is not None:
                    stays.append([round, None])
        return dict(sorted(found.items()))

    def samples(self) -> dict[str, list[dict[str, Any]]]:
        """Returns uid -> what the node trained on in each generation, for all nodes known here; empty if the data of
        absent nodes is not redistributed."""
        known = {**self.latest, **self.figures()}
        dealt = {uid: merged(self._before_restart.get(uid, (0, {}))[1].get("dealt"), each["dealt"])
                 for uid, each in sorted(known.items()) if "dealt" in each}  # fmt: skip
        return {str(uid): epochs(text) for uid, text in dealt.items()}

    def excluded_nodes(self, local: Collection[int], continues_on_partition: bool = False) -> set[int]:
        """Returns the local nodes without which the others continued: lost ones, and, before a stop, those that are not
        members of the last generation. After a stop, only lost ones, because other nodes may still end with what they
        have. Nodes in a generation that is disjoint from the last one are not counted: they continue separately.
        continues_on_partition: whether all sides of a partition continue (node.on_partition: both); then also only lost
        ones, because the others may still agree on a generation."""
        if self.stopped or continues_on_partition:
            return {*self.lost}
        last = {*(self.members or local)}
        disjoint = {uid for uid, members in self._members.items() if uid in members and last.isdisjoint(members)}
        return {*self.lost} | ({*local} - last - disjoint)

    @property
    def disjoint_generations(self) -> list[list[int]]:
        """The members of the disjoint generations in which nodes ended, sorted by lowest uid; empty if all nodes ended
        in the same generation."""
        found = sorted({tuple(sorted(self._members[uid])) for uid in self.finished if uid in self._members})
        uids = [uid for members in found for uid in members]
        return [list(members) for members in found] if len(found) > 1 and len(uids) == len({*uids}) else []

    def gone_on_other_machines(self, facts: Facts) -> tuple[dict[int, str], dict[int, int]]:
        """Returns, for nodes in the mapping on other machines: (uid -> a sentence about a lost node; uid -> the round
        from which the others continued without a node that left gracefully)."""
        lost, left = {}, {}
        reported = {int(uid) for each in self.finished.values() for uid in each.reports}
        last = max((int(each.figures.get("rounds", 0) or 0) for each in self.finished.values()), default=facts.rounds)
        for uid, (round, is_graceful) in sorted(self._departed.items()):
            if uid in facts.local or uid in reported or uid >= facts.num_nodes:
                continue
            if not is_graceful:
                lost[uid] = f"node {uid}: the others continued without it from round {round}"
            elif round < last:  # else it left because it had finished
                left[uid] = round
        return lost, left

    @property
    def stopped(self) -> bool:
        """Whether a node ended before its last round because the run was asked to stop. With own rounds, nodes also end
        early after the first one has made all its rounds; the run was then stopped only if all nodes were."""
        stopped = [finished.stopped for finished in self.finished.values()]
        return bool(stopped) and (all(stopped) if self.own_rounds else any(stopped))


def _update_figures(known: Figures, record: Mapping[str, Any]) -> None:
    """Updates a node's figures, in place, with a record of its metrics.jsonl."""
    if record.get("kind") == "round":
        known["rounds"] = record.get("round", -1) + 1
        known |= {f"bytes_{purpose}": record.get(f"{purpose}_bytes_sent", 0) for purpose in PURPOSES}
        if lost := record.get("lost", []):
            known["rounds_without"] = known.get("rounds_without", 0) + 1
            known["without"] = packed_counts(Counter(unpacked_counts(known.get("without"))) + Counter(lost))
        if dealt := unpacked(known.get("dealt")):
            dealt[-1].trained += record.get("samples", 0)
            known["dealt"] = packed(dealt)
    elif record.get("kind") == "dealt":
        now = GenerationSamples(*(record[each.name] for each in dataclasses.fields(GenerationSamples)))
        known["dealt"] = packed([*(each for each in unpacked(known.get("dealt")) if each.trained), now])
    elif record.get("kind") == "evaluation":
        known |= {key: record[key] for key in record if key not in ("kind", "round", "time")}
        known["evaluated_round"] = record.get("round")


def _best(figures: Mapping[int, Figures]) -> dict[str, Any]:
    """Returns the best evaluation of nodes that evaluate together, from the lowest uid that reported one."""
    evaluation = next((each for _, each in sorted(figures.items()) if "best_figure" in each), {})
    return {} if not evaluation else {"best": {
        "figure": evaluation["best_figure"], "value": evaluation["best_value"], "round": evaluation["best_round"],
        "evaluations_since": evaluation.get("evaluations_since_best"),
    }}  # fmt: skip


def _end(figures: Mapping[int, Figures], status: str) -> dict[str, Any]:
    """Returns why the run ended, and its best evaluation if there is one."""
    evaluation = next((each for _, each in sorted(figures.items()) if "best_figure" in each), {})
    early = bool(evaluation.get("stopped_early")) and status == "finished"
    ended = {"finished": "early_stop" if early else "rounds", "interrupted": "stop", "failed": "failure"}[status]
    return {"ended": ended, **_best(figures)}


@dataclass(frozen=True)
class Durations:
    """Seconds from the start of the command."""

    start: float | None
    """Until all nodes were connected; None if they never were."""
    wall: float
    """Until the end of the run."""


def summary(
    facts: Facts, ledger: Ledger, exit_code: int, run_dir: Path | None, durations: Durations
) -> dict[str, Any]:
    """Returns the contents of summary.json. The figures of nodes without closing figures are read from their files."""
    ledger.catch_up()
    failure = first_cause(ledger.failures)
    status = "finished" if exit_code == 0 else "failed" if failure is not None else "interrupted"
    found: dict[str, Any] = {
        "name": facts.name,
        "run": run_dir.name if run_dir else None,
        "digest": facts.digest,
        "status": status,
        **_end(ledger.figures(), status),
        "exit_code": exit_code,
        "num_nodes": facts.num_nodes,
        **({"attackers": facts.attackers} if facts.attackers else {}),
        "rounds_planned": facts.rounds,
        **({"own_rounds": True} if facts.own_rounds else {}),
        "start_seconds": durations.start,
        "wall_seconds": durations.wall,
        "task": facts.task,
        **summaries.combine(ledger.figures(), TaskMetrics.from_plain(facts.task), ledger.unreported_bytes()),
    }
    found |= _members(facts, ledger)
    if ledger.disjoint_generations:
        metrics = TaskMetrics.from_plain(facts.task)
        sides = summaries.figures_of_sides(ledger.figures(), metrics, ledger.disjoint_generations)
        for side in sides["sides"]:
            side |= _best({uid: each for uid, each in ledger.figures().items() if uid in side["nodes"]})
        found.pop("best", None)
        found |= {**sides, "apart": ledger.disjoint_generations}
    if newcomers := ledger.newcomers(facts.num_nodes):
        found["newcomers"] = {str(uid): stays for uid, stays in newcomers.items()}
    if samples := ledger.samples():
        found["samples"] = samples
    if ledger.engine is not None:
        found["engine"] = {"name": ledger.engine.name, "reason": ledger.engine.reason}
    if ledger.resumed is not None:
        record = ledger.resumed
        found["resumed"] = {"runs": [Path(each).name for each in facts.resume or ()], "round": record.get("round"),
                            "without": record.get("without", []), "rule": record.get("rule")}  # fmt: skip
    if failure is not None:
        found["failure"] = {"node": failure.uid, "title": failure.title, "exit_code": failure.exit_code}
    return found


def _members(facts: Facts, ledger: Ledger) -> dict[str, Any]:
    """Returns which nodes were members at the end, which were lost and which left before; empty if all nodes of the
    mapping took part throughout."""
    lost, left = ledger.gone_on_other_machines(facts)
    found: dict[str, Any] = {"elsewhere": sorted({*lost, *left})} if lost or left else {}
    lost |= {uid: failed.title for uid, failed in ledger.lost.items()}
    left |= {uid: int(each.figures.get("rounds", 0) or 0) for uid, each in ledger.left.items()}
    if lost or left or ledger.members:
        gone = {*lost, *left}
        found["lost"] = {str(uid): title for uid, title in sorted(lost.items())}
        found["restarts"] = {str(uid): count for uid, count in sorted(ledger.restarts.items())}
        found["members"] = ledger.members or [uid for uid in range(facts.num_nodes) if uid not in gone]
    if left:
        found["left"] = {str(uid): after for uid, after in sorted(left.items())}
    return found
