"""Which machine hosts which node, and where it is reached."""

from __future__ import annotations

MAPPINGS: dict[str, str] = {
    "linear": "decentnode.mapping.linear:Linear",
    "table": "decentnode.mapping.table:Table",
}
