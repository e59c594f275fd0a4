"""Workers and the Loader: messages of child processes, how these ended, and that none is left behind."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
import sys
import threading
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decentnode import clock
from decentnode.errors import ConfigError, EnvironmentFault, Interrupted, NodeFailed
from decentnode.launch.children.messages import ChildMessage, Failed, Finished, Header, Request
from decentnode.launch.children.pipe import Pipe
from decentnode.launch.children.signals import StopSignals
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.supervising import local_nodes, workers
from decentnode.launch.supervising.local_nodes import LocalNodes
from decentnode.launch.supervising.workers import LOAD_SECONDS, Loader, LoadError, Worker, end_all, late_nodes
from decentnode.system import replacing
from tests.commands import ROOT, started
from tests.launch.facts import FACTS
from tests.launch.stand_ins import RecordingObserver


class FakeProcess:
    """A child process; `sentinel` is readable once it has ended. obeys: whether kill() ends it."""

    def __init__(self, obeys: bool = True) -> None:
        self.exitcode: int | None = None
        self.obeys = obeys
        self.sentinel, self._end = os.pipe()
        self.join_timeouts: list[float] = []

    def end(self, code: int) -> None:
        if self.exitcode is None:
            self.exitcode = code
            os.close(self._end)

    def kill(self) -> None:
        if self.obeys:
            self.end(-signal.SIGKILL)

    def join(self, timeout: float) -> None:
        self.join_timeouts.append(timeout)

    def is_alive(self) -> bool:
        return self.exitcode is None


def make_worker(*uids: int, obeys: bool = True) -> tuple[Worker, Any, Pipe]:
    """Returns a worker, its process and the child's end of the pipe."""
    ours, theirs = multiprocessing.Pipe()
    process: Any = FakeProcess(obeys)
    return Worker(uids, process, Pipe(ours)), process, Pipe(theirs)


def test_messages_that_a_child_sent_before_it_ended_are_read() -> None:
    worker, _, child = make_worker(0)
    assert list(worker.messages()) == [] and worker.open
    said: list[ChildMessage] = [Finished(0, {}, False), Failed(0, 7, "Diverged", "loss is nan")]
    for message in said:
        child.send(message)
    child.close()
    assert list(worker.messages()) == said and not worker.open
    worker.send(said[0])  # does not raise, although the child is gone


def test_a_worker_with_several_nodes_is_done_when_all_have_finished_or_failed() -> None:
    worker = make_worker(0, 1)[0]
    worker.finished = {0}
    assert not worker.is_done
    worker.finished = {0, 1}
    assert worker.is_done
    failed = make_worker(2)[0]
    failed.failed = {2}
    assert failed.is_done and failed.alive


def test_which_nodes_are_late_depends_on_the_phase() -> None:
    first, second, ended = make_worker(0, 1)[0], make_worker(2)[0], make_worker(3)[0]
    ended.exit_code = 0
    first.bound, second.bound, ended.bound = {0}, {2}, {3}
    first.joined, ended.joined = {0, 1}, {3}
    first.finished = {1}
    all_workers = [first, second, ended]
    assert late_nodes(all_workers, "starting") == [1]
    assert late_nodes(all_workers, "joining") == [2]
    assert late_nodes(all_workers, "running") == [0, 2], "a dead worker is not late"
    second.failed = {2}
    assert late_nodes(all_workers, "running") == [0]


@pytest.mark.parametrize(("code", "words"), [
    (0, "ended with exit code 0 and no message"), (3, "ended with exit code 3 and no message"),
    (-signal.SIGSEGV, "was killed by SIGSEGV"), (-signal.SIGKILL, "was killed by SIGKILL; the system does this when"),
])  # fmt: skip
def test_a_child_that_ended_without_a_message_is_described(code: int, words: str) -> None:
    worker, process, _ = make_worker(0)
    process.end(code)
    worker.reap()
    assert worker.ending().startswith(words) and not worker.alive and not worker.open


def test_temporary_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    nodes = LocalNodes(Request(""), FACTS, tmp_path)
    try:
        with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "status.json") as temporary:
            raise KeyboardInterrupt
        (tmp_path / "nodes").mkdir()
        names = (temporary.name.replace(f".{os.getpid()}.", f".{pid}.") for pid in (7, 17))
        temporary_of_7, temporary_of_17 = (tmp_path / "nodes" / name for name in names)
        temporary_of_7.touch()
        temporary_of_17.touch()
        for code, is_kept in ((0, True), (-signal.SIGKILL, False)):
            worker = Worker((0,), SimpleNamespace(pid=7), SimpleNamespace())  # type: ignore[arg-type]
            worker.exit_code = code
            nodes.remove_temporaries_of(worker)
            assert temporary_of_7.exists() is is_kept and temporary_of_17.exists()
    finally:
        nodes.close()


def test_all_workers_are_killed_and_reaped_within_one_deadline() -> None:
    """A process that does not end counts as killed, too, so that nothing waits for it again."""
    children = [make_worker(uid, obeys=uid != 1) for uid in range(3)]
    ended_worker = children[2][0]
    children[2][1].end(0)
    ended_worker.reap()
    with clock.use(clock.VirtualClock()):
        end_all([worker for worker, _, _ in children])
    assert [worker.exit_code for worker, _, _ in children] == [-signal.SIGKILL, -signal.SIGKILL, 0]
    waits = [timeout for _, process, _ in children[:2] for timeout in process.join_timeouts]
    assert len(waits) == 2 and max(waits) <= workers.REAP_SECONDS
    assert len(children[2][1].join_timeouts) == 1, "the process that had ended was waited for again"
    end_all([worker for worker, _, _ in children])


def make_loader(monkeypatch: pytest.MonkeyPatch) -> tuple[Loader, Any, Pipe]:
    """Returns a loader, its process and the child's end of the pipe."""
    worker, process, child = make_worker()
    monkeypatch.setattr(workers, "start_child", lambda *_: worker)
    return Loader(None, Request("ring.yaml")), process, child  # type: ignore[arg-type]


def test_the_loader_returns_the_facts_first_and_later_passes_on_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, process, child = make_loader(monkeypatch)
    child.send(FACTS)
    child.send(Header([["graph", "ring"]], {}))
    assert loader.facts(Observer(), StopSignals()) == FACTS
    headers: list[Header] = []
    loader.poll(headers.append)
    assert [header.lines for header in headers] == [[["graph", "ring"]]] and loader.worker.alive
    process.end(0)
    loader.poll(headers.append)
    assert not loader.worker.alive and len(headers) == 1


@pytest.mark.parametrize(("title", "kind"), [("ConfigError", ConfigError), ("UsageError", LoadError)])
def test_an_error_in_the_loading_child_is_raised_with_its_text_and_exit_code(
    title: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, _, child = make_loader(monkeypatch)
    child.send(Failed(-1, 2, title, "ring.yaml:3:1: graph.nodes must be 1 or more, got 0"))
    with pytest.raises(kind, match="must be 1 or more") as raised:
        loader.facts(Observer(), StopSignals())
    assert raised.value.exit_code == 2  # type: ignore[attr-defined]


def test_the_death_of_the_loading_child_is_raised_with_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, process, child = make_loader(monkeypatch)
    process.end(-signal.SIGKILL)
    child.close()
    with pytest.raises(NodeFailed, match="loads the experiment was killed by SIGKILL"):
        loader.facts(Observer(), StopSignals())


def test_the_wait_for_the_facts_ends_at_a_signal_or_after_load_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    observer = RecordingObserver()
    loader, _, _ = make_loader(monkeypatch)
    with clock.use(clock.VirtualClock()) as time:

        def wait_in_vain(*_: object, timeout: float) -> list[object]:
            time.sleep(timeout)
            return []

        monkeypatch.setattr(workers, "wait", wait_in_vain)
        with pytest.raises(EnvironmentFault, match=f"not loaded within {LOAD_SECONDS:g} s"):
            loader.facts(observer, StopSignals())
    assert len(observer.waits) == LOAD_SECONDS and observer.waits[9] == "loading torch and the experiment (10 s)"
    signals = StopSignals()
    signals.received.append(signal.SIGINT)
    with pytest.raises(Interrupted):
        loader.facts(observer, signals)
    loader.close()
    assert not loader.worker.alive


class ForkServer(ForkServerContext):
    """A context whose `Process` is replaced: the loader treats it as a fork server that may still import torch."""


def make_slow_loader(monkeypatch: pytest.MonkeyPatch) -> tuple[Loader, Worker, Any, Pipe, threading.Event]:
    """Returns a loader whose child starts once the event is set, the child's parts as `make_worker`, and the event."""
    worker, process, child = make_worker()
    ready = threading.Event()

    def start(*_: object) -> Worker:
        assert ready.wait(60.0)
        return worker

    monkeypatch.setattr(workers, "start_child", start)
    return Loader(ForkServer(), Request("ring.yaml")), worker, process, child, ready


@pytest.mark.slow
def test_a_signal_ends_the_wait_for_a_fork_server_that_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import of torch takes seconds, from a network disk a minute: Ctrl-C ends the wait meanwhile."""
    loader, worker, _, child, ready = make_slow_loader(monkeypatch)
    said: list[str] = []

    class MakesServerReady(Observer):
        def waiting(self, what: str) -> None:
            said.append(what)
            child.send(FACTS)
            ready.set()

    assert loader.facts(MakesServerReady(), StopSignals()) == FACTS and said and loader.worker is worker

    loader, worker, _, _, ready = make_slow_loader(monkeypatch)
    signals = StopSignals()
    signals.received.append(signal.SIGINT)
    with pytest.raises(Interrupted):
        loader.facts(Observer(), signals)
    loader.close()
    loader.poll(lambda _: None)
    assert worker.alive
    ready.set()
    loader.started.join(60.0)
    assert not worker.alive, "a child that started after the loader was closed is alive"


def test_a_fork_server_that_ends_is_an_error_with_the_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> Worker:
        raise EOFError("unexpected EOF")

    monkeypatch.setattr(workers, "start_child", start)
    loader = Loader(ForkServer(), Request("ring.yaml"))
    with pytest.raises(NodeFailed, match=r"could not be started: EOFError\('unexpected EOF'\)"):
        loader.facts(Observer(), StopSignals())
    loader.close()


def test_children_do_not_import_the_callers_script_again() -> None:
    """A script without `if __name__ == "__main__"` would start the run once more in every child."""
    main = sys.modules["__main__"]
    with workers._without_main():
        assert sys.modules["__main__"] is not main and not hasattr(sys.modules["__main__"], "__file__")
    assert sys.modules["__main__"] is main


def test_processes_that_the_system_does_not_start_are_an_error_that_names_the_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(*_: object) -> Any:
        if nodes.workers:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return SimpleNamespace()

    monkeypatch.setattr(local_nodes, "start_node", start)
    nodes = LocalNodes(Request(""), replace(FACTS, processes=[[0], [1]]), None)
    with pytest.raises(EnvironmentFault, match=r"only 1 of 2 processes .* Too many open files; raise the limits"):
        nodes.start(ForkServerContext())


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "expected"), [
    (24, "error: too few open files are allowed: .*, the limit is 24 .*; raise the limit"),
    (16, r"error: .* could not be started: \[Errno 24\] Too many open files; raise the limit \(ulimit -n\)"),
    (8, r"error: the limit of open files \(ulimit -n\) is too low: Too many open files"),
])  # fmt: skip
def test_a_hard_limit_of_open_files_is_an_error_without_a_traceback(tmp_path: Path, limit: int, expected: str) -> None:
    limits = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))"
    words = ["run", "configs/quickstart.yaml", "--set", "node.rounds=1", "--run-dir", str(tmp_path), "--plain"]
    with started(ROOT, *words, merged=True, before=limits) as process:
        output, _ = process.communicate()
        assert process.wait() == 3 and re.search(expected, output), output
        assert "Traceback" not in output, output


@pytest.mark.slow
def test_a_run_raises_the_limit_of_open_files_for_its_supervisor(tmp_path: Path) -> None:
    """A supervisor has three files per process; some systems start with a limit of 256."""
    limits = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (56, 4096))"
    words = ["run", "configs/quickstart.yaml", "--set", "node.rounds=1", "--run-dir", str(tmp_path), "--plain"]
    with started(ROOT, *words, merged=True, before=limits) as process:
        output, _ = process.communicate()
        assert process.wait() == 0, output


class DeferredProcess:
    """A process whose fork server answers once `ready` is set: the process starts after these failures."""

    def __init__(self, *failures: Exception) -> None:
        self.ready, self.killed = threading.Event(), threading.Event()
        self.failures, self.pid, self.exitcode = [*failures], 7, -9
        self.sentinel, self._end = connection.Pipe(duplex=False)

    def start(self) -> None:
        assert self.ready.wait(60.0)
        if self.failures:
            raise self.failures.pop(0)

    def kill(self) -> None:
        self.killed.set()
        self._end.close()

    def join(self, timeout: float) -> None:
        assert self.sentinel.poll(timeout)


def start_deferred(process: DeferredProcess, monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(workers.forkserver, "start", lambda: None)
    context = ForkServerContext()
    context.Process = lambda **_: process  # type: ignore[method-assign,assignment]
    return workers.start_deferred(context, SimpleNamespace(uids=[3]))  # type: ignore[arg-type]


def test_restarting_a_node_does_not_block_on_the_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    process = DeferredProcess()
    worker = start_deferred(process, monkeypatch)
    sentinel = worker.process.sentinel
    assert worker.alive and not connection.wait([sentinel], 0) and worker.process.pid is None
    process.ready.set()
    assert connection.wait([sentinel], 60.0) and worker.process.sentinel is process.sentinel
    assert worker.process.pid == 7
    worker.kill()
    worker.reap(60.0)
    assert process.killed.is_set() and worker.exit_code == -9


def test_a_node_whose_process_starts_after_it_was_killed_is_killed_then(monkeypatch: pytest.MonkeyPatch) -> None:
    process = DeferredProcess()
    worker = start_deferred(process, monkeypatch)
    worker.kill()
    worker.reap(60.0)
    assert not worker.alive and not process.killed.is_set()
    process.ready.set()
    assert process.killed.wait(60.0)


def test_a_node_that_cannot_be_restarted_counts_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    process = DeferredProcess(OSError("no memory"))
    worker = start_deferred(process, monkeypatch)
    process.ready.set()
    assert connection.wait([worker.process.sentinel], 60.0) == [worker.process.sentinel]
    worker.reap()
    assert worker.ending() == "ended with exit code 1 and no message" and not [*worker.messages()]


def test_a_node_is_restarted_by_a_new_fork_server_once_the_old_one_is_known_to_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fork server that is killed first closes its sockets, so that its nodes end, and ends some time later."""
    process = DeferredProcess(ConnectionRefusedError(111, "Connection refused"), EOFError("unexpected EOF"))
    worker = start_deferred(process, monkeypatch)
    process.ready.set()
    assert connection.wait([worker.process.sentinel], 60.0)
    assert worker.process.sentinel is process.sentinel and worker.process.pid == 7
    worker.kill()
    worker.reap(60.0)
