"""What a sharing rule declares of itself, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from decentnode.payload import ScalarSpec


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a rule needs of the graph and of the round, and what may be done with its payloads.

    A rule's class has `requirements = Requirements(symmetric=True)`. A subclass changes its parent's value with
    `dataclasses.replace(Parent.requirements, phases=2)`, and so does a wrapper with the value of the rule inside it:
    what is not named stays as it is, also a field that is added later. A rule whose requirements follow from its config
    sets `self.requirements` in its constructor.
    """

    # -- of the graph and its mixing matrix W: a run on another graph is refused before it starts

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
    """The graph must have servers, each with clients (`Graph.servers`). Servers get no training samples, and the
    models of the run are theirs: those of clients count in no mean over the nodes."""
    overrides_topology: bool = False
    """`plan` chooses other neighbors than the graph's."""

    # -- of the round

    phases: int = 1
    """Exchanges per round, one after the other. `plan`, `outgoing` and `mix` are called for each of them with its
    number in `view.phase`; what a node sends in a phase may depend on what it mixed in the phase before. All phases
    have the same payload schema."""
    steps_before: int = 0
    """The phase before whose payloads the local steps are made; from 1 on they begin with what was mixed in the phases
    before. `adjust` is called after them, `begin` before phase 0."""
    sequential: bool = False
    """The rule uses `begin`, `adjust` or `finish`, which an overlapped schedule does not call."""
    gradient: bool = False
    """`direction` is called in every local step."""
    tolerates_missing: bool = True
    """A payload that never arrives does no lasting harm when its weight returns to the receiver alone. Runs that would
    go on without a payload are refused for other rules; a new generation of members starts with new rules."""

    # -- what may be done with payloads

    elementwise: bool = False
    """Entry k of the mixed model depends on entry k of the model and of the payloads alone. The model is then mixed
    slice by slice while the rest is still arriving: `mix` gets a slice [a:b) of the model, and the same slice of every
    payload's one tensor "x"."""
    linear: bool = False
    """mix is x <- w_ii x + sum_j w_ij payload_j["x"], and payload["x"] is the model. Where all neighbors have one
    weight, a transport may then deliver the sum of the payloads (`own_contribution`, `mix_sum`)."""
    scalars: Mapping[str, ScalarSpec] = field(default_factory=dict)
    """The numbers that a payload has beside its tensors. A payload whose numbers do not fit is refused before `unpack`.
    Collective calls of torch.distributed carry no numbers: the payloads of a rule with any never go through them."""
    compresses: bool = False
    """The rule applies its key `compression` itself; other rules are wrapped in `Compressed` (compressed.py)."""
    includes_self: frozenset[int] = frozenset()
    """Phases in which `mix` must also receive the node's own payload, as its neighbors decode it, where a lossy codec
    changes it."""

    def __post_init__(self) -> None:
        if self.phases < 1:
            raise ValueError(f"phases must be at least 1, got {self.phases}")
        if not 0 <= self.steps_before < self.phases or (self.steps_before and not self.sequential):
            raise ValueError(f"steps_before must be one of {self.phases} phases, and of a sequential rule where it is "
                             f"not 0, got {self.steps_before}")  # fmt: skip

    def described(self) -> str:
        """Returns what the rule needs of a run, in one sentence for its reference; empty where it needs nothing."""
        least = self.smallest_eigenvalue
        needs = ", ".join(text for needed, text in (
            (self.star, "a graph with servers (star)"),
            (self.tree, "a tree"), (self.static, "a static graph"), (self.symmetric, "a symmetric W"),
            (self.doubly_stochastic, "a doubly stochastic W"),
            (least is not None, f"no eigenvalue of W below {least or 0.0:.3f}"),
            (self.groups, "a graph that treats all nodes of a group alike"),
            (self.sequential, "schedule: sequential"),
            (not self.tolerates_missing, "missing: fail or regroup"),
        ) if needed)  # fmt: skip
        return f"Needs: {needs}." if needs else ""
