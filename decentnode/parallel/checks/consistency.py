"""Checks that all ranks of a wrapper have the same parameters, topology and sharing rule, with one step size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Module

from decentnode.parallel.planning.differences import Differences
from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.process_group.agreement import (
    check_same_on_all_ranks,
    collective_operation,
    succeed_on_all_ranks,
)
from decentnode.parallel.process_group.collectives import gather_texts
from decentnode.parallel.process_group.default_group import device_of_group, num_ranks


def check_wrapper_consistency(model: Module, plan: Plan, options: Sequence[str], device: torch.device) -> None:
    """Raises AssemblyError naming a rank with other parameters, another topology, rule or option. Blocking.

    options: those that decide what ranks send each other, each with its name.
    """
    graph = plan.graph
    rows = [f"{graph.num_nodes} ranks"] + [
        f"round {r}: {source}->{uid} {weight:.12g}" for r in range(min(graph.period or 4, 32))
        for uid in range(min(graph.num_nodes, 64)) for source, weight in graph.weights(uid, r).items()
    ]  # fmt: skip
    words = {True: "trained", False: "frozen"}
    parameters = [f"{n} {tuple(p.shape)} {p.dtype} {words[p.requires_grad]}" for n, p in model.named_parameters()]
    buffers = [f"{name} {tuple(each.shape)} {each.dtype}" for name, each in model.named_buffers()]
    check_same_on_all_ranks("list of parameters", parameters, device)
    check_same_on_all_ranks("list of buffers", buffers, device)
    check_same_on_all_ranks("topology", rows, device)
    check_same_on_all_ranks("sharing rule", [plan.describe()], device)
    check_same_on_all_ranks("option", options, device)


def agree_on_step_size(plan: Plan) -> None:
    """Sets the step size, of a rule that searches for one, to what rank 0 finds. Blocking, on all ranks. The search may
    give another result on another processor, and with two different step sizes the mean of the models would change.

    Raises AssemblyError if rank 0 cannot search.
    """
    rule = plan.rule
    if not isinstance(rule, Differences) or rule.config.step_size is not None:
        return
    with succeed_on_all_ranks("search the step of choco"):
        if plan.rank == 0:
            rule.choose_step(plan.graph)
    if num_ranks() > 1:
        with collective_operation("take the step of rank 0"):
            rule.step_size = float(gather_texts(repr(rule.step_size), device_of_group(), "step")[0])
