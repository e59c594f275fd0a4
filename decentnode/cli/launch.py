"""`decentnode launch`: runs this machine's share of an experiment."""

from __future__ import annotations

import click

from decentnode.cli import start
from decentnode.launch.children.messages import Request


@click.command()
@click.argument("config", type=click.Path())
@click.option("--machine", "-m", metavar="ID|auto",
              help="Number of this machine in the mapping; auto: found by its address.")  # fmt: skip
@click.option("--join", is_flag=True,
              help="The run is in progress: ask it to let this machine's nodes in (needs missing: "
                   "regroup).")  # fmt: skip
@start.dashboard_options
@start.resume_option
@start.run_options
@click.pass_context
def command(
    ctx: click.Context, config: str, machine: str | None, join: bool, resume: str | None, overrides: tuple[str, ...],
    run_dir: str | None, name: str | None, seed: int | None, plain: bool, quiet: bool, as_json: bool,
    dashboard: bool, dashboard_port: int | None,
) -> None:
    """Run this machine's nodes of CONFIG; give the same command on every other machine."""
    assignments = start.all_overrides(overrides, run_dir, name, seed)
    resume_config, resume = start.config_and_resume(config, resume)
    file, variables = start.config_of(resume_config or config, start.environ())
    request = Request(file, assignments, variables, machine, join=join, resume=resume)
    ctx.exit(start.start(request, plain=plain, quiet=quiet, as_json=as_json,
                         page=start.dashboard_page(dashboard, dashboard_port)))  # fmt: skip
