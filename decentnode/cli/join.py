"""`decentnode join`: adds a node that is not in the mapping to a run that admits newcomers (`node.newcomers`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Self

import click

from decentnode import clock
from decentnode.cli import start
from decentnode.errors import AssemblyError, UsageError

if TYPE_CHECKING:
    from decentnode.experiment import Experiment
    from decentnode.launch.children.messages import ChildMessage
    from decentnode.launch.nodes.admission import Request
    from decentnode.mapping.newcomer import Newcomer
    from decentnode.wire.messages import Granted


@click.command()
@click.option("--seed", "member", required=True, metavar="HOST:PORT",
              help="Control port of any member: the first of its two ports in the mapping.")  # fmt: skip
@click.option("--listen", metavar="ADDRESS:PORT",
              help="IP address and first of two ports on which this node listens. Default: the address "
                   "from which it reaches --seed, and free ports.")  # fmt: skip
@click.option("--reach", type=click.Choice(["auto", "direct", "relayed"]), default="auto", show_default=True,
              help="direct: members connect to --listen. relayed: they send through relays, as to a node "
                   "behind NAT. auto: relayed if members see this node at another address than it "
                   "listens on, else direct.")  # fmt: skip
@click.option("--keys", type=click.Path(path_type=Path), metavar="FOLDER",
              help="Folder with the run's public.keys and this node's newcomer.secret (decentnode keygen "
                   "--newcomer).")  # fmt: skip
@click.option("--invitation", metavar="TEXT", default="", envvar="DECENTNODE_INVITATION",
              help="Text that `decentnode invite` printed, if the run requires one; or set "
                   "$DECENTNODE_INVITATION.")  # fmt: skip
@click.option("--seed-uid", type=int, default=0, show_default=True, metavar="N",
              help="With --keys: uid of the node at --seed.")  # fmt: skip
@click.option("--samples-of", type=int, metavar="N",
              help="Train on the samples of node N of the mapping, for example of a lost node. Default: "
                   "train on none, or, if the data is private (a path contains {uid}), on this machine's "
                   "own files.")  # fmt: skip
@click.option("--run-dir", type=click.Path(path_type=Path), default="runs", show_default=True,
              help="Folder of this node's runs.")  # fmt: skip
@click.option("--timeout", type=float, default=60.0, show_default=True, metavar="SECONDS",
              help="How long to keep asking for admission.")  # fmt: skip
@click.option("--device", metavar="DEVICE", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--threads", type=click.IntRange(1), metavar="N", help="Threads of this node. Default: all cores.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Set a key of this machine, such as data.path=...; keys that change the run are "
                   "refused.")  # fmt: skip
@click.option("--quiet", "-q", is_flag=True, help="Print only errors.")
@click.pass_context
def command(
    ctx: click.Context, member: str, listen: str | None, reach: str, keys: Path | None, invitation: str, seed_uid: int,
    samples_of: int | None,
    run_dir: Path, timeout: float, device: str, threads: int | None, overrides: tuple[str, ...], quiet: bool,
) -> None:
    """Ask a run to admit this node, through its member at --seed, and take part until the run ends.

    The node gets its uid, its neighbors, the experiment and the mean of the members' models from the run. The run
    cannot make it import code. If the experiment has data paths, the node reads those paths on this machine, unless
    --set gives others. On Ctrl-C or SIGTERM, the node finishes its round and leaves; the others continue at once
    without it.
    """
    from decentnode.launch.nodes.admission import (
        Request,
        admitted,
        experiment_of,
        own_address,
        relayed,
        validated_experiment,
    )
    from decentnode.launch.nodes.newcomer import check

    started = clock.now()
    seed = _address(member, "--seed")
    host, port = own_address(*seed) if listen is None else _address(listen, "--listen")
    request = Request(member, seed_uid, host, port, keys, invitation, ["auto", "direct", "relayed"].index(reach))
    all_overrides = machine_overrides(overrides, keys)

    def tell(why: str) -> None:
        if not quiet:
            click.echo(f"asking again: {why}", err=True)

    offered = experiment_of(request, timeout, tell)
    text = validated_experiment(offered.config)
    check(text, offered.digest, all_overrides, start.environ(), samples_of, device)
    answer = admitted(request, max(1.0, timeout + started - clock.now()), tell)
    began = clock.now() - answer.age_milliseconds / 1000
    if not quiet:
        note = "; behind NAT: other nodes reach it through relays" if relayed(answer) else ""
        click.echo(f"admitted as node {answer.uid}{note}")
    admission = _Admission(request, answer, began)
    with admission:
        if answer.config != offered.config:
            raise AssemblyError("the run sent a different experiment after it admitted this node; start the node "
                                "again", [])
        ctx.exit(_run_to_end(admission, text, all_overrides, (host, port), run_dir, samples_of, (device, threads),
                             quiet))  # fmt: skip


class _Admission:
    """The uid that the run granted to this node. A context manager: if the node has not joined when it exits, it gives
    the uid back."""

    def __init__(self, request: Request, granted: Granted, began: float) -> None:
        """began: the start of the run on this machine's clock (`clock.now()`)."""
        self.granted, self.began = granted, began
        self._request, self._joined = request, False

    def tell(self, message: ChildMessage) -> None:
        """Notes from the node's messages whether it has joined."""
        from decentnode.launch.children.messages import NodeJoined

        self._joined |= isinstance(message, NodeJoined)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        from decentnode.launch.nodes.admission import resign

        if not self._joined:
            resign(self._request, self.granted)


def machine_overrides(overrides: tuple[str, ...], keys: Path | None) -> list[str]:
    """Returns the overrides of this machine."""
    own = [] if keys is None else [f"communication.keys={keys.absolute()}"]
    return [*overrides, *own]


def _address(text: str, option: str) -> tuple[str, int]:
    """Parses HOST:PORT. Raises UsageError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65535:
        raise UsageError(f"{option} must be HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)


def _run_to_end(
    admission: _Admission, text: str, overrides: list[str], address: tuple[str, int], run_dir: Path,
    samples_of: int | None, device_and_threads: tuple[str, int | None], quiet: bool,
) -> int:
    """Runs the node to its end. Returns the exit code. Blocking."""
    import os

    from decentnode.cli.node import NodePrinter, leave_on_request, leave_on_signals, own_faults
    from decentnode.experiment import load
    from decentnode.launch.children import messages
    from decentnode.launch.children.messages import Task
    from decentnode.launch.files import provenance
    from decentnode.launch.files import run_dir as run_dirs
    from decentnode.launch.nodes.node_process import Link, run_node
    from decentnode.launch.supervising.prepare import facts as facts_of
    from decentnode.system import write_atomic

    granted = admission.granted
    uid = granted.uid
    directory = run_dirs.create(run_dir.absolute(), "joined", 0, [uid])
    config = directory / "experiment.yaml"
    write_atomic(config, text)
    experiment = load(str(config), overrides, start.environ(), False)
    newcomer = newcomer_of(experiment, granted, address, samples_of, device_and_threads)
    request = messages.Request(str(config), overrides, start.environ(), 0, join=True)
    printer = NodePrinter(uid, facts_of(experiment, request), quiet, join=True)
    task = Task(
        request=request, uids=[uid], machine=newcomer.place.machine, run_dir=str(directory),
        threads=device_and_threads[1] or os.cpu_count() or 1, run_id="", in_process=False, progress_seconds=1.0,
        socket_dir="", join=True, began=admission.began,
    )  # fmt: skip
    # Without the command: an invitation in it is a secret
    facts = {"name": experiment.name, "digest": experiment.digest(), "machine": newcomer.place.machine}
    environment = provenance.begin_writing(directory, facts, directory)
    with leave_on_request(directory, uid, leave_on_signals) as attach, own_faults(experiment, task, printer) as inject:

        def tell(message: ChildMessage) -> None:
            admission.tell(message)
            printer.tell(message)
            inject(message)

        code = run_node(task, Link(tell, attach, dict), newcomer)
    environment.join(run_dirs.ENVIRONMENT_SECONDS)
    printer.drain()
    if not quiet:
        click.echo(f"node {uid} ends with exit code {code}; its files are in {directory}")
    return code


def newcomer_of(
    experiment: Experiment, granted: Granted, address: tuple[str, int], samples_of: int | None,
    device_and_threads: tuple[str, int | None],
) -> Newcomer:
    """Returns what the node's process needs to know about its own place in the run."""
    from decentnode.mapping.base import Place
    from decentnode.mapping.newcomer import Newcomer, machine_of

    mapping = experiment.make_mapping()
    device, threads = device_and_threads
    place = Place(granted.uid, machine_of(granted.uid, mapping), 0, *address, device, address[0], threads)
    return Newcomer(place, granted.seat, granted.seats, samples_of)
