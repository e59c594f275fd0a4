"""The totals of a node's rounds: what happened on each edge since the last record."""

from __future__ import annotations

from decentnode.communication.counters import Counters
from decentnode.node.measuring.totals import RoundTotals
from decentnode.node.schedules.fragment_exchange import RoundTimes


def test_edges_are_recorded_by_what_changed_since_the_last_record() -> None:
    counters = Counters()
    totals = RoundTotals(counters)
    assert totals.edge_changes() == {"edges": {}}
    first, second = counters.edge(1), counters.edge(12)
    first.data_bytes_sent, first.metadata_bytes_sent, first.frames_sent = 100, 8, 1
    first.wait_seconds, second.wait_seconds, second.payload_bytes_received = 0.25, 0.75, 40
    assert totals.edge_changes() == {
        "edges": {"1": [108, 0, 1, 0, 0.25], "12": [0, 40, 0, 0, 0.75]}, "waited_for": 12, "waited_seconds": 0.75,
    }  # fmt: skip
    assert totals.edge_changes() == {"edges": {}}
    first.wait_seconds += 0.5
    second.late_payloads += 2
    assert totals.edge_changes() == {
        "edges": {"1": [0, 0, 0, 0, 0.5]}, "waited_for": 1, "waited_seconds": 0.5, "late": {"12": 2},
    }  # fmt: skip
    second.late_payloads += 1
    assert totals.edge_changes() == {"edges": {}, "late": {"12": 1}}


def test_the_median_of_an_even_number_of_rounds_is_between_the_middle_two() -> None:
    """It was the longer one: of two rounds always the first, which is slow."""
    totals, medians = RoundTotals(Counters()), []
    for seconds in (8.0, 1.0, 2.0, 3.0):
        totals.add(seconds, RoundTimes(), [])
        medians.append(totals.figures()["round_seconds_median"])
    assert medians == [8.0, 4.5, 2.0, 2.5]
