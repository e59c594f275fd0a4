"""Hierarchical averaging: exact means inside groups of nodes, gossip of model shards between the groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.graph.groups import Groups, members_of, problem_of
from decentnode.mixing import mix_into
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing.base import Sharing, SharingConfig
from decentnode.sharing.requirements import Requirements

REDUCE, BETWEEN, GATHER = range(3)
"""The phases of a round: reduce-scatter within the group, exchange of shards between groups, all-gather within the
group."""


class HierarchicalConfig(SharingConfig):
    groups: Literal["machine"] | list[list[int]] = Field("machine")
    """Nodes that average exactly: machine, for the nodes of each machine; or lists of uids of equal length, with every
    node in one list. The k-th node of a list exchanges with the k-th nodes of the other lists."""


class Hierarchical(Sharing):
    """x <- (W_between kron J_within) x: every group's exact mean, mixed with those of the neighboring groups.

    With L nodes in a group, node k owns shard k, one L-th of the model. A round has three phases: in the group, node k
    gets shard k of all nodes and takes the mean (reduce-scatter); node k exchanges this shard with node k of the
    neighboring groups and mixes with W_between; in the group, all nodes get the mixed shards (all-gather). Between two
    groups every byte of the model crosses once, on L links side by side; inside a group a node sends 2 (L - 1) / L
    models. W_between is the graph's W, summed over groups (graph/groups.py). The scheme is that of hierarchical
    all-reduce (BlueConnect, Cho et al. 2019) with gossip in place of its middle step.

    Float buffers are mixed by the same matrix in one exchange. The weight of a node whose payload is missing goes, in
    the first phase, to the owner of the shard, in the second to the receiving group; in the third phase the others keep
    their own values of its shard. Means are added in ascending order of uid: the same bits on every transport and on
    all nodes of a group. Only a transport that averages a whole group in one collective call may use another order
    (communication/torch_distributed/group_collective.py).
    """

    Config: ClassVar[type[component.Config]] = HierarchicalConfig
    config: HierarchicalConfig
    requirements = Requirements(phases=3, groups=True, overrides_topology=True, includes_self=frozenset({GATHER}))
    """The owner of a shard keeps it as the other nodes of its group decode it in the last phase, also with a lossy
    codec."""

    def __init__(self, config: HierarchicalConfig) -> None:
        super().__init__(config)
        self._groups: Groups | None = None
        self._ends: list[int] = []
        """The end of each parameter tensor in the flat model."""

    def set_machines(self, machines: Sequence[Sequence[int]]) -> None:
        """Computes the groups. Raises ValueError if they differ in size or do not contain all nodes."""
        members = members_of(self.config.groups, machines)
        problem = problem_of(members, sum(map(len, machines)))
        if problem:
            raise ValueError(f"groups {problem}")
        self._groups = Groups(tuple(map(tuple, members)))

    @property
    def groups(self) -> Groups:
        """The groups, after `set_machines`."""
        assert self._groups is not None, "set_machines comes before everything else"
        return self._groups

    def plan(self, view: RoundView) -> RoundView:
        groups = self.groups
        at, _ = groups.place(view.uid)
        if view.phase == BETWEEN:
            row = groups.row(view.weights)
            weights = {view.uid: 0.0} | dict.fromkeys(groups.same_rank_nodes(view.uid, row), 0.0)
            for other, weight in row.items():
                # this node gets the weight of an absent node of the other group
                mate = next((uid for uid in groups.same_rank_nodes(view.uid, [other]) if uid in view.members), view.uid)
                weights[mate] += weight
            neighbors = self._alive(groups.same_rank_nodes(view.uid, groups.of(view.neighbors)), view)
            sources = self._alive(groups.same_rank_nodes(view.uid, groups.of(view.sources)), view)
            weights = {uid: weights[uid] for uid in sorted((view.uid, *sources))}
            out = 1.0 / (1 + len(neighbors))
            out_weights = dict.fromkeys(sorted((view.uid, *neighbors)), out)
            return replace(view, neighbors=neighbors, sources=sources, weights=weights, out_weights=out_weights,
                           averaging_group=())  # fmt: skip
        group = self._alive(sorted(groups.members[at]), view)
        peers = tuple(uid for uid in group if uid != view.uid)
        equal = dict.fromkeys(group, 1.0 / len(group))
        return replace(view, neighbors=peers, sources=peers, weights=equal, out_weights=equal, averaging_group=group)

    def plan_buffers(self, view: RoundView) -> RoundView:
        """Returns the view for one exchange that mixes with W_between kron J_within, so that a group's buffers become
        equal, as its models do."""
        groups = self.groups
        row = groups.row(view.weights)
        weights = {uid: weight / groups.size for at, weight in row.items() for uid in groups.members[at]}
        alive = {uid: weight for uid, weight in sorted(weights.items()) if uid in view.members}
        alive[view.uid] += sum(weights.values()) - sum(alive.values())
        here = {groups.place(view.uid)[0]}
        neighbors, sources = (
            tuple(sorted(uid for at in here.union(groups.of(uids)) for uid in groups.members[at]
                         if uid in view.members and uid != view.uid))
            for uids in (view.neighbors, view.sources)
        )  # fmt: skip
        weights = {uid: alive.get(uid, 0.0) for uid in sorted((view.uid, *sources))}
        return replace(view, neighbors=neighbors, sources=sources, weights=weights, averaging_group=(),
                       out_weights=dict.fromkeys(sorted((view.uid, *neighbors)), 1.0 / (1 + len(neighbors))))

    def own_contribution(self, model: Tensor, view: RoundView) -> Payload | None:
        if view.phase != REDUCE:
            return None
        return Payload({"x": model[self._shard(model.numel(), view.uid)]})

    def mix_sum(self, out: Tensor, model: Tensor, total: Tensor, view: RoundView) -> None:
        part = self._shard(model.numel(), view.uid)
        super().mix_sum(out[part], model[part], total, view)

    @staticmethod
    def _alive(uids: Sequence[int], view: RoundView) -> tuple[int, ...]:
        return tuple(uid for uid in uids if uid in view.members)

    def _shard(self, elements: int, uid: int) -> slice:
        """Returns the part of the model that a node owns.

        All shards have the same length, as the payload schema requires. If the group's size does not divide the
        model's, the last shards start earlier and overlap the previous shard; `mix` takes the overlap from its first
        owner.
        """
        length = self._length(elements)
        start = min(self.groups.place(uid)[1] * length, elements - length)
        return slice(start, start + length)

    def set_parameter_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self._ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))

    def tensor_sizes(
        self, payload: Payload, source: int, target: int, view: RoundView  # noqa: ARG002
    ) -> Mapping[str, Sequence[int]]:
        if not self._ends:
            return {}
        shard = self._shard(self._ends[-1], target if view.phase == REDUCE else source)
        ends = [min(max(end, shard.start), shard.stop) for end in self._ends]
        return {"x": [b - a for a, b in itertools.pairwise([shard.start, *ends])]}

    def _length(self, elements: int) -> int:
        return -(-elements // self.groups.size)

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        if view.phase == REDUCE:
            return {uid: Payload({"x": model[self._shard(model.numel(), uid)]}) for uid in view.neighbors}
        return dict.fromkeys(view.neighbors, Payload({"x": model[self._shard(model.numel(), view.uid)]}))

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        if view.phase == GATHER:
            for uid, payload in received.items():
                shard = self._shard(model.numel(), uid)
                start = min(self.groups.place(uid)[1] * self._length(model.numel()), shard.stop)
                model[start : shard.stop].copy_(payload.tensors["x"][start - shard.start :])
            return
        part = model[self._shard(model.numel(), view.uid)]
        arrivals = [(payload.tensors["x"], view.weights[uid]) for uid, payload in sorted(received.items())]
        mix_into(part, part, view.weights[view.uid], arrivals)

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {"x": TensorSpec(dtype, self._length(elements))}
