"""The parts of a run on this machine that all decisions of the supervisor share: command, processes, reports."""

from __future__ import annotations

from dataclasses import dataclass

from decentnode.launch.children.messages import Facts, Request
from decentnode.launch.children.signals import StopSignals
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.reporting.outcome import Ledger
from decentnode.launch.supervising.local_nodes import LocalNodes
from decentnode.launch.supervising.process_faults import ProcessFaults


@dataclass(frozen=True)
class Command:
    """A user's command that runs nodes."""

    request: Request
    observer: Observer
    signals: StopSignals
    started: float
    """`clock.now()` at the start of the command."""


@dataclass(frozen=True)
class LocalRun:
    """The parts of one run on this machine that `EarlyEnd`, `LostNodes` and `Deadlines` share."""

    command: Command
    facts: Facts
    nodes: LocalNodes
    ledger: Ledger
    process_faults: ProcessFaults
