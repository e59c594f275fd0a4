"""Threads that wait for neighbors: at most one listens to the doorbell, and the others wait to be notified."""

from __future__ import annotations

import threading

import pytest

from decentnode.communication.run_state import RunState, Steps, Wait, at_once, run_without_waits
from tests.conftest import wait_until


class CountingDoorbell:
    """A doorbell that counts how many threads listen to it at once (`most`), and how often it was listened to
    (`visits`)."""

    def __init__(self) -> None:
        self.rung = threading.Event()
        self.listening = self.most = self.visits = 0

    def ring(self) -> None:
        self.rung.set()

    def listen(self, timeout_seconds: float) -> None:
        self.listening += 1
        self.visits += 1
        self.most = max(self.most, self.listening)
        self.rung.wait(timeout_seconds)
        self.rung.clear()
        self.listening -= 1


def num_waiting(status: RunState) -> int:
    """Returns how many threads wait to be notified, not counting the one that listens to the doorbell."""
    with status.changed:
        return len(status.changed._waiters)  # type: ignore[attr-defined]


def test_of_two_waiting_threads_one_listens_to_the_doorbell_and_both_are_woken() -> None:
    doorbell = CountingDoorbell()
    status = RunState(doorbell=doorbell)
    done, wanted = [], {"a": False, "b": False}

    def wait(name: str) -> None:
        with status.changed:
            while not wanted[name]:
                status.wait(60)
        done.append(name)

    threads = [threading.Thread(target=wait, args=(name,), daemon=True) for name in wanted]
    threads[0].start()
    wait_until(lambda: doorbell.listening)
    threads[1].start()
    wait_until(lambda: num_waiting(status) == 1)
    with status.changed:
        wanted["a"] = True  # thread a listens to the doorbell, which thread b then takes over
        status.notify()
    threads[0].join(60)
    assert done == ["a"]
    wait_until(lambda: doorbell.visits == 2, "thread b did not take the doorbell over")
    with status.changed:
        wanted["b"] = True
        status.notify()
    threads[1].join(60)
    assert done == ["a", "b"] and doorbell.most == 1


def test_without_a_doorbell_all_threads_wait_to_be_notified() -> None:
    status, woken = RunState(), []

    def wait() -> None:
        with status.changed:
            status.wait(60)
        woken.append(1)

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: num_waiting(status) == 2)
    with status.changed:
        status.notify()
    for thread in threads:
        thread.join(60)
    assert woken == [1, 1]


def test_steps_without_waits_run_to_their_result_and_others_are_refused() -> None:
    def steps(wait: Wait | None) -> Steps[int]:
        yield None
        yield wait
        return (yield from at_once(7))

    class Never:
        deadline = 1.0

        def step(self, now: float) -> bool:
            return now < 0

    assert run_without_waits(steps(None)) == 7
    with pytest.raises(RuntimeError, match="Never must be waited for by whoever steps the node"):
        run_without_waits(steps(Never()))
