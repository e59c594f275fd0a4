"""Runs of training on a quadratic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from decentnode.build import step_all
from decentnode.communication.base import Communication
from decentnode.communication.parts import Schema
from decentnode.node.config import NodeConfig
from decentnode.node.node import Node
from decentnode.simulate.world.quadratic import Quadratic, Vector
from tests.communication.contract import open_nodes, run_on_all

__all__ = ["ENDLESS", "Quadratic", "Vector", "stacked", "stopped_in_round_7"]


def stacked(trainings: list[Quadratic], what: str = "parameters") -> Tensor:
    return torch.stack(
        [getattr(t.model, what) if what in ("parameters", "buffers") else getattr(t, what) for t in trainings]
    )


ENDLESS = NodeConfig.model_validate({"rounds": 100_000, "evaluate_every": 0})


def stopped_in_round_7(
    transport: str, schemas: tuple[Schema, ...],
    make: Callable[[Communication, Callable[[dict[str, Any]], None]], Node],
) -> None:
    """Four nodes run until node 3 is asked to stop in round 7: all end between the same two rounds or near, and the
    closing evaluation has all of them. make: a node of `ENDLESS` from its communication and what takes its records."""
    with open_nodes(transport, 4, schemas) as made:
        built: list[Node] = []

        def record(r: dict[str, Any]) -> None:
            if r["kind"] == "round" and r["round"] == 7:
                built[3].ask_stop()

        built += [make(each, record if each.uid == 3 else lambda _: None) for each in made]
        if transport == "inproc":
            step_all(built)
        else:
            run_on_all(made, lambda communication: built[communication.uid].run())
    assert all(8 <= node.round <= 16 for node in built)
    assert all(node.figures()["contributors"] == 4 for node in built)
