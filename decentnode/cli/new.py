"""`decentnode new`: creates a folder with an example experiment."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import string
import unicodedata
from importlib.resources import files
from pathlib import Path

import click

from decentnode.errors import EnvironmentFault, UsageError

STARTER = ("config.yaml", "my_data.py", "my_model.py", "my_rule.py", "graph.edges")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def command(folder: Path) -> None:
    """Write a commented experiment into FOLDER, ready to run.

    Besides config.yaml, the folder holds a model, a dataset and a sharing rule as Python modules, and a graph file:
    change them, or name components of `decentnode list` instead. FOLDER is created; it must not hold any files yet.
    """
    from decentnode.cli.console import program

    write(folder)
    for name in STARTER:
        click.echo(str(folder / name))
    click.echo(f"next: {program()} run {shlex.quote(str(folder / 'config.yaml'))}")


def write(folder: Path) -> None:
    """Creates the folder and writes the example into it. Raises UsageError if the folder contains something already,
    EnvironmentFault if writing fails; then it removes the files that it wrote, so that the command can be repeated."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} must be a folder, got a file")
    absolute = Path(os.path.abspath(folder))
    plain = unicodedata.normalize("NFKD", absolute.name).encode("ascii", "ignore").decode()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", plain).lstrip("._-")[:100].rstrip("-") or "experiment"
    written: list[Path] = []
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"{folder} must be empty or new, got a folder with {_some(folder)}")
        folder.mkdir(parents=True, exist_ok=True)
        for each in STARTER:
            text = files("decentnode").joinpath("starter", each).read_text(encoding="utf-8")
            if each == "config.yaml":
                text = string.Template(text).substitute(folder=shlex.quote(str(folder)), name=name)
            written.append(folder / each)
            written[-1].write_text(text, encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        with contextlib.suppress(OSError):
            for path in written:
                path.unlink(missing_ok=True)
        raise EnvironmentFault(f"cannot write to {error.filename or folder}: {error.strerror}") from error


def _some(folder: Path) -> str:
    names = sorted(each.name for each in folder.iterdir())
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
