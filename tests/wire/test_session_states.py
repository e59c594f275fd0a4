"""The session's table of states: every transition in it can be caused, and no other is possible."""

from __future__ import annotations

from itertools import product

import pytest

from decentnode.wire.bounds import MAX_TEXT
from decentnode.wire.codec import to_bitmap
from decentnode.wire.messages import NO_RUN, Absent, Message, Reject, Start, Welcome
from decentnode.wire.session import Session
from decentnode.wire.session_states import ADMISSIBLE, TRANSITIONS, Cause, State, next_state

RUN = b"run-id-8"
CAUSES = sorted({cause for row in TRANSITIONS.values() for cause in row})
ROWS = [(state, cause) for state, row in TRANSITIONS.items() for cause in row]


def session_in_state(state: State) -> Session:
    """Returns the session of node 1 of 2, brought into `state` by calls and messages."""
    session = Session(1, 2, "same")
    if state == "running":
        for message in (Welcome(RUN, 0, 0), Start(RUN, 0, 0)):
            session.receive(message, 0.0)
    elif state == "outside":
        session.start_outside()
    elif state == "failed":
        session.give_up()
    assert session.state == state
    return session


def trigger(session: Session, cause: Cause) -> None:
    """Makes the calls or delivers the messages that are this cause."""
    messages: dict[Cause, list[Message]] = {
        "Start": [Welcome(RUN, 0, 0), Start(RUN, 0, 0)],
        "Reject": [Reject(NO_RUN, 0, 0, "same", "n" * MAX_TEXT)],
        "Absent": [Welcome(RUN, 0, 0), Absent(RUN, 0, 0, to_bitmap([1], 2), "")],
    }
    if cause in messages:
        for message in messages[cause]:
            session.receive(message, 0.0)
    elif cause == "deadline passed":
        session.give_up()
    elif cause == "comes from outside":
        session.start_outside()
    elif cause == "new generation":
        session.adopt(RUN, (1, b"o" * 12), (0, 1))


@pytest.mark.parametrize(("state", "cause"), [row for row in ROWS if row[1] != "all present"])
def test_every_transition_in_the_table_can_be_caused(state: State, cause: Cause) -> None:
    session = session_in_state(state)
    trigger(session, cause)
    assert session.state == TRANSITIONS[state][cause]


def test_the_root_of_a_complete_run_starts_it() -> None:
    root = Session(0, 1, "same", RUN)
    root.tick(0.0)
    assert root.state == TRANSITIONS["joining"]["all present"]


@pytest.mark.parametrize(("state", "cause"), [pair for pair in product(TRANSITIONS, CAUSES) if pair not in ROWS])
def test_a_transition_that_is_not_in_the_table_raises_an_assertion_error(state: State, cause: Cause) -> None:
    with pytest.raises(AssertionError, match=f"no change of state from {state} by {cause}"):
        next_state(state, cause)


def test_every_state_admits_some_messages() -> None:
    assert ADMISSIBLE.keys() == TRANSITIONS.keys()
    assert all(ADMISSIBLE.values())
