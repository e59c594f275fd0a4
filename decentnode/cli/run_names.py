"""Completes the names of runs in the shell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def run_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:  # noqa: ARG001
    """Returns the experiments in runs/ that begin with what was typed, and `latest`; if none does, files and
    folders."""
    from click.shell_completion import CompletionItem

    folder = Path("runs")
    folders = folder.iterdir() if folder.is_dir() else ()
    experiments = sorted(each.name for each in folders if any(each.glob("*/nodes")))
    matching = [name for name in (*experiments, "latest") if name.startswith(incomplete)]
    return [CompletionItem(name) for name in matching] or [CompletionItem(incomplete, type="file")]
