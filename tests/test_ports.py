"""The ports that `free_ports` returns to tests."""

from __future__ import annotations

import contextlib
import socket

from tests.conftest import BLOCK, Ports


def test_ports_that_are_not_bound_yet_are_not_handed_out_twice() -> None:
    """Two objects take ports as two processes would, each several before any is bound."""
    one, other = Ports(), Ports()
    firsts = [each.take(4) for each in (one, other) for _ in range(40)]
    ports = [port for first in firsts for port in range(first, first + 4)]
    assert len(ports) == len(set(ports))


def test_ports_that_another_process_has_bound_are_skipped() -> None:
    ports = Ports()
    first = ports.take(1)
    with contextlib.ExitStack() as stack:
        for taken in (first + 2, first + 5):
            stack.enter_context(socket.socket()).bind(("127.0.0.1", taken))
        assert ports.take(3) == first + 6


def test_after_the_last_port_of_a_block_the_first_is_handed_out_again() -> None:
    ports = Ports()
    found = [ports.take(3) for _ in range(2 * BLOCK // 3)]
    assert max(found) + 3 - min(found) <= BLOCK and found[0] in found[1:]
