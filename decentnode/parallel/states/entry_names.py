"""Renames the entries of a state to the wrapper's names, whoever saved it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.nn import Module

EXTRA = "_extra_state"
"""The entry of `state_dict` that holds everything but the module."""

PREFIX = "module."
"""The prefix of the wrapper's names for its module's entries, the same as in torch's DistributedDataParallel."""

COMPILED = "_orig_mod."
"""What torch.compile adds to the names of a module's entries."""


def renamed_entries(
    state_dict: Mapping[str, Any], own: Iterable[str], extra: Callable[[], Any]
) -> dict[str, Any]:
    """Returns the entries of a state under the names that the wrapper gives them.

    own: those names. extra: makes the entry EXTRA, if the state has none. The state's names may lack the wrapper's
    `module.`, and may have or lack the parts that torch.compile adds; the interpretation that matches most names wins.
    """
    # The wrapper itself may have been compiled: its own entry then has the prefix of torch.compile, too.
    found = {EXTRA if plain_name(name) == EXTRA else name: value for name, value in state_dict.items()}
    wanted = list(own)
    theirs = [name for name in found if name != EXTRA]
    readings = [{f"{start}{name}": name for name in theirs} for start in ("", PREFIX)]
    plain = {plain_name(name): name for name in wanted}
    readings += [{plain.get(plain_name(name), name): old for name, old in reading.items()} for reading in readings]
    best = max(readings, key=lambda reading: sum(name in reading for name in wanted))
    entries = OrderedDict({name: found[old] for name, old in best.items()})
    entries[EXTRA] = found[EXTRA] if EXTRA in found else extra()  # states of torch's class have none
    versions = getattr(state_dict, "_metadata", None)
    if versions is not None:  # by module name; modules read from it the format version of their entries
        under = {PREFIX.rstrip(".") + f".{name}" * bool(name): version for name, version in versions.items()}
        entries._metadata = {**under, **versions}  # type: ignore[attr-defined]
    return entries


def move_extra_last(_: Module, state_dict: dict[str, Any], prefix: str, __: Any) -> None:
    """A hook of `state_dict`, which moves the entry EXTRA behind those of the module: averages over time, such as
    timm's, pair the entries of a copy with those of the wrapper by position."""
    state_dict[prefix + EXTRA] = state_dict.pop(prefix + EXTRA)


def plain_name(name: str) -> str:
    """Returns the name of an entry without the parts that torch.compile adds."""
    return name.replace(COMPILED, "")
