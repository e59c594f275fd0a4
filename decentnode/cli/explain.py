"""`decentnode explain`: explains a component or a key of a YAML file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from decentnode.cli.list import command as list_command

if TYPE_CHECKING:
    from decentnode.describe import ConfigKey


@click.command()
@click.argument("what")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(what: str, as_json: bool) -> None:
    """Explain a component or a key of a YAML file: `sharing.choco`, `sharing.choco.fraction`, `node.rounds`. For a kind
    such as `sharing`, list its components.

    The reference in the documentation has the same text, from the same source.
    """
    from decentnode.config.component import add_module_folder
    from decentnode.describe import TABLES, ComponentInfo, find

    if what in TABLES:
        click.get_current_context().invoke(list_command, kind=what, as_json=as_json)
        return
    add_module_folder(Path.cwd())  # the user's own modules are in the folder of the YAML file
    found = find(what)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found if isinstance(found, ComponentInfo) else found[1]), indent=1))
        return
    if not isinstance(found, ComponentInfo):
        component, key = found
        click.echo(f"{component.path}.{key.name}\n")
        _show([key, *(each for each in component.keys if each.name.startswith(f"{key.name}."))])
        return
    click.echo(f"{found.path}\n\n{found.text or 'Its class has no docstring, which would stand here.'}\n")
    if found.keys:
        click.echo("Keys:")
        _show(found.keys)
    else:
        click.echo("It has no keys of its own.")


def _show(keys: tuple[ConfigKey, ...] | list[ConfigKey]) -> None:
    formatter = click.HelpFormatter(width=110)
    with formatter.indentation():
        formatter.write_dl([(key.name, f"{key.facts}. {key.text}") for key in keys], col_max=28)
    click.echo(formatter.getvalue(), nl=False)
