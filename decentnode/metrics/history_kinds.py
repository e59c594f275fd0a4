"""The kinds of records of what a node did with models (history.py). Imports no torch."""

from __future__ import annotations

HISTORY: dict[str, str] = {
    "recording": "a process begins to record what its node does: versions, threads",
    "steps": "the local steps of a round are made, if it has any, and if they are not left out as too late",
    "sent": "payloads are handed to the transport: digest by neighbor",
    "mixed": "an exchange is over: digest of what was mixed, by source; who is missing, and who got nothing",
    "published": "payloads are put into mailboxes of neighbors: digest by neighbor; round: the number of that message",
    "mixed_copies": "what came into a mailbox is mixed: source, its message's number, age in own rounds, and digest",
    "broken_off": "a generation ended while an exchange was mixed into the model, so far",
    "averaging": "the node gives its part to a mean over all nodes",
    "averaged": "that mean is there",
    "left": "the node begins no further round of its generation, and why",
    "entered": "the node is a member of a generation in force: its name, members, and its first round",
    "restored": "a node that comes back takes its own checkpoint, or none is recent enough: which, digest of its state",
    "resumed": "the node goes on from a checkpoint of an earlier run: which, digest, who has none",
    "leaving": "the node alone is asked to leave: it begins no further round, and ends",
    "ordered": "the node evaluates before a round, as people ordered",
    "stopping": "the run is asked to stop: the node begins no further round",
}
"""Every kind of record with its meaning."""
