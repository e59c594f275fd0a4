"""Time-outs that do not count the time for which the process was suspended."""

from decentnode.communication.zeromq.sockets.running_time import GAP_SECONDS, RunningTime


def test_a_long_time_between_two_looks_counts_only_as_a_gap() -> None:
    left = RunningTime(3 * GAP_SECONDS, 100.0)
    assert not left.over(100.0 + 0.5 * GAP_SECONDS)
    assert not left.over(1000.0), "suspended"
    assert not left.over(1000.0 + GAP_SECONDS)
    assert left.seconds == 0.5 * GAP_SECONDS
    assert left.over(1000.0 + 1.5 * GAP_SECONDS)
