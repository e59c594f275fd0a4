"""Ranks with a secret: their process groups, and strangers that are refused. Several ranks in one process."""

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
from decentnode.parallel.membership.addresses import Address, ask_to_join
from decentnode.parallel.membership.control import Control
from decentnode.parallel.membership.keys import VARIABLE, Access
from decentnode.parallel.membership.socket_group import GroupSockets, SocketProcessGroup
from decentnode.wire.generation import FIRST, Name

OWN = Address("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
NEXT: Name = (1, bytes(12))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    write_secret(tmp_path / "ranks.secret")
    return tmp_path / "ranks.secret"


@pytest.fixture
def door(secret: Path) -> Iterator[Control]:
    with closing(Control("127.0.0.1", 0, Access.load(secret))) as made:
        yield made


class Three:
    """The sockets of three ranks."""

    def __init__(self, stack: ExitStack, secret: Path) -> None:
        access = Access.load(secret)
        self.controls = [stack.enter_context(closing(Control("127.0.0.1", 0, access))) for _ in range(3)]
        self.sockets = [stack.enter_context(closing(GroupSockets(each.sockets, "127.0.0.1", 0)))
                        for each in self.controls]  # fmt: skip

    def begin(self, name: Name, ranks: tuple[int, ...] = (0, 1, 2), seconds: float = 10.0) -> list[SocketProcessGroup]:
        endpoints = [self.sockets[rank].endpoint for rank in ranks]
        for number, rank in enumerate(ranks):
            self.sockets[rank].begin(name, number, endpoints)
        return [self.sockets[rank].group(range(len(ranks)), seconds) for rank in ranks]


@pytest.fixture
def three(secret: Path) -> Iterator[Three]:
    with ExitStack() as stack:
        yield Three(stack, secret)


def done(works: list[Any]) -> None:
    for work in works:
        assert work.wait()


def options(**given: Any) -> Any:
    return SimpleNamespace(**given)


@pytest.mark.parametrize(("op", "whole"), [
    (dist.ReduceOp.SUM, 6.0), (dist.ReduceOp.AVG, 2.0), (dist.ReduceOp.MIN, 1.0), (dist.ReduceOp.MAX, 3.0),
    (dist.ReduceOp.PRODUCT, 6.0),
])  # fmt: skip
def test_all_have_the_same_reduction(three: Three, op: Any, whole: float) -> None:
    members = three.begin(FIRST)
    tensors = [torch.full((3, 2), rank + 1.0).t() for rank in range(3)]
    done([each.allreduce([tensor], options(reduceOp=op)) for each, tensor in zip(members, tensors, strict=True)])
    assert all(torch.equal(tensor, torch.full((2, 3), whole)) for tensor in tensors)


def test_tensors_larger_than_a_chunk_and_empty_ones_arrive(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "CHUNK_BYTES", 1000)
    members = three.begin(FIRST)
    for size in (0, 1, 125, 126, 10_000):
        tensors = [torch.arange(size, dtype=torch.float64) * (rank == 1) for rank in range(3)]
        done([each.broadcast([tensor], options(rootRank=1)) for each, tensor in zip(members, tensors, strict=True)])
        assert all(torch.equal(tensor, torch.arange(size, dtype=torch.float64)) for tensor in tensors)
    gathered = [[torch.zeros(2, dtype=torch.int64) for _ in range(3)] for _ in range(3)]
    done([each.allgather([mine], [torch.full((2,), rank)])
          for rank, (each, mine) in enumerate(zip(members, gathered, strict=True))])  # fmt: skip
    assert [[int(each[0]) for each in mine] for mine in gathered] == [[0, 1, 2]] * 3


def test_a_limit_below_the_handshake_s_own_messages_lets_them_pass(three: Three) -> None:
    into = three.controls[0].sockets.listener(zmq.PULL, "127.0.0.1", 0, 40, 10)
    out = three.controls[1].sockets.sender(zmq.PUSH, into.getsockopt_string(zmq.LAST_ENDPOINT), 10, 0)
    out.send(b"x" * 40)
    assert into.poll(10_000) and into.recv() == b"x" * 40


def test_pairs_and_parts_of_the_ranks_have_operations_of_their_own(three: Three) -> None:
    members = three.begin(FIRST)
    pair = {rank: three.sockets[rank].group((0, 2), 10.0) for rank in (0, 2)}
    tensors = {rank: torch.tensor([float(rank)]) for rank in (0, 2)}
    got = torch.zeros(1)
    works = [pair[rank].allreduce([tensors[rank]], options(reduceOp=dist.ReduceOp.SUM)) for rank in (2, 0)]
    works += [members[1].recv([got], 0), members[0].send([torch.tensor([7.0])], 1)]
    works += [each.barrier() for each in members]
    done(works[::-1])
    assert tensors == {0: torch.tensor([2.0]), 2: torch.tensor([2.0])} and got.item() == 7.0


def test_who_enters_the_next_generation_first_is_heard_there_and_what_was_before_is_not(three: Three) -> None:
    before = three.begin(FIRST)
    before[0].allreduce([torch.ones(1)], options(reduceOp=dist.ReduceOp.SUM))
    endpoints = [three.sockets[rank].endpoint for rank in (0, 2)]
    three.sockets[0].begin(NEXT, 0, endpoints)
    own = torch.tensor([1.0])
    first = three.sockets[0].group((0, 1), 10.0).allreduce([own], options(reduceOp=dist.ReduceOp.SUM))
    assert not first.is_completed()
    three.sockets[2].receive(5.0)
    three.sockets[2].begin(NEXT, 1, endpoints)
    other = torch.tensor([2.0])
    done([three.sockets[2].group((0, 1), 10.0).allreduce([other], options(reduceOp=dist.ReduceOp.SUM)), first])
    assert own.item() == other.item() == 3.0


def test_a_rank_that_does_not_come_is_named_and_so_is_one_that_sends_another_size(three: Three) -> None:
    members = three.begin(FIRST, seconds=0.2)
    with pytest.raises(PeerLost, match="nothing came from rank 1, 2"):
        members[0].barrier().wait()
    members = three.begin(NEXT)
    members[1].send([torch.zeros(3)], 0)
    with pytest.raises(PeerLost, match="rank 1 has sent 12 bytes where 8 were expected"):
        members[0].recv([torch.zeros(2)], 1).wait()


def test_operations_that_there_are_not_are_refused(three: Three) -> None:
    members = three.begin(FIRST)
    with pytest.raises(RuntimeError, match="cannot all_reduce"):
        members[0].allreduce([torch.ones(1, dtype=torch.int64)], options(reduceOp=dist.ReduceOp.BXOR))


# -- strangers ------------------------------------------------------------------------------------------------


def refused(of: Control, access: Access) -> str:
    with pytest.raises(AssemblyError) as told:
        ask_to_join([of.endpoint], OWN, 60.0, access)
    return str(told.value)


def test_who_has_the_secret_is_answered(door: Control, secret: Path) -> None:
    with pytest.raises(AssemblyError, match="the job has not begun to train"):
        ask_to_join([door.endpoint], OWN, 0.5, Access.load(secret))


def test_who_has_none_or_another_is_refused_with_a_clear_line(
    door: Control, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_secret(tmp_path / "other.secret")
    with caplog.at_level(logging.WARNING):
        assert "it has keys and this process has none: give them as keys=" in refused(door, Access())
        assert "does not accept this process's keys" in refused(door, Access.load(tmp_path / "other.secret"))
    assert caplog.text.count("without the keys of this job") == 1
    with closing(Control("127.0.0.1", 0)) as unlocked:
        assert "does not accept this process's keys" in refused(unlocked, Access.load(tmp_path / "other.secret"))


def test_who_knows_the_public_key_alone_is_refused(secret: Path) -> None:
    """As somebody who has read the memory of none, but a log of all."""
    access = Access.load(secret)
    public, own = zmq.curve_keypair()
    with closing(Control("127.0.0.1", 0, access)) as control, zmq.Context() as context, \
            context.socket(zmq.DEALER) as stranger:  # fmt: skip
        stranger.linger = 0
        stranger.curve_secretkey, stranger.curve_publickey, stranger.curve_serverkey = own, public, access.public
        stranger.connect(control.endpoint)
        stranger.send(b"x")
        assert not stranger.poll(500)
        assert control.sockets._has_logged


@pytest.mark.parametrize(("keys", "host", "fine"), [
    (None, "127.0.0.1", True), (None, "::1", True), (None, "10.0.0.1", False), (None, "0.0.0.0", False),
    ("off", "10.0.0.1", True), ("secret", "10.0.0.1", True),
])  # fmt: skip
def test_without_keys_ranks_listen_on_loopback_alone_unless_told_so(
    keys: str | None, host: str, fine: bool, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for how in ("argument", "environment"):
        given = str(secret) if keys == "secret" else keys
        monkeypatch.delenv(VARIABLE, raising=False)
        if how == "environment" and given:
            monkeypatch.setenv(VARIABLE, given)
        access = Access.load(given if how == "argument" else None)
        if fine:
            access.check(host)
        else:
            with pytest.raises(UsageError, match="decentnode keygen --secret FILE"):
                access.check(host)


def test_a_secret_that_others_can_read_or_that_is_none_is_refused(secret: Path, tmp_path: Path) -> None:
    assert "secret" not in repr(Access.load(secret)).replace("are_keys_off", "")
    secret.chmod(0o644)
    with pytest.raises(EnvironmentFault, match="can be read by others"):
        Access.load(secret)
    with pytest.raises(EnvironmentFault, match="make it with decentnode keygen --secret"):
        Access.load(tmp_path / "none")
