"""The section `run`: where the results of a run go, and what is kept of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from decentnode.config.component import ADDED, Config, Settings, section
from decentnode.logs import Level
from decentnode.trackers import TRACKERS


class ProfileConfig(Settings):
    """Which round of which node torch's profiler looks at. It slows that round down."""

    round: int = Field(ge=0)
    """Number of the round, from 0. The first rounds are not typical."""
    uid: int = Field(0, ge=0)
    """Uid of the node."""


class RunConfig(Settings):
    """Where the results of a run go."""

    dir: Path = Path("runs")
    """Folder in which every run creates its own folder. A path in the YAML is relative to the YAML, one on the command
    line to the current directory."""
    log_level: Annotated[Level, ADDED] = "info"
    """Lowest level of the lines that nodes write to their log.txt. Machines of one run may have different levels."""
    record: Annotated[Literal["auto"] | bool, ADDED] = "auto"
    """Whether nodes write to events.jsonl what they do with models: a digest of every payload that is sent or mixed,
    and the generations that they enter and leave. `decentnode replay` repeats a run from these records. auto: if rounds
    may continue without a node (`node.missing`) and models are in host memory, and always if the experiment has
    `faults`. Nodes that all run in one process are recorded only with true, or with faults."""
    trace: Annotated[int, Field(ge=0), ADDED] = 0
    """Interval, in rounds, at which nodes write to trace.jsonl when they trained, sent, waited, mixed and evaluated;
    `decentnode trace` makes a time line of it. 0: never."""
    trackers: Annotated[tuple[Annotated[Config, section(TRACKERS, "tracker")], ...], ADDED] = ()
    """Where the run sends its figures while it is running: a list of trackers, each a name or a section. Each tracker
    runs in a process of its own on every machine and handles that machine's nodes. A tracker that fails does not end
    the run."""
    profile: Annotated[ProfileConfig | None, ADDED] = None
    """Round and node of which torch's profiler writes profile_round_<round>.json into the node's folder, for Perfetto
    and chrome://tracing. Default: no profile."""
