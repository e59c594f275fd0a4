"""The progress of a running experiment, collected from the nodes' records, and its one-line form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from decentnode.formatting import duration, names, number, size
from decentnode.metrics.figures import TaskMetrics
from decentnode.report.reading.measured import DEFAULT_METRICS


@dataclass
class NodeState:
    """The latest figures of one node."""

    uid: int
    has_reported: bool = False
    """Whether it has sent a record yet."""
    rounds: int = 0
    """How many rounds it has finished."""
    loss: float | None = None
    metric: float | None = None
    """The task's main metric of the node's own model."""
    evaluated: int = -1
    """The round after which it was evaluated."""
    sent_bytes: int = 0
    """By all of its processes."""
    earlier_bytes: int = 0
    """By its earlier processes; the records of the present one count from 0."""
    lost: bool = False
    """Whether the other nodes continue without it."""
    round_seconds: float = 0.0
    wait_seconds: float = 0.0
    """In its latest round."""
    waited_for: int = -1
    waited_seconds: float = 0.0


    def count_bytes(self, of_process: int) -> None:
        """Updates the sent bytes from the count of the node's present process."""
        if self.earlier_bytes + of_process < self.sent_bytes:  # another process, whose start was not reported
            self.earlier_bytes = self.sent_bytes
        self.sent_bytes = self.earlier_bytes + of_process


@dataclass(frozen=True)
class Side:
    """The members of one generation in progress. There are several if the network is partitioned and each part
    continues."""

    number: int
    """Number of the generation; each side counts its own."""
    members: frozenset[int]

    @property
    def label(self) -> str:
        return names(sorted(self.members)).replace(" ", "")


@dataclass(frozen=True)
class NodeEvaluation:
    """One node's evaluation, with its loss and sent bytes in the same round."""

    record: Mapping[str, Any]
    loss: float | None
    sent_bytes: int


@dataclass
class RunProgress:
    """The progress of all local nodes. `update` takes every record that arrives."""

    rounds: int
    """The number of rounds of the run."""
    nodes: dict[int, NodeState]
    sides: list[Side] = field(default_factory=list)
    """The latest reported generations that have no node in common, ordered by lowest uid; empty while all nodes take
    part."""
    latest: dict[str, Any] = field(default_factory=dict)
    """The latest evaluation that every local node has reported, or every one of a side, whose label is in its key
    `side`."""
    evaluate_every: int = 0
    """Rounds between evaluations; 0: only after the last."""
    measured: TaskMetrics = DEFAULT_METRICS
    """What the run's task measures."""
    own_rounds: bool = False
    """Whether nodes do not wait for each other's rounds; the first that has finished all rounds ends the run."""
    elsewhere: bool = False
    """Whether the run has nodes on other machines, whose own figures do not arrive here: then the mean covers all
    nodes, but the worst value only the nodes here."""
    _evaluations: dict[int, dict[int, NodeEvaluation]] = field(default_factory=dict)
    _latest: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The latest evaluation by the label of its side, of the present sides; the label is "" while there is only one
    side."""
    _speed_start: tuple[float, int] | None = None
    """The time of the first call of `seconds_left` and the round at that time. Earlier rounds do not count: they
    include the start, or belong to the run that was resumed."""

    @classmethod
    def of(
        cls, rounds: int, uids: Iterable[int], evaluate_every: int = 0, measured: TaskMetrics = DEFAULT_METRICS,
        own_rounds: bool = False, *, elsewhere: bool = False,
    ) -> RunProgress:
        nodes = {uid: NodeState(uid) for uid in uids}
        return cls(rounds, nodes, evaluate_every=evaluate_every, measured=measured, own_rounds=own_rounds,
                   elsewhere=elsewhere)  # fmt: skip

    def update(self, uid: int, record: Mapping[str, Any]) -> bool:
        """Takes a record of a node. Returns whether it completes an evaluation of all local nodes."""
        node = self.nodes[uid]
        node.has_reported = True
        if record.get("kind") == "round":
            node.rounds = record["round"] + 1
            node.loss = record.get("loss")
            node.count_bytes(record.get("data_bytes_sent", 0) + record.get("metadata_bytes_sent", 0))
            node.round_seconds, node.wait_seconds = record.get("seconds", 0.0), record.get("wait_seconds", 0.0)
            node.waited_for, node.waited_seconds = record.get("waited_for", -1), record.get("waited_seconds", 0.0)
            return False
        if record.get("kind") == "generation":
            node.lost = False
            self._add_side(Side(record.get("generation", 0), frozenset(record.get("members", ()))))
        if record.get("kind") != "evaluation":
            return False
        round = record["round"]
        if node.rounds < round:  # the round's own record was lost
            node.rounds, node.loss = round, None
        node.metric, node.evaluated = record.get(self.measured.main.name), round
        self._evaluations.setdefault(round, {})[uid] = NodeEvaluation(record, node.loss, node.sent_bytes)
        return self._complete(uid, round)

    def _complete(self, uid: int, round: int) -> bool:
        """Returns whether all local nodes of this node's side have reported their evaluation after `round`; if so,
        makes it the side's latest."""
        label, nodes = next(((label, nodes) for label, nodes in self.parts() if uid in {each.uid for each in nodes}),
                            ("", []))  # fmt: skip
        known = self._evaluations[round]
        if not nodes or not known.keys() >= {each.uid for each in nodes}:
            return False
        main, evaluations = self.measured.main, {each.uid: known[each.uid] for each in nodes}
        metrics = [each.record[main.name] for each in evaluations.values() if each.record.get(main.name) is not None]
        losses = [each.loss for each in evaluations.values() if each.loss is not None]
        others = [node.sent_bytes for node in self.nodes.values() if node.uid not in evaluations]
        mean = {f"{main.name}_mean": sum(metrics) / len(metrics)} if metrics else {}
        # The mean over the nodes here, for runs in which each node evaluates alone; otherwise the record's mean over
        # all nodes replaces it
        self.latest = self._latest[label] = {
            **mean, **evaluations[uid].record, "round": round,
            "worst": (min if main.worst == "min" else max)(metrics, default=None),
            "train_loss": sum(losses) / len(losses) if losses else None, "side": label,
            "sent_bytes": sum(each.sent_bytes for each in evaluations.values()) + sum(others),
        }  # fmt: skip
        past = [known for earlier, known in self._evaluations.items() if earlier <= round]
        for known in past:
            for each in nodes:
                known.pop(each.uid, None)
        self._evaluations = {each: known for each, known in self._evaluations.items() if known}
        return True

    def lose(self, uid: int) -> None:
        """Marks a node as lost: the others continue without it, until a generation contains it again."""
        if uid in self.nodes:
            self.nodes[uid].lost = True

    def restart(self, uid: int) -> None:
        """Notes that the node's next records come from a new process."""
        if uid in self.nodes:
            self.nodes[uid].earlier_bytes = self.nodes[uid].sent_bytes

    def _add_side(self, side: Side) -> None:
        """Handles a generation that a node reported: it replaces the sides with which it shares nodes, unless one of
        them has a later generation."""
        overlapping = [each for each in self.sides if not side.members.isdisjoint(each.members)]
        if any(each.number > side.number or each == side for each in overlapping):
            return
        others = [each for each in self.sides if each not in overlapping]
        self.sides = sorted([*others, side], key=lambda one: min(one.members))
        labels = {label for label, _ in self.parts()}
        self._latest = {label: latest for label, latest in self._latest.items() if label in labels}
        for uid in side.members & self.nodes.keys():
            self.nodes[uid].lost = False

    def parts(self) -> list[tuple[str, list[NodeState]]]:
        """Returns (label, local nodes) of each side that has local nodes; ("", all nodes that take part) if there is
        only one side; an empty list if all nodes are lost."""
        sides = [(side.label, side.members) for side in self.sides] or [("", frozenset(self.nodes))]
        local_parts = []
        for label, members in sides:
            local = [self.nodes[uid] for uid in sorted(members & self.nodes.keys())]
            local_parts.append((label, [node for node in local if not node.lost]))
        local_parts = [(label, nodes) for label, nodes in local_parts if nodes]
        return local_parts if len(local_parts) > 1 else [("", nodes) for _, nodes in local_parts]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Returns the latest evaluation of each side that has one; with a single side, the latest of all nodes."""
        labels = [label for label, _ in self.parts()]
        if len(labels) < 2:
            return [self.latest] if self.latest else []
        return [self._latest[label] for label in labels if label in self._latest]

    @property
    def round(self) -> int:
        """Returns how many rounds every participating local node has finished."""
        return min((node.rounds for node in self.participants()), default=0)

    @property
    def done(self) -> int:
        """Returns how many rounds of the run are done; if nodes do not wait for each other, those of the furthest
        node."""
        return max((node.rounds for node in self.participants()), default=0) if self.own_rounds else self.round

    @property
    def evaluation_due(self) -> bool:
        """Returns whether an evaluation after the present round is still to be reported."""
        parts = [] if self.own_rounds else self.parts()
        return any(self._evaluation_due(min(node.rounds for node in nodes), label) for label, nodes in parts)

    def _evaluation_due(self, round: int, label: str) -> bool:
        every = self.evaluate_every
        evaluated = round == self.rounds or (every > 0 and round % every == 0)
        latest = self._latest.get(label, {}) if label else self.latest
        return evaluated and latest.get("round", -1) < round

    def participants(self) -> list[NodeState]:
        """Returns the local nodes that are members of a generation in progress."""
        return [node for _, nodes in self.parts() for node in nodes]

    @property
    def sent_bytes(self) -> int:
        return sum(node.sent_bytes for node in self.nodes.values())

    def slowest(self) -> NodeState | None:
        """Returns the node that waited longest for one neighbor in its latest round."""
        waiting = [node for node in self.participants() if node.waited_for >= 0]
        return max(waiting, key=lambda node: node.waited_seconds, default=None)

    def seconds_left(self, now: float) -> float | None:
        """Returns the estimated seconds to the last round, at the speed since the first call; None while it is unknown.

        now: `clock.now()`. The speed counts only rounds since the first call, so that neither a slow start nor the
        rounds before a resumed checkpoint distort it.
        """
        done = self.done
        if self._speed_start is None:
            if all(node.has_reported for node in self.participants()):
                self._speed_start = now, done
            return None
        since, first = self._speed_start
        if done <= first or now <= since:
            return None
        return max(0.0, (now - since) / (done - first) * (self.rounds - done))

    def left_text(self, now: float) -> str:
        """Returns the estimated time left as the end of a line, " left=3min20s"; "" while it is unknown."""
        left = self.seconds_left(now)
        return "" if left is None or self.done >= self.rounds else f" left={duration(left).replace(' ', '')}"

    def evaluation_line(self, again: bool = False, evaluation: Mapping[str, Any] | None = None) -> str:
        """Returns an evaluation as `round=20/60 loss=0.1234 acc_mean=0.930 ...`, with figures of that round only; None:
        the latest evaluation. The line of a side begins with its nodes: `nodes=0-3 round=20/60 ...`.

        again: an earlier line has reported the round, so this one begins with `evaluated=20/60`.
        """
        latest, main = evaluation or self.latest, self.measured.main
        suffix = "_here" if self.elsewhere else ""
        parts = [f"nodes={latest['side']}"] if latest.get("side") else []
        parts.append(f"{'evaluated' if again else 'round'}={latest['round']}/{self.rounds}")
        if latest["train_loss"] is not None:
            parts.append(f"loss={latest['train_loss']:.4f}")
        figures = ((f"{main.line_name}_mean", latest.get(f"{main.name}_mean"), ".3f"),
                   (f"{main.line_name}_{main.worst}{suffix}", latest.get("worst"), ".3f"),
                   (f"{main.line_name}_merged", latest.get(f"{main.name}_merged"), ".3f"),
                   ("consensus_distance", latest.get("consensus_distance"), ".1e"))  # fmt: skip
        parts += [f"{name}={number(value, digits)}" for name, value, digits in figures if value is not None]
        return self._with_costs(parts, latest["sent_bytes"])

    def line(self) -> str:
        """Returns the progress between evaluations as `round=24/60 loss=0.1234 ...`, without evaluations of earlier
        rounds; with several sides `nodes=0-3 round=24/60 loss=0.1234, nodes=4-7 round=22/60 ...`."""
        texts = []
        for label, nodes in self.parts():
            losses = [node.loss for node in nodes if node.loss is not None]
            low, high = (pick(node.rounds for node in nodes) for pick in (min, max))
            rounds_text = f"{low}-{high}" if self.own_rounds and low < high else str(low)
            parts = [*([f"nodes={label}"] if label else []), f"round={rounds_text}/{self.rounds}"]
            parts += [f"loss={sum(losses) / len(losses):.4f}"] if losses else []
            texts.append(" ".join([*parts, *(self._own_metrics(nodes) if self.own_rounds else [])]))
        return self._with_costs([", ".join(texts or [f"round=0/{self.rounds}"])], self.sent_bytes)

    def _own_metrics(self, nodes: list[NodeState]) -> list[str]:
        """Returns mean and worst value of the nodes' latest evaluations, if each node evaluates its own model alone. As
        soon as one node was evaluated after a round, nodes with only untrained evaluations are left out."""
        main, trained = self.measured.main, [node for node in nodes if node.evaluated > 0] or nodes
        values = [node.metric for node in trained if node.metric is not None]
        if not values:
            return []
        worst = (min if main.worst == "min" else max)(values)
        return [f"{main.line_name}_mean={number(sum(values) / len(values), '.3f')}",
                f"{main.line_name}_{main.worst}={number(worst, '.3f')}"]  # fmt: skip

    def _with_costs(self, parts: list[str], sent_bytes: int) -> str:
        parts.append(f"sent={size(sent_bytes).replace(' ', '')}")
        slowest = self.slowest()
        if slowest is not None:
            waited = duration(slowest.waited_seconds).replace(" ", "")
            parts.append(f"wait_max=node{slowest.uid}:{waited}(for node{slowest.waited_for})")
        return " ".join(parts)
