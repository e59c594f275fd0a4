"""The `node:` section of an experiment."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from decentnode.config.component import Settings


class NodeConfig(Settings):
    rounds: int = Field(60, ge=0)
    """How many exchanges with the neighbors the run has."""
    schedule: Literal["sequential", "overlapped"] = "sequential"
    """sequential: local steps, then exchange and mix. overlapped: the exchange of x(r) flies while the local steps
    run from x(r); then x(r+1) = sum_j W_ij x_j(r) + what the steps changed, which is exactly D-PSGD."""
    mix_in_background: bool | None = None
    """With overlapped, on a CPU: let a thread of its own mix what arrives while the local steps run, which takes memory
    for one more model. When not given: where a node has more than one thread, or models are larger than
    `communication.window_bytes` and come over the network. Results have the same bits."""
    evaluate_every: int = Field(10, ge=0)
    """Evaluate before the first round and after every so many (0: only after the last)."""
    missing: Literal["fail", "return_weight", "regroup"] = "fail"
    """When a neighbor's payload does not come in time: stop the run; give its weight back to the node itself, for that
    round; or regroup: the others agree on a generation of members without it and go on from the models they have, also
    when a node dies or fails, and let it in again when it comes back. Sharing rules begin anew in every generation."""
    min_nodes: int | None = Field(None, ge=1)
    """With regroup: how many nodes a generation needs; after the last round those that finished count, too, and after a
    stop any number is enough. More than half of the run's when not given, so that the two sides of a broken network
    never both go on."""
    restarts: int = Field(0, ge=0)
    """With regroup: how many times a machine starts each of its nodes again that died."""
    buffers: Literal["average", "local", "recompute"] = "average"
    """Float buffers of the model (BatchNorm statistics): averaged with the neighbors' in every round; kept local; or
    recompute: kept local, and for every evaluation and the models that a run leaves those of BatchNorm are measured
    anew, of the merged model over the data of all nodes. The mean of variances is too small where nodes have unequal
    data, by the variance of their means."""
    check_finite: bool = True
    """Stop with exit code 6 when a model holds NaN or infinity after its local steps."""

    @model_validator(mode="after")
    def _behind_what(self) -> Self:
        if self.mix_in_background and self.schedule != "overlapped":
            raise ValueError("mix_in_background: true needs schedule: overlapped; otherwise nothing is mixed meanwhile")
        return self
