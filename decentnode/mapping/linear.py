"""Identical machines: uid = machine * nodes_per_machine + rank."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from decentnode.config import component
from decentnode.config.component import ADDED
from decentnode.errors import MappingError
from decentnode.mapping.addresses import Addresses, read_hosts
from decentnode.mapping.base import Device, MappingConfig
from decentnode.mapping.table import MachineConfig, Table


class LinearConfig(MappingConfig):
    machines: int = Field(1, ge=1)
    """Number of machines. If there are several, give the command of the run on each of them."""
    nodes_per_machine: int | None = Field(None, ge=1)
    """Number of nodes on every machine. Default: the number of the graph's nodes, divided by the number of machines."""
    addresses: Addresses | None = None
    """Host of each machine, a name or an IPv4 or IPv6 address: a list, {machine: host}, or the path of a YAML or JSON
    file with either. Required for several machines, except in simulations."""
    base_port: int | None = Field(None, ge=1, le=65535)
    """First TCP port on every machine: the machine's r-th node (from 0) takes base_port + 2 r and the next port.
    Default: 20000 if there are several machines; Unix sockets or free ports if there is one."""
    bind: str | None = None
    """Address or name of the interface to listen on, 0.0.0.0 for all with IPv4, "::" for all. Default: the machine's
    own host if there are several machines, else loopback. A name means all addresses that it has on this machine."""
    device: Device | list[Device] = "auto"
    """Where models are stored: auto, cpu, cuda or cuda:N, or a list of these that the nodes of a machine take in turn.
    With auto and cuda, node r takes GPU r modulo the number of GPUs; auto is the CPU if there is no GPU."""
    threads: int | None = Field(None, ge=1)
    """Threads with which a node computes. Default: the machine's cores divided by the number of its node processes, at
    least 1."""
    behind_nat: Annotated[tuple[int, ...], ADDED] = ()
    """Numbers of machines to which no other machine can connect, because a router translates their addresses. They
    connect to the others as usual; what the others send to their nodes is forwarded by nodes of other machines, their
    relays."""


class Linear(Table):
    Config: ClassVar[type[component.Config]] = LinearConfig

    def __init__(self, config: LinearConfig, *, base_dir: Path = Path()) -> None:
        """Raises MappingError for too few addresses, colliding ports, and if the number of nodes per machine is not
        given and cannot be derived."""
        if config.nodes_per_machine is None:
            raise MappingError(f"mapping.nodes_per_machine must be given: the nodes of the graph are not a multiple of "
                               f"{config.machines} machines")  # fmt: skip
        if wrong := [number for number in config.behind_nat if not 0 <= number < config.machines]:
            raise MappingError(f"behind_nat must have numbers of machines, below {config.machines}, got {wrong[0]}")
        self._set_machines(
            [
                MachineConfig(
                    nodes=config.nodes_per_machine,
                    host=host,
                    base_port=config.base_port,
                    bind=config.bind,
                    device=config.device,
                    threads=config.threads,
                    behind_nat=number in config.behind_nat,
                )
                for number, host in enumerate(read_hosts(config.addresses, config.machines, base_dir))
            ]
        )
