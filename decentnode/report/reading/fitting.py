"""Fits tables to narrow terminals."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table

LEAST_OF_WORDS = 8
"""A column of words is cut to this many characters before a whole column is left out."""


class Fitting:
    """A table that leaves out columns if the console is too narrow: numbers that are cut in half would be useless."""

    def __init__(self, table: Table, spare: Sequence[str], words: Collection[str] = ()) -> None:
        """spare: headings of the columns that may be left out, in this order. words: headings of the columns that may
        be cut."""
        self._table, self._spare, self._words = table, spare, words

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table, columns, room = self._table, [*self._table.columns], options.max_width
        between = table.padding[1] + table.padding[3]
        needs = {str(each.header): self._need(console, each) for each in columns}
        for heading in self._spare:
            if sum(needs[str(each.header)] + between for each in columns) <= room:
                break
            columns = [each for each in columns if str(each.header) != heading]
        left = max(0, room - sum(needs[str(each.header)] + between for each in columns))
        made = Table(box=table.box, padding=table.padding, pad_edge=table.pad_edge, header_style=table.header_style)
        for each in columns:
            need = needs[str(each.header)]
            more = min(left, max(0, max(console.measure(one).maximum for one in (each.header, *each.cells)) - need))
            made.add_column(each.header, justify=each.justify, no_wrap=each.no_wrap, width=need + more)
            left -= more
        for row in zip(*(each.cells for each in columns), strict=True):
            made.add_row(*row)
        yield made

    def _need(self, console: Console, column: Column) -> int:
        """Returns the minimum width: headings are wrapped between words; of the cells only those of `words` are cut."""
        whole = max((console.measure(each).maximum for each in column.cells), default=0)
        heading = max(map(len, str(column.header).split()), default=0)
        return max(heading, min(whole, LEAST_OF_WORDS) if str(column.header) in self._words else whole)
