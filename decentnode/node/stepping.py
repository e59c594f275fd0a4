"""Steps several nodes of a process in one thread, while the others of the run act elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from decentnode import clock, logs
from decentnode.communication.run_state import Steps, Wait
from decentnode.communication.shared_process import SharedProcess

Ended = Callable[[int, BaseException | None], None]

LOOK_EVERY = 4
"""Nodes that are stepped between two looks at what neighbors of other processes have announced. A look lets other
threads in and takes some 80 us, while the queue of a node has room for ten announcements: as a process steps four of
its nodes, another one steps about four, each of which announces one payload to it at most. What does not fit takes a
longer path."""


@dataclass
class _Stepped:
    """A node, and what it waits for."""

    steps: Steps[None]
    wait: Wait | None = None


class Stepping:
    """Steps nodes in ascending order of their uids, again and again: each that does not wait as far as it comes without
    the others. Whatever one of them raises ends that one alone.

    Nobody waits in vain for a node that is not stepped: one that waits holds up no other, as it hands its wait out
    (`run_state.Steps`). What a node computes depends on its neighbors' payloads and not on the order in which nodes are
    stepped, so that all bits are those of a thread per node. Used from the training thread of the process.
    """

    def __init__(self, process: SharedProcess, nodes: Mapping[int, Steps[None]], ended: Ended) -> None:
        """nodes: by uid, what `Node.steps` returned. ended: called with a uid and what ended the node, None where it
        came to its end; no node is stepped meanwhile."""
        self._process, self._ended = process, ended
        self._nodes = {uid: _Stepped(steps) for uid, steps in sorted(nodes.items())}

    def run(self) -> None:
        """Blocking until all nodes have ended."""
        while self._nodes:
            waiting_until = self._step_all()
            if waiting_until is not None:
                self._process.sleep(waiting_until - clock.now())

    def _step_all(self) -> float | None:
        """Step each node that does not wait. Returns when the first wait has to be looked at again, where all wait."""
        deadline, stepped = math.inf, 0
        for uid, node in list(self._nodes.items()):
            with logs.of_node(uid):
                if self._step(uid, node):
                    stepped += 1
                    if stepped % LOOK_EVERY == 0:
                        self._process.look()
                elif node.wait is not None:
                    deadline = min(deadline, node.wait.deadline)
        if stepped % LOOK_EVERY:
            self._process.look()
        return None if stepped else deadline

    def _step(self, uid: int, node: _Stepped) -> bool:
        """Step a node unless it waits. Returns whether it was."""
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
