"""The supervisor's children, as it sees them: what they said, how they ended, and that none is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
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
from decentnode.launch.supervising import workers
from decentnode.launch.supervising.local_nodes import LocalNodes
from decentnode.launch.supervising.workers import LOAD_SECONDS, Loader, LoadError, Worker, end_all, late_nodes
from decentnode.system import replacing
from tests.launch.facts import FACTS


class Process:
    """A child that ends when it is told to; readable at `sentinel` then."""

    def __init__(self, obeys: bool = True) -> None:
        self.exitcode: int | None = None
        self.obeys = obeys
        self.sentinel, self._end = os.pipe()
        self.joined: list[float] = []

    def end(self, code: int) -> None:
        if self.exitcode is None:
            self.exitcode = code
            os.close(self._end)

    def kill(self) -> None:
        if self.obeys:
            self.end(-signal.SIGKILL)

    def join(self, timeout: float) -> None:
        self.joined.append(timeout)

    def is_alive(self) -> bool:
        return self.exitcode is None


def made(*uids: int, obeys: bool = True) -> tuple[Worker, Any, Pipe]:
    """(worker, its process, the child's end of the pipe)."""
    ours, theirs = multiprocessing.Pipe()
    process: Any = Process(obeys)
    return Worker(uids, process, Pipe(ours)), process, Pipe(theirs)


def test_messages_are_those_that_came_and_what_was_said_before_the_end_is_read() -> None:
    worker, _, child = made(0)
    assert list(worker.messages()) == [] and worker.open
    said: list[ChildMessage] = [Finished(0, {}, False), Failed(0, 7, "Diverged", "loss is nan")]
    for message in said:
        child.send(message)
    child.close()
    assert list(worker.messages()) == said and not worker.open
    worker.send(said[0])  # to one that is gone: nobody's fault


def test_a_child_with_several_nodes_is_over_when_all_of_them_are() -> None:
    worker = made(0, 1)[0]
    worker.finished = {0}
    assert not worker.is_done
    worker.finished = {0, 1}
    assert worker.is_done
    failed = made(2)[0]
    failed.failed = {2}
    assert failed.is_done and failed.alive


def test_who_is_late_depends_on_the_phase() -> None:
    first, second, ended = made(0, 1)[0], made(2)[0], made(3)[0]
    ended.exit_code = 0
    first.bound, second.bound, ended.bound = {0}, {2}, {3}
    first.joined, ended.joined = {0, 1}, {3}
    first.finished = {1}
    everybody = [first, second, ended]
    assert late_nodes(everybody, "starting") == [1]
    assert late_nodes(everybody, "joining") == [2]
    assert late_nodes(everybody, "running") == [0, 2], "of those that live"
    second.failed = {2}
    assert late_nodes(everybody, "running") == [0]


@pytest.mark.parametrize(("code", "words"), [
    (0, "ended with exit code 0 and no message"), (3, "ended with exit code 3 and no message"),
    (-signal.SIGSEGV, "was killed by SIGSEGV"), (-signal.SIGKILL, "was killed by SIGKILL; the system does this when"),
])  # fmt: skip
def test_an_end_without_a_word_is_described(code: int, words: str) -> None:
    worker, process, _ = made(0)
    process.end(code)
    worker.reap()
    assert worker.ending().startswith(words) and not worker.alive and not worker.open


def test_what_a_killed_process_was_about_to_write_is_removed(tmp_path: Path) -> None:
    nodes = LocalNodes(Request(""), FACTS, tmp_path)
    try:
        with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "status.json") as temporary:
            raise KeyboardInterrupt
        (tmp_path / "nodes").mkdir()
        names = (temporary.name.replace(f".{os.getpid()}.", f".{pid}.") for pid in (7, 17))
        left, of_another = (tmp_path / "nodes" / name for name in names)
        left.touch()
        of_another.touch()
        for code, found in ((0, True), (-signal.SIGKILL, False)):
            worker = Worker((0,), SimpleNamespace(pid=7), SimpleNamespace())  # type: ignore[arg-type]
            worker.exit_code = code
            nodes.remove_temporaries_of(worker)
            assert left.exists() is found and of_another.exists()
    finally:
        nodes.close()


def test_all_are_killed_and_waited_for_in_one_deadline() -> None:
    """Also the one that does not go, which counts as killed: nothing waits for it again."""
    children = [made(uid, obeys=uid != 1) for uid in range(3)]
    is_done = children[2][0]
    children[2][1].end(0)
    is_done.reap()
    with clock.use(clock.VirtualClock()):
        end_all([worker for worker, _, _ in children])
    assert [worker.exit_code for worker, _, _ in children] == [-signal.SIGKILL, -signal.SIGKILL, 0]
    waits = [each for _, process, _ in children[:2] for each in process.joined]
    assert len(waits) == 2 and max(waits) <= workers.REAP_SECONDS
    assert len(children[2][1].joined) == 1, "the one that had ended is left alone"
    end_all([worker for worker, _, _ in children])


def loader(monkeypatch: pytest.MonkeyPatch) -> tuple[Loader, Any, Pipe]:
    worker, process, child = made()
    monkeypatch.setattr(workers, "start_child", lambda *_: worker)
    return Loader(None, Request("ring.yaml")), process, child  # type: ignore[arg-type]


def test_the_facts_come_first_and_the_header_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    loading, process, child = loader(monkeypatch)
    child.send(FACTS)
    child.send(Header([["graph", "ring"]], {}))
    assert loading.facts(Observer(), StopSignals()) == FACTS
    told: list[Header] = []
    loading.poll(told.append)
    assert [each.lines for each in told] == [[["graph", "ring"]]] and loading.worker.alive
    process.end(0)
    loading.poll(told.append)
    assert not loading.worker.alive and len(told) == 1


@pytest.mark.parametrize(("title", "kind"), [("ConfigError", ConfigError), ("UsageError", LoadError)])
def test_an_error_of_the_child_is_raised_with_its_words_and_exit_code(
    title: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, _, child = loader(monkeypatch)
    child.send(Failed(-1, 2, title, "ring.yaml:3:1: graph.nodes must be 1 or more, got 0"))
    with pytest.raises(kind, match="must be 1 or more") as raised:
        loading.facts(Observer(), StopSignals())
    assert raised.value.exit_code == 2  # type: ignore[attr-defined]


def test_a_child_that_dies_is_told_with_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    loading, process, child = loader(monkeypatch)
    process.end(-signal.SIGKILL)
    child.close()
    with pytest.raises(NodeFailed, match="loads the experiment was killed by SIGKILL"):
        loading.facts(Observer(), StopSignals())


def test_the_wait_for_the_facts_ends_by_a_signal_or_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Told(Observer):
        def waiting(self, what: str) -> None:
            said.append(what)

    loading, _, _ = loader(monkeypatch)
    with clock.use(clock.VirtualClock()) as time:

        def nobody(*_: object, timeout: float) -> list[object]:
            time.sleep(timeout)
            return []

        monkeypatch.setattr(workers, "wait", nobody)
        with pytest.raises(EnvironmentFault, match=f"not loaded within {LOAD_SECONDS:g} s"):
            loading.facts(Told(), StopSignals())
    assert len(said) == LOAD_SECONDS and said[9] == "loading torch and the experiment (10 s)"
    signals = StopSignals()
    signals.received.append(signal.SIGINT)
    with pytest.raises(Interrupted):
        loading.facts(Told(), signals)
    loading.close()
    assert not loading.worker.alive


class Slow(ForkServerContext):
    """A fork server that still imports torch: it answers when `ready` is set."""


def slow_loader(monkeypatch: pytest.MonkeyPatch) -> tuple[Loader, Worker, Any, Pipe, threading.Event]:
    worker, process, child = made()
    ready = threading.Event()

    def start(*_: object) -> Worker:
        assert ready.wait(60.0)
        return worker

    monkeypatch.setattr(workers, "start_child", start)
    return Loader(Slow(), Request("ring.yaml")), worker, process, child, ready


@pytest.mark.slow
def test_a_server_that_is_not_ready_is_waited_for_as_its_child_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import of torch takes seconds, from a network disk a minute: Ctrl-C ends the wait meanwhile."""
    loading, worker, _, child, ready = slow_loader(monkeypatch)
    said: list[str] = []

    class Told(Observer):
        def waiting(self, what: str) -> None:
            said.append(what)
            child.send(FACTS)
            ready.set()

    assert loading.facts(Told(), StopSignals()) == FACTS and said and loading.worker is worker

    loading, worker, _, _, ready = slow_loader(monkeypatch)
    signals = StopSignals()
    signals.received.append(signal.SIGINT)
    with pytest.raises(Interrupted):
        loading.facts(Observer(), signals)
    loading.close()
    loading.poll(lambda _: None)
    assert worker.alive
    ready.set()
    loading.started.join(60.0)
    assert not worker.alive, "a child that comes too late is ended"


def test_a_server_that_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> Worker:
        raise EOFError("unexpected EOF")

    monkeypatch.setattr(workers, "start_child", start)
    loading = Loader(Slow(), Request("ring.yaml"))
    with pytest.raises(NodeFailed, match=r"could not be started: EOFError\('unexpected EOF'\)"):
        loading.facts(Observer(), StopSignals())
    loading.close()


def test_children_do_not_import_the_callers_script_again() -> None:
    """A script without `if __name__ == "__main__"` would start the run once more in every child."""
    main = sys.modules["__main__"]
    with workers._without_main():
        assert sys.modules["__main__"] is not main and not hasattr(sys.modules["__main__"], "__file__")
    assert sys.modules["__main__"] is main


class Unstarted:
    """A process of a fork server that answers when `ready` is set."""

    def __init__(self, works: bool = True) -> None:
        self.ready, self.killed = threading.Event(), threading.Event()
        self.works, self.pid, self.exitcode = works, 7, -9
        self.sentinel, self._end = connection.Pipe(duplex=False)

    def start(self) -> None:
        assert self.ready.wait(60.0)
        if not self.works:
            raise EOFError("unexpected EOF")

    def kill(self) -> None:
        self.killed.set()
        self._end.close()

    def join(self, timeout: float) -> None:
        assert self.sentinel.poll(timeout)


def late(process: Unstarted, monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(workers.forkserver, "start", lambda: None)
    context = ForkServerContext()
    context.Process = lambda **_: process  # type: ignore[method-assign,assignment]
    return workers.start_deferred(context, SimpleNamespace(uids=[3]))  # type: ignore[arg-type]


def test_a_node_is_started_again_without_a_wait_for_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Unstarted()
    worker = late(process, monkeypatch)
    before = worker.process.sentinel
    assert worker.alive and not connection.wait([before], 0) and worker.process.pid is None
    process.ready.set()
    assert connection.wait([before], 60.0) and worker.process.sentinel is process.sentinel
    assert worker.process.pid == 7
    worker.kill()
    worker.reap(60.0)
    assert process.killed.is_set() and worker.exit_code == -9


def test_a_node_that_comes_too_late_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Unstarted()
    worker = late(process, monkeypatch)
    worker.kill()
    worker.reap(60.0)
    assert not worker.alive and not process.killed.is_set()
    process.ready.set()
    assert process.killed.wait(60.0)


def test_a_node_that_cannot_be_started_again_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Unstarted(works=False)
    worker = late(process, monkeypatch)
    process.ready.set()
    assert connection.wait([worker.process.sentinel], 60.0) == [worker.process.sentinel]
    worker.reap()
    assert worker.exit_code == -signal.SIGKILL and not [*worker.messages()]
