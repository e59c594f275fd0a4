"""Local work: what a node does with its own data between two exchanges."""

from __future__ import annotations

TRAININGS: dict[str, str] = {
    "supervised": "decentnode.training.supervised:Supervised",
}
