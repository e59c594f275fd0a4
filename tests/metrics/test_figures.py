from __future__ import annotations

import pytest

from decentnode.metrics import summary
from decentnode.metrics.figures import BY_NAME, COMPARED, CURVES, FIGURES, PURPOSES


def test_every_figure_has_one_name_a_unit_a_meaning_and_a_place() -> None:
    assert len(BY_NAME) == len(FIGURES)
    assert all(each.unit and each.meaning and each.where for each in FIGURES)
    titles = [each.title for each in FIGURES]
    assert len(set(titles)) == len(titles) and set(COMPARED) <= BY_NAME.keys()
    for each in FIGURES:
        assert ("%" in each.title) == (each.unit == "fraction"), each.name
        assert ("MB" in each.title) == (each.unit == "bytes") == each.name.startswith("bytes_"), each.name
        assert each.scale == (100 if "%" in each.title else 1e-6 if "MB" in each.title else
                              1e3 if "ms/" in each.title else 1), each.name  # fmt: skip
    assert "absolute" in CURVES["consensus_rms"].label and "relative" in CURVES["consensus_distance"].label


def test_the_summary_has_no_figure_that_is_not_in_the_table() -> None:
    found = summary.combine({0: {"uid": 0}})
    assert found.keys() - {"waiting", "nodes"} == {each.name for each in FIGURES if each.of}
    assert {f"bytes_{purpose}_total" for purpose in PURPOSES} <= found.keys()


def test_values_are_shown_as_their_title_says() -> None:
    assert BY_NAME["accuracy_mean"].shown(0.5) == "50.00"
    assert BY_NAME["round_seconds_median"].shown(0.0123) == "12.3"
    assert BY_NAME["bytes_data_total"].combined([{"bytes_data": 3}, {"bytes_data": 4}, {}]) == 7
    assert BY_NAME["bytes_sent_total"].combined([{"bytes_data": 3, "bytes_metadata": 10}]) == 13
    assert BY_NAME["accuracy_mean"].combined([{}]) is None
    assert BY_NAME["loss_mean"].combined([{"loss": 1.0}, {"loss": 2.0}]) == pytest.approx(1.5)
