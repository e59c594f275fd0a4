"""The threads by which ranks agree on the members of each generation: several in one process, without training."""

from __future__ import annotations

import socket
import threading
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
from tests.conftest import free_ports, wait_until

RUN = bytes(range(8))
LINES = ("parameter w (3, 4)", "topology 'ring'")


class Controls:
    """The control threads of a job, of founders and of ranks that join."""

    def __init__(self) -> None:
        self.all: list[Control] = []
        self.terms: JobTerms

    def found_job(self, min_ranks: int, count: int, port: int = 0) -> list[Control]:
        """Begins a job of `count` founders. port: that of uid 0; the system chooses the others."""
        founders = [Control("127.0.0.1", 0 if uid else port) for uid in range(count)]
        self.all += founders
        addresses = tuple(Address(control.endpoint, "tcp://127.0.0.1:1") for control in founders)
        self.terms = JobTerms(RUN, addresses, count + 4, min_ranks, 1.6)
        for uid, control in enumerate(founders):
            control.begin(uid, self.terms, LINES, "digest", 10.0)
        return founders

    def join_job(self, member: Control, digest: str = "digest", seconds: float = 5.0) -> Control:
        """Begins a newcomer, which asks `member` for its uid."""
        newcomer = Control("127.0.0.1", 0)
        self.all.append(newcomer)
        own = Address(newcomer.endpoint, "tcp://127.0.0.1:1")
        admission = ask_to_join([member.endpoint], own, seconds)
        newcomer.begin(admission.uid, admission.terms, LINES, digest, 10.0, admission)
        return newcomer


@pytest.fixture
def controls() -> Iterator[Controls]:
    made = Controls()
    yield made
    for control in made.all:
        control.close()


def run_in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Makes calls that wait for each other at the same time. Returns what each returned or raised."""
    results: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def next_generations(*controls: Control, error: PeerLost | None = None) -> list[Any]:
    """Returns the next generation as each of them gets it."""
    calls = [lambda control=control: control.next_generation(error, 10.0, False) for control in controls]
    return run_in_threads(*calls)


def members_of(generations: list[Any]) -> list[tuple[int, ...]]:
    """Returns the members of a generation as each rank has them, and checks that all ranks are in the same one."""
    for generation in generations:
        assert isinstance(generation, Generation), generation
    assert len({generation.name for generation in generations}) == 1
    return [generation.members for generation in generations]


def test_survivors_agree_on_a_generation_though_only_one_noticed_the_deaths(controls: Controls) -> None:
    """Two ranks die at once, the leader among them."""
    zero, one, two, three, four = controls.found_job(2, 5)
    zero.close()
    three.close()
    generations = run_in_threads(lambda: two.next_generation(PeerLost("no answer"), 10.0, False),
                                 lambda: one.next_generation(None, 10.0, False),
                                 lambda: four.next_generation(None, 10.0, False))  # fmt: skip
    assert members_of(generations) == [(1, 2, 4)] * 3
    assert not (one.broken or two.broken or four.broken)


def test_a_newcomer_that_asks_any_member_is_admitted_and_is_fresh_until_its_model_is_ready(controls: Controls) -> None:
    zero, one = controls.found_job(1, 2)
    new = controls.join_job(one)
    assert new.fresh
    generations = next_generations(zero, one, new)
    assert members_of(generations) == [(0, 1, 2)] * 3
    assert generations[0].fresh == {2}
    new.set_model_ready(7)
    assert not new.fresh


def test_a_newcomer_alone_continues_a_job_whose_min_ranks_is_one(controls: Controls) -> None:
    zero, one = controls.found_job(1, 2)
    new = controls.join_job(zero)
    members_of(next_generations(zero, one, new))
    new.set_model_ready(1)
    zero.close()
    one.close()
    assert members_of(next_generations(new, error=PeerLost("gone"))) == [(2,)]


def test_a_process_restarted_at_its_port_gets_its_old_uid(controls: Controls) -> None:
    zero, one, two = controls.found_job(2, 3)
    one.close()
    port = int(one.endpoint.rpartition(":")[2])
    assert members_of(next_generations(zero, two, error=PeerLost("gone"))) == [(0, 2)] * 2
    back = Control("127.0.0.1", port)
    controls.all.append(back)
    admission = ask_to_join([two.endpoint], controls.terms.founders[1], 5.0)
    assert admission.uid == 1 and admission.lines == LINES
    back.begin(1, admission.terms, LINES, "digest", 10.0, admission)
    generations = next_generations(zero, back, two)
    assert members_of(generations) == [(0, 1, 2)] * 3
    assert generations[1].fresh == {1}


@pytest.mark.slow
def test_a_newcomer_admitted_only_by_a_rank_that_died_asks_the_others_again(controls: Controls) -> None:
    zero, one, two = controls.found_job(1, 3)
    new = controls.join_job(zero)
    zero.close()
    assert members_of(next_generations(one, two, error=PeerLost("gone"))) == [(1, 2)] * 2
    own = Address(new.endpoint, "tcp://127.0.0.1:1")

    def ask_again() -> None:
        admission = ask_to_join([one.endpoint], own, 5.0)
        new.begin(admission.uid, admission.terms, LINES, "digest", 10.0, admission)

    generations = run_in_threads(lambda: new.next_generation(None, 30.0, False, ask_again),
                                 lambda: one.next_generation(None, 30.0, False),
                                 lambda: two.next_generation(None, 30.0, False))  # fmt: skip
    assert members_of(generations) == [(1, 2, 3)] * 3


def test_a_newcomer_with_another_config_is_refused_and_breaks_no_generation(controls: Controls) -> None:
    zero, one = controls.found_job(1, 2)
    other = controls.join_job(zero, digest="another")
    with pytest.raises(AssemblyError, match="another config or graph"):
        other.next_generation(None, 10.0, False)
    assert not zero.broken and not one.broken


@pytest.mark.slow
def test_too_few_survivors_name_the_missing_ranks_and_how_many_they_need(controls: Controls) -> None:
    zero, one, two = controls.found_job(2, 3)
    one.close()
    two.close()
    with pytest.raises(PeerLost, match=r"rank 1, rank 2 do not answer, .* needs 2 of 3 ranks \(min_ranks\)"):
        zero.next_generation(PeerLost("gone"), 1.0, False)


@pytest.mark.slow
def test_the_callers_error_is_raised_again_if_no_rank_is_missing(controls: Controls) -> None:
    zero, _ = controls.found_job(1, 2)
    with pytest.raises(PeerLost, match="took longer"):
        zero.next_generation(PeerLost("the exchange took longer than 1 s"), 20.0, False)


@pytest.mark.slow
def test_all_ranks_continue_in_a_new_generation_after_a_broken_connection(controls: Controls) -> None:
    zero, one = controls.found_job(1, 2)
    generations = run_in_threads(lambda: zero.next_generation(None, 10.0, False),
                                 lambda: one.next_generation(PeerLost("connection reset"), 10.0, True))  # fmt: skip
    assert members_of(generations) == [(0, 1)] * 2
    assert generations[0].number == 1


def test_join_addresses_that_are_wrong_or_silent_are_named_with_the_reason() -> None:
    own = Address("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    with ExitStack() as stack:
        silent = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        free = free_ports(1)
        with pytest.raises(AssemblyError) as raised:
            ask_to_join([f"127.0.0.1:{free}", f"127.0.0.1:{silent.getsockname()[1]}"], own, 0.3)
    assert f"0.3 s: 127.0.0.1:{free}: nothing listens there; 127.0.0.1:" in str(raised.value)
    assert "no member of a job answers" in str(raised.value)
    for wrong in ("", "host", "127.0.0.1:0", "127.0.0.1:x", "no.such.host.invalid:5"):
        with pytest.raises(UsageError, match="join must be addresses"):
            ask_to_join([wrong], own, 1.0)


def test_a_newcomer_logs_at_once_that_nothing_listens_and_is_admitted_when_a_job_begins_there(
    controls: Controls, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_ports(1)
    own = Address("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    admissions: list[Any] = []
    newcomer = threading.Thread(target=lambda: admissions.append(ask_to_join([f"127.0.0.1:{port}"], own, 20.0)))
    newcomer.start()
    wait_until(lambda: caplog.messages, "nothing was logged", 10)
    assert not admissions
    where = f"127.0.0.1:{port}, where this process is to join a job"
    assert caplog.messages == [f"nothing listens at {where}: trying again for 20 s"]
    controls.found_job(1, 1, port)
    newcomer.join(20)
    assert admissions[0].lines == LINES


@pytest.fixture
def job() -> Iterator[Job]:
    with closing(Job.create(None, "127.0.0.1", 10.0, None)) as made:
        yield made


@pytest.mark.slow
def test_a_newcomer_fails_with_the_reason_that_the_job_is_over(job: Job) -> None:
    job._join_addresses = [f"127.0.0.1:{free_ports(1)}"]
    with pytest.raises(AssemblyError, match="the job is over: nothing listens at 127"):
        job._knock_again()


def test_connecting_to_the_store_of_a_member_ends_early_once_the_member_refuses_connections(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[float] = []

    def time_out(*_: Any, timeout: timedelta) -> None:
        timeouts.append(timeout.total_seconds())
        raise RuntimeError("timed out")

    monkeypatch.setattr("torch.distributed.TCPStore", time_out)
    monkeypatch.setattr(Address, "refuses_connection", lambda *_: len(timeouts) > 1)
    assert isinstance(job._groups, GlooGroups)
    with pytest.raises(ConnectionBroken, match="1:5 any more"):
        job._groups._store_at("tcp://127.0.0.1:5")
    assert len(timeouts) == 2 and max(timeouts) < FORM_SECONDS


def test_malformed_messages_of_strangers_are_refused() -> None:
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
