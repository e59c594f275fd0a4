"""`decentnode schema`: writes the JSON Schema with which editors complete and check experiment files."""

from __future__ import annotations

from pathlib import Path

import click

from decentnode.errors import EnvironmentFault
from decentnode.system import write_atomic


@click.command()
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path),
              help="File to write. Default: standard output.")  # fmt: skip
def command(output: Path | None) -> None:
    """Write the JSON Schema of experiment files. Their first line names it for editors:
    `# yaml-language-server: $schema=schema.json`."""
    from decentnode.experiment.schema import schema_text

    text = schema_text()
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        write_atomic(output, text)
    except OSError as error:
        raise EnvironmentFault(f"{output}: cannot be written: {error.strerror}") from error
