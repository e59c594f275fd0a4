"""Presence in shared memory: which ranks of a host still take part."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parallel.ranks import outcomes_of_ranks, run_ranks
from tests.parallel.work import leaving


@pytest.mark.sampled(one=["how", "message"])
@pytest.mark.parametrize(("how", "message"), [
    ("stays", "^$"), ("closed", "rank 1 has ended its training after 4 steps"),
    ("forgotten", "rank 1 has ended its training after 4 steps"), ("forgotten by a child", "^$"),
])  # fmt: skip
def test_a_rank_counts_as_absent_once_its_own_process_has_closed_its_presence(
    how: str, message: str, tmp_path: Path
) -> None:
    assert re.search(message, run_ranks(2, leaving.leave_and_ask_presence, how, str(tmp_path))[0])


@pytest.mark.sampled(one=["ended", "killed"])
@pytest.mark.parametrize(("ended", "killed", "message"), [
    ((4, 0), (5, 0), "rank 1 has ended its training after 4 steps"),
    ((5, 0), (4, 0), "the process of rank 2 is gone, after 4 steps"),
    ((4, 1), (4, 0), "the process of rank 2 is gone, after 4 steps"),
])  # fmt: skip
def test_of_a_rank_that_ended_and_one_that_was_killed_the_one_that_came_least_far_is_named(
    ended: tuple[int, int], killed: tuple[int, int], message: str, tmp_path: Path
) -> None:
    progress = {0: (6, 1), 1: ended, 2: killed}
    text = outcomes_of_ranks(3, leaving.end_and_kill, str(tmp_path), progress)[0][1]
    assert re.match(f"rank 0: PeerLost: {message}", text), text
