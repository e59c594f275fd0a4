"""The command `decentnode`, also run as `python -m decentnode`. Ctrl-C ends it with one line, even during imports."""

import os
import signal
import sys
from types import FrameType


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Handles Ctrl-C. During an import, of which commands make many, it exits at once: there is nothing to clean up
    yet, and importlib swallows exceptions in the callback that drops a module's lock, so that a KeyboardInterrupt
    there is lost."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, b"interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


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
    """Runs the command line."""
    _open_closed_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    from decentnode.cli import main as command

    try:
        command(prog_name="decentnode")
    finally:
        # During Python's shutdown a second Ctrl-C would show a traceback, others would replace the exit code.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
