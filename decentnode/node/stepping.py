"""Steps several nodes of a process in one thread, while the run's other nodes are in other processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from decentnode import clock, logs
from decentnode.communication.run_state import Steps, Wait
from decentnode.communication.shared_process import SharedProcess

OnEnded = Callable[[int, BaseException | None], None]

STEPS_PER_CHECK = 4
"""The number of nodes that are stepped between two checks for announcements from neighbors in other processes. A check
lets other threads run and takes about 80 us, while a node's queue has room for ten announcements: while one process
steps four of its nodes, another one steps about four as well, each of which announces at most one payload to it. What
does not fit into the queue takes a slower path."""


@dataclass
class _SteppedNode:
    """A node's steps, and the wait that they are suspended in."""

    steps: Steps[None]
    wait: Wait | None = None


class Stepping:
    """Steps nodes repeatedly in ascending order of their uids; each one that does not wait runs until it needs the
    others. An exception raised by one node ends only that node.

    This cannot deadlock: a waiting node does not block the thread, because it yields its wait (`run_state.Steps`). A
    node's computation depends on its neighbors' payloads and not on the order in which nodes are stepped, so that
    results are bitwise equal to those of a thread per node. Used from the training thread of the process.
    """

    def __init__(self, process: SharedProcess, nodes: Mapping[int, Steps[None]], ended: OnEnded) -> None:
        """nodes: the return value of `Node.steps` by uid. ended: called with a uid and the exception that ended the
        node, or None if it finished; no node is stepped during the call."""
        self._process, self._ended = process, ended
        self._nodes = {uid: _SteppedNode(steps) for uid, steps in sorted(nodes.items())}

    def run(self) -> None:
        """Step the nodes until all of them have ended. Blocking."""
        while self._nodes:
            waiting_until = self._step_all()
            if waiting_until is not None:
                self._process.sleep(waiting_until - clock.now())

    def _step_all(self) -> float | None:
        """Step each node that does not wait. If all of them wait, returns the time at which the first wait has to be
        checked again, else None."""
        deadline, stepped = math.inf, 0
        for uid, node in list(self._nodes.items()):
            with logs.of_node(uid):
                if self._step(uid, node):
                    stepped += 1
                    if stepped % STEPS_PER_CHECK == 0:
                        self._process.look()
                elif node.wait is not None:
                    deadline = min(deadline, node.wait.deadline)
        if stepped % STEPS_PER_CHECK:
            self._process.look()
        return None if stepped else deadline

    def _step(self, uid: int, node: _SteppedNode) -> bool:
        """Step a node unless it waits. Returns whether it was stepped."""
        try:
            if node.wait is None:
                node.wait = next(node.steps)
                return True
            try:
                if not node.wait.step(clock.now()):
                    return False
            except Exception as error:
                node.wait = node.steps.throw(error)
            else:
                node.wait = next(node.steps)
        except StopIteration:
            self._end(uid, None)
        except BaseException as error:
            self._end(uid, error)
        return True

    def _end(self, uid: int, error: BaseException | None) -> None:
        del self._nodes[uid]
        self._ended(uid, error)
