"""Prints only the script's own lines when a rank ends by Ctrl-C, or because another one has ended. The full stack
through torch and this package fills a screen per rank and hides the error that caused it."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from decentnode.errors import DecentnodeError, own_frames


def shorten_traces() -> None:
    """Makes uncaught KeyboardInterrupts and DecentnodeErrors print only stack frames of the user's code from now on.

    To be called before torch adds the rank to what is printed (init_process_group). Does nothing if the script has set
    an excepthook of its own.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print


def _print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    own = own_frames(error) if isinstance(error, KeyboardInterrupt | DecentnodeError) else []
    if not own:
        sys.__excepthook__(kind, error, trace)
        return
    lines = ["Traceback (most recent call last; lines of your own code):\n", *traceback.format_list(own),
             *traceback.format_exception_only(error)]  # fmt: skip
    sys.stderr.write("".join(lines))
