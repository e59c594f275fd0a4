"""The Python interface of decentnode: run experiments and sweeps, from a file or from objects, and read their results.
"""

from decentnode.api.experiment import Experiment, run
from decentnode.api.results import Run, open_run
from decentnode.api.run_errors import RunInterrupted
from decentnode.api.sweeps import Sweep, sweep

for _public in (Experiment, Run, RunInterrupted, Sweep):
    _public.__module__ = "decentnode"  # so that tracebacks and the reference show the public name

__all__ = ["Experiment", "Run", "RunInterrupted", "Sweep", "open_run", "run", "sweep"]
