"""Partitions: which node gets which training samples."""

from __future__ import annotations

PARTITIONS: dict[str, str] = {
    "iid": "decentnode.data.partition.iid:Iid",
    "shards": "decentnode.data.partition.shards:Shards",
    "k_classes": "decentnode.data.partition.k_classes:KClasses",
    "dirichlet": "decentnode.data.partition.dirichlet:Dirichlet",
    "fractions": "decentnode.data.partition.fractions:Fractions",
    "ordered": "decentnode.data.partition.fractions:Ordered",
    "by_key": "decentnode.data.partition.by_key:ByKey",
    "only_local": "decentnode.data.partition.only_local:OnlyLocal",
}
