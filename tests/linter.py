"""Runs the project's linter on sources that tests make up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def check_banned(source: str, instead: str) -> None:
    """Asserts that the linter rejects the source in a file of the package, naming `instead`, and accepts it in a
    test."""
    root = Path(__file__).parents[1]
    ruff = [sys.executable, "-m", "ruff", "check", "--quiet", "--output-format=concise", "-"]
    for name, is_rejected in (("decentnode/node/fresh.py", True), ("tests/node/test_fresh.py", False)):
        result = subprocess.run(
            [*ruff, f"--stdin-filename={name}"], input=source, cwd=root, capture_output=True, text=True, timeout=60
        )
        assert ("TID251" in result.stdout and instead in result.stdout) is is_rejected, result.stdout + result.stderr
