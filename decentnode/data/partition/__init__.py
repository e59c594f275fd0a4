"""Partitions: who gets which training samples."""

from __future__ import annotations

PARTITIONS: dict[str, str] = {
    "iid": "decentnode.data.partition.iid:Iid",
    "shards": "decentnode.data.partition.shards:Shards",
    "k_classes": "decentnode.data.partition.k_classes:KClasses",
    "dirichlet": "decentnode.data.partition.dirichlet:Dirichlet",
    "by_key": "decentnode.data.partition.by_key:ByKey",
}
