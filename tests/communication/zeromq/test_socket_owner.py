"""Who is at the sockets: never two threads at once, and the I/O thread again as soon as the other stays away."""

from __future__ import annotations

import threading

import pytest
import torch

from decentnode.communication.zeromq.sockets.socket_owner import SocketDoorbell, SocketOwner
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.payload import Payload
from tests.communication.contract import flat_schema, nodes, together
from tests.conftest import wait_until


class Sockets:
    """Something to be at that notices when two are."""

    def __init__(self) -> None:
        self.lock, self.awake = threading.Lock(), threading.Event()
        self.calls: list[str] = []
        self.steps: dict[str, int] = {"I/O": 0, "training": 0}
        self.stop = self.crowded = False
        self.owner = SocketOwner(self.awake.set)
        self.doorbell = SocketDoorbell(self.owner, self.awake.set, lambda seconds: self.step("training", seconds))
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while not self.stop:
            if self.owner.give():
                self.owner.take_back(lambda: bool(self.calls))
            self.step("I/O", 0.05)

    def step(self, who: str, seconds: float) -> None:
        if not self.lock.acquire(blocking=False):
            self.crowded = True
            return
        self.awake.wait(seconds)
        self.awake.clear()
        self.steps[who] += 1
        self.calls.clear()
        self.lock.release()

    def close(self) -> None:
        self.stop = True
        self.owner.close()
        self.thread.join(60)
        assert not self.thread.is_alive() and not self.crowded


def test_the_socket_changes_hands_without_two_at_the_sockets() -> None:
    sockets = Sockets()

    def visited(times: int) -> bool:
        sockets.doorbell.listen(0.002)
        return sockets.steps["training"] >= times

    for times in range(20, 141, 20):
        wait_until(lambda: visited(times), "the training thread is kept away")  # noqa: B023
        before = sockets.steps["I/O"]
        wait_until(lambda: sockets.steps["I/O"] > before, "the I/O thread is kept away")  # noqa: B023
    sockets.close()


def test_what_is_urgent_does_not_wait_for_a_thread_that_went_away() -> None:
    sockets = Sockets()
    for _ in range(50):
        sockets.doorbell.listen(0.0005)
        sockets.calls.append("now")
        sockets.awake.set()
        sockets.owner.rouse()
        wait_until(lambda: not sockets.calls)
    sockets.close()


def test_a_ring_ends_the_wait_and_none_is_lost() -> None:
    sockets = Sockets()
    for _ in range(50):
        ringer = threading.Timer(0.002, sockets.doorbell.ring)
        ringer.start()
        sockets.doorbell.listen(1000)
        ringer.join()
    sockets.doorbell.ring()  # before anybody listens: the next wait ends at once
    sockets.doorbell.listen(1000)
    sockets.close()


def test_a_closed_owner_is_not_taken() -> None:
    sockets = Sockets()
    listener = threading.Thread(target=sockets.doorbell.listen, args=(1000,))
    listener.start()
    wait_until(lambda: sockets.owner.in_use)
    sockets.owner.close()
    sockets.awake.set()
    listener.join(60)
    assert not listener.is_alive() and not sockets.owner.take(0.01)
    sockets.close()


def test_an_interrupted_wait_leaves_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    sockets = Sockets()

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
    """Node 0 waits for a payload; barriers of others pass through it meanwhile, and it hears of a stop."""
    with nodes("tcp", 3, flat_schema(8)) as made:
        arrived: list[bool] = []

        def run(node: ZeroMQ) -> None:
            if node.uid == 0:
                for arrival in node.exchange(0, {}, (1,)).arrivals(60):
                    arrived.append(not arrival.missing)
                return
            wait_until(lambda: made[0]._io._owner.in_use)  # type: ignore[attr-defined]
            if node.uid == 2:
                node.announce_stop()
            wait_until(lambda: node.stopping and made[0].stopping)
            if node.uid == 1:
                node.exchange(0, {0: Payload({"x": torch.ones(8)})}, ())

        together(made, run)  # type: ignore[arg-type]
        assert arrived == [True]
