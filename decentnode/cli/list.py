"""`decentnode list`: lists the components that a YAML file can name."""

from __future__ import annotations

import json

import click


@click.command()
@click.argument("kind", required=False)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(kind: str | None, as_json: bool) -> None:
    """List the kinds of components that a YAML file names, or the components of one KIND.

    `decentnode explain KIND.NAME` explains one of them.
    """
    from decentnode.describe import KINDS, TABLES, describe, names

    if kind is None:
        rows = [(each, text) for each, text in KINDS.items()]
    elif names(kind) and kind in TABLES:
        rows = [(name, describe(kind, name).summary) for name in names(kind)]
    else:
        rows = [(key.name, key.text) for key in describe(kind, kind).keys]
    if as_json:
        click.echo(json.dumps(dict(rows), indent=1))
        return
    formatter = click.HelpFormatter(width=click.get_current_context().max_content_width or 110)
    formatter.write_dl(rows)
    click.echo(formatter.getvalue(), nl=False)
