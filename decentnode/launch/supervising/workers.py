"""The children of the supervisor, nodes and the one that loads the experiment: started, listened to, killed, reaped."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext, ForkProcess, ForkServerContext, ForkServerProcess
from typing import Any, cast

from decentnode import clock
from decentnode.errors import ConfigError, DecentnodeError, EnvironmentFault, Interrupted, NodeFailed
from decentnode.launch.children import forkserver
from decentnode.launch.children.messages import ChildMessage, Facts, Failed, Header, Request, Task
from decentnode.launch.children.pipe import Pipe
from decentnode.launch.children.signals import StopSignals
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.supervising import entry

logger = logging.getLogger(__name__)

Context = ForkServerContext | ForkContext
"""What starts processes: the fork server, or this process, whose children have its objects."""
LOAD_SECONDS = 300.0
"""Longest wait for the import of torch (from a cold network disk) and for the data."""
REAP_SECONDS = 10.0
"""Longest wait for a killed process; only a broken kernel or disk keeps one longer."""


@dataclass
class Worker:
    """One child and its state. `uids` is empty for the child that loads the experiment."""

    uids: tuple[int, ...]
    process: ForkServerProcess | ForkProcess
    channel: Pipe
    bound: set[int] = field(default_factory=set)
    joined: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    leaving_since: float | None = None
    """When its last message came; `clock.now()`."""
    open: bool = True
    """Whether its end of the pipe may still hold messages."""
    exit_code: int | None = None
    struck: bool = False
    """Whether a fault of the experiment killed it."""

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    @property
    def over(self) -> bool:
        """Whether only the end of the process is still to come."""
        return (self.failed | self.finished).issuperset(self.uids)

    @property
    def left(self) -> list[int]:
        """Its nodes that have neither finished nor failed, ascending."""
        return sorted({*self.uids} - self.finished - self.failed)

    def send(self, message: ChildMessage) -> None:
        """Send a message, or drop it where the child is gone: its own messages are still to be read."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def messages(self) -> Iterator[ChildMessage]:
        """Yields the messages that have arrived. Does not wait, apart from the rest of a message under way."""
        try:
            while self.open and self.channel.connection.poll():
                yield self.channel.receive()
        except (EOFError, OSError):
            self.open = False

    def kill(self) -> None:
        if self.alive:
            self.process.kill()

    def reap(self, timeout_seconds: float = REAP_SECONDS) -> None:
        """Wait until the process is gone; `exit_code` is known then. Blocking."""
        self.process.join(timeout_seconds)
        self.exit_code = self.process.exitcode if self.process.exitcode is not None else -signal.SIGKILL
        self.channel.close()
        self.open = False

    def ending(self) -> str:
        """Returns how the process ended, in words."""
        code = self.exit_code or 0
        if code >= 0:
            return f"ended with exit code {code} and no message"
        if self.struck:
            return "was killed, as `faults` says"
        name = signal.Signals(-code).name
        hint = "; the system does this when memory runs out" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"


def start_node(context: Context, task: Task) -> Worker:
    return start_child(context, entry.node, task, tuple(task.uids))


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Children run functions of this package only; importing the caller's main script again would cost time, and
    start the run once more where the script has no `if __name__ == "__main__"`."""
    with _main_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


_main_lock = threading.Lock()
"""Of two threads that take the script away the later one would otherwise put back the empty one."""


def start_child(
    context: Context, target: Callable[..., None], work: Any, uids: tuple[int, ...] = (), daemon: bool = True
) -> Worker:
    """Start a process that calls `target` with `work` and its end of a pipe. Blocking until the fork server answers.

    daemon: False for one that starts processes of its own.
    """
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(work, theirs), daemon=daemon)
    with _without_main():
        process.start()
    theirs.close()
    return Worker(uids, process, Pipe(ours))


def start_later(context: Context, task: Task) -> Worker:
    """As `start_node`, but a fork server is not waited for: one that had died imports torch again for seconds, and
    answers only then."""
    if not isinstance(context, ForkServerContext):
        return start_node(context, task)
    ours, theirs = context.Pipe()
    process = context.Process(target=entry.node, args=(task, theirs), daemon=True)
    return Worker(tuple(task.uids), cast("ForkServerProcess", LateProcess(process, theirs)), Pipe(ours))


class LateProcess:
    """A process that a thread starts, with what `Worker` uses of one. Where it cannot be started it has ended."""

    def __init__(self, process: ForkServerProcess, theirs: connection.Connection) -> None:
        """theirs: the child's end of its pipe, which is closed here once the child has it."""
        self._process, self._theirs = process, theirs
        self._lock = threading.Lock()
        self._started = self._killed = False
        self._begun, end = connection.Pipe(duplex=False)
        """Readable once the process is started, or cannot be."""
        threading.Thread(target=self._start, args=(end,), name="start", daemon=True).start()

    def _start(self, end: connection.Connection) -> None:
        try:
            forkserver.start()
            with _without_main():
                self._process.start()
            with self._lock:
                self._started = True
                if self._killed:
                    self._process.kill()
        except Exception as error:
            logger.warning("a node could not be started again: %r", error)
        finally:
            self._theirs.close()
            end.close()

    @property
    def sentinel(self) -> Any:
        """What `multiprocessing.connection.wait` finds ready once the process has ended, or begun: this is then another
        object."""
        return self._process.sentinel if self._started else self._begun

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._started else None

    @property
    def exitcode(self) -> int | None:
        return self._process.exitcode if self._started else None

    def kill(self) -> None:
        """Kill the process; one that is not there yet is killed when it comes."""
        with self._lock:
            self._killed = True
            if self._started:
                self._process.kill()

    def join(self, timeout: float) -> None:
        """Wait for the end of the process, but of none that is not there yet."""
        if self._started:
            self._process.join(timeout)


def late_nodes(workers: Sequence[Worker], phase: str) -> list[int]:
    """Returns the local nodes that a phase of the run (starting, joining, running) waits for."""
    if phase == "starting":
        return [uid for w in workers for uid in w.uids if uid not in w.bound]
    if phase == "joining":
        return [uid for w in workers for uid in w.uids if uid not in w.joined]
    return [uid for w in workers if w.alive for uid in w.left]


def end_all(workers: list[Worker]) -> None:
    """Kill and reap all children that live. Blocking for at most REAP_SECONDS in all."""
    for worker in workers:
        worker.kill()
    deadline = clock.now() + REAP_SECONDS
    for worker in workers:
        if worker.alive:
            worker.reap(max(0.1, deadline - clock.now()))


class LoadError(DecentnodeError):
    """An error of the child that loads the experiment, with its message and exit code."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.text)
        self.exit_code = failed.exit_code


class LoadConfigError(ConfigError):
    """A ConfigError of the child; its text lists all problems already."""

    def __init__(self, failed: Failed) -> None:
        super().__init__([], "")
        self.args = (failed.text,)


class Loader:
    """The child that loads the experiment, so that the supervisor never imports torch. `facts` waits for the first
    message, `poll` takes the header when it has come."""

    def __init__(self, context: Context, request: Request) -> None:
        """Returns at once, also where the fork server still imports torch, which takes seconds and from a cold network
        disk a minute: it answers only then, so that another thread waits for it."""
        self.worker: Worker | None = None
        self._problem: Exception | None = None
        self._lock = threading.Lock()
        self._closed = False
        if not isinstance(context, ForkServerContext):  # a fork copies the thread that makes it, alone, and waits not
            self.worker = start_child(context, entry.prepare, request, ())
            return
        self._begun, end = connection.Pipe(duplex=False)
        """Readable once there is a worker or a problem."""
        self.started = threading.Thread(target=self._start, args=(context, request, end), name="start", daemon=True)
        self.started.start()

    def _start(self, context: Context, request: Request, end: connection.Connection) -> None:
        try:
            worker = start_child(context, entry.prepare, request, ())
        except Exception as error:
            self._problem = error
        else:
            with self._lock:
                self.worker = worker
                if self._closed:
                    end_all([worker])
        finally:
            end.close()

    def facts(self, observer: Observer, signals: StopSignals) -> Facts:
        """Wait for the facts. Blocking. Raises LoadError or LoadConfigError with the child's error, NodeFailed when the
        child died or was not started, EnvironmentFault after LOAD_SECONDS, Interrupted."""
        started = clock.now()
        while True:
            worker = self.worker
            awaited = [self._begun] if worker is None else [worker.channel.connection, worker.process.sentinel]
            ready = wait([*awaited, signals.fileno()], timeout=1.0)
            signals.clear()
            if signals.suspend_if_asked(observer.suspending):
                observer.resumed()
            if signals.received:
                error = Interrupted("interrupted while the experiment was loading")
                error.exit_code = signals.exit_code
                raise error
            for message in () if worker is None else worker.messages():
                if isinstance(message, Facts):
                    return message
                if isinstance(message, Failed):
                    raise LoadConfigError(message) if message.title == "ConfigError" else LoadError(message)
            if worker is not None and (worker.process.sentinel in ready or not worker.open):
                worker.reap()
                raise NodeFailed(f"the process that loads the experiment {worker.ending()}")
            if self._problem is not None:
                raise NodeFailed("the process that loads the experiment could not be started: "
                                 f"{self._problem!r}") from self._problem  # fmt: skip
            elapsed = clock.now() - started
            if elapsed > LOAD_SECONDS:
                raise EnvironmentFault(f"the experiment was not loaded within {LOAD_SECONDS:g} s")
            if not ready:
                observer.waiting(f"loading torch and the experiment ({elapsed:.0f} s)")

    def poll(self, tell: Callable[[Header], None]) -> None:
        """Pass the header to `tell` if it has come, and reap the child once it has ended. Does not wait."""
        worker = self.worker
        for message in () if worker is None else worker.messages():
            if isinstance(message, Header):
                tell(message)
        if worker is not None and worker.alive and not worker.process.is_alive():
            worker.reap()

    def close(self) -> None:
        """End the child; one that is not there yet is ended when it comes. Idempotent."""
        with self._lock:
            self._closed = True
            if self.worker is not None:
                end_all([self.worker])
