"""Training: the local work of a node on its own data between two exchanges."""

from __future__ import annotations

TRAININGS: dict[str, str] = {
    "supervised": "decentnode.training.supervised:Supervised",
}
