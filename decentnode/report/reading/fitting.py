"""Fits tables to narrow terminals."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table

MIN_WORDS_WIDTH = 8
"""A column of words is cut to this many characters before a whole column is left out."""


class FittingTable:
    """A table that leaves out columns if the console is too narrow: numbers that are cut in half would be useless."""

    def __init__(self, table: Table, spare: Sequence[str], words: Collection[str] = ()) -> None:
        """spare: headings of the columns that may be left out, in this order. words: headings of the columns that may
        be cut."""
        self._table, self._spare, self._words = table, spare, words

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table, columns, room = self._table, [*self._table.columns], options.max_width
        between = table.padding[1] + table.padding[3]
        min_widths = {str(each.header): self._min_width(console, each) for each in columns}
        for heading in self._spare:
            if sum(min_widths[str(each.header)] + between for each in columns) <= room:
                break
            columns = [each for each in columns if str(each.header) != heading]
        unused = max(0, room - sum(min_widths[str(each.header)] + between for each in columns))
        fitted = Table(box=table.box, padding=table.padding, pad_edge=table.pad_edge, header_style=table.header_style)
        for each in columns:
            min_width = min_widths[str(each.header)]
            full_width = max(console.measure(one).maximum for one in (each.header, *each.cells))
            extra = min(unused, max(0, full_width - min_width))
            fitted.add_column(each.header, justify=each.justify, no_wrap=each.no_wrap, width=min_width + extra)
            unused -= extra
        for row in zip(*(each.cells for each in columns), strict=True):
            fitted.add_row(*row)
        yield fitted

    def _min_width(self, console: Console, column: Column) -> int:
        """Returns the minimum width: headings are wrapped between words; of the cells only those of `words` are cut."""
        cell_width = max((console.measure(each).maximum for each in column.cells), default=0)
        heading = max(map(len, str(column.header).split()), default=0)
        return max(heading, min(cell_width, MIN_WORDS_WIDTH) if str(column.header) in self._words else cell_width)
