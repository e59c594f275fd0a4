from __future__ import annotations

import os
import signal
import subprocess
import sys

from decentnode.launch.children.signals import StopSignals, signals_blocked
from tests.conftest import wait_until


def test_signals_are_recorded_and_the_former_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == [signal.SIGTERM, signal.SIGINT]
        assert signals.exit_code == 143
        signals.clear()
    assert signal.getsignal(signal.SIGTERM) is before


def test_signals_in_a_signals_blocked_block_are_delivered_after_it() -> None:
    with StopSignals() as signals:
        with signals_blocked():
            os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: signals.received == [signal.SIGTERM])  # another thread may receive it, a little later


CHILD = """
import os, signal, sys
from decentnode.launch.children import signals
sys.stdin.readline()
{work}
print("alive", flush=True)
"""


def run_child(work: str) -> str:
    """Returns the output of a process that starts with signals blocked and does `work` after three were sent."""
    with signals_blocked():
        process = subprocess.Popen([sys.executable, "-c", CHILD.format(work=work)], text=True, stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE)  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    return process.communicate("go\n", timeout=60)[0]


def test_signals_do_not_end_a_process_that_starts_with_blocked_signals_and_then_ignores_them() -> None:
    assert run_child("signals.ignore_signals(); os.kill(os.getpid(), signal.SIGTERM)") == "alive\n"


def test_a_sigterm_before_on_termination_is_passed_to_its_callback_later() -> None:
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
    assert run_child(work) == "alive\n"


def test_stop_signals_after_a_run_end_only_the_wait_for_its_reader() -> None:
    work = """
signals.ignore_signals()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
handlers = signals.keep_stop_signals()
assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
os.kill(os.getpid(), signal.SIGINT)
with signals.StopSignals() as stop:
    assert stop.received[-1] == signal.SIGINT
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    os.kill(os.getpid(), number)
for number in (signal.SIGINT, signal.SIGTERM):
    with signals.ended_by_signals(handlers):
        os.kill(os.getpid(), number)
        raise AssertionError
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
with signals.StopSignals() as stop:
    assert not stop.received
"""
    assert run_child(work) == "alive\n"


def test_a_sigterm_before_a_run_stops_the_run() -> None:
    """A point of a sweep, whose parent ignores SIGTERM, once ignored it, too, and ran to its end."""
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
    assert run_child(work) == "alive\n"
