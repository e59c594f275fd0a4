"""The failure detector: its time-out follows the answer times that were measured."""

from __future__ import annotations

import math
import random

import pytest

from decentnode.wire.membership.watch import Watch

LONGEST = 10.0
"""The longest time-out, in seconds."""


def measure_answers(watch: Watch, answer_seconds: float, now: float = 0.0, waits: int = 1) -> float:
    """Makes waits in each of which node 1 is pinged once and answers after `answer_seconds`. Returns the time after
    them."""
    for _ in range(waits):
        since = now
        assert watch.ask([1], since, since + Watch.AFTER_SECONDS) == ([1], [])
        now = since + Watch.AFTER_SECONDS + answer_seconds
        watch.answered(1, now)
        now += 1.0
    return now


def seconds_until_suspected(watch: Watch, now: float) -> float:
    """Returns how long after its first ping node 1, which no longer answers, is reported as silent."""
    since, first_ping = now, now + Watch.AFTER_SECONDS
    now = first_ping
    while watch.ask([1], since, now) != ([], [1]):
        now = max(now + 1e-3, watch.next_ask(since))
        assert now < first_ping + 2 * LONGEST
    return now - first_ping


def test_the_time_out_is_the_longest_before_there_are_answers() -> None:
    assert Watch(LONGEST).patience == LONGEST
    assert LONGEST < seconds_until_suspected(Watch(LONGEST), 5.0) <= LONGEST + 2 * Watch.EVERY_SECONDS


@pytest.mark.parametrize(
    ("answer_seconds", "patience"), [(0.001, Watch.MIN_TIMEOUT_SECONDS), (0.4, 3.2), (3.0, LONGEST)]
)
def test_the_time_out_is_a_multiple_of_the_answer_time_within_bounds(answer_seconds: float, patience: float) -> None:
    watch = Watch(LONGEST)
    now = measure_answers(watch, answer_seconds, waits=Watch.MIN_ANSWERS)
    assert watch.patience == pytest.approx(patience)
    assert patience < seconds_until_suspected(watch, now) <= patience + 2 * Watch.EVERY_SECONDS


def test_one_slow_answer_raises_the_time_out_until_it_is_forgotten() -> None:
    watch = Watch(LONGEST)
    now = measure_answers(watch, 0.01, waits=Watch.MIN_ANSWERS)
    now = measure_answers(watch, 1.0, now)
    assert watch.patience == 8.0
    measure_answers(watch, 0.01, now, waits=Watch.ANSWERS)
    assert watch.patience == Watch.MIN_TIMEOUT_SECONDS


def test_the_time_out_never_exceeds_a_short_configured_one() -> None:
    watch = Watch(0.5)
    measure_answers(watch, 0.01, waits=Watch.MIN_ANSWERS)
    assert watch.patience == 0.5


def test_answers_are_measured_when_a_wait_begins_but_not_in_every_wait() -> None:
    watch, peers = Watch(LONGEST), list(range(1, 1 + Watch.MIN_ANSWERS))
    assert watch.next_ask(7.0) == 7.0 and watch.ask(reversed(peers), 7.0, 7.0) == (peers, [])
    for uid in peers:
        assert watch.patience == LONGEST
        watch.answered(uid, 7.1)
    assert watch.patience == Watch.MIN_TIMEOUT_SECONDS
    assert watch.next_ask(8.0) == 8.0 + Watch.AFTER_SECONDS and watch.ask([1], 8.0, 8.0) == ([], [])
    assert watch.next_ask(20.0) == 20.0 and watch.ask([1], 20.0, 20.0) == ([1], [])


def test_an_unanswered_ping_that_only_measures_makes_no_node_suspect() -> None:
    watch = Watch(LONGEST)
    measure_answers(watch, 0.001, waits=Watch.MIN_ANSWERS)
    assert watch.ask([1], 50.0, 50.0) == ([1], [])
    assert watch.ask([1], 90.0, 90.0 + Watch.AFTER_SECONDS) == ([1], [])  # the first ping of this wait


def test_a_node_from_which_other_messages_arrive_is_not_suspected() -> None:
    """Its answer may be queued behind models on a full link."""
    watch = Watch(LONGEST)
    now = measure_answers(watch, 0.001, waits=Watch.MIN_ANSWERS)
    for i in range(40):
        assert watch.ask([1], now, now + Watch.AFTER_SECONDS + i * 0.5) == ([1], [])
        watch.note_heard(1)


def test_a_process_late_for_its_own_timer_waits_longer_unless_it_was_suspended() -> None:
    watch = Watch(LONGEST)
    measure_answers(watch, 0.01, waits=Watch.MIN_ANSWERS)
    watch.note_delay(30.0)
    assert watch.patience == Watch.MIN_TIMEOUT_SECONDS
    watch.note_delay(0.5)
    assert watch.patience == 4.0


def test_only_nodes_that_do_not_answer_are_reported_as_silent() -> None:
    watch = Watch(2.0)
    since, first_ping = 5.0, 5.0 + Watch.AFTER_SECONDS
    assert watch.ask([1, 2], since, first_ping) == ([1, 2], [])
    assert watch.next_ask(since) == first_ping + Watch.EVERY_SECONDS == watch.repeats_at(since)
    watch.answered(1, first_ping + 0.5)
    assert watch.ask([1, 2], since, first_ping + 1.0) == ([1, 2], [])
    watch.answered(1, first_ping + 1.1)
    assert watch.ask([1, 2], since, first_ping + 4.5) == ([], [2])
    assert watch.ask([1], since, first_ping + 4.5) == ([1], [])


def test_pings_of_an_earlier_wait_do_not_count() -> None:
    watch = Watch(2.0)
    assert watch.ask([1], 5.0, 6.0) == ([1], [])
    assert watch.repeats_at(100.0) == math.inf
    assert watch.ask([1], 100.0, 101.0) == ([1], [])
    assert watch.ask([], 100.0, 102.0) == ([], [])
    assert watch.next_ask(100.0) > 102.0, "a wait for no node does not make `ask` due at once for ever"


@pytest.mark.parametrize("slowest", [0.05, 0.3, 1.0])
def test_slow_answers_of_a_busy_machine_make_no_node_suspect(slowest: float) -> None:
    """Answers take a random time of up to `slowest` seconds, one in a hundred up to three times that. In each of
    hundreds of waits the node is pinged several times."""
    draw, watch, begins_at = random.Random(f"{slowest}"), Watch(LONGEST), 0.0
    for _ in range(500):
        now, answers_at = begins_at + Watch.AFTER_SECONDS, None
        while now < begins_at + 5.0:
            if answers_at is not None and answers_at <= now:
                watch.answered(1, answers_at)
                answers_at = None
            pinged, silent = watch.ask([1], begins_at, now)
            assert not silent, f"after {now - begins_at:.2f} s with patience {watch.patience:.2f}"
            if pinged and answers_at is None:
                answers_at = now + draw.random() * slowest * (3 if draw.random() < 0.01 else 1)
            now += Watch.EVERY_SECONDS
        begins_at = now + 1.0


@pytest.mark.parametrize(("delays", "patience"), [
    ([], Watch.MIN_TIMEOUT_SECONDS), ([0.1, 0.1, 9.0], Watch.MIN_TIMEOUT_SECONDS),
    ([0.0, 9.0], Watch.MIN_TIMEOUT_SECONDS), ([0.5, 0.6, 0.1], 4.0), ([2.0, 3.0], LONGEST),
])  # fmt: skip
def test_the_time_out_is_longer_while_most_peers_take_long_to_acknowledge_models(
    delays: list[float], patience: float
) -> None:
    """The links were idle while answers were measured, and are full now. A single slow peer says nothing about the
    others: it may itself be gone."""
    watch = Watch(LONGEST)
    now = measure_answers(watch, 0.01, waits=Watch.MIN_ANSWERS)
    watch.load = lambda _now: delays
    assert patience < seconds_until_suspected(watch, now) <= patience + 2 * Watch.EVERY_SECONDS
