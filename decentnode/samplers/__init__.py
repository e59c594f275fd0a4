"""Peer samplers: choose to which nodes a node sends, when it knows only some of the others and learns of more by
gossip."""

SAMPLERS: dict[str, str] = {
    "cyclon": "decentnode.samplers.cyclon:Cyclon",
    "knn": "decentnode.samplers.knn:Knn",
}
