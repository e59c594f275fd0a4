"""Loads a state on all ranks, or on none, and starts the exchange of what was loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from decentnode.errors import AssemblyError
from decentnode.parallel.process_group.agreement import check_same_on_all_ranks, succeed_on_all_ranks
from decentnode.parallel.process_group.default_group import device_of_group
from decentnode.parallel.steps.gossip_steps import GossipSteps

T = TypeVar("T")


def load_together(steps: GossipSteps, load: Callable[[], T]) -> T:
    """Returns what `load` returns, which loads a state, while nothing is in flight. Blocking: it succeeds on all ranks,
    or all raise and may continue to train from what they have loaded by then. Raises what `load` raised here, else
    AssemblyError, PeerLost."""
    before = steps.taken, steps.factor

    def undo() -> None:
        steps.taken, steps.factor = before

    result = all_or_none(steps, ("load_state_dict", "load the state"), load, lambda: _check_steps(steps), undo)
    _start_new_exchange(steps)
    return result


def all_or_none(
    steps: GossipSteps, what: tuple[str, str], work: Callable[[], T], check: Callable[[], None],
    undo: Callable[[], None] = lambda: None,
) -> T:
    """Returns what `work` returns, while nothing is in flight. Blocking: `work` and `check` succeed on all ranks, or
    all raise and may continue to train, after `undo`. Raises what `work` raised here, else AssemblyError, PeerLost.

    what: the operation's name, and a verb with its object, for messages. check: compares ranks; blocking.
    """
    own = None
    try:
        with steps.exchange.average(what[0]):
            with succeed_on_all_ranks(what[1]):
                try:
                    result = work()
                except Exception as error:
                    own = error
                    raise ValueError(error) from error  # because `average` takes a RuntimeError for a lost rank
            check()
    except (AssemblyError, ValueError):
        undo()
        _start_new_exchange(steps)
        if own is not None:
            raise own from None
        raise
    return result


def restart(steps: GossipSteps) -> None:
    """Starts a new exchange after a state was loaded as a part of another module's. Blocking, on all ranks."""
    steps.exchange.drain()
    with steps.exchange.average("load_state_dict"):
        _check_steps(steps)
    _start_new_exchange(steps)


def _check_steps(steps: GossipSteps) -> None:
    """Raises AssemblyError if ranks have loaded states of different steps. Blocking."""
    check_same_on_all_ranks("loaded state", [f"step {steps.taken}"], device_of_group())


def _start_new_exchange(steps: GossipSteps) -> None:
    steps.must_restart = False
    steps.launch(steps.taken)
