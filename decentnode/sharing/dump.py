"""The `dump:` section of rules that send a part of the model: writes what they chose, for studies."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from decentnode.config.component import Settings


class DumpConfig(Settings):
    """What nodes write about their choices to nodes/<uid>/dumps/ (docs/howto/dumps.rst)."""

    shared: bool = True
    """Write the positions of the entries that were sent, and how often each entry was sent in the whole run."""
    scores: bool = False
    """Also write what the entries' scores are computed from (usually their accumulated change), and the scores; twice
    the size of the model in each file."""
    every: int = Field(1, ge=1)
    """Rounds between two files."""
    nodes: tuple[Annotated[int, Field(ge=0)], ...] | Literal["all"] = (0, 1)
    """Uids of the nodes that write dumps."""
    most_megabytes: float = Field(256.0, gt=0)
    """A node whose files together would exceed this size stops writing dumps, and says so."""

    def by(self, uid: int) -> bool:
        """Returns whether a node writes dumps."""
        return self.nodes == "all" or uid in self.nodes
