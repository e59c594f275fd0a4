"""Tables for LaTeX, and p-values as tables show them."""

from __future__ import annotations

import pytest

from decentnode.report.latex import escaped, tabular
from decentnode.report.reading.significance import p_text


@pytest.mark.parametrize("text, expected", [
    ("-3.27 [-4.11, +2.42]", "$-$3.27 [$-$4.11, +2.42]"),
    ("D-PSGD 1e-3", "D-PSGD 1e-3"),
    ("<0.001", "$<$0.001"),
    ("64.2 ±9.5 %_", r"64.2 $\pm$9.5 \%\_"),
])
def test_text_is_escaped(text: str, expected: str) -> None:
    assert escaped(text) == expected


def test_a_row_that_begins_with_a_bracket_is_no_argument_of_the_line_break() -> None:
    rows = tabular([["hidden", "accuracy"], ["[8]", "1"], ["[16]", "2"]], 1).splitlines()
    assert rows[5:7] == [r"{}[8] & 1 \\", r"{}[16] & 2 \\"]


@pytest.mark.parametrize("p, text", [(None, ""), (0.0, "<0.001"),
                                     (0.0009, "<0.001"), (0.001, "0.001"), (1.0, "1.000")])  # fmt: skip
def test_no_p_value_is_shown_as_zero(p: float | None, text: str) -> None:
    assert p_text(p) == text
