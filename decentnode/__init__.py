"""decentnode: decentralized deep learning without a center."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from decentnode.version import __version__

if TYPE_CHECKING:
    from decentnode.api import Experiment, Run, RunInterrupted, Sweep, open_run, run, sweep

__all__ = ["Experiment", "Run", "RunInterrupted", "Sweep", "__version__", "open_run", "run", "sweep"]


def __getattr__(name: str) -> Any:
    """Imports the public names from `decentnode.api` on first use, so that commands that do not need them start
    fast."""
    if name in __all__:
        from decentnode import api

        globals()[name] = found = getattr(api, name)
        return found
    raise AttributeError(f"module 'decentnode' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
