"""The table of stages of membership: every transition in it happens, no other does, and the documentation shows it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from decentnode.wire.generation import Limits
from decentnode.wire.membership import Membership
from decentnode.wire.membership.stages import CAUSES, STAGES, TRANSITIONS, Cause, Stage, next_stage
from decentnode.wire.messages import Suspect
from tests.wire.swarm import run_schedule
from tests.wire.world import RUN, SUSPECT, World

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "membership.rst"
ROWS = [(stage, cause) for stage, row in TRANSITIONS.items() for cause in row]


def recording_membership(transitions: set[tuple[Stage, Cause]]) -> type[Membership]:
    """Returns a membership class that adds every transition to `transitions`, and fails if its stage is assigned
    directly."""

    class RecordingMembership(Membership):
        _changing = True

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            self._changing = False

        def change(self, cause: Cause) -> None:
            transitions.add((self.stage, cause))
            self._changing = True
            super().change(cause)
            self._changing = False

        def __setattr__(self, name: str, value: object) -> None:
            assert name != "stage" or self._changing, "the stage was assigned without the table of transitions"
            super().__setattr__(name, value)

    return RecordingMembership


def test_every_stage_and_cause_is_described_and_used() -> None:
    assert TRANSITIONS.keys() == STAGES.keys()
    assert {cause for row in TRANSITIONS.values() for cause in row} == CAUSES.keys()
    assert {stage for row in TRANSITIONS.values() for stage in row.values()} == STAGES.keys()


@pytest.mark.parametrize(("stage", "cause"), [pair for pair in product(STAGES, CAUSES) if pair not in ROWS])
def test_a_transition_that_is_not_in_the_table_raises_an_assertion_error(stage: Stage, cause: Cause) -> None:
    with pytest.raises(AssertionError, match=f"no change of stage from {stage} by {cause}"):
        next_stage(stage, cause)


@pytest.mark.slow
def test_exactly_the_transitions_in_the_table_happen() -> None:
    """Random schedules cause all transitions but three, which the test causes by hand."""
    transitions: set[tuple[Stage, Cause]] = set()
    membership = recording_membership(transitions)
    assert [failure for seed in range(150) if (failure := run_schedule(seed, membership))] == []

    limits = Limits(SUSPECT, 20.0, 2)
    # The proposal counts the node that left, but its outcome would be too small for a round
    alone = membership(0, 3, limits, draw=os.urandom, run=RUN)
    alone.left = {2}
    alone.suspect([1], 0.0)
    assert alone.stage == "short"

    leading = membership(0, 3, limits, draw=os.urandom, run=RUN)
    leading.suspect([2], 0.0)
    follower = membership(1, 3, limits, draw=os.urandom, run=RUN)
    follower.receive(leading.outbox[0][1], 0.0)
    leading.receive(follower.outbox[0][1], 0.0)
    assert leading.stage == "committing"
    for _ in range(2):
        leading.leave(0.0, "started again")
        assert leading.stage == "outside"

    assert transitions == set(ROWS)


def test_a_request_for_another_generation_ends_this_one_and_the_lowest_uid_leads() -> None:
    """Two causes at once are two transitions: the generation is over, and there is a new leader."""
    transitions: set[tuple[Stage, Cause]] = set()
    world = World(3)
    world.replace_memberships(recording_membership(transitions))
    world.deliver(0, Suspect(RUN, 0, 2, b"\x00", 0))
    expected = {("steady", "generation over"), ("suspecting", "new leader"), ("suspecting", "proposes")}
    assert expected <= transitions


def table_rows(page: str, header: list[str]) -> Iterator[list[str]]:
    """Yields the rows of the list-tables with this header. The lines of a cell are joined with blanks."""
    for table in re.findall(r"\.\. list-table::\n(?:   .*\n|\n)+", page):
        rows = [re.split(r"\n     - ", row) for row in re.split(r"\n   \* - ", table)[1:]]
        cells = [[" ".join(cell.split()) for cell in row] for row in rows]
        if cells[0] == header:
            yield from cells[1:]


def test_the_documentation_shows_the_stages_causes_and_transitions() -> None:
    page = PAGE.read_text()
    assert {row[0]: row[1] for row in table_rows(page, ["stage", "meaning"])} == STAGES
    assert {row[0]: row[1] for row in table_rows(page, ["cause", "meaning"])} == CAUSES
    shown = {tuple(row[:2]): row[2] for row in table_rows(page, ["stage", "cause", "next stage"])}
    assert shown == {(stage, cause): TRANSITIONS[stage][cause] for stage, cause in ROWS}
