"""What all ranks of a wrapper must have alike before they train: parameters, topology and sharing rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Module

from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.process_group.agreement import check_alike


def check_all_alike(model: Module, plan: Plan, options: Sequence[str], device: torch.device) -> None:
    """Blocking. Raises AssemblyError naming a rank with other parameters, another topology, rule or option.

    options: those that decide what travels between ranks, each with its name.
    """
    graph = plan.graph
    rows = [f"{graph.num_nodes} ranks"] + [
        f"round {r}: {source}->{uid} {weight:.12g}" for r in range(min(graph.period or 4, 32))
        for uid in range(min(graph.num_nodes, 64)) for source, weight in graph.weights(uid, r).items()
    ]  # fmt: skip
    words = {True: "trained", False: "frozen"}
    parameters = [f"{n} {tuple(p.shape)} {p.dtype} {words[p.requires_grad]}" for n, p in model.named_parameters()]
    buffers = [f"{name} {tuple(each.shape)} {each.dtype}" for name, each in model.named_buffers()]
    check_alike("list of parameters", parameters, device)
    check_alike("list of buffers", buffers, device)
    check_alike("topology", rows, device)
    check_alike("sharing rule", [plan.describe()], device)
    check_alike("option", options, device)
