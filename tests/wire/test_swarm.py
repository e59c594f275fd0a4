"""Random schedules of faults violate no invariant, and find known defects when these are put back into the code."""

from __future__ import annotations

from typing import Any

import pytest

from decentnode.wire.generation import Generation, Name
from decentnode.wire.membership import Membership
from decentnode.wire.messages import NO_ORIGIN, Bye
from tests.conftest import scale
from tests.wire.swarm import find_failures, run_schedule

SHARDS, SCHEDULES = scale(2, 20), scale(200, 1000)


@pytest.mark.parametrize("number", range(SHARDS))
@pytest.mark.slow
def test_at_most_one_generation_is_in_force_and_all_live_nodes_agree_in_the_end(number: int) -> None:
    assert find_failures(number * SCHEDULES, SCHEDULES) == []


@pytest.mark.parametrize("seed", [157504, 167679])
def test_schedules_that_once_failed_pass(seed: int) -> None:
    assert run_schedule(seed) == ""


class CountsEveryGoodbye(Membership):
    """Counts every node that said goodbye toward the majority, also those that left before the last round."""

    def is_finished(self) -> bool:
        return True

    def enough(self, generation: Generation) -> bool:
        return generation.stopping or len({*generation.members} | self.left) >= self.limits.min_nodes


class ForgetsFailures(CountsEveryGoodbye):
    """Forgets the failure of a node that was reported during an agreement, so that the goodbye that follows counts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        original_suspect = self._succession.suspect

        def suspect(uids: set[int], now: float, reason: str = "", dead: bool = False) -> None:
            original_suspect(uids, now, reason, dead and self.stage not in ("promised", "committed"))

        self._succession.suspect = suspect  # type: ignore[method-assign]

    def is_finished(self) -> bool:
        return super(CountsEveryGoodbye, self).is_finished() or self.stage in ("promised", "committed")

    def _on_bye(self, bye: Bye, now: float) -> None:
        if self.stage in ("promised", "committed"):
            self.left.add(bye.source)
        else:
            super()._on_bye(bye, now)


class NamesWithoutOrigin(Membership):
    """Names a generation by its number alone."""

    def new_name(self, number: int) -> Name:
        return number, NO_ORIGIN

    @staticmethod
    def may_propose(proposer: int, name: Name) -> bool:
        return True


@pytest.mark.parametrize(
    ("membership", "violation"),
    [(CountsEveryGoodbye, "too few continue"), (ForgetsFailures, "too few continue"),
     (NamesWithoutOrigin, "two generations of one name")],
)
@pytest.mark.slow
def test_the_schedules_find_a_known_defect(membership: type[Membership], violation: str) -> None:
    failures = (failure for seed in range(5000) if (failure := run_schedule(seed, membership)))
    assert any(violation in failure for failure in failures)
