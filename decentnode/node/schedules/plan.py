"""Makes the views that a sharing rule gets of each of its turns: the graph's edges of the exchange, as the rule plans
them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace

from decentnode.graph.base import RoundView, averaging_group_of
from decentnode.sharing.base import Sharing
from decentnode.sharing.fragments import Fragment
from decentnode.sharing.rounds import exchange_rounds, rule_view
from decentnode.wire.generation import Generation

DEPARTURE_LOOKAHEAD = 16
"""The number of upcoming exchanges whose neighbors are told of this node's departure."""


class Planner:
    """Makes the views of one fragment's turns, for one node and one rule."""

    def __init__(self, uid: int, seed: int, fragment: Fragment, rule: Sharing, *, averaging_groups: bool) -> None:
        """averaging_groups: whether views contain the group of nodes that average as a whole."""
        self.fragment, self.rule = fragment, rule
        self._uid, self._seed = uid, seed
        self._graph = fragment.graph
        self._averaging_groups = averaging_groups
        self._members: tuple[tuple[int, ...], frozenset[int] | None] = (), None
        self._last_view: RoundView | None = None
        self._last_group: tuple[tuple[int, tuple[int, ...]], tuple[int, ...]] | None = None

    def views(self, round: int, generation: Generation, lr: float) -> list[RoundView]:
        """Returns a view for each phase of the turn that `round` belongs to, followed by the view of the float buffers,
        which is the rule's view if it has one phase, else that of `Sharing.plan_buffers`.

        All views are known before the first phase sends (H2 in communication/path.py). lr: the learning rate of the
        round's local steps.
        """
        rule, member_set = self.rule, self._member_set(generation.members)
        graph_view = self.graph_view(self.fragment.turn(round), generation, lr)
        views = [rule.plan(replace(graph_view, phase=phase) if phase else graph_view)
                 for phase in range(rule.requirements.phases)]  # fmt: skip
        views.append(views[0] if len(views) == 1 else rule.plan_buffers(graph_view))
        return views if member_set is None else [view.among(member_set) for view in views]

    def _member_set(self, members: tuple[int, ...]) -> frozenset[int] | None:
        """Returns the members of a generation as a set, or None if all nodes are members. The set is made once: a
        lookup in a tuple of thousands takes as long as everything else that a view costs."""
        if self._members[0] is not members:
            # with newcomers, there may be as many members as nodes though not all nodes are members
            all_are_members = members == tuple(range(self._graph.num_nodes))
            self._members = members, None if all_are_members else frozenset(members)
        return self._members[1]

    def graph_view(self, turn: int, generation: Generation, lr: float = 1.0) -> RoundView:
        """Returns the graph's view of a turn. For a static graph it is computed once per generation."""
        members = generation.members
        member_set = self._member_set(members)
        exchange_number = self.rule.exchange_number(turn)
        last = self._last_view
        is_cached = last is not None and last.generation == generation.number and self._graph.period == 1
        if exchange_number is not None and last is not None and is_cached:
            return replace(last, round=turn, lr=lr, extra={})
        group = () if exchange_number is None else self._averaging_group(exchange_number, members, member_set)
        graph_view = replace(rule_view(self.rule, self._graph, self._uid, turn, self._seed, member_set),
                             averaging_group=group, generation=generation.number, fragment=self.fragment.index,
                             lr=lr)  # fmt: skip
        if exchange_number is not None:
            self._last_view = graph_view
        return graph_view

    def _averaging_group(
        self, exchange_number: int, members: tuple[int, ...], member_set: frozenset[int] | None
    ) -> tuple[int, ...]:
        """Returns the group of nodes that average as a whole in this exchange; empty if averaging groups are disabled.
        Cached for consecutive exchanges with the same position in the graph's period and the same members."""
        period = self._graph.period
        key = (exchange_number if period is None else exchange_number % period, members)
        if not self._averaging_groups:
            return ()
        if self._last_group is None or self._last_group[0] != key:
            self._last_group = key, averaging_group_of(self._graph, self._uid, exchange_number, member_set)
        return self._last_group[1]

    def neighbors_from(self, round: int, generation: Generation, lr: float) -> Collection[int]:
        """Returns the nodes to which this node would send in the next exchanges, from `round` on."""
        turns = exchange_rounds(self.rule, self.fragment.turn(round))
        next_turns = itertools.islice(turns, min(self._graph.period or DEPARTURE_LOOKAHEAD, DEPARTURE_LOOKAHEAD))
        return {uid for turn in next_turns for view in self.views(self.fragment.round_of(turn), generation, lr)
                for uid in view.neighbors}  # fmt: skip


class Planners:
    """The planners of all fragments of one node and of its float buffers."""

    def __init__(
        self, uid: int, seed: int, fragments: Sequence[tuple[Fragment, Sharing]], *, buffers: Fragment | None,
        averaging_groups: bool,
    ) -> None:
        """fragments: the fragments, each with its rule. buffers: the fragment over whose graph float buffers are
        averaged in every round; None: that of the first fragment. averaging_groups: as for `Planner`."""
        self.of_fragments = [Planner(uid, seed, *each, averaging_groups=averaging_groups) for each in fragments]
        self._of_buffers = (
            self.of_fragments[0] if buffers is None
            else Planner(uid, seed, buffers, fragments[0][1], averaging_groups=averaging_groups)
        )

    def views(self, round: int, generation: Generation, lr: float) -> tuple[list[list[RoundView]], RoundView]:
        """Returns the views of the phases of each fragment's turn, and the view of the float buffers; as
        `Planner.views`."""
        views = [planner.views(round, generation, lr) for planner in self.of_fragments]
        with_first = self._of_buffers is self.of_fragments[0]
        buffers = views[0] if with_first else self._of_buffers.views(round, generation, lr)
        return [each[:-1] for each in views], buffers[-1]

    def neighbors_from(self, round: int, generation: Generation, lr: float) -> set[int]:
        """Returns what `Planner.neighbors_from` returns, for the exchanges of all fragments and of the float
        buffers."""
        return {uid for planner in {*self.of_fragments, self._of_buffers}
                for uid in planner.neighbors_from(round, generation, lr)}  # fmt: skip
