"""Loops in C for operations that torch does not have. They are compiled at first use and cached for later processes.

They are always optional: every caller has torch operations for machines without a compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from decentnode import user_cache

logger = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
COMPILE_SECONDS = 60


@functools.cache
def compiled(source: Path) -> ctypes.CDLL | None:
    """Returns the functions of a C file; None if there is no compiler or it fails, which is logged once. The first call
    blocks for up to COMPILE_SECONDS.

    The compiled file is cached in $XDG_CACHE_HOME/decentnode (else ~/.cache/decentnode), per source, compiler and type
    of processor. It is loaded from there only if no other user can have written it.
    """
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    try:
        kept = user_cache.folder() / f"{source.stem}-{_key(source, compiler)}.so"
        if not user_cache.ours(kept):
            _compile(compiler, source, kept)
        return ctypes.CDLL(str(kept))
    except (OSError, subprocess.SubprocessError) as error:
        logger.info("%s is not compiled into a file that stays: %s", source.name, error)
    try:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / f"{source.stem}.so"
            _compile(compiler, source, target)
            return ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError) as error:
        logger.info("%s is not compiled: %s", source.name, error)
        return None


def _key(source: Path, compiler: str) -> str:
    """Returns a hash of everything that the machine code depends on: source, flags, compiler, processor."""
    tool = Path(compiler).resolve()
    try:
        text = Path("/proc/cpuinfo").read_text()
        processor = sorted({line for line in text.splitlines() if line.startswith(("flags", "Features", "model name"))})
    except OSError:
        processor = [platform.processor()]
    words = [source.read_text(), *FLAGS, str(tool), str(tool.stat().st_mtime_ns), platform.machine(), *processor]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:24]


def _compile(compiler: str, source: Path, target: Path) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".new")
    os.close(handle)
    try:
        subprocess.run([compiler, *FLAGS, str(source), "-o", name, "-lm"], check=True, capture_output=True,
                       timeout=COMPILE_SECONDS)  # fmt: skip
        Path(name).chmod(0o700)
        Path(name).replace(target)  # atomic, as several processes may do this at once
    finally:
        Path(name).unlink(missing_ok=True)


def shares(total: int, threads: int) -> list[tuple[int, int]]:
    """Returns a range [a, b) for each of at most `threads` threads; together they cover [0, total)."""
    each = max(1, -(-total // max(1, threads)))
    return [(a, min(a + each, total)) for a in range(0, total, each)]


_thread_state = threading.local()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Returns a context manager in which loops started by the calling thread use that thread alone."""
    _thread_state.alone = True
    try:
        yield
    finally:
        _thread_state.alone = False


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Returns a context manager in which torch's operations use at most `count` threads, whichever thread starts
    them."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads() -> int:
    """Returns how many threads may share a loop that the calling thread starts."""
    return 1 if getattr(_thread_state, "alone", False) else torch.get_num_threads()


def spread(call: Callable[..., Any], calls: Iterable[tuple[Any, ...]], threads: int) -> None:
    """Calls `call(*arguments)` for each of `calls`, in `threads` threads. Blocks until all are done. Raises what a call
    raises."""
    if threads < 2:
        for arguments in calls:
            call(*arguments)
    else:
        list(_pool(threads).map(lambda arguments: call(*arguments), calls))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="loop")


if hasattr(os, "register_at_fork"):
    # A child has none of the parent's threads, but its copy of the pool counts them as idle: work would wait forever.
    os.register_at_fork(after_in_child=_pool.cache_clear)
