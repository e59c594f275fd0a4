"""Whom a node sends to, where it knows only some of the others: found out by what nodes tell each other."""

SAMPLERS: dict[str, str] = {
    "cyclon": "decentnode.samplers.cyclon:Cyclon",
    "knn": "decentnode.samplers.knn:Knn",
}
