"""The command `decentnode`, also run as `python -m decentnode`. Ctrl-C ends it with one line, even during imports."""

import os
import signal
from types import FrameType


def _end(_: int, __: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


def main() -> None:
    """Runs the command line. Ctrl-C during the imports exits at once, because there is nothing to clean up yet."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from decentnode.cli import main as command

    signal.signal(signal.SIGINT, before)
    try:
        command(prog_name="decentnode")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C during Python's shutdown would show a traceback


if __name__ == "__main__":
    main()
