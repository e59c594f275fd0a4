"""Sharing rules: what leaves a node and how arrivals are mixed."""

SHARINGS: dict[str, str] = {
    "full": "decentnode.sharing.full:Full",
}
