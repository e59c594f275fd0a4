"""The section `node.checkpoint`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from decentnode.config.component import Settings

FIGURE = re.compile(r"\w+_(mean|merged)|consensus_(distance|rms)")
"""Figures of an evaluation that are the same on all nodes."""


class BestConfig(Settings):
    """Which checkpoint is kept as the best."""

    figure: str
    """A figure of the evaluations that is the same on all nodes: `<metric>_mean` over the nodes, `<metric>_merged` of
    the merged model, `consensus_distance` or `consensus_rms`."""
    better: Literal["higher", "lower"] | None = None
    """Which values are better. Default: as the metric says; lower ones for consensus_distance and consensus_rms."""

    @pydantic.field_validator("figure")
    @classmethod
    def _alike(cls, value: str) -> str:
        if not FIGURE.fullmatch(value):
            raise ValueError("must be <metric>_mean, <metric>_merged, consensus_distance or consensus_rms, which all "
                             "nodes have alike")  # fmt: skip
        return value

    @property
    def metric(self) -> str:
        """The task's metric to which the figure belongs; "" for the distances to consensus."""
        found = re.fullmatch(r"(\w+)_(mean|merged)", self.figure)
        return found[1] if found else ""


def of_figure(value: Any) -> Any:
    """Returns the section for a figure that is given only by its name."""
    return {"figure": value} if isinstance(value, str) else value


class CheckpointConfig(Settings):
    """What a node keeps of itself, so that its run can be resumed (docs/howto/resume.rst)."""

    every: int | None = Field(None, ge=1)
    """Rounds between two checkpoints; with an asynchronous schedule, rounds of the node with the lowest uid."""
    minutes: float | None = Field(None, gt=0)
    """Minutes between two checkpoints, instead of or in addition to `every`: when they have passed, the node with the
    lowest uid announces a coming round to all."""
    keep: int = Field(2, ge=1)
    """How many checkpoints a node keeps, the newest ones; older ones are also kept until all nodes have written a newer
    one."""
    best: Annotated[
        BestConfig, pydantic.BeforeValidator(of_figure, json_schema_input_type=BestConfig | str)
    ] | None = None
    """Additionally keep the checkpoint with the best evaluation by this figure: its name, or {figure: ..., better:
    ...}."""
    recent: int = Field(20, ge=0)
    """With `missing: regroup`: a returning node continues from its own newest checkpoint if that is at most this many
    rounds older than the round from which the others continue, else from the mean of their models. 0: always from the
    mean."""
