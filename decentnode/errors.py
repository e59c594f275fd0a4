"""Every error that decentnode raises, with the exit code of a process that ends with it.

DecentnodeError                 exit code
  UsageError                    2    the user's input: config, graph, mapping, data
    ConfigError                      all problems of one experiment file at once
    GraphError  MappingError  DataError
      SampleFailed              8    one sample could not be made by the user's Dataset or read; others may be intact
  EnvironmentFault              3    the machine: port in use, file limit, missing extra
  AssemblyError                 4    nodes that did not join before the deadline
  PeerLost                      5    a neighbor that stopped answering during the run
    Regrouping                       the current generation of members ended; the node joins the next generation
    NoGeneration                     no next generation formed in time, and the node gave up
  Diverged                      6    NaN or infinity in a model
  CheckpointError               7    a checkpoint that cannot be used
  NodeFailed                    8    a node's own code raised
  Interrupted                   130  the run was asked to stop; finished work has been written
PeerFault                            bytes from a peer that break the protocol: counted, never fatal
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

LARGE_PACKETS = "large packets may get lost between the machines (try a smaller MTU; decentnode doctor measures it)"
"""What to try if nothing comes from another machine although its processes run."""


class DecentnodeError(Exception):
    """Base of all errors meant for the user; `str()` of it is the whole message."""

    exit_code = 8


class UsageError(DecentnodeError):
    exit_code = 2


class ConfigError(UsageError):
    """All problems found in one experiment, each already rendered with its location."""

    def __init__(self, problems: Sequence[str], source: str = "config") -> None:
        self.problems = tuple(problems)
        self.source = source
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        super().__init__("\n".join([f"{source}: {count}", "", *self.problems]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...], str]]:
        """Makes the error picklable: a process pool returns its workers' errors as bytes."""
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
    """Nodes did not join in time; `missing` holds their uids as far as this node knows them."""

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
    """A peer's bytes break the protocol. `reason` is the name of a counter, such as "malformed_header"."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


_NOT_USER_CODE = (str(Path(__file__).parent), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"),
           sysconfig.get_path("stdlib"))  # fmt: skip
"""Folders with code that is not the user's own."""


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Returns the frames of an exception's traceback that are the user's own code, the innermost last."""
    return [frame for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith((*_NOT_USER_CODE, "<"))]  # fmt: skip


def describe_error(error: BaseException) -> str:
    """Returns the type and text of an exception in one line, followed by the innermost line of the user's own code that
    is in its traceback, if any: "ValueError: no such file (net.py:12)"."""
    text = " ".join(traceback.format_exception_only(error)[-1].split())
    own = own_frames(error)
    return f"{text} ({own[-1].filename}:{own[-1].lineno})" if own else text
