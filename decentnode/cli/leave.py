"""`decentnode leave`: lets nodes leave a run cleanly while the others continue."""

from __future__ import annotations

import click

from decentnode.cli.run_names import run_names
from decentnode.errors import UsageError


@click.command()
@click.argument("run", default="latest", shell_complete=run_names)
@click.option("--node", "-n", "nodes", metavar="NODES",
              help="Nodes of this machine that leave: a uid (2), several (0,3,5) or a range (4-7). Default: the only "
                   "one."
)  # fmt: skip
@click.option("--timeout", type=click.FloatRange(min=0.1), default=10.0, show_default=True, metavar="SECONDS",
              help="How long to wait for each node's answer.")  # fmt: skip
def command(run: str, nodes: str | None, timeout: float) -> None:
    """Let nodes of RUN on this machine leave after their current round.

    Each finishes its round, saves its model, tells the others and ends with exit code 0; the others continue at once
    without it (node.missing: regroup). RUN is a run directory, the folder of an experiment (its latest run) or latest;
    for a node that came with `decentnode join`, the folder that it printed. A node stays if too few nodes would be left
    without it.
    """
    from decentnode.launch.files.run_dir import node_dir, resolve
    from decentnode.launch.files.supervisor_file import ended
    from decentnode.launch.supervising.leaving import ask

    path = resolve(run)
    local_uids = sorted(int(each.name) for each in (path / "nodes").iterdir() if each.name.isdigit())
    if nodes is None and len(local_uids) != 1:
        raise UsageError(f"{path} has {len(local_uids)} nodes on this machine: choose with --node which of them leave")
    leaving = local_uids if nodes is None else _uids(nodes)
    if unknown := [uid for uid in leaving if uid not in local_uids]:
        raise UsageError(f"{path} has no node {', '.join(map(str, unknown[:5]))} on this machine")
    for uid in leaving:
        if over := ended(path, node_dir(path, uid)):
            raise UsageError(f"node {uid} cannot leave {path}: {over}")
        ask(path, uid, timeout)
        click.echo(f"node {uid} leaves after its round")


def _uids(text: str) -> list[int]:
    """Returns the uids of --node. Raises UsageError."""
    from decentnode.cli.keygen import parse_uids

    try:
        return parse_uids(f"{text}," if text.isdigit() else text)
    except UsageError:
        raise UsageError(f"--node must be a uid (2), different uids (0,3,5) or a range (4-7), got {text!r}") from None
