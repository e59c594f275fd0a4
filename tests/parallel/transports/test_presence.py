"""Which ranks of a host still take part."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parallel.ranks import run_ranks
from tests.parallel.work import leaving


@pytest.mark.sampled(one=["how", "says"])
@pytest.mark.parametrize(("how", "says"), [
    ("stays", "^$"), ("closed", "rank 1 has ended its training after 4 steps"),
    ("forgotten", "rank 1 has ended its training after 4 steps"), ("forgotten by a child", "^$"),
])  # fmt: skip
def test_only_a_process_that_is_gone_is_called_so(how: str, says: str, tmp_path: Path) -> None:
    assert re.search(says, run_ranks(2, leaving.present, how, str(tmp_path))[0])
