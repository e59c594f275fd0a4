"""Holds the sharing rules of a node and what depends on them: the schedule, and the views of the graph in each
round."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from decentnode.communication.base import Communication
from decentnode.graph.base import RoundView
from decentnode.node.config import NodeConfig
from decentnode.node.schedules.fragment_exchange import FragmentExchange
from decentnode.node.schedules.plan import Planners
from decentnode.node.schedules.schedules import payload_schema, schedule_of
from decentnode.sharing.base import Sharing
from decentnode.sharing.fragments import Fragment
from decentnode.training.base import Training
from decentnode.wire.generation import Generation

Rules = Sharing | Sequence[Sharing]
"""One sharing rule for the whole model, or one per fragment."""


class NodeRules:
    """The sharing rules in force and their schedule, which are replaced in every membership generation."""

    def __init__(
        self, uid: int, config: NodeConfig, rules: Rules, training: Training, communication: Communication,
        fragments: tuple[Fragment, ...], *, seed: int, renew: Callable[[], Rules] | None, buffers: Fragment | None,
    ) -> None:
        """rules: the sharing rules in their initial state; `renew` creates further ones like them. fragments: the
        fragments of the parameters, at least one. buffers: as for `Planners`."""
        self.fragments = fragments
        self._uid, self._config, self._training, self._communication = uid, config, training, communication
        self._seed, self._buffers, self._renew = seed, buffers, renew
        self.lost: set[int] = set()
        """Nodes that were members since the rules were created and lost their state, including those that came back
        without it."""
        self._install(rules)

    @property
    def sharing(self) -> Sharing:
        """The sharing rule of the first fragment; the rules of the other fragments have the same requirements."""
        return self.schedule.sharing

    def _install(self, sharing: Rules) -> None:
        config, training, communication = self._config, self._training, self._communication
        rules = (sharing,) if isinstance(sharing, Sharing) else tuple(sharing)
        for rule in rules:
            rule.set_samples(training.num_samples)
        num_fragments, groups = len(self.fragments), config.missing == "fail"
        fragments_and_rules = list(zip(self.fragments, rules, strict=True))
        self._planners = Planners(
            self._uid, self._seed, fragments_and_rules, buffers=self._buffers, averaging_groups=groups
        )
        self.schedule = schedule_of(config.schedule, rules[0])(
            training, [FragmentExchange(*pair, communication, num_fragments=num_fragments, averaging_groups=groups)
                       for pair in fragments_and_rules],
            communication, averaging_groups=groups, in_background=config.mix_in_background,
            averages_buffers=config.buffers == "average", asynchronous=config.asynchronous,
        )  # fmt: skip
        if config.training_rounds is not None:
            self.schedule.trains_in = functools.partial(config.training_rounds.trains, self._seed, self._uid)

    def renew(self, generation: Generation) -> None:
        """Replace the rules with new ones, which keep only the state that outlives a membership generation. generation:
        the one that begins."""
        assert self._renew is not None
        old_schedule, created = self.schedule, self._renew()
        rules = (created,) if isinstance(created, Sharing) else created
        for rule, part in zip(rules, self.fragments, strict=True):  # a payload may arrive before the rule has sent one
            payload_schema(self._config.schedule, rule, part.elements, self._training.model.dtype)
        self._install(rules)
        self.schedule.cuts = old_schedule.cuts
        self.schedule.succeed(old_schedule, generation, frozenset(self.lost))
        self.lost.clear()
        for fragment, before in zip(self.schedule.fragments, old_schedule.fragments, strict=True):
            fragment.rule.succeed(before.rule)

    def views(self, round: int, among: Generation) -> tuple[list[list[RoundView]], RoundView]:
        """Returns what `Planners.views` returns for the current learning rate."""
        return self._planners.views(round, among, self._training.learning_rate)

    def trains_in(self, round: int, among: Generation) -> bool:
        """Returns whether the node makes local steps in a round, if nothing is lost."""
        if not self.sharing.requirements.star:
            return self.schedule.trains_in(round)
        return self.sharing.is_chosen(self._planners.of_fragments[0].graph_view(round, among))

    def weights_in(self, among: Generation, round: int) -> Mapping[int, float]:
        """Returns the node's row of the mixing matrix W in a round, for the first fragment and phase."""
        (view, *_), *_ = self.views(round, among)[0]
        return view.weights

    def neighbors_from(self, round: int, among: Generation) -> set[int]:
        """Returns what `Planners.neighbors_from` returns for the current learning rate."""
        return self._planners.neighbors_from(round, among, self._training.learning_rate)

    def rules_at(self, round: int, among: Generation) -> list[tuple[Sharing, Tensor, RoundView]]:
        """Returns the rules, each with its part of the model and its view of the round's first phase."""
        views, _ = self.views(round, among)
        model = self._training.model.parameters
        return [(fragment.rule, fragment.part(model), view)
                for fragment, (view, *_) in zip(self.schedule.fragments, views, strict=True)]  # fmt: skip

    def state_dict(self) -> list[dict[str, Any]]:
        """Returns copies of the state that each fragment's rule and exchange keep between rounds, followed by the
        schedule's own state if it has any."""
        own = self.schedule.state_dict()
        return [*(fragment.state_dict() for fragment in self.schedule.fragments), *([own] if own else [])]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Restores what `state_dict` returned. Raises ValueError if the state belongs to other rules or fragments."""
        num_fragments = len(self.schedule.fragments)
        for fragment, each in zip(self.schedule.fragments, state[:num_fragments], strict=True):
            fragment.load_state_dict(each)
        for each in state[num_fragments:]:
            self.schedule.load_state_dict(each)
