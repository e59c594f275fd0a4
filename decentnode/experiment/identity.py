"""The keys that determine what an experiment computes; a resumed run must share them with the run it continues."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from decentnode.experiment.tree import EDGES, Experiment, portable_text
from decentnode.sharing.compressed import make_sharing

MAY_CHANGE = (
    "name", "run", "mapping", "communication", "sharing.dump", "faults",
    *(f"node.{key}" for key in ("rounds", "checkpoint", "evaluate_every", "mix_in_background", "missing", "min_nodes",
                                "on_partition", "merge_weights", "restarts", "check_finite", "early_stop")),
)  # fmt: skip
"""Keys, or whole sections, that determine where, how long and how safely a run computes, or which faults occur, but not
what it computes."""


def identity(experiment: Experiment) -> dict[str, Any]:
    """Returns "section.key" -> value of everything that determines what is computed, as plain data.

    Paths, ports and devices are left out. The resulting edges of the graphs, the content of `model.init`, and the nodes
    of each machine if the sharing rule has one group per machine are included.
    """
    content, *graphs = json.loads(portable_text(experiment))
    found = {key: value for key, value in _leaves(content, "") if not _may_change(key)}
    found[EDGES] = hashlib.blake2b(json.dumps(graphs).encode(), digest_size=8).hexdigest()
    machines = [list(uids) for uids in experiment.make_mapping().nodes_by_machine()]
    if make_sharing(experiment.sharing, machines).requirements.groups:
        groups = getattr(experiment.sharing, "groups", "machine")
        found["sharing.groups (uids)"] = machines if groups == "machine" else groups
    return found


def compared(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of an identity that count now; an earlier version may have written keys that may change
    since."""
    return {key: value for key, value in found.items() if not _may_change(key)}


def _may_change(key: str) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in MAY_CHANGE)


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _leaves(below, f"{key}.{name}" if key else name)
    elif not (isinstance(value, dict) or value is None):
        yield key, value
