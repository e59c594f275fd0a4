"""Tables of the states of a session, the transitions between them, and the messages that are admissible in each."""

from __future__ import annotations

from typing import Literal

from decentnode.wire.messages import (
    Absent,
    Ack,
    Arrive,
    Ask,
    Bye,
    Chunk,
    Credit,
    Depart,
    Due,
    Fail,
    Hello,
    Key,
    Message,
    Order,
    Overdue,
    Part,
    Position,
    Present,
    Probe,
    Refused,
    Reject,
    Report,
    Skipped,
    Slot,
    Start,
    Stop,
    Waits,
    Welcome,
)

State = Literal["joining", "running", "failed", "outside"]
Cause = Literal["all present", "Start", "Reject", "Absent", "deadline passed", "comes from outside", "new generation"]

TRANSITIONS: dict[State, dict[Cause, State]] = {
    "joining": {
        "all present": "running", "Start": "running", "Reject": "failed", "Absent": "failed",
        "deadline passed": "failed", "comes from outside": "outside",
    },
    "running": {"new generation": "running"},
    "outside": {"new generation": "running"},
    "failed": {},
}  # fmt: skip
"""The next state for each state and cause. "all present": the root knows that every node has joined. "deadline passed":
this node has waited too long for the start. "comes from outside": the run has already begun, and this process asks to
join it. "new generation": this node is a member of a generation that is in force (wire/membership/)."""

_ALWAYS = frozenset({Hello, Reject, Present, Refused, Stop, Fail, Ack, Probe, Bye})
IN_A_RUN = frozenset({Chunk, Part, Credit, Arrive, Depart, Slot, Skipped, Overdue, Waits, Ask, Key})
"""Messages that a member may send to any other member once it knows the run's id; Arrive only along the tree."""

ADMISSIBLE: dict[State, frozenset[type[Message]]] = {
    "joining": _ALWAYS | IN_A_RUN | {Welcome, Start, Absent},
    "running": _ALWAYS | IN_A_RUN | {Report, Order, Position, Due},
    "failed": frozenset({Ack, Probe, Bye}),
    "outside": frozenset({Ack, Probe, Bye}),
}
"""The messages that a node accepts in each state. Bulk messages are accepted before the start, because a sender that is
higher in the tree receives the start earlier."""

FROM_PARENT = (Welcome, Start, Absent, Reject, Due)
"""Messages that only the tree parent may send."""
FROM_CHILD = (Hello, Present, Refused, Report, Position)
"""Messages that only tree children may send."""


def next_state(state: State, cause: Cause) -> State:
    """Returns the state that follows. Raises AssertionError for a transition that is not in the table: a bug in our own
    code."""
    following = TRANSITIONS[state].get(cause)
    if following is None:
        raise AssertionError(f"no change of state from {state} by {cause}")
    return following
