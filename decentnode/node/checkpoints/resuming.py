"""Restores a node's state when a run resumes, once the nodes have agreed on a checkpoint and this node has read its
own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from decentnode.checkpoint import store
from decentnode.communication.run_state import Steps
from decentnode.errors import CheckpointError
from decentnode.formatting import names
from decentnode.node.checkpoints.checkpoint_mean import mean_unless_ending
from decentnode.node.checkpoints.handover import (
    agree_on_early_stopping,
    begin_rules_anew,
    deal_samples,
    give_models,
    skip_training,
)
from decentnode.node.checkpoints.snapshot import Restored
from decentnode.node.measuring.evaluation import begin_mean
from decentnode.node.resumable import Resumable

logger = logging.getLogger(__name__)

MODEL_PARTS = ("model", "training", "sharing")
"""The parts of a checkpoint that models depend on. A node that comes back to a run restores them as well, but keeps
only as much of the sharing rule's state as outlives a generation."""


@dataclass(frozen=True)
class ResumePosition:
    """The position from which a run resumes; it is the same on all nodes, except under an asynchronous schedule."""

    round: int
    """The first round after resuming; for a node without a checkpoint it is the round of the most advanced node."""
    evaluated: int
    """The number of finished rounds at the last evaluation that all nodes with a checkpoint completed; -1 if there was
    none."""
    without: Sequence[int]
    """The members that have no checkpoint."""


def go_on(node: Resumable, restored: Restored | None, cut: str, where: ResumePosition) -> Steps[None]:
    """Resume the node at the position `where`, as steps. restored: the node's own checkpoint in the folder `cut`, of
    which the model and the training state are restored already; None if the node is one of `where.without`, and gets
    the mean of the other nodes' models."""
    history = node.communication.history
    if history is not None:
        digest = "" if restored is None else restored.digest(*MODEL_PARTS)
        history.resumed(where.round, where.evaluated, where.without, cut, digest)
    if where.without:
        if node.uid in where.without:
            logger.warning("no checkpoint of this node: it continues from the mean of the others' models")
        yield from give_models(node, frozenset(where.without), "resume/model")
        if restored is not None:
            restored.put_rule(node)  # for the state that outlives a generation
        node.round = where.round
        yield from begin_rules_anew(node, "resume", frozenset(where.without))
    elif restored is not None:
        restored.put_rule(node)
        newcomers = restored.members.difference(node.generation.members)
        if newcomers:
            logger.info("continues without node %s, which is not in the mapping", names(sorted(newcomers)))
            node.round = where.round
            yield from begin_rules_anew(node, "resume/members", newcomers)
    if restored is None:
        skip_training(node, where.round)
    else:
        restored.put_progress(node)
    if node.config.orphans == "adopted" and (where.without or node.training.members != node.generation.members):
        deal_samples(node, where.round)  # the checkpoint was made by other members
        node.round = where.round
        yield from begin_rules_anew(node, "resume/dealt")
    if where.without:
        yield from agree_on_early_stopping(node, frozenset(where.without), "resume/course")
    node.round = where.round
    node.communication.begin_at(where.round)


def evaluate_if_due(node: Resumable, where: ResumePosition) -> Steps[None]:
    """Make the evaluation that is due at this round if the interrupted run had not made it, as steps."""
    every, round = node.config.evaluate_every, where.round
    if every and round % every == 0 and where.evaluated != round and round < node.config.rounds:
        yield from node.evaluate_between()


def evaluation_missed(node: Resumable, first_round: int) -> Steps[bool]:
    """Returns, as steps, whether an evaluation was due right before `first_round`, the first round of the new
    generation, and not all members of the previous generation made it. The result is the same on all members."""
    every, generation = node.config.evaluate_every, node.generation
    if not every or first_round % every or not 0 < first_round < node.config.rounds or generation.stopping:
        return False
    # A joining node has made no evaluation and need not make this one: it counts as if it had.
    done = node.evaluated == first_round or node.uid in generation.fresh
    own = torch.tensor([float(done)], dtype=torch.float64)
    pending = begin_mean(node.communication, "generation/evaluated", own)
    found = yield from mean_unless_ending(node, pending, "whether an evaluation is to be made up for")
    return found is not None and float(found[0]) * found[1] < found[1] - 0.5


def evaluate_alone_if_missed(node: Resumable) -> Steps[None]:
    """Under an asynchronous schedule, make the evaluation that was due when the previous generation ended, as steps."""
    every, round = node.config.evaluate_every, node.round
    if every and round % every == 0 and node.evaluated != round and 0 < round < node.config.rounds:
        yield from node.evaluate_between()


def restore_own_checkpoint(node: Resumable, folder: Path, first_round: int, recent: int) -> bool:
    """Restore a node whose process was restarted from the newest checkpoint of this run in `folder` that is at most
    `recent` rounds older than `first_round`, the round in which the node continues. Restores the model, the training
    state, and as much of the sharing rule's state as outlives a generation. Returns whether there was such a
    checkpoint."""
    run, history = node.communication.run_id.hex(), node.communication.history
    for manifest in store.scan([folder], node.uid, {run})[0]:
        cut = manifest.cut
        if not 0 <= first_round - manifest.round <= recent:
            continue
        try:
            restored = Restored.read(manifest)
            digest = "" if history is None else restored.digest(*MODEL_PARTS)
            restored.put_training(node)
            restored.put_rule(node)
        except CheckpointError as error:
            logger.warning("%s", error)
            continue
        logger.info("continues from its own checkpoint after round %d", manifest.round)
        if history is not None:
            history.restored(manifest.round, (cut.generation, bytes.fromhex(cut.origin)), digest)
        return True
    if history is not None:
        history.restored()
    return False
