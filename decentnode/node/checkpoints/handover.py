"""What the members of a generation hand over to joining members (a model, the evaluations so far, sums that sharing
rules start from), and how they take over the samples of absent nodes."""

from __future__ import annotations

import logging
from dataclasses import asdict

import torch

from decentnode import clock
from decentnode.communication.run_state import Steps
from decentnode.node.measuring.early_stopping import NUM_NUMBERS
from decentnode.node.measuring.evaluation import begin_mean, mean_of
from decentnode.node.resumable import Resumable

logger = logging.getLogger(__name__)


def give_models(node: Resumable, to: frozenset[int], key: str) -> Steps[None]:
    """Give the mean of the other members' models to the members `to`, as steps. The models of the other members stay
    unchanged, and so do parameters that are not shared. key: the name of the mean, the same on all nodes."""
    model, shared = node.training.model, node.shared
    # A sum of float16 models, or a buffer (float32), can be larger than the largest float16
    wide = torch.promote_types(model.dtype, torch.float32)
    own = torch.cat([model.parameters[:shared].to(wide), model.buffers.to(wide)])
    fresh = node.uid in to
    pending = begin_mean(node.communication, key, torch.zeros_like(own) if fresh else own, closing=True)
    timeout_seconds = node.communication.config.timeout_seconds
    mean, contributors = yield from mean_of(pending, node.sharing.requirements.phases, timeout_seconds)
    if fresh:
        mean = (mean * (contributors / (contributors - len(to)))).to(own.device)
        with torch.no_grad():
            model.parameters[:shared].copy_(mean[:shared])
            model.buffers.copy_(mean[shared:])


def agree_on_early_stopping(node: Resumable, without: frozenset[int], key: str) -> Steps[None]:
    """Give all members the same record of the evaluations so far: that of the lowest member that is not in `without`. A
    joining member has seen none of the evaluations, and one of the others may have missed the last. As steps; does
    nothing if no early stopping is configured. key: the name of the mean, the same on all nodes."""
    if node.config.early_stop is None:
        return
    giver = min(uid for uid in node.generation.members if uid not in without)
    numbers = node.early_stopping.numbers() if node.uid == giver else [0.0] * NUM_NUMBERS
    pending = begin_mean(node.communication, key, torch.tensor(numbers, dtype=torch.float64), closing=True)
    timeout_seconds = node.communication.config.timeout_seconds
    mean, contributors = yield from mean_of(pending, node.sharing.requirements.phases, timeout_seconds)
    # the giver as well, so that all have the same rounded values
    node.early_stopping.load_numbers((mean * contributors).tolist())


def deal_samples(node: Resumable, first_round: int) -> None:
    """With `orphans: adopted`, deal the samples of nodes that are not members of the generation to the members, for all
    rounds from `first_round` on."""
    if node.config.orphans == "adopted":
        generation, training = node.generation, node.training
        training.deal_among(generation.members, generation.number, first_round)
        node.record({"kind": "dealt", "time": clock.recorded(), **asdict(training.dealt[-1])})
        logger.info("trains on %d samples, %d of them of nodes that are not there", training.num_samples,
                    training.dealt[-1].adopted)  # fmt: skip


def skip_training(node: Resumable, round: int) -> None:
    """Set the learning-rate schedule and the position in the order of samples to those before `round`."""
    if all(map(node.trains_in, range(round + 1))):
        node.training.skip_to(round)
    else:
        node.training.skip_to(round, node.trains_in)


def begin_rules_anew(node: Resumable, key: str, without: frozenset[int] = frozenset()) -> Steps[None]:
    """Replace the sharing rules with new ones, as steps, and provide those rules that need a sum over all members to
    start from with that sum. key: the prefix of the sums' names, the same on all nodes. without: as for
    `Node.renew_rules`."""
    for index, (rule, model, view) in enumerate(node.renew_rules(without)):
        totals = {}
        for name, own in rule.to_be_summed(model, view).items():
            wide = own.to(torch.promote_types(own.dtype, torch.float32))
            pending = begin_mean(node.communication, f"{key}/rule-{index}/{name}", wide, closing=True)
            timeout_seconds = node.communication.config.timeout_seconds
            mean, contributors = yield from mean_of(pending, rule.requirements.phases, timeout_seconds)
            totals[name] = (mean * contributors).to(own)
        if totals:
            rule.summed(totals, view)
