from __future__ import annotations

import os

from decentnode.wire.generation import Generation, Limits, new_origin
from decentnode.wire.membership.proposal import MAX_OTHER_GENERATIONS, OtherGenerations, Proposal
from decentnode.wire.messages import Promise
from tests.wire.world import RUN, SUSPECT

LIMITS = Limits(SUSPECT, 20.0, 1)


def promise(uid: int, position: int, fresh: int = 0, stopping: int = 0) -> Promise:
    return Promise(RUN, 1, uid, position, fresh, stopping)


def test_the_resulting_generation_begins_at_the_highest_round_of_the_members_with_a_model() -> None:
    proposal = Proposal((1, new_origin(0, os.urandom)), frozenset({0, 1, 2}), {1: 0.0, 2: 0.0})
    for message in (promise(0, 3), promise(1, 5, stopping=1), promise(2, 9, fresh=1)):
        assert not proposal.promised_by_all()
        proposal.promises[message.source] = message
    assert proposal.promised_by_all()
    expected = Generation(1, (0, 1, 2), 5, frozenset({2}), proposal.name[1], stopping=True)
    assert proposal.resulting_generation() == expected


def test_a_proposal_whose_members_have_no_model_results_in_no_generation() -> None:
    proposal = Proposal((1, new_origin(0, os.urandom)), frozenset({0}), {}, {0: promise(0, 3, fresh=1)})
    assert proposal.resulting_generation() is None


def test_silence_is_measured_from_the_last_message_and_readiness_from_the_commit() -> None:
    name = (1, new_origin(0, os.urandom))
    proposal = Proposal(name, frozenset({0, 1, 2}), {1: 0.0, 2: 5.0}, ready={0, 1}, committed_at=0.0)
    assert proposal.silent(5.0, LIMITS, committing=False) == {1}
    proposal.heard_at[1] = 20.0
    proposal.heard_at[2] = 20.0
    assert proposal.silent(20.0, LIMITS, committing=True) == set()
    assert proposal.silent(20.5, LIMITS, committing=True) == {2}
    proposal.ignore_silence(40.0)
    assert proposal.silent(41.0, LIMITS, committing=True) == set()


def test_a_node_leaves_for_a_lower_generation_only_if_a_majority_reports_it() -> None:
    """A generation with a lower name outweighs this node's own only with more than half of the run's nodes, even if
    `min_nodes` is lower. A single report of a higher name is enough."""
    others, own = OtherGenerations(5, LIMITS), (3, new_origin(0, os.urandom))
    lower, higher = (2, new_origin(1, os.urandom)), (4, new_origin(1, os.urandom))
    assert others.heard(higher, 1, 0.0, own)
    assert [others.heard(lower, uid, 0.0, own) for uid in (1, 1, 2, 3)] == [False, False, False, True]
    others.expire(2 * SUSPECT)
    assert not others


def test_the_number_of_remembered_other_generations_is_bounded() -> None:
    others, own = OtherGenerations(5, LIMITS), (1, new_origin(0, os.urandom))
    names = [(2 + number, new_origin(1, os.urandom)) for number in range(MAX_OTHER_GENERATIONS + 1)]
    accepted = [others.heard(name, 1, 0.0, own) for name in names]
    assert accepted == [True] * MAX_OTHER_GENERATIONS + [False]
