"""`decentnode completion`: lets the shell complete commands, options and files."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import click

from decentnode.errors import EnvironmentFault
from decentnode.system import replacing

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_DECENTNODE_COMPLETE"
"""The environment variable through which the shell's function asks decentnode for completions."""
MARK = "# decentnode completion"
"""The end of decentnode's line in the shell's start-up file, by which it is found again."""


@click.command()
@click.argument("shell", type=click.Choice(SHELLS), required=False)
@click.option("--install", is_flag=True, help="Write the script to a file that the shell reads when it starts.")
def command(shell: str | None, install: bool) -> None:
    """Print the completion script for SHELL; without SHELL, for $SHELL.

    With --install, the script is written into the home directory, and bash and zsh get one line in ~/.bashrc or
    ~/.zshrc that reads it. Repeating the command changes only the script. New shells then complete with the Tab key.
    """
    shell = shell or _own_shell()
    if not install:
        click.echo(script_text(shell))
        return
    for line in install_script(shell):
        click.echo(line)


def _own_shell() -> str:
    """Returns the name of the user's shell. Raises UsageError for a shell without completion."""
    name = Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        raise click.UsageError(f"give the shell: {', '.join(SHELLS)}; $SHELL is {name or 'not set'}")
    return name


def script_text(shell: str) -> str:
    """Returns the script that makes a shell complete."""
    from click.shell_completion import get_completion_class

    from decentnode.cli import main

    shell_class = get_completion_class(shell)
    assert shell_class is not None
    complete = shell_class(main, {}, "decentnode", VARIABLE)
    return str(complete.source_template % complete.source_vars()).rstrip()


def install_script(shell: str) -> list[str]:
    """Writes the script and the line that reads it. Returns what was done, in words. Raises EnvironmentFault."""
    script, start = script_paths(shell)
    messages = []
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(script_text(shell) + "\n", encoding="utf-8")
        messages.append(f"written  {script}")
        if start is not None:
            messages.append(_add_line(script, start))
    except OSError as error:
        raise EnvironmentFault(f"cannot write {error.filename}: {error.strerror}") from error
    return [*messages, f"new {shell} shells will complete decentnode commands"]


def script_paths(shell: str) -> tuple[Path, Path | None]:
    """Returns (the script, the start-up file that has to read it; None if the shell finds the script by itself)."""
    home = Path.home()
    if shell == "fish":
        config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        return config / "fish" / "completions" / "decentnode.fish", None
    script = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share") / "decentnode" / f"completion.{shell}"
    return script, (Path(os.environ.get("ZDOTDIR") or home) / ".zshrc" if shell == "zsh" else home / ".bashrc")


def _add_line(script: Path, start: Path) -> str:
    """Adds a line that reads the script to a start-up file, unless it has one."""
    before = start.read_text(encoding="utf-8", errors="surrogateescape") if start.exists() else ""
    path = shlex.quote(str(script))
    # In zsh, `compdef`, which the script calls, exists only after `compinit`
    ready = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }; " if script.suffix == ".zsh" else ""
    line = f"[ -r {path} ] && {{ {ready}. {path}; }}  {MARK}"
    lines = before.splitlines()
    if line in lines:
        return f"kept     the line in {start}"
    kept = [each for each in lines if not each.endswith(MARK)]
    target = start.resolve()  # start-up files are often links to files kept elsewhere
    with replacing(target) as temporary:
        temporary.write_text("\n".join([*kept, line]) + "\n", encoding="utf-8", errors="surrogateescape")
        if target.exists():
            shutil.copymode(target, temporary)
    return f"{'replaced' if len(kept) < len(lines) else 'added   '} a line in {start}"
