"""The entries of a state by the names that the wrapper gives them, whoever named them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

EXTRA = "_extra_state"
"""The entry of `state_dict` that holds everything but the module."""

PREFIX = "module."
"""What the wrapper's names of its module's entries begin with, as those of torch's DistributedDataParallel."""

COMPILED = "_orig_mod."
"""What torch.compile adds to the names of the entries of the module that it is given."""


def renamed_entries(
    state_dict: Mapping[str, Any], own: Iterable[str], extra: Callable[[], Any]
) -> dict[str, Any]:
    """The entries of a state by the names that the wrapper gives them.

    own: those names. extra: makes the entry EXTRA, where the state has none. The names may lack the `module.` of the
    wrapper, and the parts that torch.compile adds; of these readings that which fits most names is taken.
    """
    # The wrapper itself may have been compiled: its own entry then has that name, too.
    found = {EXTRA if plain_name(name) == EXTRA else name: value for name, value in state_dict.items()}
    wanted = list(own)
    theirs = [name for name in found if name != EXTRA]
    readings = [{f"{start}{name}": name for name in theirs} for start in ("", PREFIX)]
    plain = {plain_name(name): name for name in wanted}
    readings += [{plain.get(plain_name(name), name): old for name, old in reading.items()} for reading in readings]
    best = max(readings, key=lambda reading: sum(name in reading for name in wanted))
    entries = OrderedDict({name: found[old] for name, old in best.items()})
    entries[EXTRA] = found[EXTRA] if EXTRA in found else extra()  # files of torch's class have none
    versions = getattr(state_dict, "_metadata", None)
    if versions is not None:  # by modules' names, which modules ask for the format of their entries
        under = {PREFIX.rstrip(".") + f".{name}" * bool(name): version for name, version in versions.items()}
        entries._metadata = {**under, **versions}  # type: ignore[attr-defined]
    return entries


def plain_name(name: str) -> str:
    """The name of an entry without the parts that torch.compile adds."""
    return name.replace(COMPILED, "")
