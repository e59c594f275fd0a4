"""Presence in shared memory: which ranks of a host still take part."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parallel.ranks import run_ranks
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
