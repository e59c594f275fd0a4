from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests share two cores with the processes they start
import torch


def scale(small: int, full: int) -> int:
    """The count of a stress test: small by default, full under `bash tests/run.sh --stress`."""
    return full if os.environ.get("DECENTNODE_STRESS") else small


# A busy machine is no failure, as every test has a time-out; what is drawn is new under --stress alone.
settings.register_profile("decentnode", deadline=None, derandomize=not scale(0, 1))
settings.load_profile("decentnode")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws without a seed of its own is the same in every run."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def wait_until(condition: Callable[[], object], what: object = "it did not come about", seconds: float = 60) -> None:
    """Look until `condition` holds. what: said where it does not in time; a function is called for it then."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.002)


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports that are free on 127.0.0.1 and .2: below those that the system hands out
    for outgoing connections, and drawn anew by every process, so that runs side by side do not meet."""
    draw = random.Random(f"{os.getpid()} {os.urandom(8).hex()}")
    while True:
        first = draw.randrange(12_000, 32_000 - count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                for host in ("127.0.0.1", "127.0.0.2"):
                    stack.enter_context(socket.socket()).bind((host, port))
            return first


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
        probe.bind(("::1", 0))
        return True
    return False


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")
