"""Reads the hosts of machines from a list, a mapping, a YAML file or decentralizepy's JSON; finds this host's own
names."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import yaml

from decentnode.errors import MappingError
from decentnode.mapping.hosts import address

Addresses = Path | list[str] | dict[int, str]
"""A file, the hosts in order, or machine number -> host."""


def read_hosts(addresses: Addresses | None, machines: int, base_dir: Path) -> list[str]:
    """Returns one host per machine. If no addresses are given, as for a simulation, these are placeholder names for
    several machines, and loopback for one. Raises MappingError, which names the machine without an address."""
    if addresses is None:
        return ["127.0.0.1"] if machines == 1 else [f"machine-{number}" for number in range(machines)]
    where = ""
    given: object = addresses
    if isinstance(addresses, Path):
        path = base_dir / addresses
        where = f"{path}: "
        try:
            given = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
        except OSError as error:
            raise MappingError(f"{path}: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise MappingError(f"{path}: neither YAML nor JSON: {error}") from error
    if isinstance(given, Mapping):
        table = {str(machine): host for machine, host in given.items()}
    elif isinstance(given, Sequence) and not isinstance(given, str):
        table = {str(machine): host for machine, host in enumerate(given)}
    else:
        raise MappingError(f'{where}addresses must be a list of hosts or a mapping such as {{"0": "10.0.0.1"}}')
    for machine in range(machines):
        if not isinstance(table.get(str(machine)), str):
            raise MappingError(f"{where}machine {machine} of {machines} has no address")
    return [str(table[str(machine)]) for machine in range(machines)]


def own_names() -> set[str]:
    """Returns this host's name, in short form and as the system gives it, and the addresses of all its interfaces. Does
    not use a name server."""
    name = socket.gethostname()
    found = {name, name.partition(".")[0], "localhost"}
    for interfaces in psutil.net_if_addrs().values():
        given = [each.address.partition("%")[0] for each in interfaces
                 if each.family in (socket.AF_INET, socket.AF_INET6)]  # fmt: skip
        found |= {str(address(each) or each) for each in given}
    return found


def find_machine_by_name(hosts: Sequence[str], names: set[str]) -> int:
    """Returns the one machine whose host is among `names`, ignoring case. Raises MappingError if none or several
    are."""
    lower = {name.lower() for name in names}
    found = [machine for machine, host in enumerate(hosts) if host.lower() in lower]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{machine}: {host}" for machine, host in enumerate(hosts))
    if not found:
        raise MappingError(
            f"this machine ({', '.join(sorted(names))}) is not in the mapping ({known}); give its number with --machine"
        )
    raise MappingError(
        f"this machine matches several machines of the mapping: {', '.join(map(str, found))} of ({known}); give its "
        "number with --machine"
    )
