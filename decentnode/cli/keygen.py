"""`decentnode keygen`: creates the keys with which nodes authenticate to each other."""

from __future__ import annotations

from pathlib import Path

import click

from decentnode.errors import EnvironmentFault, UsageError

MAX_NODES = 1 << 20


@click.command()
@click.argument("nodes", metavar="NODES", required=False)
@click.option("--out", "-o", default="keys", show_default=True, type=click.Path(path_type=Path),
              help="Folder for the keys; created if it does not exist.")  # fmt: skip
@click.option("--newcomer", is_flag=True,
              help="Instead, create the key of a node that is not in the mapping (decentnode join).")  # fmt: skip
@click.option("--secret", "secret", default=None, metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="Instead, create one secret shared by all ranks of a script "
                   "(initialize_dist(keys=...)).")  # fmt: skip
def command(nodes: str | None, out: Path, newcomer: bool, secret: Path | None) -> None:
    """Create a key pair for each of NODES: a count (16), a range (4-7) or uids (0,3,5).

    The folder then holds node-UID.secret (only for that node's machine) and public.keys (for every machine). To keep
    every secret on its own machine, run this command on each machine for its own nodes and concatenate the public.keys
    files. Otherwise create all keys in one place, and copy public.keys and its own nodes' secrets to each machine. Name
    the folder in the experiment: communication: {security: on, keys: FOLDER}.

    With --newcomer, the public key is printed: add it as a line to authorized.keys in the key folders of all members to
    admit its owner.

    With --secret, FILE is created, for the ranks of a script of your own in which ranks may die and new ranks may join
    (missing="regroup"). Copy it to every machine, readable only by your user, and name it in DECENTNODE_KEYS.
    """
    from decentnode.communication.zeromq.sockets.security import PUBLIC_FILE, read_public, write_keys, write_newcomer

    if (nodes is not None) + newcomer + (secret is not None) != 1:
        raise UsageError("give one of NODES, --newcomer and --secret")
    if secret is not None:
        _make_secret(secret)
        return
    if nodes is None:
        click.echo(write_newcomer(out).decode())
        return
    uids = write_keys(out, parse_uids(nodes))
    click.echo(f"{len(uids)} secret keys in {out} (never copy one to another node's machine)")
    click.echo(f"{out / PUBLIC_FILE}: the public keys of {len(read_public(out))} nodes, for every machine")


def _make_secret(path: Path) -> None:
    from decentnode.communication.zeromq.sockets.security import write_secret

    try:
        write_secret(path)
    except FileExistsError:
        raise UsageError(f"{path} already exists; remove it first, or choose another name") from None
    except OSError as error:
        raise EnvironmentFault(f"cannot make {path}: {error.strerror}") from error
    click.echo(f"{path}: copy it to every machine, readable by your user alone")


def parse_uids(text: str) -> list[int]:
    """Returns the uids of "16", "4-7" or "0,3,5"; "2," is uid 2 alone. Raises UsageError."""
    try:
        if text.isdigit():
            uids = list(range(min(int(text), MAX_NODES + 1)))
        else:
            uids = []
            for part in filter(None, text.split(",")):
                first, dash, last = part.partition("-")
                uids += range(int(first), min(int(last if dash else first), MAX_NODES) + 1)
    except ValueError:
        uids = []
    if not uids or len(set(uids)) != len(uids) or max(uids) >= MAX_NODES:
        raise UsageError(f"NODES must be a count (16), a range (4-7) or different uids (0,3,5), got {text!r}")
    return uids
