"""Starts, listens to, kills and reaps the supervisor's child processes: those that run nodes, and the one that loads
the experiment."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
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
"""Starts processes: from the fork server, or as forks of this process, which then have its objects."""
LOAD_SECONDS = 300.0
"""Longest wait until torch is imported (from a cold network disk) and the experiment, with its data, is loaded."""
REAP_SECONDS = 10.0
"""Longest wait for a killed process to end; only a broken kernel or disk keeps one longer."""
START_SECONDS, START_AGAIN_SECONDS = 10.0, 0.1
"""How long, and how often, it is tried again to start a process. The fork server that died a moment ago may have closed
its files, by which the death of its nodes is noticed, and not be known to have ended yet."""
PIPES_OF_A_START = 3
"""multiprocessing opens this many in this process to start another, counting a connection to the fork server as one."""


@dataclass
class Worker:
    """A child process and its state. `uids` is empty for the child that loads the experiment."""

    uids: tuple[int, ...]
    process: ForkServerProcess | ForkProcess
    channel: Pipe
    bound: set[int] = field(default_factory=set)
    joined: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    last_message_time: float | None = None
    """When the process's last node reported its end; `clock.now()`. None while a node is unfinished."""
    open: bool = True
    """Whether more messages may arrive on the pipe."""
    exit_code: int | None = None
    killed_by_fault: bool = False
    """Whether an injected fault killed the process."""

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    @property
    def is_done(self) -> bool:
        """Whether all nodes of the process have finished or failed, so that only the process has still to end."""
        return (self.failed | self.finished).issuperset(self.uids)

    @property
    def unfinished(self) -> list[int]:
        """The nodes of the process that have neither finished nor failed, ascending."""
        return sorted({*self.uids} - self.finished - self.failed)

    def send(self, message: ChildMessage) -> None:
        """Sends a message, or drops it if the child is gone. Not an error, as the child's own last messages are still
        to be read."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def messages(self) -> Iterator[ChildMessage]:
        """Yields the messages that have arrived. Does not wait, except for the rest of a message that has arrived in
        part."""
        try:
            while self.open and self.channel.connection.poll():
                yield self.channel.receive()
        except (EOFError, OSError):
            self.open = False

    def kill(self) -> None:
        if self.alive:
            self.process.kill()

    def reap(self, timeout_seconds: float = REAP_SECONDS) -> None:
        """Waits until the process has ended, and sets `exit_code`. Blocking for at most timeout_seconds."""
        self.process.join(timeout_seconds)
        self.exit_code = self.process.exitcode if self.process.exitcode is not None else -signal.SIGKILL
        self.channel.close()
        self.open = False

    def ending(self) -> str:
        """Returns how the process ended, as the predicate of a sentence."""
        code = self.exit_code or 0
        if code >= 0:
            return f"ended with exit code {code} and no message"
        if self.killed_by_fault:
            return "was killed, as `faults` says"
        name = signal.Signals(-code).name
        hint = "; the system does this when memory runs out" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"


def start_node(context: Context, task: Task) -> Worker:
    return start_child(context, entry.node, task, tuple(task.uids))


def _start(process: ForkServerProcess | ForkProcess) -> None:
    """Starts a process. Blocking until the fork server answers. Raises OSError or EOFError if it cannot be started."""
    with contextlib.ExitStack() as files:
        for _ in range(PIPES_OF_A_START):  # without them the fork server, already connected, would end with a traceback
            for end in os.pipe():
                files.callback(os.close, end)
    with _without_main():
        process.start()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hides the caller's main script while a process is started, so that the child does not import it again. Children
    run functions of this package only; the import would cost time, and start another run if the script has no
    `if __name__ == "__main__"`."""
    with _main_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


_main_lock = threading.Lock()
"""Without it, the later of two threads that hide the script would restore the empty module of the other."""


def start_child(
    context: Context, target: Callable[..., None], work: Any, uids: tuple[int, ...] = (), daemon: bool = True
) -> Worker:
    """Starts a process that calls `target` with `work` and its end of a pipe. Blocking until the fork server answers.

    daemon: False for a process that starts processes itself.
    """
    parent_end, child_end = context.Pipe()
    process = context.Process(target=target, args=(work, child_end), daemon=daemon)
    _start(process)
    child_end.close()
    return Worker(uids, process, Pipe(parent_end))


def start_deferred(context: Context, task: Task) -> Worker:
    """Starts a process for nodes like `start_node`, but without waiting for the fork server: one that had died is
    started anew and answers only after it has imported torch, which takes seconds."""
    if not isinstance(context, ForkServerContext):
        return start_node(context, task)
    parent_end, child_end = context.Pipe()
    process = context.Process(target=entry.node, args=(task, child_end), daemon=True)
    return Worker(tuple(task.uids), cast("ForkServerProcess", DeferredProcess(process, child_end)), Pipe(parent_end))


class DeferredProcess:
    """A process that is started in a thread, with the part of the process interface that `Worker` uses. A process that
    cannot be started counts as ended."""

    def __init__(self, process: ForkServerProcess, child_end: connection.Connection) -> None:
        """child_end: the child's end of the pipe, which is closed here once the child has it."""
        self._process, self._child_end = process, child_end
        self._lock = threading.Lock()
        self._started = self._killed = self._failed = False
        self._ready, end = connection.Pipe(duplex=False)
        """Becomes readable once the process is started, or could not be."""
        threading.Thread(target=self._start, args=(end,), name="start", daemon=True).start()

    def _start(self, end: connection.Connection) -> None:
        try:
            self._start_process()
            with self._lock:
                self._started = True
                if self._killed:
                    self._process.kill()
        except Exception as error:
            self._failed = True
            logger.warning("a node could not be started again: %r", error)
        finally:
            self._child_end.close()
            end.close()

    def _start_process(self) -> None:
        deadline = clock.now() + START_SECONDS
        while True:
            forkserver.start()
            try:
                _start(self._process)
                return
            except (ConnectionError, EOFError):
                if clock.now() >= deadline:
                    raise
                clock.sleep(START_AGAIN_SECONDS)

    @property
    def sentinel(self) -> Any:
        """An object for `multiprocessing.connection.wait`, ready once the process has started, and from then on another
        object, ready once the process has ended."""
        return self._process.sentinel if self._started else self._ready

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._started else None

    @property
    def exitcode(self) -> int | None:
        return self._process.exitcode if self._started else 1 if self._failed else None

    def kill(self) -> None:
        """Kills the process; one that is not started yet is killed as soon as it is."""
        with self._lock:
            self._killed = True
            if self._started:
                self._process.kill()

    def join(self, timeout: float) -> None:
        """Waits for the end of the process; returns at once if it is not started yet."""
        if self._started:
            self._process.join(timeout)


def late_nodes(workers: Sequence[Worker], phase: str) -> list[int]:
    """Returns the local nodes that a phase of the run (starting, joining, running) waits for."""
    if phase == "starting":
        return [uid for w in workers for uid in w.uids if uid not in w.bound]
    if phase == "joining":
        return [uid for w in workers for uid in w.uids if uid not in w.joined]
    return [uid for w in workers if w.alive for uid in w.unfinished]


def end_all(workers: list[Worker]) -> None:
    """Kills and reaps all children that are alive. Blocking for at most about REAP_SECONDS in all."""
    for worker in workers:
        worker.kill()
    deadline = clock.now() + REAP_SECONDS
    for worker in workers:
        if worker.alive:
            worker.reap(max(0.1, deadline - clock.now()))


class LoadError(DecentnodeError):
    """An error in the child that loads the experiment, with its message and exit code."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.text)
        self.exit_code = failed.exit_code


class LoadConfigError(ConfigError):
    """A ConfigError in the child that loads the experiment; its text already lists all problems."""

    def __init__(self, failed: Failed) -> None:
        super().__init__([], "")
        self.args = (failed.text,)


class Loader:
    """The child that loads the experiment, so that the supervisor never imports torch. `facts` waits for its first
    message, `poll` takes the header once it has arrived."""

    def __init__(self, context: Context, request: Request) -> None:
        """Starts the child. Returns at once: a thread waits for the fork server, which answers only after it has
        imported torch. That takes seconds, from a cold network disk a minute."""
        self.worker: Worker | None = None
        self._problem: Exception | None = None
        self._lock = threading.Lock()
        self._closed = False
        if not isinstance(context, ForkServerContext):  # a plain fork needs no wait, and copies only the calling thread
            self.worker = start_child(context, entry.prepare, request, ())
            return
        self._ready, end = connection.Pipe(duplex=False)
        """Becomes readable once there is a worker or a problem."""
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
        """Waits for the facts and returns them. Blocking. Raises LoadError or LoadConfigError with the child's error,
        NodeFailed if the child died or could not be started, EnvironmentFault after LOAD_SECONDS or with too few open
        files, Interrupted after a signal."""
        started = clock.now()
        while True:
            worker = self.worker
            awaited = [self._ready] if worker is None else [worker.channel.connection, worker.process.sentinel]
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
            if isinstance(self._problem, OSError) and self._problem.errno in (errno.EMFILE, errno.ENFILE):
                raise EnvironmentFault("the process that loads the experiment could not be started: "
                                       f"{self._problem}; raise the limit (ulimit -n)") from self._problem  # fmt: skip
            if self._problem is not None:
                raise NodeFailed("the process that loads the experiment could not be started: "
                                 f"{self._problem!r}") from self._problem  # fmt: skip
            elapsed = clock.now() - started
            if elapsed > LOAD_SECONDS:
                raise EnvironmentFault(f"the experiment was not loaded within {LOAD_SECONDS:g} s")
            if not ready:
                observer.waiting(f"loading torch and the experiment ({elapsed:.0f} s)")

    def poll(self, tell: Callable[[Header], None]) -> None:
        """Passes the header to `tell` if it has arrived, and reaps the child once it has ended. Does not wait."""
        worker = self.worker
        for message in () if worker is None else worker.messages():
            if isinstance(message, Header):
                tell(message)
        if worker is not None and worker.alive and not worker.process.is_alive():
            worker.reap()

    def close(self) -> None:
        """Ends the child; one that is not started yet is ended as soon as it is. Idempotent."""
        with self._lock:
            self._closed = True
            if self.worker is not None:
                end_all([self.worker])
