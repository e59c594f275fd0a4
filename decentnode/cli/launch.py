"""`decentnode launch`: this machine's share of an experiment."""

from __future__ import annotations

import click

from decentnode.cli import start
from decentnode.launch.children.messages import Request


@click.command()
@click.argument("config", type=click.Path())
@click.option("--machine", "-m", metavar="ID|auto", help="Which machine of the mapping this is; auto: by address.")
@click.option("--join", is_flag=True, help="The run has begun; its nodes let this machine's in (missing: regroup).")
@start.watched
@start.resuming
@start.options
@click.pass_context
def command(
    ctx: click.Context, config: str, machine: str | None, join: bool, resume: str | None, overrides: tuple[str, ...],
    run_dir: str | None, name: str | None, seed: int | None, plain: bool, quiet: bool, as_json: bool,
    dashboard: bool, dashboard_port: int | None,
) -> None:
    """Run this machine's nodes of CONFIG; the other machines run theirs with the same command."""
    chosen = start.all_overrides(overrides, run_dir, name, seed)
    given, resume = start.resumed(config, resume)
    file, variables = start.config_of(given or config, start.environ())
    request = Request(file, chosen, variables, machine, join=join, resume=resume)
    ctx.exit(start.start(request, plain=plain, quiet=quiet, as_json=as_json,
                         page=start.page_of(dashboard, dashboard_port)))  # fmt: skip
