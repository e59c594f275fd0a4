"""`decentnode invite`: creates an invitation, with which a run admits nodes that are not in its mapping."""

from __future__ import annotations

from pathlib import Path

import click

from decentnode import clock
from decentnode.errors import EnvironmentFault
from decentnode.wire.invitation import MAX_SECONDS, MAX_USES


@click.command()
@click.argument("secret", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--nodes", "-n", type=click.IntRange(1, MAX_USES), default=1, show_default=True,
              help="How many nodes it admits.")  # fmt: skip
@click.option("--hours", type=click.FloatRange(min=0, max=MAX_SECONDS / 3600, min_open=True), default=24.0,
              show_default=True, help="How long it is valid.")  # fmt: skip
def command(secret: Path, nodes: int, hours: float) -> None:
    """Print an invitation made with the secret in file SECRET; the file is created if it does not exist.

    Name the file in the experiment (communication: {invitations: SECRET}) and copy it to every machine of the mapping,
    readable only by your user. A node that presents the printed text to a member (decentnode join --invitation TEXT) is
    admitted until the invitation is used up or has expired; other nodes are refused. Keep the text as secret as a
    password.
    """
    from decentnode import entropy
    from decentnode.communication.zeromq.sockets.security import read_secret, write_secret
    from decentnode.wire.invitation import issue

    if not secret.exists():
        try:
            write_secret(secret)
        except OSError as error:
            raise EnvironmentFault(f"cannot make {secret}: {error.strerror}") from error
        click.echo(f"{secret} was created: copy it to every machine of the mapping before the run starts", err=True)
    click.echo(issue(read_secret(secret), nodes, int(clock.wall() + 3600 * hours), entropy.draw))
