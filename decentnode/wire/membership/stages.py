"""The stages of a node while its run agrees on generations, and every transition between them.

The code changes the stage only through `TRANSITIONS`; a transition that is not in it raises AssertionError.
docs/explanation/membership.rst shows the same table, which tests/wire/test_stages.py compares with this one.
"""

from __future__ import annotations

from typing import Literal

from decentnode.wire.messages import Commit, Current, Denied, Go, Message, Prepare

Stage = Literal["steady", "suspecting", "short", "preparing", "promised", "committing", "committed", "outside"]

STAGES: dict[Stage, str] = {
    "steady": "its generation is in force",
    "suspecting": "its generation is over, and it waits for the leader of the next one",
    "short": "it leads, but too few nodes are left for a generation",
    "preparing": "it leads, and some members have not promised yet",
    "committing": "it leads, all have promised, and some are not ready yet",
    "promised": "it follows a leader, and begins no round",
    "committed": "it follows a leader, and releases what belonged to the old generation, then says Ready",
    "outside": "it belongs to no generation, and asks to join one",
}

Cause = Literal[
    "generation over", "new leader", "proposes", "too few", "all promised", "all ready", "yields",
    "Prepare", "Commit", "Go", "excluded",
]  # fmt: skip

CAUSES: dict[Cause, str] = {
    "generation over": "a member is missed or failed, asks for another generation, or a node asks to join",
    "new leader": "the leader or a member of its proposal is silent, or a node answers or joins that was missed: the "
                  "lowest uid of those left leads",
    "proposes": "this node is the lowest uid of those left",
    "too few": "fewer than min_nodes are left, or a server is gone, and no stop was asked for",
    "all promised": "every member of the proposal has promised",
    "all ready": "every member of the proposal is ready",
    "yields": "a node with a lower uid leads too, and has proposed as high a number",
    "Prepare": "a leader asks for a promise with a higher name than any that this node promised",
    "Commit": "the leader says that all have promised",
    "Go": "the leader says that all are ready",
    "excluded": "the process was started again, the others went on without this node, or nobody has a model",
}  # fmt: skip

TRANSITIONS: dict[Stage, dict[Cause, Stage]] = {
    "steady": {"generation over": "suspecting", "excluded": "outside"},
    "suspecting": {
        "new leader": "suspecting", "proposes": "preparing", "too few": "short", "Prepare": "promised",
        "excluded": "outside",
    },
    "short": {"new leader": "suspecting", "Prepare": "promised", "excluded": "outside"},
    "preparing": {
        "all promised": "committing", "too few": "short", "new leader": "suspecting", "yields": "suspecting",
        "Prepare": "promised", "excluded": "outside",
    },
    "committing": {
        "all ready": "steady", "new leader": "suspecting", "yields": "suspecting", "Prepare": "promised",
        "excluded": "outside",
    },
    "promised": {
        "Commit": "committed", "new leader": "suspecting", "Prepare": "promised", "excluded": "outside",
    },
    "committed": {"Go": "steady", "new leader": "suspecting", "Prepare": "promised", "excluded": "outside"},
    "outside": {"Prepare": "promised", "excluded": "outside"},
}  # fmt: skip
"""The next stage for each stage and cause. Two causes at once are two transitions: a `Prepare` that reaches a steady
node ends its generation first."""

HEARD_BY_GUESTS: frozenset[type[Message]] = frozenset({Prepare, Commit, Go, Current, Denied})
"""The messages that a node accepts until it has entered a generation; it has no part in agreements of the others."""


def next_stage(stage: Stage, cause: Cause) -> Stage:
    """Returns the stage that follows. Raises AssertionError for a transition that is not in the table: a bug in our own
    code."""
    following = TRANSITIONS[stage].get(cause)
    if following is None:
        raise AssertionError(f"no change of stage from {stage} by {cause}")
    return following
