"""How a node takes the place that its run goes on from, once the nodes have agreed on it and its checkpoint is read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from decentnode.checkpoint import store
from decentnode.communication.run_state import Steps
from decentnode.errors import CheckpointError
from decentnode.node.checkpoints.checkpoint_mean import mean_unless_ending
from decentnode.node.checkpoints.handover import agree_on_course, begin_rules_anew, deal_samples, give_models
from decentnode.node.checkpoints.snapshot import Restored
from decentnode.node.measuring.evaluation import begin_mean
from decentnode.node.resumable import Resumable
from decentnode.words import names

logger = logging.getLogger(__name__)

OF_MODELS = ("model", "training", "sharing")
"""Parts of a checkpoint that models depend on. A node that comes back to a run takes them over, too: of the sharing
rule's state it keeps what outlives a generation."""


@dataclass(frozen=True)
class GoingOn:
    """Where a run goes on, the same on all nodes, unless these are in different rounds."""

    round: int
    """Its first one; of a node without a checkpoint the furthest one's."""
    evaluated: int
    """After how many rounds the last evaluation was that all nodes with a checkpoint finished; -1 before the first."""
    without: Sequence[int]
    """Members that have no checkpoint."""


def go_on(node: Resumable, restored: Restored | None, cut: str, where: GoingOn) -> Steps[None]:
    """Take the place that the node had, as steps. restored: the node's own checkpoint, whose model and training it has
    already, in the folder `cut`; None where it is one of `where.without`, and takes the mean of the others' models."""
    history = node.communication.history
    if history is not None:
        digest = "" if restored is None else restored.digest(*OF_MODELS)
        history.resumed(where.round, where.evaluated, where.without, cut, digest)
    if where.without:
        if node.uid in where.without:
            logger.warning("no checkpoint of this node: it continues from the mean of the others' models")
        yield from give_models(node, frozenset(where.without), "resume/model")
        if restored is not None:
            restored.put_rule(node)  # for what outlives a generation
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
        node.training.skip_to(where.round)
    else:
        restored.put_progress(node)
    if node.config.orphans == "adopted" and (where.without or node.training.members != node.generation.members):
        deal_samples(node, where.round)  # the checkpoint is of other members
        node.round = where.round
        yield from begin_rules_anew(node, "resume/dealt")
    if where.without:
        yield from agree_on_course(node, frozenset(where.without), "resume/course")
    node.round = where.round
    node.communication.begin_at(where.round)


def evaluate_if_due(node: Resumable, where: GoingOn) -> Steps[None]:
    """Evaluate where the interrupted run had not come to it, as steps."""
    every, round = node.config.evaluate_every, where.round
    if every and round % every == 0 and where.evaluated != round and round < node.config.rounds:
        yield from node.evaluate_between()


def evaluation_missed(node: Resumable, first_round: int) -> Steps[bool]:
    """Returns whether an evaluation is due after the rounds before `first_round`, with which a generation begins, and
    the members of the one before did not all come to it; the same on all members, as steps."""
    every, generation = node.config.evaluate_every, node.generation
    if not every or first_round % every or not 0 < first_round < node.config.rounds or generation.stopping:
        return False
    # Who comes has seen no evaluation, and need not: it counts as one that has.
    done = node.evaluated == first_round or node.uid in generation.fresh
    told = torch.tensor([float(done)], dtype=torch.float64)
    pending = begin_mean(node.communication, "generation/evaluated", told)
    found = yield from mean_unless_ending(node, pending, "whether an evaluation is to be made up for")
    return found is not None and float(found[0]) * found[1] < found[1] - 0.5


def evaluate_alone_if_missed(node: Resumable) -> Steps[None]:
    """Where each node evaluates its own model alone: make up for what was due as the generation before was over."""
    every, round = node.config.evaluate_every, node.round
    if every and round % every == 0 and node.evaluated != round and 0 < round < node.config.rounds:
        yield from node.evaluate_between()


def take_own(node: Resumable, folder: Path, first_round: int, recent: int) -> bool:
    """After the node's process was started again: take the state of the newest checkpoint of this run in `folder`, the
    model's, the training's, and the sharing rule's for what outlives a generation of it, where it is at most `recent`
    rounds older than `first_round`, in which the node goes on. Returns whether there was one."""
    run, history = node.communication.run_id.hex(), node.communication.history
    for manifest in store.scan([folder], node.uid, {run})[0]:
        cut = manifest.cut
        if not 0 <= first_round - manifest.round <= recent:
            continue
        try:
            restored = Restored.read(manifest)
            digest = "" if history is None else restored.digest(*OF_MODELS)
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
