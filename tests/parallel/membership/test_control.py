"""The threads by which ranks agree on who is a member, several in one process, without any training."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import Any

import pytest

from decentnode.errors import AssemblyError, PeerFault, PeerLost, UsageError
from decentnode.parallel.membership.addresses import Address, JobTerms, ListenAddress, ask_to_join, unpacked_frame
from decentnode.parallel.membership.control import ConnectionBroken, Control
from decentnode.parallel.membership.generation_groups import FORM_SECONDS, GlooGroups
from decentnode.parallel.membership.job import Job
from decentnode.wire.generation import Generation
from tests.conftest import free_ports

RUN = bytes(range(8))
LINES = ("parameter w (3, 4)", "topology 'ring'")


class Jobs:
    """Founders' threads, and those of newcomers."""

    def __init__(self) -> None:
        self.controls: list[Control] = []
        self.terms: JobTerms

    def make(self, min_ranks: int, count: int, port: int = 0) -> list[Control]:
        """port: of the first, the others' any."""
        made = [Control("127.0.0.1", 0 if number else port) for number in range(count)]
        self.controls += made
        founders = tuple(Address(each.endpoint, "tcp://127.0.0.1:1") for each in made)
        self.terms = JobTerms(RUN, founders, count + 4, min_ranks, 1.6)
        for uid, each in enumerate(made):
            each.begin(uid, self.terms, LINES, "digest", 10.0)
        return made

    def newcomer(self, door: Control, digest: str = "digest", seconds: float = 5.0) -> Control:
        made = Control("127.0.0.1", 0)
        self.controls.append(made)
        own = Address(made.endpoint, "tcp://127.0.0.1:1")
        admission = ask_to_join([door.endpoint], own, seconds)
        made.begin(admission.uid, admission.terms, LINES, digest, 10.0, admission)
        return made


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    made = Jobs()
    yield made
    for each in made.controls:
        each.close()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What calls that wait for each other return, or raise."""
    found: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    return found


def next_of(*controls: Control, error: PeerLost | None = None) -> list[Any]:
    """What all of them get as their next generation."""
    return together(*(lambda each=each: each.next_generation(error, 10.0, False) for each in controls))


def members(found: list[Any]) -> list[tuple[int, ...]]:
    for each in found:
        assert isinstance(each, Generation), each
    assert len({each.name for each in found}) == 1
    return [each.members for each in found]


def test_survivors_agree_though_only_one_misses_the_dead(jobs: Jobs) -> None:
    """Two at once, the leader among them."""
    zero, one, two, three, four = jobs.make(2, 5)
    zero.close()
    three.close()
    found = together(lambda: two.next_generation(PeerLost("no answer"), 10.0, False),
                     lambda: one.next_generation(None, 10.0, False),
                     lambda: four.next_generation(None, 10.0, False))  # fmt: skip
    assert members(found) == [(1, 2, 4)] * 3
    assert not (one.broken or two.broken or four.broken)


def test_a_newcomer_is_sent_on_to_who_admits_and_counts_as_new(jobs: Jobs) -> None:
    zero, one = jobs.make(1, 2)
    new = jobs.newcomer(one)
    assert new.fresh
    found = next_of(zero, one, new)
    assert members(found) == [(0, 1, 2)] * 3
    assert found[0].fresh == {2}
    new.set_model_ready(7)
    assert not new.fresh


def test_a_newcomer_takes_the_place_of_the_dead_where_less_than_half_is_enough(jobs: Jobs) -> None:
    zero, one = jobs.make(1, 2)
    new = jobs.newcomer(zero)
    members(next_of(zero, one, new))
    new.set_model_ready(1)
    zero.close()
    one.close()
    assert members(next_of(new, error=PeerLost("gone"))) == [(2,)]


def test_a_process_that_comes_back_to_its_port_is_who_it_was(jobs: Jobs) -> None:
    zero, one, two = jobs.make(2, 3)
    one.close()
    port = int(one.endpoint.rpartition(":")[2])
    assert members(next_of(zero, two, error=PeerLost("gone"))) == [(0, 2)] * 2
    back = Control("127.0.0.1", port)
    jobs.controls.append(back)
    admission = ask_to_join([two.endpoint], jobs.terms.founders[1], 5.0)
    assert admission.uid == 1 and admission.lines == LINES
    back.begin(1, admission.terms, LINES, "digest", 10.0, admission)
    found = next_of(zero, back, two)
    assert members(found) == [(0, 1, 2)] * 3
    assert found[1].fresh == {1}


@pytest.mark.slow
def test_a_newcomer_whose_place_only_the_dead_knew_asks_the_others_for_another(jobs: Jobs) -> None:
    zero, one, two = jobs.make(1, 3)
    new = jobs.newcomer(zero)
    zero.close()
    assert members(next_of(one, two, error=PeerLost("gone"))) == [(1, 2)] * 2
    own = Address(new.endpoint, "tcp://127.0.0.1:1")

    def again() -> None:
        admission = ask_to_join([one.endpoint], own, 5.0)
        new.begin(admission.uid, admission.terms, LINES, "digest", 10.0, admission)

    found = together(lambda: new.next_generation(None, 30.0, False, again),
                     *(lambda each=each: each.next_generation(None, 30.0, False) for each in (one, two)))  # fmt: skip
    assert members(found) == [(1, 2, 3)] * 3


def test_another_config_is_refused_by_name_and_ends_nothing(jobs: Jobs) -> None:
    zero, one = jobs.make(1, 2)
    other = jobs.newcomer(zero, digest="another")
    with pytest.raises(AssemblyError, match="another config or graph"):
        other.next_generation(None, 10.0, False)
    assert not zero.broken and not one.broken


@pytest.mark.slow
def test_too_few_say_whom_they_miss_and_how_many_they_need(jobs: Jobs) -> None:
    zero, one, two = jobs.make(2, 3)
    one.close()
    two.close()
    with pytest.raises(PeerLost, match="rank 1, rank 2 do not answer, and a generation needs 2 of 3"):
        zero.next_generation(PeerLost("gone"), 1.0, False)


@pytest.mark.slow
def test_where_nobody_is_missed_the_error_is_the_callers(jobs: Jobs) -> None:
    zero, _ = jobs.make(1, 2)
    with pytest.raises(PeerLost, match="took longer"):
        zero.next_generation(PeerLost("the exchange took longer than 1 s"), 20.0, False)


@pytest.mark.slow
def test_after_a_broken_connection_all_go_on_in_another_generation(jobs: Jobs) -> None:
    zero, one = jobs.make(1, 2)
    found = together(lambda: zero.next_generation(None, 10.0, False),
                     lambda: one.next_generation(PeerLost("connection reset"), 10.0, True))  # fmt: skip
    assert members(found) == [(0, 1)] * 2
    assert found[0].number == 1


def test_a_wrong_address_is_told_with_what_became_of_it() -> None:
    own = Address("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    with ExitStack() as stack:
        silent = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        free = free_ports(1)
        with pytest.raises(AssemblyError) as told:
            ask_to_join([f"127.0.0.1:{free}", f"127.0.0.1:{silent.getsockname()[1]}"], own, 0.3)
    assert f"0.3 s: 127.0.0.1:{free}: nothing listens there; 127.0.0.1:" in str(told.value)
    assert "no member of a job answers" in str(told.value)
    for wrong in ("", "host", "127.0.0.1:0", "127.0.0.1:x", "no.such.host.invalid:5"):
        with pytest.raises(UsageError, match="join must be addresses"):
            ask_to_join([wrong], own, 1.0)


def test_who_is_to_join_where_nobody_listens_yet_is_told_at_once(
    jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """And gets its place when somebody does."""
    port = free_ports(1)
    own = Address("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    asking = threading.Thread(target=lambda: found.append(ask_to_join([f"127.0.0.1:{port}"], own, 20.0)))
    found: list[Any] = []
    asking.start()
    until = time.monotonic() + 10
    while not caplog.messages and time.monotonic() < until:
        time.sleep(0.01)
    assert not found
    where = f"127.0.0.1:{port}, where this process is to join a job"
    assert caplog.messages == [f"nothing listens at {where}: trying again for 20 s"]
    jobs.make(1, 1, port)
    asking.join(20)
    assert found[0].lines == LINES


@pytest.fixture
def job() -> Iterator[Job]:
    with closing(Job.create(None, "127.0.0.1", 10.0, None)) as made:
        yield made


@pytest.mark.slow
def test_a_newcomer_of_a_job_that_is_over_is_told_so(job: Job) -> None:
    job._join_addresses = [f"127.0.0.1:{free_ports(1)}"]
    with pytest.raises(AssemblyError, match="the job is over: nothing listens at 127"):
        job._knock_again()


def test_the_store_of_a_member_that_dies_meanwhile_is_given_up_at_once(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []

    def dies(*_: Any, timeout: timedelta) -> None:
        tried.append(timeout.total_seconds())
        raise RuntimeError("timed out")

    monkeypatch.setattr("torch.distributed.TCPStore", dies)
    monkeypatch.setattr(Address, "refuses_connection", lambda *_: len(tried) > 1)
    assert isinstance(job._groups, GlooGroups)
    with pytest.raises(ConnectionBroken, match="1:5 any more"):
        job._groups._store_at("tcp://127.0.0.1:5")
    assert len(tried) == 2 and max(tried) < FORM_SECONDS


def test_what_a_stranger_sends_is_refused() -> None:
    for frames in ([], [b"x"], [b"x" * 30], [b"a", b"b"]):
        with pytest.raises(PeerFault):
            unpacked_frame(frames)
    for raw in (b"", b"[]", b"{}", b'{"founders": [["tcp://h:1"]]}',
                b'{"founders": [["tcp://h:1", "tcp://h:2"]], "capacity": 1e9, "min_ranks": 1, "suspect_seconds": 1, '
                b'"lines": []}'):  # fmt: skip
        with pytest.raises(PeerFault):
            JobTerms.decoded(RUN, raw)
    with pytest.raises(ValueError, match="listen must be"):
        ListenAddress.parse("host:port")
