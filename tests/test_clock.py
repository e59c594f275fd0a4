"""The clock: virtual time moves only when it is advanced, and no other module reads the time."""

import time

import pytest

from decentnode import clock
from tests.linter import check_banned


def test_virtual_time_moves_only_when_it_is_advanced() -> None:
    with clock.use(clock.VirtualClock(wall=1000.0)) as virtual:
        assert (clock.now(), clock.wall()) == (0.0, 1000.0)
        clock.sleep(3600.0)
        assert (clock.now(), clock.wall()) == (3600.0, 4600.0)
        virtual.advance_to(4000.0)
        assert clock.now() == 4000.0
        with pytest.raises(ValueError, match="must not go back"):
            virtual.advance_to(3999.0)
        assert clock.now() == 4000.0


def test_after_virtual_time_the_clock_is_the_machines_again() -> None:
    with pytest.raises(RuntimeError), clock.use(clock.VirtualClock()):
        raise RuntimeError
    before = time.monotonic()
    assert before <= clock.now() <= time.monotonic()
    before = time.time()
    assert before <= clock.wall() <= time.time()


@pytest.mark.parametrize("by", [-3600.0, 3600.0])
def test_a_clock_that_is_set_does_not_change_the_time_between_records(
    by: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, wall = clock.RealClock(), time.time
    began = machine.recorded()
    assert abs(began - wall()) < 1
    monkeypatch.setattr(time, "time", lambda: wall() + by)
    assert abs(machine.wall() - wall() - by) < 1 and began <= machine.recorded() < began + 60


@pytest.mark.parametrize("source", [
    "import time\nprint(time.monotonic())\n",
    "from time import sleep\nsleep(1.0)\n",
    "from datetime import datetime\nprint(datetime.now())\n",
    "import datetime as dates\nprint(dates.date.today())\n",
])  # fmt: skip
def test_the_linter_rejects_other_modules_that_read_the_time_or_sleep(source: str) -> None:
    check_banned(source, "decentnode.clock")
