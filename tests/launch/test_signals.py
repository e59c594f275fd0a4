from __future__ import annotations

import os
import signal
import subprocess
import sys

from decentnode.launch.children.signals import StopSignals, signals_blocked


def test_signals_are_counted_and_wake_the_waiter() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == [signal.SIGTERM, signal.SIGINT]
        assert signals.exit_code == 143
        signals.clear()
    assert signal.getsignal(signal.SIGTERM) is before


def test_signals_of_a_held_block_are_not_lost() -> None:
    with StopSignals() as signals:
        with signals_blocked():
            os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == [signal.SIGTERM]


CHILD = """
import os, signal, sys
from decentnode.launch.children import signals
sys.stdin.readline()
{work}
print("alive", flush=True)
"""


def child(work: str) -> str:
    """What a process prints that starts in a held block, and to which signals come before it does `work`."""
    with signals_blocked():
        process = subprocess.Popen([sys.executable, "-c", CHILD.format(work=work)], text=True, stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE)  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    return process.communicate("go\n", timeout=60)[0]


def test_a_process_that_starts_in_a_held_block_is_not_ended_before_it_can_ignore_signals() -> None:
    assert child("signals.ignore_signals(); os.kill(os.getpid(), signal.SIGTERM)") == "alive\n"


def test_a_termination_that_comes_too_early_is_obeyed_later() -> None:
    work = """
signals.ignore_signals()
signals.keep_sigterm()
os.kill(os.getpid(), signal.SIGTERM)
asked = []
signals.on_termination(lambda: asked.append(1))
assert asked == [1]
os.kill(os.getpid(), signal.SIGTERM)
assert asked == [1, 1]
"""
    assert child(work) == "alive\n"


def test_a_termination_that_comes_before_a_run_stops_it() -> None:
    """Of a sweep's point, whose parent ignores the signal: the point ignored it, too, and ran on to its end."""
    work = """
signals.ignore_signals()
signals.keep_sigterm()
os.kill(os.getpid(), signal.SIGTERM)
with signals.StopSignals() as stop:
    assert stop.received == [signal.SIGTERM]
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.received == [signal.SIGTERM] * 2
with signals.StopSignals() as stop:
    assert not stop.received
"""
    assert child(work) == "alive\n"
