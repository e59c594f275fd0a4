"""Loading the experiment in a child, so that the supervisor never imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext

from decentnode.errors import ConfigError, DecentnodeError, EnvironmentFault, Interrupted, NodeFailed
from decentnode.launch.messages import Facts, Failed, Header, Request
from decentnode.launch.observer import Observer
from decentnode.launch.signals import StopSignals
from decentnode.launch.workers import Worker, end_all, start_loader

LOAD_SECONDS = 300.0
"""Longest wait for the import of torch (from a cold network disk) and for the data."""


class LoadError(DecentnodeError):
    """An error of the child that loads, with its message and exit code."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.text)
        self.exit_code = failed.exit_code


class LoadConfigError(ConfigError):
    """The child's ConfigError; its text has all problems already."""

    def __init__(self, failed: Failed) -> None:
        super().__init__([], "")
        self.args = (failed.text,)


class Loader:
    """The child that loads. `facts` blocks; the header comes when it is ready."""

    def __init__(self, context: ForkServerContext, request: Request) -> None:
        self.worker: Worker = start_loader(context, request)

    def facts(self, observer: Observer, signals: StopSignals) -> Facts:
        """Blocking. Raises LoadError or LoadConfigError with the child's error,
        EnvironmentFault after LOAD_SECONDS, Interrupted."""
        started = time.monotonic()
        while True:
            ready = wait([self.worker.channel.connection, self.worker.process.sentinel, signals.fileno()], timeout=1.0)
            signals.clear()
            if signals.suspend_if_asked(observer.suspending):
                observer.resumed()
            if signals.received:
                raise Interrupted("interrupted while the experiment was loaded")
            for message in self.worker.messages():
                if isinstance(message, Facts):
                    return message
                if isinstance(message, Failed):
                    raise LoadConfigError(message) if message.title == "ConfigError" else LoadError(message)
            if self.worker.process.sentinel in ready or not self.worker.open:
                self.worker.reap()
                raise NodeFailed(f"the process that loads the experiment {self.worker.ending()}")
            elapsed = time.monotonic() - started
            if elapsed > LOAD_SECONDS:
                raise EnvironmentFault(f"the experiment was not loaded within {LOAD_SECONDS:g} s")
            if not ready:
                observer.waiting(f"loading torch and the experiment ({elapsed:.0f} s)")

    def poll(self, tell: Callable[[Header], None]) -> None:
        """Not blocking: hand over the header if it has come, and reap the child at its end."""
        for message in self.worker.messages():
            if isinstance(message, Header):
                tell(message)
        if self.worker.alive and not self.worker.process.is_alive():
            self.worker.reap()

    def close(self) -> None:
        end_all([self.worker])


