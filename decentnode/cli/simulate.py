"""`decentnode simulate`: simulates all nodes of an experiment in one process."""

from __future__ import annotations

import click

from decentnode.cli import start
from decentnode.launch.children.messages import Request


@click.command()
@click.argument("config", type=click.Path(), required=False)
@click.option("--engine", type=click.Choice(["auto", "stepped", "batched"]), help="Same as --set simulate.engine=NAME.")
@start.resume_option
@start.run_options
@click.pass_context
def command(
    ctx: click.Context, config: str | None, engine: str | None, resume: str | None, overrides: tuple[str, ...],
    run_dir: str | None, name: str | None, seed: int | None, plain: bool, quiet: bool, as_json: bool,
) -> None:
    """Simulate all nodes of CONFIG in one process; without CONFIG, the built-in quickstart.

    CONFIG is the same file as for `decentnode run`, also if it is for several machines: neighbors exchange models in
    memory, and the run's folder has the same files. The section `simulate` says how the nodes are computed.
    """
    assignments = start.all_overrides(overrides, run_dir, name, seed)
    if engine is not None:
        assignments.append(f"simulate.engine={engine}")
    config, resume = start.config_and_resume(config, resume)
    file, variables = start.config_of(config or start.default_config(), start.environ())
    request = Request(file, assignments, variables, in_process=True, simulate=True, resume=resume)
    ctx.exit(start.start(request, plain=plain, quiet=quiet, as_json=as_json))
