"""How long a node may be silent is what answers were seen to take."""

from __future__ import annotations

import math
import random

import pytest

from decentnode.wire.membership.watch import Watch

LONGEST = 10.0


def asked(watch: Watch, took: float, now: float = 0.0, times: int = 1) -> float:
    """Waits in which node 1 is asked at once, and answers after `took`. Returns the time behind them."""
    for _ in range(times):
        since = now
        assert watch.ask([1], since, since + Watch.AFTER_SECONDS) == ([1], [])
        now = since + Watch.AFTER_SECONDS + took
        watch.answered(1, now)
        now += 1.0
    return now


def silence(watch: Watch, now: float) -> float:
    """After how long node 1, which says nothing any more, counts as gone, from its first ping on."""
    since, first = now, now + Watch.AFTER_SECONDS
    now = first
    while watch.ask([1], since, now) != ([], [1]):
        now = max(now + 1e-3, watch.next_ask(since))
        assert now < first + 2 * LONGEST
    return now - first


def test_before_there_was_an_answer_the_longest_silence_is_borne() -> None:
    assert Watch(LONGEST).patience == LONGEST
    assert LONGEST < silence(Watch(LONGEST), 5.0) <= LONGEST + 2 * Watch.EVERY_SECONDS


@pytest.mark.parametrize(("took", "patience"), [(0.001, Watch.MIN_TIMEOUT_SECONDS), (0.4, 3.2), (3.0, LONGEST)])
def test_silence_is_borne_for_many_times_what_answers_take(took: float, patience: float) -> None:
    watch = Watch(LONGEST)
    now = asked(watch, took, times=Watch.MIN_ANSWERS)
    assert watch.patience == pytest.approx(patience)
    assert patience < silence(watch, now) <= patience + 2 * Watch.EVERY_SECONDS


def test_one_slow_answer_counts_for_as_long_as_it_is_remembered() -> None:
    watch = Watch(LONGEST)
    now = asked(watch, 0.01, times=Watch.MIN_ANSWERS)
    now = asked(watch, 1.0, now)
    assert watch.patience == 8.0
    asked(watch, 0.01, now, times=Watch.ANSWERS)
    assert watch.patience == Watch.MIN_TIMEOUT_SECONDS


def test_the_longest_silence_is_what_the_config_says_however_short() -> None:
    watch = Watch(0.5)
    asked(watch, 0.01, times=Watch.MIN_ANSWERS)
    assert watch.patience == 0.5


def test_answers_are_measured_as_a_wait_begins_and_then_now_and_then() -> None:
    watch, peers = Watch(LONGEST), list(range(1, 1 + Watch.MIN_ANSWERS))
    assert watch.next_ask(7.0) == 7.0 and watch.ask(reversed(peers), 7.0, 7.0) == (peers, [])
    for uid in peers:
        assert watch.patience == LONGEST
        watch.answered(uid, 7.1)
    assert watch.patience == Watch.MIN_TIMEOUT_SECONDS
    assert watch.next_ask(8.0) == 8.0 + Watch.AFTER_SECONDS and watch.ask([1], 8.0, 8.0) == ([], [])
    assert watch.next_ask(20.0) == 20.0 and watch.ask([1], 20.0, 20.0) == ([1], [])


def test_a_beat_that_is_not_answered_makes_nobody_suspect() -> None:
    watch = Watch(LONGEST)
    asked(watch, 0.001, times=Watch.MIN_ANSWERS)
    assert watch.ask([1], 50.0, 50.0) == ([1], [])
    assert watch.ask([1], 90.0, 90.0 + Watch.AFTER_SECONDS) == ([1], [])  # asked for the first time in this wait


def test_who_sends_models_lives() -> None:
    """Its answer waits behind them where the link is full."""
    watch = Watch(LONGEST)
    now = asked(watch, 0.001, times=Watch.MIN_ANSWERS)
    for i in range(40):
        assert watch.ask([1], now, now + Watch.AFTER_SECONDS + i * 0.5) == ([1], [])
        watch.note_heard(1)


def test_a_process_that_comes_late_itself_waits_longer_and_one_that_was_suspended_does_not() -> None:
    watch = Watch(LONGEST)
    asked(watch, 0.01, times=Watch.MIN_ANSWERS)
    watch.note_delay(30.0)
    assert watch.patience == Watch.MIN_TIMEOUT_SECONDS
    watch.note_delay(0.5)
    assert watch.patience == 4.0


def test_only_those_that_do_not_answer_are_silent() -> None:
    watch = Watch(2.0)
    since, first = 5.0, 5.0 + Watch.AFTER_SECONDS
    assert watch.ask([1, 2], since, first) == ([1, 2], [])
    assert watch.next_ask(since) == first + Watch.EVERY_SECONDS == watch.repeats_at(since)
    watch.answered(1, first + 0.5)
    assert watch.ask([1, 2], since, first + 1.0) == ([1, 2], [])
    watch.answered(1, first + 1.1)
    assert watch.ask([1, 2], since, first + 4.5) == ([], [2])
    assert watch.ask([1], since, first + 4.5) == ([1], [])


def test_what_was_asked_in_an_earlier_wait_does_not_count() -> None:
    watch = Watch(2.0)
    assert watch.ask([1], 5.0, 6.0) == ([1], [])
    assert watch.repeats_at(100.0) == math.inf
    assert watch.ask([1], 100.0, 101.0) == ([1], [])
    assert watch.ask([], 100.0, 102.0) == ([], [])
    assert watch.next_ask(100.0) > 102.0, "nobody to ask is not due for ever"


@pytest.mark.parametrize("slowest", [0.05, 0.3, 1.0])
def test_a_busy_machine_makes_nobody_suspect(slowest: float) -> None:
    """Answers take as long as chance has it, up to `slowest`, and one in a hundred three times that; hundreds of waits,
    each until the node was asked several times."""
    of, watch, now = random.Random(f"{slowest}"), Watch(LONGEST), 0.0
    for _ in range(500):
        since, at, due = now, now + Watch.AFTER_SECONDS, None
        while at < since + 5.0:
            if due is not None and due <= at:
                watch.answered(1, due)
                due = None
            ping, silent = watch.ask([1], since, at)
            assert not silent, f"after {at - since:.2f} s with patience {watch.patience:.2f}"
            if ping and due is None:
                due = at + of.random() * slowest * (3 if of.random() < 0.01 else 1)
            at += Watch.EVERY_SECONDS
        now = at + 1.0


@pytest.mark.parametrize(("delays", "patience"), [
    ([], Watch.MIN_TIMEOUT_SECONDS), ([0.1, 0.1, 9.0], Watch.MIN_TIMEOUT_SECONDS),
    ([0.0, 9.0], Watch.MIN_TIMEOUT_SECONDS), ([0.5, 0.6, 0.1], 4.0), ([2.0, 3.0], LONGEST),
])  # fmt: skip
def test_answers_are_waited_for_longer_where_most_peers_take_long_for_models(
    delays: list[float], patience: float
) -> None:
    """Links were idle as answers were measured, and are full now; one peer that takes no models is gone itself."""
    watch = Watch(LONGEST)
    now = asked(watch, 0.01, times=Watch.MIN_ANSWERS)
    watch.load = lambda _now: delays
    assert patience < silence(watch, now) <= patience + 2 * Watch.EVERY_SECONDS
