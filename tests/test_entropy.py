"""The source of randomness that no seed determines: a simulation may replace it."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from decentnode import entropy
from decentnode.communication.parts import BindPlan, TransportParts
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.communication.zeromq.protocol.credentials import BulkAccess
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.wire.generation import Limits
from tests.communication.contract import flat_schema
from tests.linter import check_banned


def everything_a_node_draws() -> list[object]:
    """Returns everything that a node draws: the id of its run, the origin of its proposals, credentials for bulk."""
    node = ZeroMQ(ZeroMQConfig(), TransportParts(
        uid=0, machine_of={0: 0, 1: 0}, schemas=flat_schema(4), digest="d", bind=BindPlan(),
        limits=Limits(1.0, 1.0, 1),
    ))  # fmt: skip
    try:
        assert node._generations is not None
        given = BulkAccess(True, True).give(1)
        return [node.run_id, node._generations.reconfiguration.membership.new_name(1), given.token, given.key]
    finally:
        node.close()


def test_a_seeded_source_gives_the_same_draws_for_the_same_seed() -> None:
    found = []
    for seed in (1, 1, 2):
        with entropy.use(entropy.seeded(seed)):
            found.append(everything_a_node_draws())
    assert found[0] == found[1]
    assert all(one != other for one, other in zip(found[0], found[2], strict=True))
    assert all(one != other for one, other in zip(everything_a_node_draws(), everything_a_node_draws(), strict=True))


def test_after_a_seeded_source_the_source_is_the_machines_again() -> None:
    with pytest.raises(RuntimeError), entropy.use(entropy.seeded(1)):
        raise RuntimeError
    assert entropy._thread_state.source is os.urandom
    assert len(entropy.draw(5)) == 5 and len(entropy.word(5)) == 10


def test_draws_of_other_threads_do_not_advance_a_seeded_source() -> None:
    found = []
    for beside in (0, 3):
        with entropy.use(entropy.seeded(1)), ThreadPoolExecutor(1) as pool:
            first = entropy.draw(4)
            for _ in range(beside):
                pool.submit(entropy.draw, 4).result()
            found.append([first, entropy.draw(4)])
    assert found[0] == found[1]


@pytest.mark.parametrize("source", ["import secrets\nsecrets.token_hex(2)\n", "import os\nos.urandom(8)\n",
                                    "import uuid\nuuid.uuid4()\n"])  # fmt: skip
def test_the_linter_rejects_other_modules_that_draw(source: str) -> None:
    check_banned(source, "decentnode.entropy")
