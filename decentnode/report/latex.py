"""Escapes text for LaTeX and makes tables with the package booktabs."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

_SPECIAL = {"\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%",
            "_": r"\_", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": "$<$", ">": "$>$"}  # fmt: skip
_MINUS = re.compile(r"(?<!\w)-(?=[\d.])")


def escaped(text: str) -> str:
    """Returns text with the special characters of LaTeX escaped, and with minus signs instead of hyphens before
    numbers."""
    found = "".join(_SPECIAL.get(character, character) for character in text).replace("±", r"$\pm$")
    return _MINUS.sub("$-$", found)


def tabular(cells: Sequence[Sequence[str]], left: int, bold: Collection[tuple[int, int]] = ()) -> str:
    """Returns a tabular. cells: the headings, then the rows, as plain text. left: how many of the first columns are
    aligned left. bold: (row below the headings, column)."""
    columns = "l" * left + "r" * (len(cells[0]) - left)
    lines = [r"% \usepackage{booktabs}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule",
             " & ".join(map(escaped, cells[0])) + r" \\", r"\midrule"]  # fmt: skip
    for row, line in enumerate(cells[1:]):
        shown = [rf"\textbf{{{escaped(cell)}}}" if (row, column) in bold else escaped(cell)
                 for column, cell in enumerate(line)]  # fmt: skip
        protected = "{}" if shown[0][:1] in ("[", "*") else ""  # or LaTeX reads it as an argument of the \\ before it
        lines.append(protected + " & ".join(shown) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])
