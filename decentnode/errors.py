"""Every error that decentnode raises, and the exit code each one ends a process with.

DecentnodeError                 exit code
  UsageError                    2    the user's input: config, graph, mapping, data
    ConfigError                      all problems of one experiment file at once
    GraphError  MappingError  DataError
      SampleFailed              8    a sample could not be made by the user's Dataset, or read; others may be whole
  EnvironmentFault              3    the machine: port in use, file limit, missing extra
  AssemblyError                 4    nodes that did not join before the deadline
  PeerLost                      5    a neighbor that stopped answering during the run
    Regrouping                       the generation of members ended; a node then takes part in the next one
    NoGeneration                     none followed it in time, and the node gave up
  Diverged                      6    NaN or infinity in a model
  CheckpointError               7    a checkpoint that cannot be used
  NodeFailed                    8    a node's own code raised
  Interrupted                   130  asked to stop; what was finished is written
PeerFault                            bytes from a peer that break the protocol: counted, never fatal
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path


class DecentnodeError(Exception):
    """Base of all errors meant for the user; `str()` is the whole message."""

    exit_code = 8


class UsageError(DecentnodeError):
    exit_code = 2


class ConfigError(UsageError):
    """All problems found in one experiment, each already rendered with its place."""

    def __init__(self, problems: Sequence[str], source: str = "config") -> None:
        self.problems = tuple(problems)
        self.source = source
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        super().__init__("\n".join([f"{source}: {count}", "", *self.problems]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...], str]]:
        """A pool of processes hands its worker's errors back as bytes."""
        return type(self), (self.problems, self.source)


class GraphError(UsageError):
    pass


class MappingError(UsageError):
    pass


class DataError(UsageError):
    pass


class SampleFailed(DataError):
    exit_code = 8


class EnvironmentFault(DecentnodeError):
    exit_code = 3


class AssemblyError(DecentnodeError):
    """Nodes did not join in time; `missing` holds their uids as far as this node knows."""

    exit_code = 4

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class PeerLost(DecentnodeError):
    """Neighbors stopped answering; `missing` holds their uids."""

    exit_code = 5

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class Regrouping(PeerLost):
    pass


class NoGeneration(PeerLost):
    pass


class Diverged(DecentnodeError):
    exit_code = 6


class CheckpointError(DecentnodeError):
    exit_code = 7


class NodeFailed(DecentnodeError):
    exit_code = 8


class Interrupted(DecentnodeError):
    exit_code = 130


class PeerFault(Exception):
    """A peer's bytes break the protocol. `reason` is a counter's name, such as "malformed_header"."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


_OTHERS = (str(Path(__file__).parent), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"),
           sysconfig.get_path("stdlib"))  # fmt: skip
"""Folders of code that is not the user's own."""


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Returns the frames of an exception's traceback that are the user's own code, the innermost last."""
    return [frame for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith((*_OTHERS, "<"))]  # fmt: skip


def told(error: BaseException) -> str:
    """Returns the type and text of an exception out of the user's own code, and the line of that code: "ValueError: no
    such file (net.py:12)". On one line."""
    text = " ".join(traceback.format_exception_only(error)[-1].split())
    own = own_frames(error)
    return f"{text} ({own[-1].filename}:{own[-1].lineno})" if own else text
