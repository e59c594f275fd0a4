"""The `node:` section of an experiment."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field, model_validator

from decentnode.checkpoint.config import BestConfig, CheckpointConfig, of_figure
from decentnode.config.component import ADDED, Config, Settings, section
from decentnode.graph.repaired import Repair
from decentnode.node.schedules.asynchronous.config import AsynchronousConfig
from decentnode.samplers import SAMPLERS
from decentnode.wire.messages import MAX_SEATS

MergeWeights = Literal["samples", "rounds"]


class EarlyStopConfig(BestConfig):
    """When a run ends before its last round."""

    patience: int = Field(5, ge=1)
    """After how many evaluations in a row without a better value the run ends."""
    min_delta: float = Field(0.0, ge=0)
    """By how much a value has to be better than the best one, in the unit of the figure."""
    after: int = Field(0, ge=0)
    """Evaluations up to this round do not count against the patience."""


class QuorumConfig(Settings):
    """When a round goes on without neighbors that are late."""

    share: float = Field(0.5, gt=0, le=1)
    """Of the neighbors that a payload is expected of: so many must be there, rounded up."""
    grace_seconds: float = Field(0.1, ge=0)
    """How long the others are waited for from then on, in seconds. Local steps that the exchange is hidden behind do
    not count."""
    weights: Annotated[Literal["neighbors", "samples", "tokens"], ADDED] = "neighbors"
    """What a payload that is mixed counts; the share counts neighbors in any case. neighbors: what the graph's weights
    say. samples: that, times how many training samples its sender has trained on since its payload before. tokens:
    times how many tokens; of a task without any, samples. What comes counts against each other: a row of the weights
    sums to one, whoever is missing. The mean of all models is kept with neighbors alone."""


class NodeConfig(Settings):
    rounds: int = Field(60, ge=0)
    """Number of rounds. In each, a node makes its local steps and exchanges once with its neighbors."""
    schedule: Literal["sequential", "overlapped", "gossip_async", "ad_psgd", "epidemic"] = "sequential"
    """In which order a round computes and communicates. sequential: local steps, then exchange and mix. overlapped: the
    models x(r) are exchanged while the local steps run from x(r); then x(r+1) = sum_j W_ij x_j(r) + what the steps
    changed, which is exactly D-PSGD. gossip_async: local steps, then mix the newest model that came of each neighbor,
    whatever round it is of, and wait for nobody; with sharing push_sum it is asynchronous push-sum. ad_psgd: local
    steps, then average with one random neighbor as soon as that one comes to it, and wait for nobody. epidemic: local
    steps, then wait until some models came, of whomever, or the time is over, and mix those. In an asynchronous
    schedule the first node that has made all rounds ends the run."""
    asynchronous: Annotated[AsynchronousConfig | None, ADDED] = None
    """How nodes meet with an asynchronous schedule. When not given, its keys have their defaults."""
    sampler: Annotated[Annotated[Config, section(SAMPLERS, "sampler")] | None, ADDED] = None
    """With schedule epidemic: how a node that knows only some of the others finds those that it sends to. It begins
    with its neighbors in the first round of the graph, which decides nothing else then. When not given, the graph says
    whom it sends to."""
    mix_in_background: bool | None = None
    """With overlapped, on a CPU: whether a second thread mixes what arrives while the local steps run. It takes memory
    for one more model and changes no bit of the results. Default: yes where a node has more than one thread, or where
    models are larger than `communication.window_bytes` and come over the network."""
    evaluate_every: int = Field(10, ge=0)
    """Number of rounds between two evaluations; one more precedes the first round and one follows the last. 0: only
    after the last round."""
    missing: Literal["fail", "return_weight", "regroup"] = "fail"
    """What to do when a neighbor's payload does not come in time. fail: stop the run. return_weight: mix without it,
    and add its weight to the node's own, for that round. regroup: the others agree on a generation of members without
    the node and go on from their present models, also when it died; a node that comes back is let in again. Sharing
    rules start anew in every generation."""
    quorum: Annotated[QuorumConfig | None, ADDED] = None
    """With return_weight: a round goes on as soon as the payloads of so many neighbors are there and a grace window
    after that is over, long before the time-out. Who comes later is left out of this round, its weight returned to the
    node itself: it is dropped, and counted as late. Default: all are waited for, up to the time-out."""
    min_nodes: int | None = Field(None, ge=1)
    """With regroup: the least number of nodes of a generation. Default: more than half of the run's nodes, so that of
    the two sides of a broken network at most one goes on. After the last round nodes that finished count too, and after
    a stop any number is enough."""
    on_partition: Annotated[Literal["majority", "both"], ADDED] = "majority"
    """With regroup: which sides of a broken network go on. majority: the one that has `min_nodes`; the others wait for
    it. both: each side goes on in a generation of its own, however small. Once they hear each other again they become
    one, which begins with the round of the furthest member; before it all models become their weighted mean."""
    merge_weights: Annotated[MergeWeights, ADDED] = "samples"
    """With on_partition both: what a model counts in that mean. samples: the samples that its node trained on since it
    parted from the others. rounds: its rounds since then."""
    orphans: Annotated[Literal["lost", "adopted"], ADDED] = "lost"
    """With regroup: what becomes of the training samples of nodes that are not members. lost: nobody trains on them
    until the node is back. adopted: the data's partition deals them to the members, and they go back when the node
    does. Every change of members then begins an epoch on all nodes, so that no sample is trained on twice in one."""
    repair: Annotated[Repair, ADDED] = "none"
    """With regroup: what becomes of a graph that without the absent nodes falls apart into parts that do not hear of
    each other. none: the run says so, and the parts go on apart until somebody comes back. ring: edges are added that
    join the parts in a ring. random: edges are added that join them in a tree, drawn with the run's seed. Added edges
    go both ways and take their weight from their own ends' weights for themselves. Which are added follows from the
    members alone, and they are gone once the graph joins the members by itself."""
    restarts: int = Field(0, ge=0)
    """With regroup: how many times each node that died is started again by its machine. One that gave up waiting for
    the others is only where other nodes of its machine go on."""
    newcomers: Annotated[int, ADDED] = Field(0, ge=0, le=MAX_SEATS)
    """With regroup: how many nodes that are not in the mapping the run admits (`decentnode join`). The graph must be
    one that can be made with so many nodes more. They do not count toward `min_nodes`."""
    buffers: Literal["average", "local", "recompute"] = "average"
    """What happens to float buffers of the model, such as the running statistics of BatchNorm. average: they are
    averaged with the neighbors' in every round. local: every node keeps its own. recompute: as local, but for every
    evaluation and for the saved models the statistics of BatchNorm are measured anew, on the merged model over the data
    of all nodes; the average of variances is too small where nodes hold different data."""
    check_finite: bool = True
    """Stop the run with exit code 6 when a model holds NaN or infinity after its local steps."""
    early_stop: Annotated[EarlyStopConfig | None, ADDED, pydantic.BeforeValidator(
        of_figure, json_schema_input_type=EarlyStopConfig | str | None)] = None
    """End the run, on all nodes after the same round, once a figure of the evaluations has not become better for a
    while: the figure's name (`accuracy_merged`), or a section. When not given, all rounds are made."""
    checkpoint: CheckpointConfig | None = None
    """Keep the whole state of all nodes on the disk, every so many rounds or minutes and after the last round, so that
    `--resume` goes on from there; nothing is kept when not given."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.early_stop is not None and not self.evaluate_every:
            raise ValueError("early_stop needs evaluate_every of at least 1; otherwise nothing is measured in between")
        if self.quorum is not None and self.missing != "return_weight":
            raise ValueError("quorum needs missing: return_weight, by which rounds go on without neighbors")
        if self.quorum is not None and self.schedule not in ("sequential", "overlapped"):
            raise ValueError(f"quorum needs a schedule in which nodes wait for each other, got {self.schedule}")
        if self.mix_in_background and self.schedule != "overlapped":
            raise ValueError("mix_in_background: true needs schedule: overlapped; otherwise nothing is mixed meanwhile")
        if self.asynchronous is not None and self.schedule in ("sequential", "overlapped"):
            raise ValueError(f"asynchronous needs schedule: gossip_async, ad_psgd or epidemic, got {self.schedule}")
        if self.sampler is not None and self.schedule != "epidemic":
            raise ValueError(f"sampler needs schedule: epidemic, in which nodes expect nobody, got {self.schedule}")
        return self
