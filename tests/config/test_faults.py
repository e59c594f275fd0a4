"""Faults that cannot come about are said before the run begins."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config.experiments import BASE, said


@pytest.mark.parametrize(("faults", "more", "wrong"), [
    ("[{do: kil, nodes: [1], at_round: 1}]", "", "kil"),
    ("[{do: kill, nodes: [9], at_round: 1}]", "", "nodes below 4, got 9"),
    ("[{do: drop, share: .1}]", "communication: {name: shared_memory}", "drop is of messages that go through sockets"),
    ("[{do: cut, sides: [[0], [1]], at_round: 1, seconds: 1}]", "", "models go through shared_memory here"),
    ("[{do: delay, by_seconds: .1}]", "communication: {name: collective}", "models go through collective here"),
    ("[{do: corrupt}]", "communication: {name: zeromq, checksum: none}", "found by checksums alone"),
    ("[{do: kill, nodes: [1], at_round: 1}]", "communication: {name: inproc}", "neither processes nor connections"),
    ("[{do: restart, nodes: [1], at_seconds: 1}]", "", "missing: regroup alone"),
])  # fmt: skip
def test_faults_that_cannot_come_about_are_refused_by_name(write: Any, faults: str, more: str, wrong: str) -> None:
    assert wrong in said(write(f"{BASE}faults: {faults}\n{more}\n"))
