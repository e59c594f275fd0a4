"""Takes a node into a new membership generation: agrees on it, hands models over, catches up on rounds and replaces the
sharing rules."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from typing import Any, Protocol

from decentnode import clock
from decentnode.communication.run_state import Steps
from decentnode.node.checkpoints.handover import (
    agree_on_early_stopping,
    begin_rules_anew,
    deal_samples,
    give_models,
    skip_training,
)
from decentnode.node.checkpoints.resuming import evaluate_alone_if_missed, evaluation_missed
from decentnode.node.generations.disconnected import disconnected_graphs, lacking_neighbors
from decentnode.node.generations.merging import TrainingWork, merge_models
from decentnode.node.resumable import NodeCheckpoints, Resumable
from decentnode.node.rules import NodeRules
from decentnode.node.sampling import Sampling
from decentnode.wire.generation import Generation

logger = logging.getLogger(__name__)


class Member(Resumable, Protocol):
    """The part of `Node` that `NodeGenerations` uses; see `Node` for the docstrings."""

    checkpoints: NodeCheckpoints | None

    def makes_no_more(self) -> bool: ...

    def make_round(self, among: Generation, /) -> Steps[None]: ...


class NodeGenerations:
    """Takes one node from one membership generation to the next."""

    def __init__(self, node: Member, rules: NodeRules, work: TrainingWork, sampling: Sampling | None) -> None:
        """work: the node's record of its training work, which determines its model's weight when models are merged."""
        self._node, self._rules, self._work, self._sampling = node, rules, work, sampling

    def regroup(self) -> Steps[None]:
        """Agree on the next generation and take part in it, as steps: yields until the node is a member of a generation
        in force."""
        node = self._node
        node.doing = "agreeing on the next generation"
        model = node.training.model
        model.rebind(model.parameters.clone())  # it may be in shared memory that the old generation releases
        pending = node.communication.regroup()
        yield None
        while not pending.ready:
            yield None
        generation = yield from pending.steps()
        yield from self.take_part(generation)

    def take_part(self, generation: Generation) -> Steps[None]:
        """Continue as a member of `generation` with the current model, as steps; fresh members first get the mean of
        the other members' models."""
        node = self._node
        before, node.generation = node.generation, generation
        first_round = min(generation.first_round, node.config.rounds)
        if node.communication.history is not None:
            node.communication.history.entered(
                generation.name, generation.members, first_round, generation.fresh, generation.stopping,
                generation.merging,
            )  # fmt: skip
        old_members, new_members = {*before.members}, {*generation.members}
        self._work.mark_separated(old_members - new_members)
        self._rules.lost |= old_members - (new_members - generation.fresh)
        merge_record = yield from self._hand_over(generation)
        yield from agree_on_early_stopping(node, generation.fresh, "generation/course")
        self._work.mark_reunited(new_members)
        node.communication.mark_in_sync(generation)
        is_asynchronous = self._rules.schedule.asynchronous
        evaluation_is_missing = not is_asynchronous and (yield from evaluation_missed(node, first_round))
        yield from self._advance_to(first_round, generation)
        if node.checkpoints is not None:
            yield from node.checkpoints.begin_generation()
        deal_samples(node, node.round)
        yield from begin_rules_anew(node, "generation")
        if self._sampling is not None:
            self._sampling.forget(old_members - new_members)
        departed = sorted((old_members - new_members) & node.communication.departed())
        node.record({
            "kind": "generation", "generation": generation.number, "origin": generation.origin.hex(),
            "round": node.round, "time": clock.recorded(),
            "members": sorted(new_members), "left": sorted(old_members - new_members),
            "joined": sorted(new_members - old_members | generation.fresh),
            **({"departed": departed} if departed else {}), **({"own_rounds": True} if is_asynchronous else {}),
            **({"stopping": True} if generation.stopping else {}),
            **merge_record,
        })
        logger.info("generation %d of %d nodes from round %d", generation.number, len(generation.members), node.round)
        if node.uid == generation.members[0]:
            self._report_graphs(generation)
        if evaluation_is_missing:
            yield from node.evaluate_between()
        elif is_asynchronous and node.uid not in generation.fresh and not generation.stopping:
            yield from evaluate_alone_if_missed(node)

    def _hand_over(self, generation: Generation) -> Steps[dict[str, Any]]:
        """Give all members the model with which they continue, as steps. Returns the fields about it for the
        generation's record."""
        node = self._node
        if generation.merging:
            node.doing = "merging models"
            others = {*generation.members} - generation.fresh
            weight = self._work.work_since_separation(others, node.config.merge_weights)
            share = yield from merge_models(node, generation.fresh, weight, "generation/merge")
            return {"merged": {"weight": weight, "share": share}}
        if generation.fresh:
            node.doing = "getting a model" if node.uid in generation.fresh else "giving a model"
            yield from give_models(node, generation.fresh, "generation/model")
        return {}

    def _advance_to(self, first_round: int, generation: Generation) -> Steps[None]:
        """Advance the node to the first round of the generation, as steps, if it has to be there under its schedule."""
        node = self._node
        if node.uid in generation.fresh:
            if node.checkpoints is not None:
                node.checkpoints.restore_own_checkpoint(first_round)
            skip_training(node, first_round)
            node.communication.mark_caught_up()
            node.round = first_round
        elif generation.merging and not generation.stopping:
            if node.round < first_round:
                skip_training(node, first_round)  # the merged model contains the other side's rounds
                node.round = first_round
        elif not (self._rules.schedule.asynchronous or generation.stopping):
            yield from self._catch_up(first_round)

    def _catch_up(self, first_round: int) -> Steps[None]:
        """Make the missing rounds up to the generation's first round, which is that of its most advanced member, as
        steps. The others have made these rounds in the previous generation, so that this node has nobody to exchange
        payloads with: its row of W is that of the identity. The guarantees of a sharing rule hold from the generation's
        first round on, in which all rules start anew.

        With star rules, the missing rounds are skipped: a client that receives nothing from the server does not train,
        and a server without answers takes no step."""
        node = self._node
        if node.round >= first_round or node.makes_no_more():
            return
        if node.sharing.requirements.star:
            for round in range(node.round, first_round):
                node.training.rest(round)
            node.round = first_round
            return
        last_round = first_round - 1
        rounds = f"round {node.round}" if node.round == last_round else f"rounds {node.round} to {last_round}"
        logger.info("makes %s alone, as others are ahead", rounds)
        self._rules.renew(node.generation)
        only_this_node = replace(node.generation, members=(node.uid,))
        while node.round < first_round and not node.makes_no_more():
            yield from node.make_round(only_this_node)

    def _report_graphs(self, generation: Generation) -> None:
        """Report what the graphs lack without the absent nodes, for any rule and for this one."""
        node, graphs = self._node, [each.graph for each in self._rules.fragments]
        where = {"generation": generation.number, "round": node.round, "time": clock.recorded()}
        needed = node.sharing.requirements.min_neighbors
        if lacking := lacking_neighbors(graphs, generation.members, needed):
            node.record({"kind": "lacking", **where, "nodes": lacking, "needed": needed})
        if objection := next(filter(None, (node.sharing.objection(each, generation.members) for each in graphs)), ""):
            node.record({"kind": "objection", **where, "reason": objection})
            logger.warning("without the absent nodes, the sharing rule %s", objection)
        for disconnected in disconnected_graphs(graphs, generation.members):
            node.record({"kind": "apart", **where, **asdict(disconnected)})
            node.communication.counters.on_event("apart", None, str(disconnected))
            logger.warning("%s", disconnected)
