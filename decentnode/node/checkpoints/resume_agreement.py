"""Lets the nodes of a resumed run agree on the checkpoint from which all of them continue, and reads it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from decentnode.checkpoint import agreement, store
from decentnode.checkpoint.store import Cut, Manifest
from decentnode.communication.run_state import Steps
from decentnode.errors import CheckpointError
from decentnode.node.checkpoints.resuming import ResumePosition
from decentnode.node.checkpoints.snapshot import Restored
from decentnode.node.measuring.evaluation import mean_of
from decentnode.node.resumable import Resumable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumeFrom:
    """Where a run looks for the checkpoints from which it can resume."""

    folders: tuple[Path, ...]
    """The checkpoints/ folders of runs."""
    runs: frozenset[str] | None = None
    """The ids of the runs whose checkpoints may be used; None: those of any run."""


@dataclass(frozen=True)
class AgreedCut:
    """The cut that all nodes agreed on, and this node's part of it."""

    number: int
    """The number of the cut: the nodes' round when it was made, or under an asynchronous schedule the checkpoint's
    number."""
    manifest: Manifest | None
    """The manifest of this node's checkpoint; None if it has none."""
    restored: Restored | None
    """This node's checkpoint, of which the model and the training state are restored already; None if it has none."""
    where: ResumePosition
    problems: list[str]
    """Why other checkpoints of this node could not be read, one line each."""


def read_agreed_cut(node: Resumable, resume: ResumeFrom) -> Steps[AgreedCut]:
    """Returns the newest cut of which all members have a complete and readable checkpoint, as steps; this node's model
    and training state are then restored. Blocks while nodes agree and read. Raises CheckpointError if there is no such
    cut."""
    manifests, problems = store.scan(resume.folders, node.uid, resume.runs)
    for attempt in range(agreement.MAX_CUTS + 1):
        chosen = yield from agreed_cut(node, [each.cut for each in manifests], attempt)
        if chosen is None:
            raise CheckpointError(no_common_cut(node.uid, manifests, problems))
        number, key = chosen
        mine = next((each for each in manifests if each.cut.key == key), None)
        restored = None
        if mine is not None:
            try:
                restored = Restored.read(mine)
                restored.put_training(node)
            except CheckpointError as error:
                problems.append(str(error))
                manifests.remove(mine)
                restored = None
        evaluated = int(restored.progress["evaluated"]) + 1 if restored is not None else 0
        own = [int(restored is not None), int(mine is not None and restored is None), evaluated,
               0 if mine is None or restored is None else mine.round + 1]  # fmt: skip
        rows = yield from gathered(node, f"resume/read-{attempt}", own, len(own))
        if not any(row[1] for row in rows):
            break
    else:
        raise CheckpointError(no_common_cut(node.uid, manifests, problems))
    for problem in problems:
        logger.warning("%s", problem)
    without = [uid for uid in node.generation.members if not rows[uid][0]]
    round = (own[3] or max(row[3] for row in rows)) - 1
    # A stop may have come before some nodes made an evaluation that others have finished: then all make it again.
    last = evaluated if node.schedule.asynchronous else min(row[2] for row in rows if row[0])
    return AgreedCut(number, mine, restored, ResumePosition(round, last - 1, without), problems)


def agreed_cut(node: Resumable, cuts: Sequence[Cut], attempt: int) -> Steps[tuple[int, int] | None]:
    """Returns (round, key) of the newest cut of which all members have a checkpoint, the same on all nodes; None if
    there is none. As steps; blocks until the other nodes have answered.

    cuts: those of which this node has a complete checkpoint. attempt: 0 for the first call, then one more for each call
    after a cut that could not be read.
    """
    rows = yield from gathered(node, f"resume/offers-{attempt}", agreement.offers(cuts), agreement.MAX_CUTS)
    without = [uid for uid, row in enumerate(rows) if not any(row)]
    found = agreement.complete(cuts, rows, without)
    votes = yield from gathered(node, f"resume/votes-{attempt}", agreement.vote(found), 3)
    return agreement.chosen(votes)


def gathered(node: Resumable, key: str, values: Sequence[int], width: int) -> Steps[list[list[int]]]:
    """Returns the `width` values of every node, indexed by uid, as steps. Blocks for at most the longer one of
    `timeout_seconds` and `start_timeout_seconds` of the transport."""
    pending = node.communication.mean(key, agreement.row(values, node.uid, node.graph.num_nodes, width))
    config = node.communication.config
    longest = max(config.timeout_seconds, config.start_timeout_seconds)
    mean, contributors = yield from mean_of(pending, node.sharing.requirements.phases, longest)
    return agreement.gathered(mean, contributors)


def no_common_cut(uid: int, manifests: Sequence[Manifest], problems: Sequence[str]) -> str:
    """Returns the error text of node `uid` for when there is no round of which all nodes have a complete checkpoint."""
    own = ", ".join(str(each.cut.round) for each in manifests) or "none"
    text = f"node {uid}: no round has a complete checkpoint on all nodes; checkpoints of this node: {own}"
    return "\n".join([text, *problems])
