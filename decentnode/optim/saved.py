"""Checks that a saved state fits an optimizer: torch would load any, and miss entries at the next step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

NO_OPTIONS = {"params", "param_names"}
"""Keys of a saved group that are not options."""
SCHEDULED = {"initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum", "swa_lr"}
"""Keys that schedulers add to the groups of any optimizer."""
SWITCHES = {"foreach", "fused", "capturable", "differentiable", "maximize"}
"""Options by which optimizers of one kind differ between versions of torch."""


def class_name_of(optimizer: object) -> str:
    """Returns the class name that a state stores to say what it was saved from."""
    return type(optimizer).__name__


def count_entries(state: Mapping[str, Any]) -> int:
    """Returns how many values a state (of `Optimizer.state_dict`) has for single parameters, such as their momentum."""
    return sum(len(each) if isinstance(each, Mapping) else 1 for each in state.get("state", {}).values())


def check_state_matches(
    optimizer: Optimizer, state: Mapping[str, Any], kind: str | None = None, entries: int | None = None
) -> None:
    """Raises ValueError unless `state` (of `Optimizer.state_dict`) is one of this kind of optimizer, with groups of as
    many parameters. kind: the `class_name_of` the saved optimizer; entries: `count_entries` of the saved state; None if
    unknown.

    Optimizers are of the same kind if their groups have the same options, such as Adam and AdamW. If `kind` is not
    known, it is enough that one has all options of the other, since new versions of torch add options.
    """
    saved, here = _options(state["param_groups"]), _options(optimizer.param_groups)
    same = kind == class_name_of(optimizer) or saved == here
    if not same and (kind is not None or (saved - here and here - saved)):
        was = f"optimizer must be {kind}, which was saved, with" if kind else "optimizer must be the saved one, with"
        raise ValueError(f"{was} {_list_options(saved - here)}, got {class_name_of(optimizer)} with "
                         f"{_list_options(here - saved)}")  # fmt: skip
    sizes, wanted = ([len(group["params"]) for group in each] for each in
                     (state["param_groups"], optimizer.param_groups))  # fmt: skip
    if sizes != wanted:
        raise ValueError(f"optimizer must have groups of as many parameters as the saved one, {sizes}, got {wanted}")
    if entries is not None and count_entries(state) < entries:  # more are fine: the optimizer may have stepped since
        raise ValueError(f"the state must have the {entries} values that the optimizer kept when it was saved, got "
                         f"{count_entries(state)}: torch.distributed.checkpoint loads those alone that the state which "
                         "it is given has already, so give it the state as bytes "
                         "(docs/howto/own_script.rst)")  # fmt: skip


def _options(groups: Iterable[Mapping[str, Any]]) -> set[str]:
    return {key for group in groups for key in group} - NO_OPTIONS - SCHEDULED - SWITCHES


def _list_options(options: set[str]) -> str:
    return ", ".join(sorted(options)) or "no other option"
