"""The kinds of records of what a node did with models (history.py). Imports no torch."""

from __future__ import annotations

HISTORY: dict[str, str] = {
    "recording": "a process begins to record what its node does: versions, threads",
    "steps": "the local steps of a round are made, if it has any and they are not skipped as too late",
    "sent": "payloads are handed to the transport: digest by neighbor",
    "mixed": "an exchange is over: digest of what was mixed, by source; who is missing, and who got nothing",
    "published": "payloads are put into mailboxes of neighbors: digest by neighbor; round: the number of that message",
    "mixed_copies": "payloads from a mailbox are mixed: source, its message's number, age in own rounds, digest",
    "broken_off": "a generation ended during an exchange, of which a part is mixed into the model",
    "averaging": "the node contributes to a mean over all nodes",
    "averaged": "the mean over all nodes has arrived",
    "left": "the node begins no further round of its generation, and why",
    "entered": "the node is a member of a generation in force: its name, members, and its first round",
    "restored": "a restarted node restores its own checkpoint, if one is recent enough: which, its state's digest",
    "resumed": "the node resumes from a checkpoint of an earlier run: which, its digest, members without one",
    "leaving": "only this node is asked to leave: it ends without beginning another round",
    "ordered": "the node evaluates before a round, because a user requested it",
    "stopping": "the run is asked to stop: the node begins no further round",
}
"""Every kind of record with its meaning."""
