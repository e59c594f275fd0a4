"""The part of a wrapper's state beside its module's: optimizer, schedule, sharing rules and number of steps."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from decentnode.optim.saved import check_state_matches, class_name_of, count_entries
from decentnode.parallel.states.layouts import bucket_layout, convert_rule_states
from decentnode.parallel.steps.gossip_steps import GossipSteps


def state_of_wrapper(steps: GossipSteps, named: Sequence[tuple[str, Tensor]], optimizer: Optimizer) -> dict[str, Any]:
    """Returns the part of a wrapper's state beside its module's. named: the exchanged parameters, with their names.
    optimizer: the one that the script sees, with its hooks."""
    local, kept = steps.local, optimizer.state_dict()
    return {
        "optimizer": kept, "optimizer_kind": class_name_of(local.optimizer), "optimizer_entries": count_entries(kept),
        "steps": steps.taken, "factor": steps.factor, "learning_rate": steps.learning_rate,
        "lr_scheduler": None if local.lr_scheduler is None else local.lr_scheduler.state_dict(),
        "lr_scheduler_kind": class_name_of(local.lr_scheduler),
        "scaler": None if local.scaler is None else local.scaler.state_dict(),
        "sharing": [bucket.rule.state_dict() for bucket in steps.buckets],
        "layout": bucket_layout(steps.buckets, named),
    }  # fmt: skip


def load_wrapper_state(
    steps: GossipSteps, named: Sequence[tuple[str, Tensor]], optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Loads what `state_of_wrapper` returned. Raises ValueError, having loaded nothing, for a sharing rule's state that
    does not fit the buckets, and for that of another optimizer or scheduler. Starts no new exchange (loading.py)."""
    layout, local = bucket_layout(steps.buckets, named), steps.local
    rule_states = convert_rule_states(state["sharing"], state.get("layout"), layout)
    kind, entries = state.get("optimizer_kind"), state.get("optimizer_entries")
    check_state_matches(local.optimizer, state["optimizer"], kind, entries)
    if local.lr_scheduler is not None and state["lr_scheduler"] is not None:
        load_scheduler(local.lr_scheduler, state["lr_scheduler"], state.get("lr_scheduler_kind"))
    optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch would keep the tensors of `state`
    if local.scaler is not None and state["scaler"] is not None:
        local.scaler.load_state_dict(state["scaler"])
    steps.taken, steps.factor = int(state["steps"]), float(state["factor"])
    steps.learning_rate = float(state.get("learning_rate", steps.rate()))
    for bucket, each in zip(steps.buckets, rule_states, strict=True):
        bucket.rule.load_state_dict(moved_to(bucket.flat.device, each))
    steps.must_restart = True


def moved_to(device: torch.device, value: Any) -> Any:
    """Returns the state of a rule or method with its tensors on the device of what it belongs to: files and other
    machines have them on the CPU."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: moved_to(device, each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(moved_to(device, each) for each in value)
    return value


def load_scheduler(scheduler: Any, state: Mapping[str, Any], kind: str | None = None) -> None:
    """Loads a scheduler's state. Raises ValueError if it lacks entries that this class needs. kind: the class that it
    was saved from, if known."""
    try:
        scheduler.load_state_dict(copy.deepcopy(state))  # a copy, as torch removes entries from it
    except KeyError as error:
        raise ValueError(f"lr_scheduler must be {kind or 'the one'}, which was saved, got {class_name_of(scheduler)}: "
                         f"the state has no {error}") from error  # fmt: skip
