"""Jobs with keys: process groups over encrypted sockets, and processes without the keys, which are refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zmq

from decentnode.communication.zeromq.sockets.security import write_secret
from decentnode.errors import AssemblyError, EnvironmentFault, PeerLost, UsageError
from decentnode.parallel.membership import socket_group as groups
from decentnode.parallel.membership.addresses import Address, _knock, ask_to_join
from decentnode.parallel.membership.control import Control
from decentnode.parallel.membership.keys import VARIABLE, Access
from decentnode.parallel.membership.socket_group import GroupSockets, SocketProcessGroup
from decentnode.wire.generation import FIRST, Name
from decentnode.wire.messages import Declined
from tests.conftest import wait_until

OWN = Address("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
NEXT: Name = (1, bytes(12))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    write_secret(tmp_path / "ranks.secret")
    return tmp_path / "ranks.secret"


@pytest.fixture
def member(secret: Path) -> Iterator[Control]:
    """The control of a member of a job with keys."""
    with closing(Control("127.0.0.1", 0, Access.load(secret))) as made:
        yield made


class ThreeRanks:
    """The controls and the sockets of three ranks in this process."""

    def __init__(self, stack: ExitStack, secret: Path) -> None:
        access = Access.load(secret)
        self.controls = [stack.enter_context(closing(Control("127.0.0.1", 0, access))) for _ in range(3)]
        self.sockets = [stack.enter_context(closing(GroupSockets(control.sockets, "127.0.0.1", 0)))
                        for control in self.controls]  # fmt: skip

    def begin(self, name: Name, ranks: tuple[int, ...] = (0, 1, 2), seconds: float = 10.0) -> list[SocketProcessGroup]:
        """Begins a generation of these ranks. Returns each rank's group of all of them."""
        endpoints = [self.sockets[rank].endpoint for rank in ranks]
        for number, rank in enumerate(ranks):
            self.sockets[rank].begin(name, number, endpoints)
        return [self.sockets[rank].group(range(len(ranks)), seconds) for rank in ranks]


@pytest.fixture
def three(secret: Path) -> Iterator[ThreeRanks]:
    with ExitStack() as stack:
        yield ThreeRanks(stack, secret)


def wait_for(works: list[Any]) -> None:
    for work in works:
        assert work.wait()


def options(**fields: Any) -> Any:
    """Returns an object like torch's AllreduceOptions, with these fields."""
    return SimpleNamespace(**fields)


@pytest.mark.parametrize(("op", "expected"), [
    (dist.ReduceOp.SUM, 6.0), (dist.ReduceOp.AVG, 2.0), (dist.ReduceOp.MIN, 1.0), (dist.ReduceOp.MAX, 3.0),
    (dist.ReduceOp.PRODUCT, 6.0),
])  # fmt: skip
def test_all_reduce_gives_every_rank_the_reduction_of_all_tensors(three: ThreeRanks, op: Any, expected: float) -> None:
    ranks = three.begin(FIRST)
    tensors = [torch.full((3, 2), rank + 1.0).t() for rank in range(3)]
    wait_for([rank.allreduce([tensor], options(reduceOp=op)) for rank, tensor in zip(ranks, tensors, strict=True)])
    assert all(torch.equal(tensor, torch.full((2, 3), expected)) for tensor in tensors)


def test_tensors_larger_than_a_chunk_and_empty_ones_arrive(three: ThreeRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "CHUNK_BYTES", 1000)
    ranks = three.begin(FIRST)
    for size in (0, 1, 125, 126, 10_000):
        tensors = [torch.arange(size, dtype=torch.float64) * (rank == 1) for rank in range(3)]
        wait_for([rank.broadcast([tensor], options(rootRank=1)) for rank, tensor in zip(ranks, tensors, strict=True)])
        assert all(torch.equal(tensor, torch.arange(size, dtype=torch.float64)) for tensor in tensors)
    gathered = [[torch.zeros(2, dtype=torch.int64) for _ in range(3)] for _ in range(3)]
    wait_for([rank.allgather([room], [torch.full((2,), number)])
              for number, (rank, room) in enumerate(zip(ranks, gathered, strict=True))])  # fmt: skip
    assert [[int(tensor[0]) for tensor in room] for room in gathered] == [[0, 1, 2]] * 3


def test_a_size_limit_below_the_handshakes_messages_does_not_block_the_handshake(three: ThreeRanks) -> None:
    into = three.controls[0].sockets.listener(zmq.PULL, "127.0.0.1", 0, 40, 10)
    out = three.controls[1].sockets.sender(zmq.PUSH, into.getsockopt_string(zmq.LAST_ENDPOINT), 10, 0)
    out.send(b"x" * 40)
    assert into.poll(10_000) and into.recv() == b"x" * 40


def test_groups_of_some_ranks_and_pairs_count_their_operations_independently(three: ThreeRanks) -> None:
    ranks = three.begin(FIRST)
    pair = {rank: three.sockets[rank].group((0, 2), 10.0) for rank in (0, 2)}
    tensors = {rank: torch.tensor([float(rank)]) for rank in (0, 2)}
    received = torch.zeros(1)
    works = [pair[rank].allreduce([tensors[rank]], options(reduceOp=dist.ReduceOp.SUM)) for rank in (2, 0)]
    works += [ranks[1].recv([received], 0), ranks[0].send([torch.tensor([7.0])], 1)]
    works += [rank.barrier() for rank in ranks]
    wait_for(works[::-1])
    assert tensors == {0: torch.tensor([2.0]), 2: torch.tensor([2.0])} and received.item() == 7.0


def test_operations_of_the_next_generation_wait_for_late_ranks_and_those_of_the_last_are_dropped(
    three: ThreeRanks
) -> None:
    ranks = three.begin(FIRST)
    ranks[0].allreduce([torch.ones(1)], options(reduceOp=dist.ReduceOp.SUM))
    endpoints = [three.sockets[rank].endpoint for rank in (0, 2)]
    three.sockets[0].begin(NEXT, 0, endpoints)
    own = torch.tensor([1.0])
    first = three.sockets[0].group((0, 1), 10.0).allreduce([own], options(reduceOp=dist.ReduceOp.SUM))
    assert not first.is_completed()
    three.sockets[2].receive(5.0)
    three.sockets[2].begin(NEXT, 1, endpoints)
    other = torch.tensor([2.0])
    wait_for([three.sockets[2].group((0, 1), 10.0).allreduce([other], options(reduceOp=dist.ReduceOp.SUM)), first])
    assert own.item() == other.item() == 3.0


def test_missing_ranks_and_a_rank_that_sends_another_size_are_named(three: ThreeRanks) -> None:
    ranks = three.begin(FIRST, seconds=0.2)
    with pytest.raises(PeerLost, match=r"nothing came from rank 1, 2$"):
        ranks[0].barrier().wait()
    three.sockets[0].begin(FIRST, 0, [three.sockets[0].endpoint, "tcp://192.0.2.1:9"])
    with pytest.raises(PeerLost, match="from rank 1; if they run, large packets may get lost between the machines"):
        three.sockets[0].group((0, 1), 0.2).barrier().wait()
    ranks = three.begin(NEXT)
    ranks[1].send([torch.zeros(3)], 0)
    with pytest.raises(PeerLost, match="rank 1 has sent 12 bytes where 8 were expected"):
        ranks[0].recv([torch.zeros(2)], 1).wait()


def test_unsupported_reductions_are_refused(three: ThreeRanks) -> None:
    ranks = three.begin(FIRST)
    with pytest.raises(RuntimeError, match="cannot all_reduce"):
        ranks[0].allreduce([torch.ones(1, dtype=torch.int64)], options(reduceOp=dist.ReduceOp.BXOR))


# -- processes without the keys -------------------------------------------------------------------------------


def refusal(member: Control, access: Access) -> str:
    """Returns the error of a process that asks to join with these keys."""
    with pytest.raises(AssemblyError) as raised:
        ask_to_join([member.endpoint], OWN, 60.0, access)
    return str(raised.value)


def test_a_process_with_the_secret_is_answered(member: Control, secret: Path) -> None:
    with zmq.Context() as context:
        answer = _knock(context, Access.load(secret), member.endpoint, OWN, 60.0)
    assert isinstance(answer, Declined) and "the job has not begun to train" in answer.reason


def test_a_process_without_keys_or_with_others_is_refused_with_the_reason(
    member: Control, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_secret(tmp_path / "other.secret")
    with caplog.at_level(logging.WARNING):
        assert "it has keys and this process has none: give them as keys=" in refusal(member, Access())
        assert "does not accept this process's keys" in refusal(member, Access.load(tmp_path / "other.secret"))
    assert caplog.text.count("without the keys of this job") == 1
    with closing(Control("127.0.0.1", 0)) as without_keys:
        assert "does not accept this process's keys" in refusal(without_keys, Access.load(tmp_path / "other.secret"))


def test_a_process_that_knows_only_the_public_key_is_refused(secret: Path) -> None:
    """The public key may have leaked, for example into a log; the secret has not."""
    access = Access.load(secret)
    public, own = zmq.curve_keypair()
    with closing(Control("127.0.0.1", 0, access)) as control, zmq.Context() as context, \
            context.socket(zmq.DEALER) as stranger:  # fmt: skip
        stranger.linger = 0
        stranger.curve_secretkey, stranger.curve_publickey, stranger.curve_serverkey = own, public, access.public
        stranger.connect(control.endpoint)
        stranger.send(b"x")
        wait_until(lambda: control.sockets._has_logged)
        assert not stranger.poll(100)


@pytest.mark.parametrize(("keys", "host", "is_allowed"), [
    (None, "127.0.0.1", True), (None, "::1", True), (None, "10.0.0.1", False), (None, "0.0.0.0", False),
    ("off", "10.0.0.1", True), ("secret", "10.0.0.1", True),
])  # fmt: skip
def test_ranks_without_keys_listen_only_on_loopback_unless_keys_are_off(
    keys: str | None, host: str, is_allowed: bool, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = str(secret) if keys == "secret" else keys
    for given_by in ("argument", "environment"):
        monkeypatch.delenv(VARIABLE, raising=False)
        if given_by == "environment" and value:
            monkeypatch.setenv(VARIABLE, value)
        access = Access.load(value if given_by == "argument" else None)
        if is_allowed:
            access.check(host)
        else:
            with pytest.raises(UsageError, match="decentnode keygen --secret FILE"):
                access.check(host)


def test_a_secret_that_others_can_read_or_that_does_not_exist_is_refused(secret: Path, tmp_path: Path) -> None:
    # the repr must not show the secret
    assert "secret" not in repr(Access.load(secret)).replace("are_keys_off", "")
    secret.chmod(0o644)
    with pytest.raises(EnvironmentFault, match="can be read by others"):
        Access.load(secret)
    with pytest.raises(EnvironmentFault, match="make it with decentnode keygen --secret"):
        Access.load(tmp_path / "none")
