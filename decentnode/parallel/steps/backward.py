"""Detects the end of a backward pass that has computed gradients of given parameters."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from decentnode.parallel.checks.refusals import refuse_compiled_autograd

logger = logging.getLogger(__name__)

_last_end: tuple[int, weakref.ref[Any]] = (-1, weakref.ref(set()))
"""The id of the backward pass whose end was last reported, and the watch that it was reported to."""
_warned = False


def _warn_of_two_watches(watch: BackwardWatch) -> None:
    """Warns, once in a process, if the end of one backward pass is reported to more than one watch."""
    global _last_end, _warned
    number = torch._C._current_graph_task_id()
    before = _last_end[1]()
    if not _warned and _last_end[0] == number and before is not None and before is not watch:
        _warned = True
        logger.warning("one backward pass steps two wrapped modules: if its loss belongs to only one of them, as in a "
                       "GAN, set requires_grad_(False) on the other meanwhile, or use its no_sync()")  # fmt: skip
    _last_end = number, weakref.ref(watch)


def find_tensors(output: Any) -> Iterator[Tensor]:
    """Yields the tensors in what a module returned: in mappings, lists, tuples and dataclasses, at any depth."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | list | tuple):
        for each in output.values() if isinstance(output, Mapping) else output:
            yield from find_tensors(each)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for part in dataclasses.fields(output):
            yield from find_tensors(getattr(output, part.name, None))


class BackwardWatch:
    """Calls a method once at the end of each backward pass in which one of the parameters got its gradient.

    Reentrant checkpoints run nested backward passes, whose ends do not count. A pass begins when the gradient of one of
    the module's outputs arrives (`note_output_gradient`); if that happens in a nested pass, the end of the outermost
    pass counts.
    The parameters keep neither this object nor the method's object alive.
    """

    def __init__(self, params: Sequence[Parameter], on_end: Callable[[], None]) -> None:
        """params: empty to watch no pass. on_end: a bound method, called on the thread on which the autograd engine
        ends the pass."""
        self.accumulating = False
        """While True, passes only accumulate gradients."""
        self._on_end = weakref.WeakMethod(on_end)
        self._has_gradient = False
        """Whether a parameter got its gradient in the current pass."""
        self._queued: weakref.ref[Callable[[], None]] | None = None
        """The end-of-pass callback of the pass in progress, alive until the pass has ended or raised; None once it was
        called: then anything may keep it alive, such as an error with its frames."""
        itself = weakref.ref(self)

        def on_gradient(_: Tensor) -> None:
            watch = itself()
            if watch is not None and not watch.accumulating:
                watch._await_end()
                watch._has_gradient = True

        self._on_gradient = on_gradient
        self._hooks: list[Any] = []
        self.stopped = False
        self.add(params)

    def add(self, params: Sequence[Parameter]) -> None:
        """Watches these parameters, too, unless stopped. They must require gradients."""
        if not self.stopped:
            self._hooks += [p.register_post_accumulate_grad_hook(self._on_gradient) for p in params]

    def note_output_gradient(self) -> None:
        """Notes that a backward pass through the module has begun; to be called when an output gets its gradient."""
        if not self.accumulating:
            self._await_end()

    def _await_end(self) -> None:
        # The engine silently drops its callbacks when a pass raises: the weak reference is dead then, and the next pass
        # queues its own callback.
        if self._queued is not None and self._queued() is not None:
            return
        refuse_compiled_autograd()
        self._has_gradient = False
        self._queue_end()

    def _queue_end(self) -> None:
        on_end = self._on_end()

        def end_of_backward() -> None:
            self._queued = None
            around = torch._C._current_autograd_node()
            if around is not None:
                self._await_end_around(around)
            elif on_end is not None and not self.stopped and self._has_gradient:
                _warn_of_two_watches(self)
                on_end()

        self._queued = weakref.ref(end_of_backward)
        torch.autograd.Variable._execution_engine.queue_callback(end_of_backward)

    def _await_end_around(self, node: Any) -> None:
        """Defers `on_end` to the end of the outer pass; called at the end of a nested pass that its `node` runs.

        The callback is queued when a gradient leaves `node`, because no code runs in the outer pass before that.
        """
        had_gradient = self._has_gradient
        handles: list[Any] = []

        def on_later_gradient(_: Any) -> None:
            for handle in handles:
                handle.remove()
            if self.accumulating:
                return
            if self._queued is None or self._queued() is None:
                self._has_gradient = had_gradient
                self._queue_end()
            else:
                self._has_gradient |= had_gradient

        handles += [following.register_prehook(on_later_gradient) for following, _ in node.next_functions if following]

    def stop(self) -> bool:
        """Removes the hooks from the parameters; returns whether they were still there. Idempotent."""
        before, self.stopped = self.stopped, True
        for hook in self._hooks:
            hook.remove()
        return not before
