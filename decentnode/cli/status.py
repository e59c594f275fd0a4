"""`decentnode status`: shows what each node of a run is doing and which nodes it waits for."""

from __future__ import annotations

import json

import click

from decentnode import clock
from decentnode.cli.run_names import run_names
from decentnode.errors import UsageError


@click.command()
@click.argument("run", default="latest", shell_complete=run_names)
@click.option("--edges", is_flag=True, help="Show a row for every edge: payload bytes, chunks, resends, time waited.")
@click.option("--once", is_flag=True, help="Print once instead of until the run ends.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, once.")
def command(run: str, edges: bool, once: bool, as_json: bool) -> None:
    """Show what each node of RUN on this machine is doing; on a terminal, live while the run is in progress.

    RUN is a run directory, the folder of an experiment (its latest run) or latest.
    """
    from rich.console import Console
    from rich.live import Live

    from decentnode.launch.files.run_dir import resolve
    from decentnode.launch.files.supervisor_file import died
    from decentnode.report.reading.run_status import in_progress, read, table

    path = resolve(run)
    statuses = read(path)
    death = died(path)
    if not statuses and not death:
        raise UsageError(f"{path} has no status of any node: the run has not begun, or has not written its status")
    if as_json:
        click.echo(json.dumps({str(uid): status for uid, status in statuses.items()}, indent=1))
        if death:
            click.echo(death, err=True)
        return
    console = Console(highlight=False, emoji=False)
    if once or not console.is_terminal or not in_progress(statuses):
        if statuses:
            console.print(table(statuses, edges))
        if death:
            console.print(death, style="red", soft_wrap=True)
        return
    with Live(table(statuses, edges), console=console, refresh_per_second=2) as live:
        while in_progress(statuses):
            clock.sleep(1.0)
            statuses = read(path) or statuses
            live.update(table(statuses, edges))
    if death := died(path):
        console.print(death, style="red", soft_wrap=True)
