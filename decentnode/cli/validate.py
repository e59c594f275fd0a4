"""`decentnode validate`: every problem of an experiment before anything starts."""

from __future__ import annotations

import json

import click

from decentnode.errors import ConfigError


@click.command()
@click.argument("config", type=click.Path())
@click.option("--set", "-s", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a.b=value; a={...} replaces.")
@click.option("--resolved", is_flag=True, help="Print every value of the run and where it comes from.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; the exit code stays the same.")
@click.pass_context
def command(ctx: click.Context, config: str, overrides: tuple[str, ...], resolved: bool, as_json: bool) -> None:
    """Check CONFIG: keys, values, graph, mapping and data. Exit code 2 when something is wrong."""
    from decentnode.experiment import load

    try:
        experiment = load(config, overrides)
    except ConfigError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "source": config, "problems": error.problems}, indent=1))
        ctx.exit(error.exit_code)
    if as_json:
        found = {"ok": True, "source": config, "problems": [], "digest": experiment.digest()}
        click.echo(json.dumps(found | ({"resolved": experiment.resolved()} if resolved else {}), indent=1))
    elif resolved:
        click.echo(experiment.resolved_yaml(), nl=False)
    else:
        machines = experiment.make_mapping().num_machines
        click.echo(
            f"{config}: ok: {experiment.name}, {experiment.make_graph().num_nodes} nodes on {machines} "
            f"machine{'s' if machines != 1 else ''}, digest {experiment.digest()}"
        )
