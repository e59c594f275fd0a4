"""The `node.asynchronous:` section of an experiment."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from decentnode.config.component import ADDED, Settings


class AsynchronousConfig(Settings):
    """How nodes meet that do not wait for each other's rounds."""

    max_age: int = Field(10, ge=0)
    """With gossip_async: the greatest age of a neighbor's model that is still mixed. The age is the number of rounds
    that this node has finished since it received the model; a model received since the last mixing has age 0. Older
    models are left out, and their weights go to the node itself."""
    stale: Literal["leave_out", "wait"] = "leave_out"
    """With gossip_async: what to do if a neighbor's model is older than `max_age`. leave_out: mix without it. wait:
    wait up to `wait_seconds` for a new one, then leave it out."""
    wait_seconds: float = Field(1.0, gt=0)
    """With stale: wait, the longest wait in a round, in seconds."""
    age_weights: bool = True
    """With gossip_async: whether a model of age a gets the weight w / (1 + a) instead of w; the difference goes to the
    node itself."""
    advance_copies: Annotated[bool, ADDED] = True
    """With gossip_async: whether an outdated model of a neighbor is corrected by the distance that the node's own model
    has moved since. Without the correction, averages with outdated models take back part of each step. Also, a node
    that is slower than its neighbors then mixes before it publishes."""
    patience: int = Field(2, ge=1)
    """With ad_psgd: if a neighbor does not answer an offer for this many rounds of the node, the node withdraws the
    offer and tries another neighbor."""
    arrivals: int | None = Field(None, ge=0)
    """With epidemic: how many received models are enough to continue. Default: half as many as the node sends, at least
    one."""
    deadline_seconds: float | None = Field(None, ge=0)
    """With epidemic: the longest wait for these models in a round, in seconds. Default: the time that the local steps
    of the round took, but at least 1 and at most `communication.timeout_seconds`."""
