"""Tables on narrow terminals: columns are left out, numbers are never truncated."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from decentnode.report.reading.progress import RunProgress
from decentnode.report.reading.run_status import COLUMNS, table
from decentnode.report.table import live_table


def render_text(made: Any, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, legacy_windows=False).print(made)
    assert all(len(line) <= width for line in out.getvalue().splitlines())
    return out.getvalue()


@pytest.mark.parametrize(("width", "gone"), [(80, 0), (60, 2), (40, 4)])
def test_a_narrow_live_table_drops_columns_and_truncates_no_number(width: int, gone: int) -> None:
    state = RunProgress.of(1000, range(3))
    for uid in range(3):
        state.update(uid, {"kind": "round", "round": 119, "loss": 1.23456, "data_bytes_sent": 129_345, "seconds": 0.277,
                           "wait_seconds": 0.02, "waited_for": 1})  # fmt: skip
        state.update(uid, {"kind": "evaluation", "round": 120, "accuracy": 0.438})
    text = render_text(live_table(state, 12.0, "", 10), width)
    assert "…" not in text and text.count("0.438 (120)") == 3 and text.count(" 120 ") >= 3
    heads = ("longest", "waiting", "time", "loss", "sent")
    assert [head in text for head in heads] == [False] * gone + [True] * (len(heads) - gone), text


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("width", [100, 60, 40])
def test_a_narrow_status_table_truncates_no_number(width: int, edges: bool) -> None:
    edge = {"sent": 129_345_678, "received": 1_293_456, "chunks": 1234, "resends": 0, "wait_seconds": 0.131}
    status = {"doing": "waiting for the neighbors", "time": 9e12, "pid": 1, "round": 60, "rounds": 1000, "faults": {},
              "waiting_for": [1, 2, 3, 4], "waiting_seconds": 3.2, "edges": {"1": edge, "2": edge}}  # fmt: skip
    text = render_text(table({0: status, 1: status}, edges), width)
    assert text.count("60/1000") == 2 and text.count("3.2 s") == 2
    assert text.count("258.7 MB") == 2 and (not edges or text.count("131 ms") == 4), text
    if width == 100:
        assert all(each in text for each in COLUMNS if each not in ("chunks", "since"))
