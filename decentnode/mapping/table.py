"""Different machines: each with its own number of nodes, host, ports, interface, device and threads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

import pydantic
from pydantic import Field

from decentnode.config import component
from decentnode.config.component import ADDED
from decentnode.errors import MappingError
from decentnode.mapping.addresses import find_machine_by_name
from decentnode.mapping.base import Device, Mapping, MappingConfig, Place
from decentnode.mapping.hosts import address, normalized_host

PORTS_PER_NODE = 2
DEFAULT_BASE_PORT = 20000


class MachineConfig(pydantic.BaseModel):
    """One machine of a table."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    nodes: int = Field(ge=1)
    """Number of nodes on this machine."""
    host: str = "127.0.0.1"
    """Name or address (IPv4 or IPv6) by which the other machines reach this one."""
    base_port: int | None = Field(None, ge=1, le=65535)
    """First TCP port of this machine: its r-th node (from 0) takes base_port + 2 r and the next port. Default: free
    ports if there is one machine, 20000 if there are several."""
    bind: str | None = None
    """Address or name of the interface to listen on, 0.0.0.0 for all with IPv4, "::" for all. Default: `host` if there
    are several machines, else loopback. A name means all addresses that it has on this machine."""
    device: Device | list[Device] = "auto"
    """Where models are stored: auto, cpu, cuda or cuda:N, or a list of these that the nodes take in turn. With auto and
    cuda, node r takes GPU r modulo the number of GPUs; auto is the CPU if there is no GPU."""
    threads: int | None = Field(None, ge=1)
    """Threads with which a node computes. Default: the machine's cores divided by the number of its node processes, at
    least 1."""
    behind_nat: Annotated[bool, ADDED] = False
    """Whether other machines cannot connect to this one, because a router translates its address. It connects to the
    others as usual; what they send to its nodes is forwarded by nodes of other machines, its relays."""


class TableConfig(MappingConfig):
    machines: list[MachineConfig] = Field(min_length=1)
    """One entry per machine, in order. Nodes get their uids in this order, from 0 on."""


class Table(Mapping):
    """uid = number of nodes on the earlier machines + rank."""

    Config: ClassVar[type[component.Config]] = TableConfig

    def __init__(self, config: TableConfig, *, base_dir: Path = Path()) -> None:  # noqa: ARG002
        self._set_machines(config.machines)

    def _set_machines(self, machines: list[MachineConfig]) -> None:
        for number, machine in enumerate(machines):
            if not machine.device:
                raise MappingError(f"device of machine {number} must name at least one, got {machine.device!r}")
        count = len(machines)
        machines = [self._with_normalized_hosts(machine, number, count) for number, machine in enumerate(machines)]
        if all(machine.behind_nat for machine in machines):
            raise MappingError("behind_nat: at least one machine must be one that the others can connect to")
        self.machines = machines
        self.num_machines = len(machines)
        self._first = [sum(m.nodes for m in machines[:i]) for i in range(len(machines) + 1)]
        self.num_nodes = self._first[-1]
        self._places = [self._place(machine, rank) for machine, m in enumerate(machines) for rank in range(m.nodes)]
        self._check_ports()

    @staticmethod
    def _with_normalized_hosts(machine: MachineConfig, number: int, machines: int) -> MachineConfig:
        """Returns the same machine with its host and bind in a canonical form. Raises MappingError if one of them is
        not valid."""
        normalized = {}
        for key, host in (("host", machine.host), ("bind", machine.bind)):
            try:
                normalized[key] = None if host is None else normalized_host(host)
            except ValueError as error:
                raise MappingError(f"{key} of machine {number} {error}") from None
        host = normalized["host"]
        known = address(host) if host else None
        if machines > 1 and (host == "*" or (known is not None and known.is_unspecified)):
            raise MappingError(
                f"host of machine {number} must be the address by which the others reach it, got {host!r}; to listen "
                "on every "
                f"interface give its own address or name here, and bind: {'0.0.0.0' if host == '*' else host}"
            )
        return machine.model_copy(update=normalized)

    def _place(self, machine: int, rank: int) -> Place:
        m = self.machines[machine]
        single = self.num_machines == 1
        base = m.base_port if single else m.base_port or DEFAULT_BASE_PORT
        port = None if base is None else base + PORTS_PER_NODE * rank
        bind = m.bind or ("127.0.0.1" if single else m.host)
        device = m.device if isinstance(m.device, str) else m.device[rank % len(m.device)]
        return Place(self._first[machine] + rank, machine, rank, m.host, port, device, bind, m.threads,
                     m.behind_nat)  # fmt: skip

    def _check_ports(self) -> None:
        taken: dict[tuple[str, int], Place] = {}
        for place in self._places:
            if place.port is None:
                continue
            if place.port + PORTS_PER_NODE - 1 > 65535:
                raise MappingError(
                    f"node {place.uid} (machine {place.machine}, rank {place.rank}) would take port "
                    f"{place.port + 1}; ports end at 65535: lower base_port"
                )
            for port in range(place.port, place.port + PORTS_PER_NODE):
                other = taken.setdefault((place.host, port), place)
                if other is not place:
                    raise MappingError(
                        f"port {port} on {place.host} is taken twice: by node {other.uid} (machine "
                        f"{other.machine}) and node {place.uid} (machine {place.machine}); give the "
                        f"machines different hosts or base_port"
                    )

    def place(self, uid: int) -> Place:
        if not 0 <= uid < self.num_nodes:
            raise MappingError(f"uid must be in [0, {self.num_nodes}), got {uid}")
        return self._places[uid]

    def uid(self, machine: int, rank: int) -> int:
        if not 0 <= machine < self.num_machines:
            raise MappingError(f"machine must be in [0, {self.num_machines}), got {machine}")
        if not 0 <= rank < self.machines[machine].nodes:
            raise MappingError(f"rank on machine {machine} must be in [0, {self.machines[machine].nodes}), got {rank}")
        return self._first[machine] + rank

    def find_machine(self, names: set[str]) -> int:
        return 0 if self.num_machines == 1 else find_machine_by_name([m.host for m in self.machines], names)
