"""`decentnode run`: runs all nodes of an experiment on this machine."""

from __future__ import annotations

import click

from decentnode.cli import start
from decentnode.launch.children.messages import Request


@click.command()
@click.argument("config", type=click.Path(), required=False)
@click.option("--dry-run", is_flag=True, help="Build everything and do one round in one process; write no files.")
@start.dashboard_options
@start.resume_option
@start.run_options
@click.pass_context
def command(
    ctx: click.Context, config: str | None, dry_run: bool, resume: str | None, overrides: tuple[str, ...],
    run_dir: str | None, name: str | None, seed: int | None, plain: bool, quiet: bool, as_json: bool,
    dashboard: bool, dashboard_port: int | None,
) -> None:
    """Run all nodes of CONFIG on this machine; without CONFIG, the built-in quickstart.

    CONFIG is an experiment's file, or the folder of a run, whose experiment is then run again in a new folder beside
    it.
    """
    assignments = start.all_overrides(overrides, run_dir, name, seed)
    config, resume = start.config_and_resume(config, resume)
    file, variables = start.config_of(config or start.default_config(), start.environ())
    request = Request(file, assignments, variables, in_process=dry_run, one_round=dry_run, resume=resume)
    ctx.exit(start.start(request, plain=plain, quiet=quiet, as_json=as_json, dry_run=dry_run,
                         page=start.dashboard_page(dashboard, dashboard_port)))  # fmt: skip
