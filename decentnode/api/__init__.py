"""Decentralized training from Python: run an experiment, from a file or from objects, and look at what it left."""

from decentnode.api.experiment import Experiment, run
from decentnode.api.results import Run, open_run
from decentnode.api.stopped import RunInterrupted
from decentnode.api.sweeps import Sweep, sweep

for _public in (Experiment, Run, RunInterrupted, Sweep):
    _public.__module__ = "decentnode"  # as tracebacks and the reference name them

__all__ = ["Experiment", "Run", "RunInterrupted", "Sweep", "open_run", "run", "sweep"]
