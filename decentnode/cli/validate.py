"""`decentnode validate`: reports every problem of an experiment before anything starts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from decentnode.cli import start
from decentnode.errors import ConfigError

if TYPE_CHECKING:
    from decentnode.experiment import Experiment


def check_machine(experiment: Experiment, machine: str, config: str) -> None:
    """Checks what the nodes of this machine check when they start. Raises MappingError, EnvironmentFault,
    UsageError."""
    from decentnode.build import devices_of
    from decentnode.communication.zeromq.sockets.security import load_keyring, read_secret
    from decentnode.launch.supervising.prepare import check_memory, choose_machine

    mapping, chosen = experiment.make_mapping(), experiment.communication
    uids = mapping.local(choose_machine(mapping, machine, config))
    devices_of(mapping, uids)
    experiment.open_data().check_private_files(uids)
    check_memory(experiment, uids)
    for uid in uids:
        if chosen.key_folder is not None:
            load_keyring(experiment.base_dir / chosen.key_folder, uid, mapping.num_nodes)
    if (invitations := getattr(chosen, "invitations", None)) is not None:
        read_secret(experiment.base_dir / invitations)


@click.command()
@click.argument("config", type=click.Path())
@click.option("--set", "-s", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Set a.b=value; a={...} replaces the whole section.")  # fmt: skip
@click.option("--machine", "-m", metavar="ID|auto", help="Also check that this machine has what its nodes need.")
@click.option("--resolved", is_flag=True, help="Print every value of the run and its origin.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; the exit code stays the same.")
@click.pass_context
def command(
    ctx: click.Context, config: str, overrides: tuple[str, ...], machine: str | None, resolved: bool, as_json: bool
) -> None:
    """Check CONFIG: keys, values, graph, mapping and data. The exit code is 2 if something is wrong.

    With --machine, also check memory, devices, keys and private data of that machine's nodes; the exit code is 3 if
    something is missing.
    """
    from decentnode.experiment import load

    config, variables = start.config_of(config, start.environ())
    try:
        experiment = load(config, overrides, variables)
        if machine is not None:
            check_machine(experiment, machine, config)
    except ConfigError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "source": config, "problems": error.problems}, indent=1))
        ctx.exit(error.exit_code)
    from decentnode.launch.reporting.notices import default_lr_notice, privacy_notice, short_timeout_warning

    for warning in filter(None, [*experiment.config_warnings, short_timeout_warning(experiment)]):
        click.echo(f"warning: {warning}", err=True)
    if text := default_lr_notice(experiment):
        click.echo(f"note: {text}", err=True)
    if text := privacy_notice(experiment):
        click.echo(f"note: privacy: {text}", err=True)
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
