"""`decentnode collect`: copies the parts of a run that other machines hold into one folder."""

from __future__ import annotations

from pathlib import Path

import click

from decentnode.cli.run_names import run_names


@click.command()
@click.argument("run", metavar="RUN", shell_complete=run_names)
@click.argument("others", nargs=-1, required=True, metavar="OTHER...", type=click.Path(path_type=Path))
def command(run: str, others: tuple[Path, ...]) -> None:
    """Copy the files of RUN that other machines hold into its folder: records, models and checkpoints of their nodes,
    and descriptions of these machines. plot, report, compare, trace and dashboard then show all nodes. A warning says
    where the machines had different versions or code.

    RUN is a run directory, the folder of an experiment or its name (its latest run), or latest. OTHER is a folder of
    the same run that was copied from another machine or is on a shared disk, or a folder that contains several of them.
    Existing files are kept; while the run is in progress, the command may be repeated.
    """
    from decentnode.formatting import names, plural, size
    from decentnode.launch.collecting.collect import collect
    from decentnode.launch.files.run_dir import resolve
    from decentnode.metrics.machines import differences, machines_of
    from decentnode.report.reading.run_status import FINAL_STATES, read

    found = collect(resolve(run), others)
    for each in found.taken:
        parts = [f"node {names(each.uids)}"] if each.uids else []
        parts += each.whole
        parts += [f"details of machine {names(sorted(each.machines))}"] if each.machines else []
        new = f"{', '.join(parts)}; {size(each.size)}" if parts else "nothing new"
        click.echo(f"{each.folder}: {new}")
    for line in found.left_out:
        click.echo(f"left out: {line}", err=True)
    going = [uid for uid, status in read(found.run).items() if status.get("doing") not in FINAL_STATES]
    if going:
        click.echo(f"node {names(going)} had not ended when it was copied: collect again later to get the rest, "
                   "unless it died")  # fmt: skip
    for machine, uids in sorted(found.missing.items()):
        click.echo(f"missing: node {names(uids)}, of machine {machine}")
    for line in differences(machines_of(found.run)):
        click.echo(f"warning: the machines of the run differ: {line}", err=True)
    have = sorted(path.name for path in (found.run / "nodes").iterdir() if path.name.isdigit() and any(path.iterdir()))
    click.echo(f"{found.run} has {plural(len(have), 'node')}")
