"""Mappings: the machine that hosts each node, and the address at which the others reach it."""

from __future__ import annotations

MAPPINGS: dict[str, str] = {
    "linear": "decentnode.mapping.linear:Linear",
    "table": "decentnode.mapping.table:Table",
}
