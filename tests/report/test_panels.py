"""A column of panels has one label, and so one unit and one range."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from decentnode.report import plots

matplotlib = pytest.importorskip("matplotlib")


def test_a_column_has_one_unit_and_one_range() -> None:
    """A failed run whose losses go on for longer than its evaluations."""
    from matplotlib.figure import Figure

    ends = {"loss": 9.8e6, "accuracy": 0.0}

    def series(metric: str, axis: str, merged: bool = False) -> Any:
        x = [0.0, ends[metric]] if axis == "bytes" else [0.0, ends[metric] / 1e6]
        return SimpleNamespace(x=x, mean=[1.0, 0.5], low=[0.9, 0.4], high=[1.1, 0.6])

    line: Any = SimpleNamespace(label="a", runs=[0], series=series)
    curve: Any = SimpleNamespace(label="", spread=False, merged=False, logarithmic=False)
    panels = Figure().subplots(2, 2, squeeze=False)
    plots._panels(panels, [line], {"loss": curve, "accuracy": curve}, ["rounds", "bytes"])
    for column, most in ((0, 9.8), (1, 9.8)):
        assert [panel.get_xlim() for panel in panels[:, column]] == [(0, pytest.approx(1.02 * most))] * 2
    assert panels[1][1].get_xlabel().endswith("(MB)") and not panels[0][1].get_xlabel()
    assert panels[0][1].lines[0].get_xdata()[-1] == pytest.approx(9.8)
    assert all(float(tick).is_integer() for tick in panels[1][0].get_xticks())
