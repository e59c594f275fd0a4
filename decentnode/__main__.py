"""The command `decentnode`, as `python -m decentnode` too: Ctrl-C ends it in one line from its first moment on."""

import os
import signal
from types import FrameType


def _end(_: int, __: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


def main() -> None:
    """Run the command line. While it is imported, nothing is under way that an end would have to tidy up."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # `compare` starts its runs with it blocked
    from decentnode.cli import main as command

    signal.signal(signal.SIGINT, before)
    try:
        command(prog_name="decentnode")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python tidies up now; a second Ctrl-C there showed a traceback


if __name__ == "__main__":
    main()
