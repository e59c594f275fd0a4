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
    """Counted from 0. The first rounds are not typical."""
    uid: int = Field(0, ge=0)
    """The node."""


class RunConfig(Settings):
    """Where the results of a run go."""

    dir: Path = Path("runs")
    """Folder in which every run makes its own. A path in the YAML is relative to the YAML, one on the command line to
    the current directory."""
    log_level: Annotated[Level, ADDED] = "info"
    """Which lines nodes write to their log.txt: those of this level and above. Machines of one run may differ in it."""
    record: Annotated[Literal["auto"] | bool, ADDED] = "auto"
    """Whether nodes write to events.jsonl what they do with models: a digest of every payload that is sent or mixed,
    generations that they enter and leave. `decentnode replay` repeats a run from it. auto: where rounds may go on
    without a node (`node.missing`), and models are in the host's memory; and where the experiment has `faults`. Nodes
    that all run in one process are recorded with true, or with faults, alone."""
    trace: Annotated[int, Field(ge=0), ADDED] = 0
    """Every so many rounds nodes write to trace.jsonl when they trained, sent, waited and mixed, and when they
    evaluated; `decentnode trace` makes a time line of it. 0: never."""
    trackers: Annotated[tuple[Annotated[Config, section(TRACKERS, "tracker")], ...], ADDED] = ()
    """What the run's figures are told to while it goes on: a list of trackers, by name alone or as sections. Each runs
    in a process of its own on every machine, and tells of that machine's nodes. One that fails ends no run."""
    profile: Annotated[ProfileConfig | None, ADDED] = None
    """Of which round of which node torch's profiler writes profile_round_<round>.json into the node's folder, for
    Perfetto and chrome://tracing; of none when not given."""
