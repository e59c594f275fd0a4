"""`decentnode doctor`: checks this machine and its links to the others before a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click

from decentnode.errors import EnvironmentFault


@click.command()
@click.argument("config", type=click.Path())
@click.option("--machine", "-m", help="Number of this machine in the mapping, or auto.")
@click.option("--set", "-s", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Set a.b=value; a={...} replaces the whole section.")  # fmt: skip
@click.option("--wait", default=30.0, show_default=True, help="Seconds to wait for the other machines' doctors.")
@click.option("--links", type=click.Path(path_type=Path),
              help="Write the measured links to this YAML file, for decentnode plan --links.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per check.")
def command(
    config: str, machine: str | None, overrides: tuple[str, ...], wait: float, links: Path | None, as_json: bool
) -> None:
    """Check that this machine can run its share of CONFIG: cores, memory, /dev/shm, addresses, ports, files, keys.

    With several machines, run it on all of them at the same time: they measure latency, bandwidth and clock
    differences. The exit code is 3 if a run would fail.
    """
    from decentnode.experiment import load
    from decentnode.launch import doctor
    from decentnode.launch.supervising.prepare import choose_machine
    from decentnode.system import write_atomic

    experiment = load(config, overrides)
    mapping = experiment.make_mapping()
    local_machine = choose_machine(mapping, machine, config)

    def checks() -> Iterator[doctor.Finding]:
        yield from doctor.local(experiment, local_machine)
        if mapping.num_machines > 1 or mapping.place(0).port is not None:
            yield doctor.names(experiment, local_machine)
        free = doctor.ports(experiment, local_machine)
        yield free
        if mapping.num_machines > 1 and free.ok:
            yield from doctor.remote(experiment, local_machine, wait)

    failed, measured = [], []
    for finding in checks():
        if finding.link is not None:
            measured.append(finding.link)
        if finding.ok is False:
            failed.append(finding.what)
        if as_json:
            click.echo(json.dumps(vars(finding)))
        else:
            mark = {True: "ok", None: "warning", False: "FAILED"}[finding.ok]
            click.echo(f"{mark:8} {finding.what}: {finding.detail}")
    if links is not None:
        write_atomic(links, "".join(["machines:\n" if measured else "machines: []\n",
                                     *(f"- {json.dumps(each)}\n" for each in measured)]))  # fmt: skip
        if not as_json:
            click.echo(str(links))
    if failed:
        raise EnvironmentFault(f"{config} would fail on machine {local_machine}: {', '.join(failed)}")
