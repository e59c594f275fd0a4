from __future__ import annotations

import os

from decentnode.wire.generation import FIRST, new_origin
from decentnode.wire.membership.joining import JOIN_EVERY_SECONDS, JoinRequests
from tests.wire.world import SUSPECT


def test_a_node_asks_at_once_and_then_regularly() -> None:
    joining = JoinRequests(SUSPECT)
    joining.begin(10.0)
    assert [joining.due(now) for now in (10.0, 10.1, 10.0 + JOIN_EVERY_SECONDS)] == [True, False, True]


def test_a_node_that_has_to_join_again_waits_twice_as_long_each_time() -> None:
    joining = JoinRequests(SUSPECT)
    for number in range(9):
        joining.begin(10.0)
        wait = SUSPECT * (2 ** min(number, 6) - 1)
        assert wait == 0 or not joining.due(10.0 + wait - 0.01)
        assert joining.due(10.0 + wait)


def test_a_request_names_the_last_known_generation_of_its_receiver() -> None:
    joining, name = JoinRequests(SUSPECT), (3, new_origin(1, os.urandom))
    joining.begin(10.0)
    assert joining.due(10.0)
    assert joining.name_for(1) == FIRST
    assert joining.note(1, name, 10.1)
    assert joining.name_for(1) == name
    assert not joining.note(1, name, 10.2)
    joining.begin(20.0)
    assert joining.name_for(1) == FIRST
    assert not joining.note(1, name, 20.0)  # the next request waits for the backoff
