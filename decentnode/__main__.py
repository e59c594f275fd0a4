"""The command `decentnode`, also run as `python -m decentnode`. Ctrl-C ends it with one line, even during imports."""

import os
import signal
import sys
from types import FrameType


def _end(_: int, __: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


def _open_closed_streams() -> None:
    """Opens /dev/null as those of stdin, stdout and stderr that the caller closed (`>&-`, some schedulers). Otherwise
    sockets and files would get their numbers, and what is printed would go there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def main() -> None:
    """Runs the command line. Ctrl-C during the imports exits at once, because there is nothing to clean up yet."""
    _open_closed_streams()
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
