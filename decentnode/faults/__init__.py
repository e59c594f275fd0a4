"""Fault injection as data: the kinds of faults, the plan that a list of them resolves to, and what happens to a
message."""

from decentnode.faults.affected_links import StruckModels
from decentnode.faults.message_faults import Fate, Fates, damaged
from decentnode.faults.plan import Course, InEffect, Plan, lasts, resolve
from decentnode.faults.vocabulary import (
    FAULTS,
    AnyFault,
    Break,
    ClockJump,
    Corrupt,
    Cut,
    Delay,
    Drop,
    Duplicate,
    Fault,
    Faults,
    FullDisk,
    HalfOpen,
    InNode,
    Kill,
    Link,
    MessageFault,
    OnLinks,
    OnProcesses,
    Pause,
    Reorder,
    Restart,
    Slow,
)

__all__ = (
    "FAULTS", "AnyFault", "Break", "ClockJump", "Corrupt", "Course", "Cut", "Delay", "Drop", "Duplicate", "Fate",
    "Fates", "Fault", "Faults", "FullDisk", "HalfOpen", "InEffect", "InNode", "Kill", "Link", "MessageFault", "OnLinks",
    "OnProcesses", "Pause", "Plan", "Reorder", "Restart", "Slow", "StruckModels", "damaged", "lasts", "resolve",
)  # fmt: skip
