"""The table of changes of stage: complete, exactly what happens, and what the documentation shows."""

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


def recording(seen: set[tuple[Stage, Cause]]) -> type[Membership]:
    """A membership that notes every change, and whose stage changes through the table alone."""

    class Recording(Membership):
        _changing = True

        def __init__(self, *values: object, **more: object) -> None:
            super().__init__(*values, **more)  # type: ignore[arg-type]
            self._changing = False

        def change(self, cause: Cause) -> None:
            seen.add((self.stage, cause))
            self._changing = True
            super().change(cause)
            self._changing = False

        def __setattr__(self, name: str, value: object) -> None:
            assert name != "stage" or self._changing, "the stage was set past the table"
            super().__setattr__(name, value)

    return Recording


def test_every_stage_and_cause_is_described_and_used() -> None:
    assert TRANSITIONS.keys() == STAGES.keys()
    assert {cause for row in TRANSITIONS.values() for cause in row} == CAUSES.keys()
    assert {stage for row in TRANSITIONS.values() for stage in row.values()} == STAGES.keys()


@pytest.mark.parametrize(("stage", "cause"), [pair for pair in product(STAGES, CAUSES) if pair not in ROWS])
def test_a_change_that_is_not_in_the_table_is_our_own_fault(stage: Stage, cause: Cause) -> None:
    with pytest.raises(AssertionError, match=f"no change of stage from {stage} by {cause}"):
        next_stage(stage, cause)


@pytest.mark.slow
def test_every_row_of_the_table_happens_and_nothing_else() -> None:
    """Random schedules go through all rows but three, which are made by hand; no schedule leaves the table."""
    seen: set[tuple[Stage, Cause]] = set()
    membership = recording(seen)
    assert [wrong for seed in range(150) if (wrong := run_schedule(seed, membership))] == []

    limits = Limits(SUSPECT, 20.0, 2)
    # counts who left when it proposes, but that is too few for a round
    alone = membership(0, 3, limits, draw=os.urandom, run=RUN)
    alone.left = {2}
    alone.suspect([1], 0.0)
    assert alone.stage == "short"

    leading = membership(0, 3, limits, draw=os.urandom, run=RUN)
    leading.suspect([2], 0.0)
    for _ in leading.outbox[:1]:
        promise = membership(1, 3, limits, draw=os.urandom, run=RUN)
        promise.receive(leading.outbox[0][1], 0.0)
        leading.receive(promise.outbox[0][1], 0.0)
    assert leading.stage == "committing"
    for _ in range(2):
        leading.leave(0.0, "started again")
        assert leading.stage == "outside"

    assert seen == set(ROWS)


def test_a_request_for_another_generation_ends_this_one_and_a_leader_is_found() -> None:
    """Two causes at once are two changes: the generation is over, then the lowest uid leads."""
    seen: set[tuple[Stage, Cause]] = set()
    world = World(3)
    world.replace_memberships(recording(seen))
    world.deliver(0, Suspect(RUN, 0, 2, b"\x00", 0))
    assert {("steady", "generation over"), ("suspecting", "new leader"), ("suspecting", "proposes")} <= seen


def rows_of(page: str, heads: list[str]) -> Iterator[list[str]]:
    """The rows of the list-table with these heads, a blank between the lines of a cell."""
    for table in re.findall(r"\.\. list-table::\n(?:   .*\n|\n)+", page):
        rows = [re.split(r"\n     - ", row) for row in re.split(r"\n   \* - ", table)[1:]]
        cells = [[" ".join(cell.split()) for cell in row] for row in rows]
        if cells[0] == heads:
            yield from cells[1:]


def test_the_page_shows_the_table() -> None:
    page = PAGE.read_text()
    assert {row[0]: row[1] for row in rows_of(page, ["stage", "meaning"])} == STAGES
    assert {row[0]: row[1] for row in rows_of(page, ["cause", "meaning"])} == CAUSES
    shown = {tuple(row[:2]): row[2] for row in rows_of(page, ["stage", "cause", "next stage"])}
    assert shown == {(stage, cause): TRANSITIONS[stage][cause] for stage, cause in ROWS}
