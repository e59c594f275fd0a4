"""Finds the number of this machine in the environment variables of torchrun, Slurm or Kubernetes. It only selects the
machine in the mapping; the uids of its nodes follow from the mapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from decentnode.errors import UsageError


@dataclass(frozen=True)
class Hint:
    """The number of this machine according to a scheduler's environment variables."""

    source: str
    machine: int
    machines: int | None
    """The number of machines; None if the scheduler does not say."""


@dataclass(frozen=True)
class _Scheduler:
    source: str
    machine: str
    machines: str | None
    present: str
    """A variable that is set only in processes that the scheduler started, while a shell may have the others."""


SCHEDULERS = (
    _Scheduler("DECENTNODE_MACHINE", "DECENTNODE_MACHINE", None, "DECENTNODE_MACHINE"),
    _Scheduler("torchrun", "GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    _Scheduler("Slurm", "SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_ID"),
    _Scheduler("Kubernetes", "JOB_COMPLETION_INDEX", None, "JOB_COMPLETION_INDEX"),
)
"""In the order in which they are tried: torchrun inside a Slurm step comes first, because it knows more than the step.
Kubernetes: indexed jobs only."""


def detect(variables: Mapping[str, str]) -> Hint | None:
    """Returns the hint of the first scheduler that started this process, or None. Raises UsageError for a value that
    is not a number."""
    for each in SCHEDULERS:
        if each.present in variables and each.machine in variables:
            machines = _number(variables, each.machines) if each.machines and each.machines in variables else None
            return Hint(each.source, _number(variables, each.machine), machines)
    return None


def machine_of(hint: Hint, num_machines: int) -> int:
    """Returns the machine number of the hint. Raises UsageError if it or the number of machines does not fit the
    mapping."""
    if hint.machines is not None and hint.machines != num_machines:
        raise UsageError(
            f"{hint.source} started {hint.machines} machines, but the mapping has {num_machines}; start that many, or "
            "give this machine's number with --machine N"
        )
    if not 0 <= hint.machine < num_machines:
        raise UsageError(f"{hint.source} says machine {hint.machine}, but the mapping has only {num_machines}")
    return hint.machine


def _number(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise UsageError(f"{name} must be a number, got {variables[name]!r}") from None
