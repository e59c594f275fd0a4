"""Ownership of the sockets: never two threads at once, and the I/O thread takes them back when the other stays away."""

from __future__ import annotations

import threading

import pytest
import torch

from decentnode.communication.zeromq.sockets.socket_owner import SocketDoorbell, SocketOwner
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.payload import Payload
from tests.communication.contract import flat_schema, open_nodes, run_on_all
from tests.conftest import wait_until


class SharedSockets:
    """Stands in for sockets with an I/O thread, and notices when two threads use them at once."""

    def __init__(self) -> None:
        self.lock, self.awake = threading.Lock(), threading.Event()
        self.calls: list[str] = []
        self.steps: dict[str, int] = {"I/O": 0, "training": 0}
        self.stop = self.used_by_two = False
        self.owner = SocketOwner(self.awake.set)
        self.doorbell = SocketDoorbell(self.owner, self.awake.set, lambda seconds: self.step("training", seconds))
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while not self.stop:
            if self.owner.give():
                self.owner.take_back(lambda: bool(self.calls))
            self.step("I/O", 0.05)

    def step(self, thread: str, seconds: float) -> None:
        if not self.lock.acquire(blocking=False):
            self.used_by_two = True
            return
        self.awake.wait(seconds)
        self.awake.clear()
        self.steps[thread] += 1
        self.calls.clear()
        self.lock.release()

    def close(self) -> None:
        self.stop = True
        self.owner.close()
        self.thread.join(60)
        assert not self.thread.is_alive() and not self.used_by_two


def test_the_sockets_change_hands_without_two_threads_using_them_at_once() -> None:
    sockets = SharedSockets()

    def has_stepped(times: int) -> bool:
        sockets.doorbell.listen(0.002)
        return sockets.steps["training"] >= times

    for times in range(20, 141, 20):
        wait_until(lambda: has_stepped(times), "the training thread is kept away")  # noqa: B023
        before = sockets.steps["I/O"]
        wait_until(lambda: sockets.steps["I/O"] > before, "the I/O thread is kept away")  # noqa: B023
    sockets.close()


def test_urgent_calls_do_not_wait_for_a_training_thread_that_went_away() -> None:
    sockets = SharedSockets()
    for _ in range(50):
        sockets.doorbell.listen(0.0005)
        sockets.calls.append("now")
        sockets.awake.set()
        sockets.owner.rouse()
        wait_until(lambda: not sockets.calls)
    sockets.close()


def test_a_ring_ends_the_wait_and_no_ring_is_lost() -> None:
    sockets = SharedSockets()
    for _ in range(50):
        ringer = threading.Timer(0.002, sockets.doorbell.ring)
        ringer.start()
        sockets.doorbell.listen(1000)
        ringer.join()
    sockets.doorbell.ring()  # no thread listens: the next wait ends at once
    sockets.doorbell.listen(1000)
    sockets.close()


def test_a_closed_owner_gives_the_sockets_to_no_thread() -> None:
    sockets = SharedSockets()
    listener = threading.Thread(target=sockets.doorbell.listen, args=(1000,))
    listener.start()
    wait_until(lambda: sockets.owner.in_use)
    sockets.owner.close()
    sockets.awake.set()
    listener.join(60)
    assert not listener.is_alive() and not sockets.owner.take(0.01)
    sockets.close()


def test_an_interrupted_wait_returns_the_sockets_to_the_io_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    sockets = SharedSockets()

    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sockets.doorbell, "_work", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sockets.doorbell.listen(5)
    before = sockets.steps["I/O"]
    wait_until(lambda: sockets.steps["I/O"] > before)
    sockets.close()


def test_a_waiting_training_thread_serves_control_and_notices_stops() -> None:
    """Node 0 waits for a payload, and receives and forwards a stop meanwhile."""
    with open_nodes("tcp", 3, flat_schema(8)) as nodes:
        arrived: list[bool] = []

        def run(node: ZeroMQ) -> None:
            if node.uid == 0:
                for arrival in node.exchange(0, {}, (1,)).arrivals(60):
                    arrived.append(not arrival.missing)
                return
            wait_until(lambda: nodes[0]._io._owner.in_use)  # type: ignore[attr-defined]
            if node.uid == 2:
                node.announce_stop()
            wait_until(lambda: node.stopping and nodes[0].stopping)
            if node.uid == 1:
                node.exchange(0, {0: Payload({"x": torch.ones(8)})}, ())

        run_on_all(nodes, run)  # type: ignore[arg-type]
        assert arrived == [True]
