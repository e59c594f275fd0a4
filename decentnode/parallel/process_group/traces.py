"""What is printed when a rank ends by Ctrl-C, or because another one has: the script's own lines. The stack from there
through torch and this package is a screen for every rank, among which the error that began it was not found."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from decentnode.errors import DecentnodeError, own_frames


def shorten_traces() -> None:
    """From now on an uncaught KeyboardInterrupt or DecentnodeError is printed with frames of the user's code alone.

    To be called before torch puts the rank before what is printed (init_process_group). Does nothing where the script
    has a hook of its own.
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
