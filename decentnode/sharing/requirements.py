"""The requirements that a sharing rule declares, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from decentnode.payload import ScalarSpec


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a rule requires of the graph and the round, and what transports may do with its payloads.

    A rule's class has `requirements = Requirements(symmetric=True)`. A subclass changes its parent's value with
    `dataclasses.replace(Parent.requirements, phases=2)`, and a wrapper changes that of its inner rule in the same way;
    fields that are not named, including ones added later, keep their values. A rule whose requirements depend on its
    config sets `self.requirements` in its constructor.
    """

    # -- requirements of the graph and its mixing matrix W: a run on another graph is refused before it starts

    symmetric: bool = False
    """W must be symmetric, and the graph undirected."""
    doubly_stochastic: bool = False
    """Every column of W must sum to one, as every row does."""
    column_stochastic: bool = False
    """The rule mixes by `view.out_weights`, the weights of what a node sends (every column sums to one), not by W."""
    static: bool = False
    """The graph must have the same edges and weights in every round."""
    tree: bool = False
    """The graph must be a tree."""
    smallest_eigenvalue: float | None = None
    """W must have no eigenvalue below this; one that equals it is accepted with a warning."""
    groups: bool = False
    """The rule's Config has a key `groups` (machine, or lists of uids of one length), and the graph must treat all
    nodes of a group alike (graph/groups.py)."""
    star: bool = False
    """The graph must have servers, each with clients (`Graph.servers`). Servers get no training samples, and the run's
    model is theirs: clients' models have no weight in means over the nodes."""
    min_neighbors: int = 0
    """Every node must receive from at least this many neighbors in every round."""
    unweighted: bool = False
    """`mix` does not use the weights of `view`, so that weights by samples or tokens would have no effect."""
    overrides_topology: bool = False
    """`plan` chooses neighbors other than the graph's."""

    # -- requirements of the round

    phases: int = 1
    """The number of exchanges per round, one after the other. `plan`, `outgoing` and `mix` are called for each of them
    with its number in `view.phase`; what a node sends in a phase may depend on what it mixed in the previous phase. All
    phases have the same payload schema."""
    steps_before: int = 0
    """The phase before which the local steps are made; if it is not 0, they start from the model mixed in the earlier
    phases. `adjust` is called after the steps, `begin` before phase 0."""
    sequential: bool = False
    """The rule uses `begin`, `adjust` or `finish`, which an overlapped schedule does not call."""
    gradient: bool = False
    """`direction` is called in every local step."""
    tolerates_missing: bool = True
    """A missing payload does no lasting harm if its weight is given to the receiver. For rules without this property,
    runs that would continue without a payload are refused; a new membership generation starts with new rules."""
    private: bool = False
    """Neighbors cannot see the model in a payload. Float buffers must not be averaged, as they would be sent as they
    are. Payloads depend on keys that no seed determines, so that a run cannot be replayed; its models do not."""

    # -- what transports may do with payloads

    elementwise: bool = False
    """Entry k of the mixed model only depends on entry k of the model and of the payloads. The model is then mixed
    slice by slice while the rest is still arriving: `mix` gets a slice [a:b) of the model, and the same slice of every
    payload's only tensor "x"."""
    linear: bool = False
    """`mix` computes x <- w_ii x + sum_j w_ij payload_j["x"], and payload["x"] is the model. If all neighbors have the
    same weight, a transport may then deliver the sum of the payloads (`own_contribution`, `mix_sum`)."""
    scalars: Mapping[str, ScalarSpec] = field(default_factory=dict)
    """The numbers that a payload has beside its tensors. A payload whose numbers do not match is refused before
    `unpack`. Collectives of torch.distributed cannot carry numbers, so that they are not used for rules with any."""
    compresses: bool = False
    """The rule applies its key `compression` itself; other rules are wrapped in `Compressed` (compressed.py)."""
    includes_self: frozenset[int] = frozenset()
    """The phases in which `mix` must also receive the node's own payload as its neighbors decode it, if a lossy codec
    changes it."""

    def __post_init__(self) -> None:
        if self.phases < 1:
            raise ValueError(f"phases must be at least 1, got {self.phases}")
        if not 0 <= self.steps_before < self.phases or (self.steps_before and not self.sequential):
            raise ValueError(f"steps_before must be one of {self.phases} phases, and of a sequential rule where it is "
                             f"not 0, got {self.steps_before}")  # fmt: skip

    def described(self) -> str:
        """Returns what the rule requires of a run, in one sentence for its reference page; "" if it requires
        nothing."""
        least = self.smallest_eigenvalue
        needs = ", ".join(text for needed, text in (
            (self.star, "a graph with servers (star)"),
            (self.tree, "a tree"), (self.static, "a static graph"), (self.symmetric, "a symmetric W"),
            (self.doubly_stochastic, "a doubly stochastic W"),
            (least is not None, f"no eigenvalue of W below {least or 0.0:.3f}"),
            (self.min_neighbors > 0, f"at least {self.min_neighbors} neighbors per node"),
            (self.groups, "a graph that treats all nodes of a group alike"),
            (self.sequential, "schedule: sequential"),
            (not self.tolerates_missing, "missing: fail or regroup"),
        ) if needed)  # fmt: skip
        return f"Needs: {needs}." if needs else ""
