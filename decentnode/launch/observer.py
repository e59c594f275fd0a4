"""What the supervisor tells whoever looks at the run: the console, a test, nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from decentnode.launch.messages import Facts, Failed


class Observer:
    """Every method does nothing; overwrite those of interest. All are called from the supervisor's thread."""

    def facts(self, facts: Facts, run_dir: Path | None) -> None:
        """The experiment is loaded; `run_dir` is None for a dry run."""

    def header(self, lines: list[list[str]]) -> None:
        """(label, text) lines that describe the experiment."""

    def waiting(self, text: str) -> None:
        """Something takes longer than a moment; says for whom the run waits. Repeated while it lasts."""

    def joined(self, seconds: float) -> None:
        """All nodes of the run are connected, `seconds` after the command."""

    def asks_to_join(self, seconds: float) -> None:
        """Instead of `joined`: this machine's nodes ask a run that has begun to let them in."""
        self.joined(seconds)

    def progress(self, uid: int, record: dict[str, Any]) -> None:
        """A record of a node's metrics.jsonl: every evaluation, and now and then a round."""

    def notice(self, text: str) -> None:
        """Something that the user should know and that does not stop the run."""

    def failed(self, failure: Failed, log: Path | None) -> None:
        """The first failure; `log` is the folder of the node's logs."""

    def stopping(self, signal_name: str) -> None:
        """A first signal came: nodes finish their round and write what they have."""

    def suspending(self) -> None:
        """The terminal stops this process (Ctrl-Z); the nodes go on."""

    def resumed(self) -> None:
        """This process goes on after `suspending`."""

    def tick(self) -> None:
        """At least four times per second: time to redraw."""
