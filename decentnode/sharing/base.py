"""The contract of a sharing rule: what a node sends, and how it mixes what arrives into its model.

A rule has a Config, `requirements`, and three methods: `outgoing`, `mix`, `payload_schema`. Everything else has a
default and stands in hooks.py: local steps that a rule corrects, other neighbors, rounds without an exchange, checks of
what arrives, state for checkpoints.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from decentnode.compression import CODECS
from decentnode.config.component import Component, Config, section
from decentnode.graph.base import RoundView
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing.former import FORMER, FormerAttribute, take_former
from decentnode.sharing.hooks import Hooks
from decentnode.sharing.requirements import Requirements


class SharingConfig(Config):
    """Keys that every rule has."""

    compression: Annotated[Config, section(CODECS, "compression")] | None = None
    """Codec of the values that are sent. Default: values are sent uncompressed."""


class Sharing(Hooks, Component, abc.ABC):
    """One rule on the flat parameters [P] of one node. It never sees sockets, the graph, or float buffers."""

    requirements: Requirements = Requirements()
    """What the rule needs of the graph and of the round, and what may be done with its payloads."""
    config: Config

    def __init__(self, config: Config) -> None:
        self.config = config

    @abc.abstractmethod
    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        """Returns a payload for every neighbor of `view`; one object for several neighbors is encoded once.

        model: [P] float, not modified. Payload tensors may be views of `model`: the transport takes a snapshot of them
        before `exchange` returns.
        """

    @abc.abstractmethod
    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        """Mixes the payloads that arrived into the model, in place.

        model: [P], or a slice of it for elementwise rules. received: by source, in ascending order of uid. view: the
        weight of a source whose payload is missing has been added to the node's own, `view.weights[view.uid]`.
        """

    @abc.abstractmethod
    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Returns name, dtype and largest size of every tensor in a payload for a model of `elements` entries.

        Receivers size their buffers and check payloads by it, never by a number in a message.
        """

    def __init_subclass__(cls, **options: Any) -> None:
        """Raises TypeError for a rule that would silently take its requirements from one of two parents."""
        super().__init_subclass__(**options)
        take_former(cls)
        parents = [base for base in cls.__bases__ if issubclass(base, Sharing)]
        if "requirements" not in vars(cls):
            for base in parents:
                if base.requirements not in (cls.requirements, Requirements()):
                    raise TypeError(f"{cls.__qualname__} must have requirements of its own, for those of "
                                    f"{' and '.join(each.__name__ for each in parents)} differ")  # fmt: skip


for _name in FORMER:
    setattr(Sharing, _name, FormerAttribute(_name))
