"""Thousands of random schedules of faults; and that they find what they are there for, when it is put back."""

from __future__ import annotations

from typing import Any

import pytest

from decentnode.wire.generation import Generation, Name
from decentnode.wire.membership import Membership
from decentnode.wire.messages import NO_ORIGIN, Bye
from tests.conftest import scale
from tests.wire.swarm import shard, survive

SHARDS, SCHEDULES = scale(2, 20), scale(200, 1000)


@pytest.mark.parametrize("number", range(SHARDS))
@pytest.mark.slow
def test_at_most_one_generation_is_in_force_and_all_that_live_agree_in_the_end(number: int) -> None:
    assert shard(number * SCHEDULES, SCHEDULES) == []


@pytest.mark.parametrize("seed", [157504, 167679])
def test_schedules_that_failed_once(seed: int) -> None:
    assert survive(seed) == ""


class CountsDeparted(Membership):
    """Whoever said goodbye counts toward the majority, whenever that was."""

    def is_finished(self) -> bool:
        return True

    def enough(self, generation: Generation) -> bool:
        return generation.stopping or len({*generation.members} | self.left) >= self.limits.min_nodes


class Forgets(CountsDeparted):
    """What is heard of failures while something else is promised is forgotten: the goodbye that follows counts."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        known = self._succession.suspect

        def suspect(uids: set[int], now: float, reason: str = "", dead: bool = False) -> None:
            known(uids, now, reason, dead and self.stage not in ("promised", "committed"))

        self._succession.suspect = suspect  # type: ignore[method-assign]

    def is_finished(self) -> bool:
        return super(CountsDeparted, self).is_finished() or self.stage in ("promised", "committed")

    def _on_bye(self, bye: Bye, now: float) -> None:
        if self.stage in ("promised", "committed"):
            self.left.add(bye.source)
        else:
            super()._on_bye(bye, now)


class NamesRepeat(Membership):
    """A generation is its number."""

    def new_name(self, number: int) -> Name:
        return number, NO_ORIGIN

    @staticmethod
    def may_propose(proposer: int, name: Name) -> bool:
        return True


@pytest.mark.parametrize(
    ("fault", "what"),
    [(CountsDeparted, "too few go on"), (Forgets, "too few go on"), (NamesRepeat, "two generations of one name")],
)
@pytest.mark.slow
def test_the_schedules_find_what_was_wrong_once(fault: type[Membership], what: str) -> None:
    found = (wrong for seed in range(5000) if (wrong := survive(seed, fault)))
    assert any(what in wrong for wrong in found)
