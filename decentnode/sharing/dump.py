"""What a rule that sends a part of the model says of its choice, for those who study it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from decentnode.config.component import Settings


class DumpConfig(Settings):
    """What nodes write of their choices into nodes/<uid>/dumps/ (docs/howto/dumps.rst)."""

    shared: bool = True
    """The positions of the entries that were sent, and how often each one was in the whole run."""
    scores: bool = False
    """What the entries' scores are made of (their accumulated change, as a rule), and their values; twice the size of
    the model in each file."""
    every: int = Field(1, ge=1)
    """Rounds from one file to the next."""
    nodes: tuple[Annotated[int, Field(ge=0)], ...] | Literal["all"] = (0, 1)
    """The uids of the nodes that write."""
    most_megabytes: float = Field(256.0, gt=0)
    """A node whose files would become larger than this together writes no more of them, and says so."""

    def by(self, uid: int) -> bool:
        """Whether the node writes."""
        return self.nodes == "all" or uid in self.nodes
