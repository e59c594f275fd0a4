"""SCAFFOLD: control variates remove each client's own drift from its local steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.sharing.federated.fedavg import FedAvgConfig
from decentnode.sharing.federated.rounds import Federated


class ScaffoldConfig(FedAvgConfig):
    weighted_by: Literal["equal"] = "equal"
    """Clients count one each: the server's control variate is the mean of theirs."""


class Scaffold(Federated):
    """Every local step of client i takes g - c_i + c; then c_i' = c_i - c + (x - y) / (K lr) after K steps from x to y,
    and the server takes x <- x + eta mean(y - x), c <- c + |S| / N mean(c_i' - c_i) over the |S| of N clients that
    answered (Karimireddy et al. 2020, arXiv 1910.06378, algorithm 1, option II).

    c is the mean of all c_i: a client whose answer was lost restores its previous c_i. The rule is for plain SGD with
    one learning rate per round, for which (x - y) / (K lr) is the mean of the K gradients. It sends and keeps two
    tensors of the model's size. In a new membership generation, c becomes the mean of the c_i of the present clients:
    some may be gone, others may have come without one or with that of a checkpoint, and answers of the interrupted
    round may or may not have been used.
    """

    Config: ClassVar[type[component.Config]] = ScaffoldConfig
    config: ScaffoldConfig
    requirements = replace(Federated.requirements, gradient=True)
    NAMES: ClassVar[tuple[str, ...]] = ("x", "c")
    TENSORS: ClassVar[tuple[str, ...]] = ("control", "_before")
    SURVIVING: ClassVar[tuple[str, ...]] = ("control",)
    KEEPS: ClassVar[bool] = True

    def __init__(self, config: ScaffoldConfig) -> None:
        super().__init__(config)
        self.control: Tensor | None = None
        """[P] c on a server, c_i on a client."""
        self._before: Tensor | None = None
        """[P] on a client: c_i before the last answer."""
        self._correction: Tensor | None = None
        """[P] c - c_i in this round."""
        self._steps = 0

    def given(self, model: Tensor) -> dict[str, Tensor]:
        return {"x": model, "c": self._control_of(model)}

    def _control_of(self, model: Tensor) -> Tensor:
        if self.control is None:
            self.control = torch.zeros_like(model)
        return self.control

    def take(self, tensors: Mapping[str, Tensor], view: RoundView) -> None:  # noqa: ARG002
        self._correction, self._steps = tensors["c"] - self._control_of(tensors["c"]), 0

    def direction(self, gradient: Tensor, view: RoundView) -> Tensor:  # noqa: ARG002
        assert self._correction is not None
        self._steps += 1
        return gradient.add_(self._correction)

    def answer(self, change: Tensor, view: RoundView) -> dict[str, Tensor]:
        assert self._correction is not None
        control, scale = self._control_of(change), self._steps * view.lr
        self._before = control
        if scale:
            # c_i' - c_i = (x - y) / (K lr) - c
            moved = (change / -scale).sub_(self._correction).sub_(control)
        else:
            moved = torch.zeros_like(change)
        self.control = control + moved
        return {"x": change, "c": moved}

    def answer_lost(self) -> None:
        self.control = self._before

    def to_be_summed(self, model: Tensor, view: RoundView) -> Mapping[str, Tensor]:
        nothing, server = torch.zeros_like(model), self.server_of(view)
        own = nothing if self.control is None or view.uid == server else self.control
        return {f"control-{uid}": own if uid == server else nothing for uid in view.servers if uid in view.members}

    def summed(self, totals: Mapping[str, Tensor], view: RoundView) -> None:
        if view.uid in view.servers:
            self.control = totals[f"control-{view.uid}"] / max(1, len(self.clients_of(view.uid, view)))

    def sum_up(self, means: Mapping[str, Tensor], answers: int, clients: int) -> None:
        self._control_of(means["c"]).add_(means["c"], alpha=answers / clients)

    def step(self, model: Tensor, change: Tensor, view: RoundView) -> None:  # noqa: ARG002
        model.add_(change, alpha=self.config.server_lr)
