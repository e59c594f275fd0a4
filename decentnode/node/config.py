"""The `node:` section of an experiment."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field, model_validator

from decentnode.checkpoint.config import BestConfig, CheckpointConfig, of_figure
from decentnode.config.component import ADDED, Config, Settings, section
from decentnode.graph.repaired import Repair
from decentnode.node.schedules.asynchronous.config import AsynchronousConfig
from decentnode.node.training_rounds import TrainingRoundsConfig
from decentnode.samplers import SAMPLERS
from decentnode.wire.messages import MAX_SEATS

MergeWeights = Literal["samples", "rounds"]


class EarlyStopConfig(BestConfig):
    """When a run ends before its last round."""

    patience: int = Field(5, ge=1)
    """The run ends after this many evaluations in a row without a better value."""
    min_delta: float = Field(0.0, ge=0)
    """How much better than the best value a value must be, in the unit of the figure."""
    after: int = Field(0, ge=0)
    """Evaluations up to this round do not count against the patience."""


class QuorumConfig(Settings):
    """When a round continues without neighbors that are late."""

    share: float = Field(0.5, gt=0, le=1)
    """Share of the expected payloads that must have arrived, rounded up to a number of neighbors."""
    grace_seconds: float = Field(0.1, ge=0)
    """How long to wait for the other neighbors after that, in seconds. Time during which local steps hide the exchange
    does not count."""
    weights: Annotated[Literal["neighbors", "samples", "tokens"], ADDED] = "neighbors"
    """How much a payload counts in the mix; `share` counts neighbors in any case. neighbors: by the graph's weights.
    samples: by the graph's weights times the number of training samples that its sender has trained on since its
    previous payload. tokens: times the number of tokens; samples for a task without tokens. The weights of what arrived
    are normalized: each row sums to one, whichever payloads are missing. Only neighbors keeps the mean of all
    models."""


class NodeConfig(Settings):
    rounds: int = Field(60, ge=0)
    """Number of rounds. In each round, a node makes its local steps and exchanges once with its neighbors."""
    schedule: Literal["sequential", "overlapped", "gossip_async", "ad_psgd", "epidemic"] = "sequential"
    """The order in which a round computes and communicates. sequential: local steps, then exchange and mix. overlapped:
    the models x(r) are exchanged while the local steps run from x(r); then x(r+1) = sum_j W_ij x_j(r) + the change made
    by the steps, which is exactly D-PSGD. gossip_async: local steps, then mix the newest model received from each
    neighbor, of whatever round, without waiting; with sharing push_sum it is asynchronous push-sum. ad_psgd: local
    steps, then average with one random neighbor as soon as that neighbor is ready, without waiting meanwhile. epidemic:
    local steps, then wait until some models have arrived, from any nodes, or the time is over, and mix these. In an
    asynchronous schedule, the first node that has made all rounds ends the run."""
    asynchronous: Annotated[AsynchronousConfig | None, ADDED] = None
    """How nodes exchange under an asynchronous schedule. If not given, its keys have their defaults."""
    sampler: Annotated[Annotated[Config, section(SAMPLERS, "sampler")] | None, ADDED] = None
    """With schedule epidemic: how a node that knows only some of the others chooses where to send. Initially it knows
    its neighbors in the first round of the graph, which has no other effect then. Default: a node sends to its
    neighbors in the graph."""
    training_rounds: Annotated[TrainingRoundsConfig | None, ADDED] = None
    """In which rounds nodes make local steps; in the others they only exchange and mix. Default: in all."""
    mix_in_background: bool | None = None
    """With overlapped, on a CPU: whether a second thread mixes arriving models while the local steps run. It takes
    memory for one more model and does not change the results. Default: yes if a node has more than one thread, or if
    models are larger than `communication.window_bytes` and are sent over the network."""
    evaluate_every: int = Field(10, ge=0)
    """Number of rounds between two evaluations; there is also one before the first round and one after the last. 0:
    only after the last round."""
    missing: Literal["fail", "return_weight", "regroup"] = "fail"
    """What to do when a neighbor's payload does not arrive in time. fail: stop the run. return_weight: mix without it
    and add its weight to the node's own, for that round. regroup: the others agree on a generation of members without
    the node, also if it has died, and continue from their current models; a node that comes back is admitted again.
    Sharing rules start anew in every generation."""
    quorum: Annotated[QuorumConfig | None, ADDED] = None
    """With return_weight: a round continues when the payloads of enough neighbors have arrived and a grace period after
    that is over, long before the time-out. A later payload is left out of this round and its weight is added to the
    node's own: the payload is dropped and counted as late. Default: wait for all neighbors, up to the time-out."""
    min_nodes: int | None = Field(None, ge=1)
    """With regroup: the smallest number of nodes in a generation. Default: more than half of the run's nodes, so that
    at most one side of a network partition continues. After the last round, nodes that have finished count too; after a
    stop, any number is enough."""
    on_partition: Annotated[Literal["majority", "both"], ADDED] = "majority"
    """With regroup: which sides of a network partition continue. majority: the side that has `min_nodes` nodes; the
    others wait for it. both: each side continues in a generation of its own, however small. When they hear each other
    again, they merge into one generation, which begins with the round of the furthest member; first, all models are
    replaced by their weighted mean."""
    merge_weights: Annotated[MergeWeights, ADDED] = "samples"
    """With on_partition both: how much each model counts in that mean. samples: the number of samples that its node has
    trained on since it was separated from the others. rounds: the number of its rounds since then."""
    orphans: Annotated[Literal["lost", "adopted"], ADDED] = "lost"
    """With regroup: what happens to the training samples of nodes that are not members. lost: no node trains on them
    until their node is back. adopted: the data's partition deals them to the members, and they go back when their node
    does. Every change of members then begins a new epoch on all nodes, so that no sample is trained on twice in an
    epoch."""
    repair: Annotated[Repair, ADDED] = "none"
    """With regroup: what happens if the graph without the absent nodes is disconnected. none: the run says so, and the
    parts continue separately until a node comes back. ring: edges are added that connect the parts in a ring. random:
    edges are added that connect them in a tree, drawn with the run's seed. Added edges go both ways, and their weight
    is taken from the weights of their two nodes for themselves. The added edges follow from the members alone, and are
    removed when the graph connects the members without them."""
    restarts: int = Field(0, ge=0)
    """With regroup: how many times each node that died is started again by its machine. A node that gave up waiting for
    the others is only started again if other nodes of its machine are still running."""
    newcomers: Annotated[int, ADDED] = Field(0, ge=0, le=MAX_SEATS)
    """With regroup: how many nodes that are not in the mapping the run admits (`decentnode join`). It must be possible
    to make the graph with that many more nodes. Newcomers do not count toward `min_nodes`."""
    buffers: Literal["average", "local", "recompute"] = "average"
    """What happens to the model's float buffers, such as the running statistics of BatchNorm. average: they are
    averaged with the neighbors' in every round. local: every node keeps its own. recompute: like local, but for every
    evaluation and for the saved models, the BatchNorm statistics are measured anew, with the merged model on the data
    of all nodes, because averaged variances are too small if nodes hold different data."""
    check_finite: bool = True
    """Stop the run with exit code 6 if a model contains NaN or infinity after its local steps."""
    early_stop: Annotated[EarlyStopConfig | None, ADDED, pydantic.BeforeValidator(
        of_figure, json_schema_input_type=EarlyStopConfig | str | None)] = None
    """End the run, on all nodes after the same round, when a figure of the evaluations has stopped improving: the
    figure's name (`accuracy_merged`), or a section. Default: all rounds are made."""
    checkpoint: CheckpointConfig | None = None
    """Store the whole state of all nodes on disk, at an interval of rounds or minutes and after the last round, so that
    `--resume` can continue from it. Default: nothing is stored."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.early_stop is not None and not self.evaluate_every:
            raise ValueError("early_stop needs evaluate_every of at least 1; otherwise nothing is measured during the "
                             "run")
        if self.quorum is not None and self.missing != "return_weight":
            raise ValueError("quorum needs missing: return_weight, with which rounds continue without neighbors")
        if self.quorum is not None and self.schedule not in ("sequential", "overlapped"):
            raise ValueError(f"quorum needs a schedule in which nodes wait for each other, got {self.schedule}")
        if self.mix_in_background and self.schedule != "overlapped":
            raise ValueError("mix_in_background: true needs schedule: overlapped; otherwise nothing is mixed during "
                             "local steps")
        if self.asynchronous is not None and self.schedule in ("sequential", "overlapped"):
            raise ValueError(f"asynchronous needs schedule: gossip_async, ad_psgd or epidemic, got {self.schedule}")
        if self.training_rounds is not None and self.schedule not in ("sequential", "overlapped"):
            raise ValueError("training_rounds needs a schedule in which all nodes are in the same round, sequential or "
                             f"overlapped, got {self.schedule}")
        if self.sampler is not None and self.schedule != "epidemic":
            raise ValueError("sampler needs schedule: epidemic, in which nodes do not wait for particular neighbors, "
                             f"got {self.schedule}")
        return self
