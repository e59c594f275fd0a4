"""Prints only the script's own lines when a rank ends by Ctrl-C, or because another one has ended. The full stack
through torch and this package fills a screen per rank and hides the error that caused it."""

from __future__ import annotations

import inspect
import sys
import traceback
from types import TracebackType

import torch.distributed as dist

from decentnode.errors import DecentnodeError, own_frames


def shorten_traces() -> None:
    """Makes uncaught KeyboardInterrupts and DecentnodeErrors print only stack frames of the user's code from now on.

    To be called before torch adds the rank to what is printed (init_process_group). Does nothing if the script has set
    an excepthook of its own.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print


def forget_group() -> None:
    """Takes back what torch did to the excepthook when it made the default process group: it began every line with the
    rank in that group. The next group's numbers may differ, and they would be added in front of these."""
    hook = sys.excepthook
    if getattr(hook, "__module__", "") == dist.distributed_c10d.__name__:
        sys.excepthook = inspect.getclosurevars(hook).nonlocals.get("old_hook", hook)


def _print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    own = own_frames(error) if isinstance(error, KeyboardInterrupt | DecentnodeError) else []
    if not own:
        sys.__excepthook__(kind, error, trace)
        return
    lines = ["Traceback (most recent call last; lines of your own code):\n", *traceback.format_list(own),
             *traceback.format_exception_only(error)]  # fmt: skip
    sys.stderr.write("".join(lines))
