"""What people ask of whoever runs a run, and the answers: files KIND-KEY.request and KIND-KEY.answer in its folder.

Whoever may write into the folder may ask, and nobody else: the process that answers has no port for it.
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
"""How often the folder is looked into."""
POLL_SECONDS = 0.05
"""How often whoever asked looks for the answer."""
MAX_BYTES = 4096
MOST_AT_ONCE = 16
"""Requests that are taken in one look."""

Content = dict[str, Any]


def ask(
    run: Path, name: str, content: Mapping[str, Any], whom: str, over: Callable[[], str], timeout_seconds: float
) -> Content:
    """Ask something. Blocking until the answer is there, which is returned. No file is left.

    name: KIND-KEY. whom: who is asked, in words. over(): why nobody answers, "" as long as somebody may.
    Raises UsageError with what over() says; EnvironmentFault where the folder cannot be written, or nobody answers in
    time.
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
    """What a file says; None where it is not there, or says nothing that makes sense."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


class Requests:
    """Those of one kind in one run folder, for the process that answers them."""

    def __init__(self, run: Path | None, kind: str, key: str) -> None:
        """run: None where nothing is written, and nobody can ask. key: a regular expression of the keys to take."""
        self._run, self._kind, self._next = run, kind, 0.0
        self._name = re.compile(rf"{kind}-({key})\.request")

    def taken(self, now: float) -> list[tuple[str, Content]]:
        """Returns key and content of what was asked since the last call, by key; looks every LOOK_SECONDS at most. What
        makes no sense is taken as empty."""
        if self._run is None or now < self._next:
            return []
        self._next = now + LOOK_SECONDS
        found = []
        with contextlib.suppress(OSError):
            asked = {path: match[1] for path in self._run.iterdir() if (match := self._name.fullmatch(path.name))}
            for path in sorted(asked)[:MOST_AT_ONCE]:
                content = _read(path)
                path.unlink(missing_ok=True)
                found.append((asked[path], content or {}))
        return found

    def answer(self, key: str, content: Mapping[str, Any]) -> None:
        """Answer whoever asked. A disk that refuses costs the answer alone."""
        if self._run is not None:
            with contextlib.suppress(OSError):
                write_atomic(self._run / f"{self._kind}-{key}.answer", json.dumps(content) + "\n")

    def refuse_the_rest(self) -> None:
        """Refuse what was asked and nobody takes any more, now that the run is over."""
        while asked := self.taken(self._next):
            for key, _ in asked:
                self.answer(key, {"refusal": "the run is over"})
