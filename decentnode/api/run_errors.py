"""Makes the exception for a run that did not finish, with the text and exit code that the command line would give."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decentnode import errors
from decentnode.errors import ConfigError, DecentnodeError, NodeFailed
from decentnode.launch.files.run_dir import node_dir
from decentnode.launch.reporting.outcome import Outcome

if TYPE_CHECKING:
    from decentnode.api.results import Run

KINDS: dict[int, type[DecentnodeError]] = {
    kind.exit_code: kind
    for kind in (errors.UsageError, errors.EnvironmentFault, errors.AssemblyError, errors.PeerLost, errors.Diverged,
                 errors.CheckpointError, errors.NodeFailed)
}  # fmt: skip


class RunInterrupted(KeyboardInterrupt):
    """Raised after Ctrl-C, the interrupt of a notebook, or SIGTERM stopped a run, and its results so far were written.
    `run` is the run; None if it was stopped while it was loading, and for sweeps."""

    def __init__(self, message: str, run: Run | None, exit_code: int) -> None:
        super().__init__(message)
        self.run, self.exit_code = run, exit_code


def interrupted(outcome: Outcome, run: Run | None) -> RunInterrupted:
    rounds, planned = outcome.summary.get("rounds") or 0, outcome.summary.get("rounds_planned")
    text = f"stopped after round {rounds} of {planned}"
    return RunInterrupted(f"{text}; decentnode.open_run({str(run.path)!r})" if run else text, run, outcome.exit_code)


def failure(outcome: Outcome, run: Run | None) -> DecentnodeError:
    """Returns the exception for a run that failed, with the run as the attribute `run`."""
    failed, kind = outcome.failure, KINDS.get(outcome.exit_code, NodeFailed)
    if failed is None:
        error = kind(f"the run ended with exit code {outcome.exit_code}")
    else:
        title, node = failed.title, f"node {failed.uid}: "
        own = title if title.startswith(node) else f"{node}{title}"
        lines = [own if outcome.error is not None else failed.text or title]
        if outcome.run_dir is not None and failed.uid >= 0:
            lines.append(f"log: {node_dir(outcome.run_dir, failed.uid)}/log.txt, stderr.txt")
        error = kind("\n".join(lines))
    error.run = run  # type: ignore[attr-defined]
    return error


def loading_error(error: DecentnodeError) -> DecentnodeError | RunInterrupted:
    """Converts an error from the child that loads the experiment to the exception that was raised there; a stop during
    loading to RunInterrupted."""
    if isinstance(error, errors.Interrupted):
        return RunInterrupted(str(error), None, error.exit_code)
    if isinstance(error, ConfigError):
        found = ConfigError([], "")
        found.args = error.args  # the whole text, with all problems
        return found
    if type(error) in KINDS.values():
        return error
    return KINDS.get(error.exit_code, NodeFailed)(str(error))
