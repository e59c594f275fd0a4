from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before the imports: tests share two cores with their processes
import numpy as np
import torch

from tests import products


@pytest.hookimpl(tryfirst=True)  # before -m selects tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    products.mark_omitted(items)


def scale(small: int, full: int) -> int:
    """Returns the count of a stress test: small by default, full under `bash tests/run.sh --stress`."""
    return full if os.environ.get("DECENTNODE_STRESS") else small


# No deadline, as a busy machine is no failure and every test has a time-out; examples are new only under --stress.
settings.register_profile("decentnode", deadline=None, derandomize=not scale(0, 1))
settings.load_profile("decentnode")


# pytest gives every logger that does not propagate a handler, six times in each test, and torch has 40 of these.
for _logger in logging.root.manager.loggerDict.values():
    if isinstance(_logger, logging.Logger) and _logger.name.partition(".")[0] == "torch":
        _logger.propagate = True


THREADS, OMP_THREADS = torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Makes each test start from the same state. Random draws without a seed are the same in every run. The numbers of
    torch threads, of this process and of processes that the test starts, are reset, as nodes that a test runs in this
    process change both: with two threads on a busy machine all later tests took ten times the CPU, and convolutions
    gave other bits."""
    os.environ["OMP_NUM_THREADS"] = OMP_THREADS
    if torch.get_num_threads() != THREADS:
        torch.set_num_threads(THREADS)
    random.seed(0)
    np.random.seed(0)
    # While CUDA is not initialized, torch.manual_seed takes a millisecond to store the seed for each kind of device
    marked = {mark.name for mark in request.node.iter_markers()}
    on_gpus = torch.cuda.is_initialized() or marked & {"gpu", "multigpu"}
    (torch.manual_seed if on_gpus else torch.default_generator.manual_seed)(0)


@pytest.fixture
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Makes the test's parameter `dtype` torch's default, as in scripts that train in 16 bits."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


def wait_until(
    condition: Callable[[], object], what: object = "the condition did not hold in time", seconds: float = 60
) -> None:
    """Polls until `condition` holds. what: the message, or a function that returns it, if it does not hold in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.002)


BLOCK = 200
BLOCKS = range(10_000, 20_000, BLOCK)
"""Blocks of ports for tests, below the ports that runs choose for themselves and the system's outgoing ports."""


class Ports:
    """A block of ports that only this process hands out: binding the block's first port reserves it until the process
    ends."""

    def __init__(self) -> None:
        for first in random.Random(os.urandom(8)).sample(BLOCKS, len(BLOCKS)):
            self._claim = socket.socket()
            with contextlib.suppress(OSError):
                self._claim.bind(("127.0.0.1", first))
                self._ports, self._next = range(first + 1, first + BLOCK), first + 1
                return
            self._claim.close()
        raise RuntimeError(f"other processes have all {len(BLOCKS)} blocks of ports")

    def take(self, count: int) -> int:
        """Returns the first of `count` free consecutive ports; recently returned ones are reused last."""
        for _ in self._ports:
            first = self._next if self._next + count <= self._ports.stop else self._ports.start
            self._next = first + 1
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
                for port in range(first, first + count):
                    for host in ("127.0.0.1", "127.0.0.2"):
                        stack.enter_context(socket.socket()).bind((host, port))
                self._next = first + count
                return first
        raise RuntimeError(f"no {count} ports in a row are free in {self._ports}")


@functools.cache
def _ports_of(process: int) -> Ports:
    return Ports()


def free_ports(count: int) -> int:
    """Returns the first of `count` consecutive ports that are free on 127.0.0.1 and .2. No other process gets them, and
    this one gets them again only after all others of its block, so they need not be bound at once."""
    return _ports_of(os.getpid()).take(count)


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
        probe.bind(("::1", 0))
        return True
    return False


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")
