"""Passes users' requests to the process that runs a run, and its answers, as the files KIND-KEY.request and
KIND-KEY.answer in the run's folder.

Everybody who may write into the folder may ask, and nobody else: the process that answers has no port for it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from decentnode import clock
from decentnode.errors import EnvironmentFault, UsageError
from decentnode.system import write_atomic

LOOK_SECONDS = 0.25
"""Time between two looks for requests."""
POLL_SECONDS = 0.05
"""Time between two looks for the answer."""
MAX_BYTES = 4096
MAX_AT_ONCE = 16
"""The most requests that are taken at a time."""

Content = dict[str, Any]


def ask(
    run: Path, name: str, content: Mapping[str, Any], whom: str, over: Callable[[], str], timeout_seconds: float
) -> Content:
    """Writes a request, waits for the answer and returns it. Blocking. Leaves no file.

    name: KIND-KEY. whom: who is asked, in words. over(): returns why no process can answer, "" if one may.
    Raises UsageError with the text of over(); EnvironmentFault if the folder cannot be written, or there is no answer
    within timeout_seconds.
    """
    request, answer = run / f"{name}.request", run / f"{name}.answer"
    deadline = clock.now() + timeout_seconds
    try:
        answer.unlink(missing_ok=True)
        write_atomic(request, json.dumps(content) + "\n")
        try:
            while (found := _read(answer)) is None:
                if why := over():
                    raise UsageError(f"{whom} cannot be asked: {why}")
                if clock.now() >= deadline:
                    later = "" if request.exists() else "; it has received the request and may still do it"
                    raise EnvironmentFault(f"no answer from {whom} within {timeout_seconds:g} s{later}")
                clock.sleep(POLL_SECONDS)
        finally:
            request.unlink(missing_ok=True)
            answer.unlink(missing_ok=True)
    except OSError as error:
        raise EnvironmentFault(f"cannot ask in {run}: {error.strerror}") from error
    return found


def _read(path: Path) -> Content | None:
    """Returns the JSON object in a file; None if there is no file, or no valid object in it."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


class Requests:
    """Reads and answers the requests of one kind in one run folder."""

    def __init__(self, run: Path | None, kind: str, key: str) -> None:
        """run: the run folder; None if nothing is written, and so no request can be made. key: a regular expression for
        the keys to take."""
        self._run, self._kind, self._next = run, kind, 0.0
        self._name = re.compile(rf"{kind}-({key})\.request")

    def take_new(self, now: float) -> list[tuple[str, Content]]:
        """Returns (key, content) of the requests since the last call, sorted by file name, and removes their files.
        Looks at most every LOOK_SECONDS. Invalid content is returned as empty."""
        if self._run is None or now < self._next:
            return []
        self._next = now + LOOK_SECONDS
        found = []
        with contextlib.suppress(OSError):
            asked = {path: match[1] for path in self._run.iterdir() if (match := self._name.fullmatch(path.name))}
            for path in sorted(asked)[:MAX_AT_ONCE]:
                content = _read(path)
                path.unlink(missing_ok=True)
                found.append((asked[path], content or {}))
        return found

    def answer(self, key: str, content: Mapping[str, Any]) -> None:
        """Writes the answer to a request. If the disk refuses, only the answer is lost."""
        if self._run is not None:
            with contextlib.suppress(OSError):
                write_atomic(self._run / f"{self._kind}-{key}.answer", json.dumps(content) + "\n")

    def refuse_remaining(self) -> None:
        """Refuses all requests that are left, because the run is over."""
        while asked := self.take_new(self._next):
            for key, _ in asked:
                self.answer(key, {"refusal": "the run is over"})
