"""What the supervisor itself writes into the run directory: inputs, environment, summary."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decentnode.launch import provenance, run_dir, sources
from decentnode.launch.messages import Facts
from decentnode.metrics import summary as summaries

ENVIRONMENT_SECONDS = 30.0


class Records:
    """Nothing here stops a run once it is going: a disk that refuses becomes a notice."""

    def __init__(self, facts: Facts, config: str, command: str) -> None:
        """Make the run directory. Raises EnvironmentFault."""
        self.directory = run_dir.create(Path(facts.runs_dir), facts.name, facts.machine, facts.local)
        run_dir.write_inputs(self.directory, facts, command)
        self.notices: list[str] = []
        self._facts = facts
        self._config_dir = Path(config).absolute().parent
        self._thread: threading.Thread | None = None
        self._modules: dict[str, dict[str, str]] = {}

    def keep_modules(self, modules: Mapping[str, str]) -> None:
        """Copy what is new among the modules of the user's own (name -> path): the run can be repeated from here."""
        try:
            self._modules |= sources.keep({n: p for n, p in modules.items() if n not in self._modules}, self.directory)
        except OSError as error:
            self.notices.append(f"the run's own modules could not be kept: {error.strerror}")

    def start(self) -> None:
        """Write the environment in a thread: versions and git's state take up to a second; idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_environment, daemon=True)
            self._thread.start()

    def _write_environment(self) -> None:
        facts = {"name": self._facts.name, "digest": self._facts.digest, "machine": self._facts.machine}
        try:
            provenance.write(self.directory, facts, self._config_dir)
        except OSError as error:
            self.notices.append(f"the environment could not be written: {error.strerror}")

    def _write_modules(self) -> None:
        """Into env.json, which is written before all of them are known."""
        path = self.directory / "env.json"
        if self._modules and path.exists():
            with contextlib.suppress(OSError, ValueError):
                found = {**json.loads(path.read_text()), "modules": self._modules}
                summaries.write_atomic(path, json.dumps(found, indent=2) + "\n")

    def finish(self, summary: dict[str, Any], whole: bool) -> bool:
        """Blocking: the rest, and, where it is of the `whole` run, summary.json; whether that could be written."""
        self.start()
        assert self._thread is not None
        self._thread.join(ENVIRONMENT_SECONDS)
        self._write_modules()
        if not whole:
            return True
        try:
            summaries.write(self.directory / "summary.json", summary)
        except OSError as error:
            self.notices.append(f"summary.json could not be written: {error.strerror}")
            return False
        return True
