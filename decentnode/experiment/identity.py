"""What an experiment computes: the keys that a resumed run must share with the one that made its checkpoints."""

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
"""Keys, or whole sections, that say where, how long and how safely a run computes, or what goes wrong meanwhile, but
not what."""


def identity(experiment: Experiment) -> dict[str, Any]:
    """Returns "section.key" -> value of everything that decides what is computed, as plain data.

    Paths, ports and devices are left out, but the edges that the graphs came out with are in it, the content of
    `model.init`, and the machines where the sharing rule's groups are those.
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
    """Returns what of an identity counts now: one that an earlier version wrote may have keys that may change since."""
    return {key: value for key, value in found.items() if not _may_change(key)}


def _may_change(key: str) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in MAY_CHANGE)


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _leaves(below, f"{key}.{name}" if key else name)
    elif not (isinstance(value, dict) or value is None):
        yield key, value
