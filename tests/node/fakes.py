"""Nodes that train on a quadratic."""

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

__all__ = ["ENDLESS", "Quadratic", "Vector", "check_stop_in_round_7", "stacked"]


def stacked(trainings: list[Quadratic], what: str = "parameters") -> Tensor:
    """Returns [N, ...]: parameters or buffers of the models, or another attribute of the trainings."""
    return torch.stack(
        [getattr(t.model, what) if what in ("parameters", "buffers") else getattr(t, what) for t in trainings]
    )


ENDLESS = NodeConfig.model_validate({"rounds": 100_000, "evaluate_every": 0})


def check_stop_in_round_7(
    transport: str, schemas: tuple[Schema, ...],
    make: Callable[[Communication, Callable[[dict[str, Any]], None]], Node],
) -> None:
    """Runs four nodes until node 3 is asked to stop in round 7: all end soon after, and the closing evaluation has all
    of them. make: makes a node with the config `ENDLESS` from its communication and a function that takes its records.
    """
    with open_nodes(transport, 4, schemas) as ends:
        built: list[Node] = []

        def stop_in_round_7(record: dict[str, Any]) -> None:
            if record["kind"] == "round" and record["round"] == 7:
                built[3].ask_stop()

        built += [make(end, stop_in_round_7 if end.uid == 3 else lambda _: None) for end in ends]
        if transport == "inproc":
            step_all(built)
        else:
            run_on_all(ends, lambda communication: built[communication.uid].run())
    assert all(8 <= node.round <= 16 for node in built)
    assert all(node.figures()["contributors"] == 4 for node in built)
