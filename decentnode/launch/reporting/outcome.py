"""The outcome of a run: exit code, first failure, summary."""

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
from decentnode.metrics.dealt import Dealt, epochs, merged, packed, unpacked
from decentnode.metrics.figures import PURPOSES, TaskMetrics, packed_counts, unpacked_counts

Figures = dict[str, Any]
BYTES = tuple(f"bytes_{purpose}" for purpose in PURPOSES)
"""Keys of figures that count from the start of a node's process."""


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
    """Those of them that did not end and had to be killed: a node that hangs is among them when all others timed
    out."""
    error: BaseException | None = None
    """The exception of a node in this very process; None where nodes have processes of their own."""


def finished_before(facts: Facts, notice: Callable[[str], None]) -> Outcome | None:
    """Returns the outcome of a run that is to go on and has nothing left to do, and tells `notice` so; None of others.
    """
    if not facts.finished or not facts.resume:
        return None
    notice(facts.finished)
    run_dir = Path(facts.resume[0])
    return Outcome(0, run_dir, summaries.read(run_dir / "summary.json"))


def first_cause(failures: list[Failed]) -> Failed | None:
    """Returns the failure to report: the first that does not follow from another node's."""
    return next((failed for failed in failures if not failed.follower), failures[0] if failures else None)


@dataclass
class Ledger:
    """What the local nodes have reported so far.

    Not all records of rounds reach the supervisor, because nodes send one now and then; their files have them all.
    """

    directory: Path | None = None
    """The run directory, whose metrics.jsonl files have what did not reach the supervisor; None: there are none."""
    own_rounds: bool = False
    """Whether nodes wait for no round of each other, and the first that has made all ends the run."""
    latest: dict[int, Figures] = field(default_factory=dict)
    """Last known figures by uid, from evaluations and rounds: the only ones of a node that dies."""
    finished: dict[int, Finished] = field(default_factory=dict)
    failures: list[Failed] = field(default_factory=list)
    lost: dict[int, Failed] = field(default_factory=dict)
    """Local nodes that the others went on without."""
    left: dict[int, Finished] = field(default_factory=dict)
    """Local nodes that left in peace, because they were asked to."""
    restarts: dict[int, int] = field(default_factory=dict)
    """How often each node was started again."""
    resumed: Mapping[str, Any] | None = None
    """The record of kind "resumed" of the first node that had one."""
    checkpoint_problems: set[str] = field(default_factory=set)
    """Why checkpoints could not be written, as far as the user was told while the run went on."""
    engine: Engine | None = None
    """Of a simulated run."""
    _members: dict[int, list[int]] = field(default_factory=dict)
    """uid -> members of the last generation that this node took part in, the latest report last."""
    _generations: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    """number -> first round and members of every generation that was told of, as the first node told it."""
    _gone: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """uid -> from which round the others went on without this node, and whether it left in peace; as local nodes tell,
    of all machines' nodes that are not back."""
    _earlier: Counter[str] = field(default_factory=Counter)
    """Bytes by figure that earlier processes of restarted nodes had sent."""
    _before: dict[int, tuple[int, Figures]] = field(default_factory=dict)
    """Of restarted nodes: how many records earlier processes left in metrics.jsonl, and the figures until then."""

    def done(self, local: Collection[int]) -> bool:
        """Returns whether all nodes of this machine ended as they should, or the others went on without them."""
        gone = {*self.finished, *self.lost, *self.left}
        return bool(self.finished or self.left) and gone.issuperset(local) and not self.stopped

    def followers(self, local: Iterable[int], cause: Failed | None) -> tuple[int, ...]:
        """Returns the local nodes that ended because of `cause`, which was another node's failure."""
        if cause is None:
            return ()
        together = {each.uid for each in self.failures if each.title == cause.title}
        return tuple(uid for uid in local if uid not in {*together, *self.finished, *self.left})

    def restarted(self, uid: int) -> None:
        """Note that a node is started again: its new process counts bytes from 0."""
        records = self._catch_up(uid)
        self.restarts[uid] = self.restarts.get(uid, 0) + 1
        known = self.latest.get(uid, {})
        self._earlier.update({key: known.pop(key) for key in BYTES if key in known})
        self._before[uid] = records, dict(known)

    def catch_up(self) -> None:
        """Take from their files the last figures of nodes that have not reported closing ones."""
        for uid in self.latest.keys() - self.finished.keys() - self.left.keys():
            self._catch_up(uid)

    def _catch_up(self, uid: int) -> int:
        """Replace the figures of a node by those of its metrics.jsonl, unless these are older, as on a full disk.
        Returns how many records the file has."""
        count, (known_records, before) = 0, self._before.get(uid, (0, {"uid": uid, "rounds": 0}))
        found = dict(before)
        with contextlib.suppress(OSError):
            if self.directory is not None:
                for record in reader.read(node_dir(self.directory, uid) / "metrics.jsonl"):
                    count += 1
                    if count > known_records:
                        _add(found, record)
        known = self.latest.get(uid, {})
        newer = all(found.get(key, -1) >= known.get(key, -1) for key in ("rounds", "evaluated_round"))
        if count > known_records and newer:
            self.latest[uid] = found
        return count

    def bytes_beside(self) -> Counter[str]:
        """Returns last known bytes that are in no node's closing figures: of earlier processes, and of nodes that
        left."""
        told, found = self.figures(), Counter(self._earlier)
        for uid, figures in (self.latest | {uid: each.figures for uid, each in self.left.items()}).items():
            if uid not in told:
                found.update({key: figures[key] for key in BYTES if key in figures})
        return found

    @property
    def members(self) -> list[int]:
        """The nodes that took part to the end, as far as is known; empty where there was only one generation.

        After a stop nodes that lost each other close in generations of their own: the figures of all of them count.
        """
        if not self._members:
            return []
        if not self.finished:
            return next(reversed(self._members.values()))
        return sorted({*self.finished}.union(*(self._members.get(uid, ()) for uid in self.finished)))

    def progress(self, uid: int, record: Mapping[str, Any]) -> None:
        """Keep the figures of a record, for nodes that report no closing figures."""
        known = self.latest.get(uid, {})
        if record.get("kind") == "round" and record.get("data_bytes_sent", 0) < known.get("bytes_data", 0):
            # A new process of which nobody told, as in a simulated world: it counts from 0.
            self._earlier.update({key: known[key] for key in BYTES if key in known})
        _add(self.latest.setdefault(uid, {"uid": uid, "rounds": 0}), record)
        if record.get("kind") == "generation":
            self._members.pop(uid, None)
            self._members[uid] = record.get("members", [])
            told = int(record.get("round", 0)), self._members[uid]
            self._generations.setdefault(int(record.get("generation", 0)), told)
            for member in self._members[uid]:
                self._gone.pop(member, None)
            for gone in record.get("left", []):
                peace = gone in record.get("departed", []) or self._gone.get(gone, (0, False))[1]
                self._gone[gone] = int(record.get("round", 0)), peace

    def figures(self) -> dict[int, Figures]:
        """Returns by uid the closing figures of every node that has reported them, else the last known ones."""
        found = self.latest | {uid: each.figures for uid, each in self.left.items()}
        for uid, finished in self.finished.items():
            found[uid] = finished.figures
        for finished in self.finished.values():
            found |= {int(uid): figures for uid, figures in finished.reports.items()}
        if self.finished and self.members:
            found = {uid: figures for uid, figures in found.items() if uid in self.members}
        return found

    def newcomers(self, num_nodes: int) -> dict[int, list[list[int | None]]]:
        """Returns by uid, of the nodes that are in no mapping, the stays of each: the round from which it was a member,
        and the one from which the others went on without it; None where it was one to the end."""
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
        """Returns by uid, of all nodes that are known here, what they trained on in each generation; empty where the
        samples of absent nodes are lost."""
        known = {**self.latest, **self.figures()}
        dealt = {uid: merged(self._before.get(uid, (0, {}))[1].get("dealt"), each["dealt"])
                 for uid, each in sorted(known.items()) if "dealt" in each}  # fmt: skip
        return {str(uid): epochs(text) for uid, text in dealt.items()}

    def outside(self, local: Collection[int], sides: bool = False) -> set[int]:
        """Returns local nodes that the others went on without: lost ones, and, before a stop, those that are not
        members of the last generation. After a stop, such a node may still close with what it has. Nodes that go on
        apart, in a generation that shares no node with the last one, are with others, or alone, as they are to be.
        sides: whether they may (node.on_partition: both): those that are in no new generation may agree on one yet."""
        if self.stopped or sides:
            return {*self.lost}
        last = {*(self.members or local)}
        apart = {uid for uid, members in self._members.items() if uid in members and last.isdisjoint(members)}
        return {*self.lost} | ({*local} - last - apart)

    @property
    def apart(self) -> list[list[int]]:
        """The members of the generations in which nodes ended that share no node, the one with the lowest uid first;
        empty where all ended together."""
        found = sorted({tuple(sorted(self._members[uid])) for uid in self.finished if uid in self._members})
        uids = [uid for members in found for uid in members]
        return [list(members) for members in found] if len(found) > 1 and len(uids) == len({*uids}) else []

    def gone_elsewhere(self, facts: Facts) -> tuple[dict[int, str], dict[int, int]]:
        """Returns of nodes of other machines, without newcomers: (uid -> what became of those that were lost; uid ->
        the round from which the others went on without those that left in peace)."""
        lost, left = {}, {}
        told = {int(uid) for each in self.finished.values() for uid in each.reports}
        last = max((int(each.figures.get("rounds", 0) or 0) for each in self.finished.values()), default=facts.rounds)
        for uid, (round, peace) in sorted(self._gone.items()):
            if uid in facts.local or uid in told or uid >= facts.num_nodes:
                continue
            if not peace:
                lost[uid] = f"node {uid}: the others continued without it from round {round}"
            elif round < last:  # else it said goodbye as it had finished
                left[uid] = round
        return lost, left

    @property
    def stopped(self) -> bool:
        """Whether a node ended before its last round because somebody asked the run to stop; not where another one had
        made all of its rounds, which ended the run for nodes that have rounds of their own."""
        stopped = [finished.stopped for finished in self.finished.values()]
        return bool(stopped) and (all(stopped) if self.own_rounds else any(stopped))


def _add(known: Figures, record: Mapping[str, Any]) -> None:
    """Bring a node's figures up to a record of its metrics.jsonl, in place."""
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
        now = Dealt(*(record[each.name] for each in dataclasses.fields(Dealt)))
        known["dealt"] = packed([*(each for each in unpacked(known.get("dealt")) if each.trained), now])
    elif record.get("kind") == "evaluation":
        known |= {key: record[key] for key in record if key not in ("kind", "round", "time")}
        known["evaluated_round"] = record.get("round")


def _best(figures: Mapping[int, Figures]) -> dict[str, Any]:
    """Returns the best evaluation of nodes that evaluate together, as the lowest with figures of it tells."""
    told = next((each for _, each in sorted(figures.items()) if "best_figure" in each), {})
    return {} if not told else {"best": {
        "figure": told["best_figure"], "value": told["best_value"], "round": told["best_round"],
        "evaluations_since": told.get("evaluations_since_best"),
    }}  # fmt: skip


def _end(figures: Mapping[int, Figures], status: str) -> dict[str, Any]:
    """Returns why the run ended, and its best evaluation where it had one."""
    told = next((each for _, each in sorted(figures.items()) if "best_figure" in each), {})
    early = bool(told.get("stopped_early")) and status == "finished"
    ended = {"finished": "early_stop" if early else "rounds", "interrupted": "stop", "failed": "failure"}[status]
    return {"ended": ended, **_best(figures)}


@dataclass(frozen=True)
class Durations:
    """Seconds since the command."""

    start: float | None
    """Until all nodes were connected; None where they never were."""
    wall: float
    """Until the end of the run."""


def summary(
    facts: Facts, ledger: Ledger, exit_code: int, run_dir: Path | None, durations: Durations
) -> dict[str, Any]:
    """Returns the contents of summary.json. Of nodes without closing figures it has what their files tell."""
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
        "rounds_planned": facts.rounds,
        **({"own_rounds": True} if facts.own_rounds else {}),
        "start_seconds": durations.start,
        "wall_seconds": durations.wall,
        "task": facts.task,
        **summaries.combine(ledger.figures(), TaskMetrics.from_plain(facts.task), ledger.bytes_beside()),
    }
    found |= _members(facts, ledger)
    if ledger.apart:
        sides = summaries.of_sides(ledger.figures(), TaskMetrics.from_plain(facts.task), ledger.apart)
        for side in sides["sides"]:
            side |= _best({uid: each for uid, each in ledger.figures().items() if uid in side["nodes"]})
        found = {**{key: value for key, value in found.items() if key != "best"}, **sides, "apart": ledger.apart}
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
    """Returns which nodes were members in the end, which were lost and which left before it; empty where all nodes of
    the mapping were there throughout."""
    lost, left = ledger.gone_elsewhere(facts)
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
