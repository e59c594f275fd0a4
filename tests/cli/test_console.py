"""What the plain form of a run says: every round once, every accuracy with its own round."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

import pytest

from decentnode.cli import console as module
from decentnode.cli.console import ConsoleObserver
from decentnode.cli.output import Output
from decentnode.clock import VirtualClock, use
from tests.launch.facts import FACTS


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    with use(VirtualClock()) as virtual:
        virtual.sleep(100.0)
        yield virtual


def test_every_round_is_printed_once_with_its_own_accuracy(clock: VirtualClock) -> None:
    out = io.StringIO()
    output = Output(out)
    observer = ConsoleObserver(output, started=100.0, share="", live=False)
    observer.facts(FACTS, None)  # ten rounds, an evaluation every five
    observer.joined(1.0)
    accuracy = {0: 0.1, 5: 0.5, 10: 0.9}
    for finished in range(11):
        for uid in FACTS.local:
            if finished:
                observer.progress(uid, {"kind": "round", "round": finished - 1, "loss": 1.0})
            clock.sleep(module.LINE_SECONDS)
            observer.tick()  # between the end of a round and its evaluation, too
            if finished in accuracy:
                observer.progress(uid, {"kind": "evaluation", "round": finished, "accuracy": accuracy[finished],
                                        "accuracy_mean": accuracy[finished]})  # fmt: skip
        clock.sleep(module.LINE_SECONDS + 1)
        observer.tick()
    assert output.drain(30)
    told = re.findall(r"^round=(\d+)/10(.*)$", out.getvalue(), re.MULTILINE)
    assert [int(round) for round, _ in told] == list(range(11)), out.getvalue()
    for round, rest in told:
        assert ("acc_mean" in rest) == (int(round) in accuracy)
        assert int(round) not in accuracy or f"acc_mean={accuracy[int(round)]:.3f}" in rest


def test_the_closing_evaluation_of_a_stopped_run_does_not_print_its_round_again(clock: VirtualClock) -> None:
    out = io.StringIO()
    output = Output(out)
    observer = ConsoleObserver(output, started=100.0, share="", live=False)
    observer.facts(FACTS, None)
    for uid in FACTS.local:
        observer.progress(uid, {"kind": "round", "round": 6, "loss": 1.0})
    clock.sleep(module.LINE_SECONDS + 1)
    observer.tick()
    for uid in FACTS.local:
        observer.progress(uid, {"kind": "evaluation", "round": 7, "accuracy": 0.5, "accuracy_mean": 0.5})
    assert output.drain(30)
    assert re.findall(r"^(round|evaluated)=7/10 ", out.getvalue(), re.MULTILINE) == ["round", "evaluated"]


@pytest.mark.parametrize("join", [False, True])
def test_only_nodes_of_a_run_that_starts_are_said_to_be_connected(join: bool) -> None:
    out = io.StringIO()
    output = Output(out)
    observer = ConsoleObserver(output, started=100.0, share="", live=False)
    observer.facts(FACTS, None)
    (observer.asks_to_join if join else observer.joined)(1.0)
    assert output.drain(30)
    assert ("all connected" in out.getvalue(), "let them in" in out.getvalue()) == (not join, join)
