"""The `node.asynchronous:` section of an experiment."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from decentnode.config.component import ADDED, Settings


class AsynchronousConfig(Settings):
    """How nodes meet that do not wait for each other's rounds."""

    max_age: int = Field(10, ge=0)
    """With gossip_async: the greatest age of a neighbor's model that is mixed. The age counts the rounds that this node
    has finished since the model came; a model that came since the last mixing has age 0. Older ones are left out, and
    their weights go to the node itself."""
    stale: Literal["leave_out", "wait"] = "leave_out"
    """With gossip_async: what to do where a neighbor's model is older than that. leave_out: mix without it. wait: wait
    for a new one first, for `wait_seconds`, then leave it out."""
    wait_seconds: float = Field(1.0, gt=0)
    """With stale: wait, the longest wait in a round, in seconds."""
    age_weights: bool = True
    """With gossip_async: whether a model of age a gets the weight w / (1 + a) in place of w; what is left goes to the
    node itself."""
    advance_copies: Annotated[bool, ADDED] = True
    """With gossip_async: whether what a model is behind is made up for, by how far the node's own model has moved:
    otherwise averages with models of earlier moments take back a part of each step. And whether a node that is slower
    than its neighbors mixes before it publishes."""
    patience: int = Field(2, ge=1)
    """With ad_psgd: after how many of its own rounds without an answer a node withdraws what it offered to a neighbor,
    and tries another one."""
    arrivals: int | None = Field(None, ge=0)
    """With epidemic: how many models that came are enough to go on. Default: half as many as the node sends, at least
    one."""
    deadline_seconds: float | None = Field(None, ge=0)
    """With epidemic: the longest wait for them in a round, in seconds. Default: as long as the local steps of the round
    took, but at least 1 and at most `communication.timeout_seconds`."""
