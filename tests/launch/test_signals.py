from __future__ import annotations

import os
import signal

from decentnode.launch.signals import StopSignals


def test_signals_are_counted_and_wake_the_waiter() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == [signal.SIGTERM, signal.SIGINT]
        assert signals.exit_code == 143
        signals.clear()
    assert signal.getsignal(signal.SIGTERM) is before
