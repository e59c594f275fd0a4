"""Time-outs that are not given are derived from others, and contradictory ones are refused."""

from __future__ import annotations

from typing import Any

import pytest

from decentnode.experiment import load
from tests.config.experiments import BASE, load_problems


@pytest.mark.parametrize(("given", "suspect", "start"), [
    ("", 10.0, 60.0), (", timeout_seconds: 6", 2.0, 60.0), (", timeout_seconds: 600", 10.0, 600.0),
    (", timeout_seconds: 6, suspect_seconds: 4, start_timeout_seconds: 30", 4.0, 30.0),
])  # fmt: skip
def test_time_outs_that_are_not_given_follow_from_the_time_out_of_a_round(
    write: Any, given: str, suspect: float, start: float
) -> None:
    config = load(write(f"{BASE}communication: {{name: zeromq{given}}}\n")).communication
    assert (config.suspect_seconds, config.start_timeout_seconds) == (suspect, start)


@pytest.mark.parametrize(("given", "silence"), [("", 2.0), (", suspect_seconds: 60, timeout_seconds: 600", 2.0),
                                                (", timeout_seconds: 3", 1.0)])  # fmt: skip
def test_the_silence_before_a_ping_is_two_seconds_but_at_most_suspect_seconds(
    write: Any, given: str, silence: float
) -> None:
    config = load(write(f"{BASE}communication: {{name: zeromq{given}}}\n")).communication
    assert config.silence_seconds == silence


@pytest.mark.parametrize(("given", "wrong"), [
    ("suspect_seconds: .5", "suspect_seconds must be at least 0.75, got 0.5"),
    ("timeout_seconds: 5, suspect_seconds: 5", "suspect_seconds must be less than timeout_seconds, 5, got 5"),
    ("timeout_seconds: 1", "suspect_seconds must be at least 0.75"),
])  # fmt: skip
def test_suspect_seconds_must_be_longer_than_a_ping_and_shorter_than_a_round(
    write: Any, given: str, wrong: str
) -> None:
    assert wrong in load_problems(write(f"{BASE}communication: {{{given}}}\nnode: {{missing: regroup}}\n"))
    load(write(f"{BASE}communication: {{{given}}}\n"))  # no node is suspected in a run that ends when one is missing
