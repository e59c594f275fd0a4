"""Loads a state on all ranks, or on none, and starts the exchange of what was loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from decentnode.errors import AssemblyError
from decentnode.parallel.process_group.agreement import check_alike, together
from decentnode.parallel.process_group.default_group import device_of_group
from decentnode.parallel.steps.gossip_steps import GossipSteps

T = TypeVar("T")


def load_together(steps: GossipSteps, load: Callable[[], T]) -> T:
    """What `load` returns, which loads a state, while nothing is in flight. Blocking: all ranks do it, or all raise and
    may go on training from what they have loaded by then. Raises what `load` raised here, else AssemblyError,
    PeerLost."""
    before, own = (steps.taken, steps.factor), None
    try:
        with steps.exchange.average("load_state_dict"):
            with together("load the state"):
                try:
                    result = load()
                except Exception as error:
                    own = error
                    raise ValueError(error) from error  # a RuntimeError would be taken for a sign of a lost rank
            _check_steps(steps)
    except (AssemblyError, ValueError):
        steps.taken, steps.factor = before
        _launch_anew(steps)
        if own is not None:
            raise own from None
        raise
    _launch_anew(steps)
    return result


def restart(steps: GossipSteps) -> None:
    """Begins anew after a state that was loaded as a part of another module's. Blocking, on all ranks."""
    steps.exchange.drain()
    with steps.exchange.average("load_state_dict"):
        _check_steps(steps)
    _launch_anew(steps)


def _check_steps(steps: GossipSteps) -> None:
    """Blocking. Raises AssemblyError where ranks have loaded states of different steps."""
    check_alike("loaded state", [f"step {steps.taken}"], device_of_group())


def _launch_anew(steps: GossipSteps) -> None:
    steps.must_restart = False
    steps.launch(steps.taken)
