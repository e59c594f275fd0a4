"""The contract of a sharing rule: what a node sends, and how it mixes arriving payloads into its model.

A rule has a Config, `requirements`, and three methods: `outgoing`, `mix`, `payload_schema`. Everything else has a
default in hooks.py: corrections of local steps, other neighbors, rounds without an exchange, checks of arriving
payloads, state for checkpoints.
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
from decentnode.sharing.hooks import Hooks
from decentnode.sharing.old_attributes import OLD_ATTRIBUTES, OldAttribute, move_old_attributes
from decentnode.sharing.requirements import Requirements


class SharingConfig(Config):
    """The keys that every rule has."""

    compression: Annotated[Config, section(CODECS, "compression")] | None = None
    """Codec of the values that are sent. Default: values are sent uncompressed."""


class Sharing(Hooks, Component, abc.ABC):
    """A sharing rule for the flat parameters [P] of one node. It never sees sockets, the graph, or float buffers."""

    requirements: Requirements = Requirements()
    """What the rule requires of the graph and the round, and what transports may do with its payloads."""
    config: Config

    def __init__(self, config: Config) -> None:
        self.config = config

    @abc.abstractmethod
    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        """Returns a payload for every neighbor of `view`; a payload object that several neighbors share is encoded
        once.

        model: [P] float, not modified. Payload tensors may be views of `model`: the transport takes a snapshot of them
        before `exchange` returns.
        """

    @abc.abstractmethod
    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        """Mixes the payloads that arrived into the model, in place.

        model: [P], or a slice of it for elementwise rules. received: source -> payload, in ascending order of uid.
        view: the view, in which the weights of missing sources have been added to the node's own,
        `view.weights[view.uid]`.
        """

    @abc.abstractmethod
    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Returns name -> dtype and largest size of every tensor in a payload for a model of `elements` entries.

        Receivers size their buffers and check payloads by the schema, never by a number in a message.
        """

    def __init_subclass__(cls, **options: Any) -> None:
        """Raises TypeError for a rule that would silently inherit its requirements from only one of several parents."""
        super().__init_subclass__(**options)
        move_old_attributes(cls)
        parents = [base for base in cls.__bases__ if issubclass(base, Sharing)]
        if "requirements" not in vars(cls):
            for base in parents:
                if base.requirements not in (cls.requirements, Requirements()):
                    raise TypeError(f"{cls.__qualname__} must have requirements of its own, for those of "
                                    f"{' and '.join(each.__name__ for each in parents)} differ")  # fmt: skip


for _name in OLD_ATTRIBUTES:
    setattr(Sharing, _name, OldAttribute(_name))
