"""Tables on narrow terminals."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table

LEAST_OF_WORDS = 8
"""To so many characters a column of words is cut before another column is left out."""


class Fitting:
    """A table that leaves columns out where the console is too narrow for them: numbers that are cut in half say
    nothing."""

    def __init__(self, table: Table, spare: Sequence[str], words: Collection[str] = ()) -> None:
        """spare: headings of the columns that may go, the first of them first. words: those that may be cut."""
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
        """Returns the least width: headings are broken between words, of the rest only `words` are cut."""
        whole = max((console.measure(each).maximum for each in column.cells), default=0)
        heading = max(map(len, str(column.header).split()), default=0)
        return max(heading, min(whole, LEAST_OF_WORDS) if str(column.header) in self._words else whole)
