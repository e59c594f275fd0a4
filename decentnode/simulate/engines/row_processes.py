"""Forks of this process that each compute a part of the nodes, on a core of their own.

Threads could do it too, but with small models they pass the GIL to each other at every operation: two threads needed
3.9 ms per step of GN-LeNet and 7.1 ms of CPU time, a single one 6.6 ms. A fork has all objects of the nodes, and shares
the memory that no process writes to; models are in memory that all processes may write to.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

import torch
from torch import Tensor

from decentnode import clock, errors
from decentnode.errors import DecentnodeError, NodeFailed

POLL_SECONDS = 1.0
PATIENCE_SECONDS = 120.0
"""Time-out for the other processes, in addition to ten times the time that this process took for its own part."""
END_SECONDS = 5.0

Answer = dict[str, Any]


def can_fork(device: torch.device) -> bool:
    """Returns whether forks can compute. They cannot with GPUs, whose driver and autograd threads do not survive a
    fork."""
    return sys.platform == "linux" and device.type == "cpu" and not torch.cuda.is_available()


def shared_like(values: Tensor) -> Tensor:
    """Returns a copy of a tensor in memory that forks share; it begins at a page boundary."""
    if not values.numel():
        return values.clone()
    memory = mmap.mmap(-1, values.numel() * values.element_size())
    return torch.frombuffer(memory, dtype=values.dtype).view(values.shape).copy_(values)


class RowProcesses:
    """The forks of one population. The process that makes them computes a part of the nodes itself. Not thread-safe."""

    def __init__(self, count: int, work: Callable[[int, str, Any], list[Any]]) -> None:
        """work: (part, job, argument) -> the results of the part's nodes. It runs in the fork of that part, and for
        part 0 in this process. It raises errors that have the node's `uid` as an attribute. count: number of parts."""
        self._work = work
        self._pids: list[int] = []
        self._ends: list[Connection] = []
        self._number = 0
        """The number of the last job: an answer to an earlier one that was interrupted here may still arrive."""
        for part in range(1, count):
            own_end, fork_end = Pipe()
            pid = os.fork()
            if pid == 0:
                for end in (*self._ends, own_end):  # a fork that kept these would not notice our end
                    end.close()
                _serve(fork_end, lambda job, argument, part=part: work(part, job, argument))  # type: ignore[misc]
            fork_end.close()
            self._pids.append(pid)
            self._ends.append(own_end)

    def run(self, job: str, argument: Any) -> list[list[Any]]:
        """Returns the results of all parts. Blocking. Raises what a node raised, the lowest uid first; NodeFailed if a
        fork ended, or takes far longer than this process."""
        self._number += 1
        request = json.dumps([self._number, job, argument]).encode()
        for part, end in enumerate(self._ends, 1):
            try:
                end.send_bytes(request)
            except OSError as error:
                raise NodeFailed(self._end_message(part)) from error
        began, failed = clock.now(), list[BaseException]()
        results: list[Any] = []
        try:
            results.append(self._work(0, job, argument))
        except Exception as error:
            failed.append(error)
        deadline = clock.now() + 10 * (clock.now() - began) + PATIENCE_SECONDS
        for part in range(1, len(self._ends) + 1):
            answer = self._receive_answer(part, deadline)
            if "failed" in answer:
                failed.append(_error_from(answer))
            else:
                results.append(answer["results"])
        if failed:
            raise min(failed, key=lambda error: getattr(error, "uid", 0))
        return results

    def _receive_answer(self, part: int, deadline: float) -> Answer:
        end = self._ends[part - 1]
        try:
            while True:
                while not end.poll(POLL_SECONDS):
                    if clock.now() > deadline:
                        raise NodeFailed(f"the process {self._pids[part - 1]}, which computes part {part} of the "
                                         "nodes, did not answer in time")  # fmt: skip
                found: Answer = json.loads(end.recv_bytes())
                if found["number"] == self._number:
                    return found
        except (EOFError, OSError) as error:
            raise NodeFailed(self._end_message(part)) from error

    def _end_message(self, part: int) -> str:
        return (f"the process {self._pids[part - 1]}, which computes part {part} of the nodes, ended; unless someone "
                "stopped it, memory may have run out")  # fmt: skip

    def close(self) -> None:
        """Ends the forks; those that do not end by themselves within END_SECONDS are killed. Blocking. Idempotent."""
        for end in self._ends:
            end.close()
        pids, self._pids, self._ends = self._pids, [], []
        deadline = clock.now() + END_SECONDS
        for pid in pids:
            with contextlib.suppress(ChildProcessError):  # another part of the program may reap all children
                while os.waitpid(pid, os.WNOHANG)[0] == 0:
                    if clock.now() > deadline:
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
                        break
                    clock.sleep(0.002)


def _serve(end: Connection, work: Callable[[str, Any], list[Any]]) -> NoReturn:
    """Executes jobs in a fork, until the parent closes the other end or is gone."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the parent handles these, and ends this process
        torch.set_num_threads(1)  # a fork has only the first thread of a thread pool
        while True:
            number, job, argument = json.loads(end.recv_bytes())
            try:
                answer: Answer = {"results": work(job, argument)}
            except Exception as error:
                answer = {"failed": type(error).__name__, "text": str(error), "told": errors.describe_error(error),
                          "uid": getattr(error, "uid", None)}  # fmt: skip
            end.send_bytes(json.dumps({"number": number, **answer}).encode())
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:
        os._exit(1)


def _error_from(answer: Answer) -> DecentnodeError:
    """Returns the error that a fork reported, of the same class if it is one of this project's."""
    kind: Any = getattr(errors, answer["failed"], None)
    if isinstance(kind, type) and issubclass(kind, DecentnodeError) and kind is not errors.ConfigError:
        error: DecentnodeError = kind(answer["text"])
    else:
        error = NodeFailed(f"node {answer['uid']}: {answer['told']}")
    if answer["uid"] is not None:
        error.__dict__["uid"] = answer["uid"]
    return error


def merge_parts(parts: Sequence[Sequence[Any]], count: int) -> list[Any]:
    """Merges the results of the parts by uid; part k has every `len(parts)`-th node, from node k on."""
    found: list[Any] = [None] * count
    for first, results in enumerate(parts):
        found[first :: len(parts)] = results
    return found
