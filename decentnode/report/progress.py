"""The state of a running experiment, gathered from the nodes' records, and its one-line form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from decentnode.metrics.figures import TaskMetrics
from decentnode.report.measured import BEFORE
from decentnode.words import duration, number, size


@dataclass
class NodeState:
    """The last known figures of one node."""

    uid: int
    heard: bool = False
    """Whether it has said anything yet."""
    rounds: int = 0
    """How many rounds it has finished."""
    loss: float | None = None
    metric: float | None = None
    """The task's main metric of its own model."""
    evaluated: int = -1
    """The round after which it was evaluated."""
    sent_bytes: int = 0
    round_seconds: float = 0.0
    wait_seconds: float = 0.0
    """From the last known round."""
    waited_for: int = -1
    waited_seconds: float = 0.0


@dataclass(frozen=True)
class Told:
    """One node's evaluation, and its other figures at that moment: all of the same round."""

    record: Mapping[str, Any]
    loss: float | None
    sent_bytes: int


@dataclass
class RunProgress:
    """The state of all local nodes. `update` takes every record that comes."""

    rounds: int
    """The number of rounds of the run."""
    nodes: dict[int, NodeState]
    members: frozenset[int] | None = None
    """The members of the last reported generation; None while all nodes take part."""
    latest: dict[str, Any] = field(default_factory=dict)
    """The last evaluation that every local node has reported."""
    evaluate_every: int = 0
    """Rounds between evaluations; 0: only after the last."""
    measured: TaskMetrics = BEFORE
    """What the run's task measures."""
    _evaluations: dict[int, dict[int, Told]] = field(default_factory=dict)
    _mark: tuple[float, int] | None = None
    """When it was first asked how long it takes, and the round then: what came before is the start, or another run."""

    @classmethod
    def of(
        cls, rounds: int, uids: Iterable[int], evaluate_every: int = 0, measured: TaskMetrics = BEFORE
    ) -> RunProgress:
        nodes = {uid: NodeState(uid) for uid in uids}
        return cls(rounds, nodes, evaluate_every=evaluate_every, measured=measured)

    def update(self, uid: int, record: Mapping[str, Any]) -> bool:
        """Take a record of a node. Returns whether it completes an evaluation of all local nodes."""
        node = self.nodes[uid]
        node.heard = True
        if record.get("kind") == "round":
            node.rounds = record["round"] + 1
            node.loss = record.get("loss")
            node.sent_bytes = record.get("data_bytes_sent", 0) + record.get("metadata_bytes_sent", 0)
            node.round_seconds, node.wait_seconds = record.get("seconds", 0.0), record.get("wait_seconds", 0.0)
            node.waited_for, node.waited_seconds = record.get("waited_for", -1), record.get("waited_seconds", 0.0)
            return False
        if record.get("kind") == "generation":
            self.members = frozenset(record.get("members", ()))
        if record.get("kind") != "evaluation":
            return False
        round = record["round"]
        if node.rounds < round:  # the round's own record was lost
            node.rounds, node.loss = round, None
        main = self.measured.main
        node.metric, node.evaluated = record.get(main.name), round
        known = self._evaluations.setdefault(round, {})
        known[uid] = Told(record, node.loss, node.sent_bytes)
        if not known.keys() >= {node.uid for node in self.taking_part()}:
            return False
        metrics = [each.record[main.name] for each in known.values() if each.record.get(main.name) is not None]
        losses = [each.loss for each in known.values() if each.loss is not None]
        self.latest = {
            **record, "worst": (min if main.worst == "min" else max)(metrics, default=None), "round": round,
            "train_loss": sum(losses) / len(losses) if losses else None,
            "sent_bytes": sum(each.sent_bytes for each in known.values()),
        }  # fmt: skip
        self._evaluations = {later: told for later, told in self._evaluations.items() if later > round}
        return True

    @property
    def round(self) -> int:
        """How many rounds every participating local node has finished."""
        return min((node.rounds for node in self.taking_part()), default=0)

    @property
    def due(self) -> bool:
        """Returns whether an evaluation after this round is still to come and will be reported."""
        every = self.evaluate_every
        evaluated = self.round == self.rounds or (every > 0 and self.round % every == 0)
        return evaluated and self.latest.get("round", -1) < self.round

    def taking_part(self) -> list[NodeState]:
        """The local nodes that are members of the last generation."""
        return [node for uid, node in self.nodes.items() if self.members is None or uid in self.members]

    @property
    def sent_bytes(self) -> int:
        return sum(node.sent_bytes for node in self.nodes.values())

    def slowest(self) -> NodeState | None:
        """Returns the node that waited longest for one neighbor in its last known round."""
        waiting = [node for node in self.taking_part() if node.waited_for >= 0]
        return max(waiting, key=lambda node: node.waited_seconds, default=None)

    def seconds_left(self, now: float) -> float | None:
        """Returns the seconds to the last round, at the pace since this was asked first; None while that is not known.

        now: `clock.now()`. The pace counts rounds made since, so that neither a slow start nor the rounds of a run that
        goes on from a checkpoint are in it.
        """
        done = self.round
        if self._mark is None:
            if all(node.heard for node in self.taking_part()):
                self._mark = now, done
            return None
        since, first = self._mark
        if done <= first or now <= since:
            return None
        return max(0.0, (now - since) / (done - first) * (self.rounds - done))

    def left_text(self, now: float) -> str:
        """Returns how long the run still takes as the end of a line, " left=3min20s"; "" where that is not known."""
        left = self.seconds_left(now)
        return "" if left is None or self.round >= self.rounds else f" left={duration(left).replace(' ', '')}"

    def evaluation_line(self, again: bool = False) -> str:
        """Returns the last evaluation as `round=20/60 loss=0.1234 acc_mean=0.930 ...`, with figures of that round
        alone.

        again: a line told of the round already, so that this one begins with `evaluated=20/60`.
        """
        latest, main = self.latest, self.measured.main
        parts = [f"{'evaluated' if again else 'round'}={latest['round']}/{self.rounds}"]
        if latest["train_loss"] is not None:
            parts.append(f"loss={latest['train_loss']:.4f}")
        parts += [
            f"{main.line_name}_mean={number(latest.get(f'{main.name}_mean'), '.3f')}",
            f"{main.line_name}_{main.worst}={number(latest.get('worst'), '.3f')}",
            f"{main.line_name}_merged={number(latest.get(f'{main.name}_merged'), '.3f')}",
            f"consensus_distance={number(latest.get('consensus_distance'), '.1e')}",
        ]
        return self._with_costs(parts, latest["sent_bytes"])

    def line(self) -> str:
        """Returns the progress between evaluations as `round=24/60 loss=0.1234 ...`, without evaluations of earlier
        rounds."""
        losses = [node.loss for node in self.taking_part() if node.loss is not None]
        parts = [f"round={self.round}/{self.rounds}"]
        if losses:
            parts.append(f"loss={sum(losses) / len(losses):.4f}")
        return self._with_costs(parts, self.sent_bytes)

    def _with_costs(self, parts: list[str], sent_bytes: int) -> str:
        parts.append(f"sent={size(sent_bytes).replace(' ', '')}")
        slowest = self.slowest()
        if slowest is not None:
            waited = duration(slowest.waited_seconds).replace(" ", "")
            parts.append(f"wait_max=node{slowest.uid}:{waited}(for node{slowest.waited_for})")
        return " ".join(parts)
