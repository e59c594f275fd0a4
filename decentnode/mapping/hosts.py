"""Hosts as users write them (names, IPv4 and IPv6 addresses), and the addresses that they resolve to on this
machine."""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
from collections.abc import Iterable

import psutil

from decentnode import clock
from decentnode.mapping.base import Mapping, Place

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_.])?")
RESOLVE_SECONDS = 5.0
"""Longest wait for the system's resolver; a name that it has not found by then counts as unknown."""


def address(host: str) -> Address | None:
    """Returns the address that `host` is, where an IPv6 address may have brackets; None for names."""
    try:
        found = ipaddress.ip_address(host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def normalized_host(host: str) -> str:
    """Returns `host` in a form that can be compared: addresses compressed and without brackets, names unchanged.

    Raises ValueError if it is not a host, and for IPv6 link-local addresses.
    """
    found = address(host)
    if found is not None:
        if found.version == 6 and found.is_link_local:
            raise ValueError(
                f"must not be a link-local address, got {host!r}: it means a different machine on every link; give a "
                f"global or unique local one (fd00::/8), or a name"
            )
        if "%" in host:
            raise ValueError(f"must be an address without a zone, got {host!r}")
        return str(found)
    if host == "*" or _NAME.fullmatch(host):
        return host
    raise ValueError(f"must be a name, an IPv4 or an IPv6 address, without a port, got {host!r}")


def endpoint(host: str, port: int | str) -> str:
    """Returns a ZeroMQ endpoint: tcp://host:port, with an IPv6 address in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host and host[0] != "[" else f"tcp://{host}:{port}"


def host_of(endpoint_: str) -> str:
    """Returns the host of a tcp endpoint, without brackets; empty for any other endpoint."""
    return endpoint_[6:].rpartition(":")[0].strip("[]") if endpoint_.startswith("tcp://") else ""


def resolved(host: str) -> list[str]:
    """Returns the addresses of a host, IPv4 before IPv6, without link-local ones; none if the name is unknown on this
    machine.

    Blocking as long as the system's resolver is.
    """
    literal = address(host)
    if literal is not None:
        return [str(literal)]
    try:
        rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    found = [address(str(row[4][0]).partition("%")[0]) for row in rows]
    usable = [each for each in found if each is not None and not (each.version == 6 and each.is_link_local)]
    return list(dict.fromkeys(str(each) for each in sorted(usable, key=lambda each: each.version)))


def resolve_all(hosts: Iterable[str], seconds: float = RESOLVE_SECONDS) -> dict[str, list[str]]:
    """Returns the addresses of many hosts, looked up concurrently. Blocking for `seconds` at most; names not found by
    then have no addresses."""
    found: dict[str, list[str]] = {}
    missing = set()
    for host in set(hosts):
        literal = address(host)
        if literal is None:
            missing.add(host)
        else:
            found[host] = [str(literal)]

    def ask(host: str) -> None:
        answers[host] = resolved(host)

    answers: dict[str, list[str]] = {}
    threads = [threading.Thread(target=ask, args=(host,), daemon=True) for host in sorted(missing)]
    for thread in threads:
        thread.start()
    deadline = clock.now() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - clock.now()))
    return found | {host: answers.get(host, []) for host in missing}


def by_ipv6(addresses: list[str]) -> bool:
    """Returns whether a host with these addresses is reached over IPv6: it has no IPv4 address, or none is known
    yet."""
    return not any(":" not in each for each in addresses)


def only_first_tried(name: str, addresses: list[str]) -> str:
    """Returns what may be wrong if nothing answers at a name with these addresses, as the end of a sentence; "" if
    there is only one."""
    if len(addresses) < 2:
        return ""
    return (f"; of the addresses of {name} ({', '.join(addresses)}) only the first is tried: give the right one "
            "instead of the name")  # fmt: skip


def is_loopback(addresses: list[str]) -> bool:
    """Returns whether there are addresses and all of them are loopback addresses, which lead only to this machine."""
    return bool(addresses) and all(ipaddress.ip_address(each).is_loopback for each in addresses)


def is_interface(name: str) -> bool:
    """Returns whether this machine has a network interface of this name, such as eth0."""
    return name in psutil.net_if_addrs()


def unknown_name(host: str, what: str) -> str:
    """Returns why a node cannot listen on `host`, if it is a name that this machine cannot resolve; else "". Blocking
    as long as the system's resolver is.

    what: where the mapping has the name, such as "host of machine 1".
    """
    if address(host) is not None or host == "*" or is_interface(host) or resolved(host):
        return ""
    return (
        f"{what} in the mapping is {host!r}, a name that cannot be resolved on this machine, which must listen there: "
        "correct it, add it to the name server or to this machine's /etc/hosts, or give the address of the "
        f"network interface in its place"
    )


def named_by(place: Place) -> str:
    """Returns which key of the mapping gives the address that a node listens on: "host of machine N" or "bind of
    machine N"."""
    return f"{'host' if place.bind == place.host else 'bind'} of machine {place.machine}"


def unreachable(mapping: Mapping, machine: int) -> tuple[str, str]:
    """Returns (error, warning): why other machines cannot reach this one, and why this one may be unable to reach
    others, because a name cannot be resolved here or a host is a loopback address. Each is empty if there is no reason,
    and both if all machines are on loopback.

    A node that listens on 127.0.0.1, because this machine's /etc/hosts maps its own name to it, would wait for ever for
    the others, which connect to the machine's real address or to themselves. A `bind` to a loopback address is
    accepted, as is another machine's loopback host, because a tunnel may lead there. A name of another machine may
    become resolvable while the nodes wait for it. Blocking for RESOLVE_SECONDS at most, and for a name that this
    machine listens on as long as the system's resolver is.
    """
    places = mapping.first_places()
    own = places[machine]
    if own.port is not None and (problem := unknown_name(own.bind, named_by(own))):
        return problem, ""
    if mapping.num_machines < 2:
        return "", ""
    found = resolve_all({place.host for place in places} | {own.bind})
    loopback = [number for number, place in enumerate(places) if is_loopback(found[place.host])]
    others = [number for number in range(len(places)) if number != machine]
    asked_for = own.bind != own.host and address(own.bind) is not None
    if len(loopback) < len(places) and is_loopback(found[own.bind]) and not asked_for:
        other = min(others, key=lambda number: (number in loopback, number))
        return _on_loopback(own, found[own.bind][0], f"machine {other} ({places[other].host})"), ""
    unknown = [f"{places[number].host!r} (machine {number})" for number in others if not found[places[number].host]]
    if unknown:
        return "", (
            f"a name in the mapping cannot be resolved here: {', '.join(unknown[:5])}{', ...' if unknown[5:] else ''}; "
            "the run waits for the nodes there until it can be resolved; correct it, or add it to the name server or "
            "to this "
            f"machine's /etc/hosts"
        )
    wrong = [number for number in loopback if number != machine]
    if wrong and len(loopback) < len(places):
        host = places[wrong[0]].host
        meant = f"{host!r} in the mapping" + ("" if address(host) else f", which is {found[host][0]} here")
        return "", (
            f"machine {wrong[0]} is {meant}: unless a tunnel leads there, this machine reaches itself instead"
        )
    return "", ""


def _on_loopback(own: Place, found: str, other: str) -> str:
    """Returns the error for a node that listens on loopback. found: the address that `own.bind` resolves to here.
    other: the machine that cannot reach it."""
    give = f"give machine {own.machine} the address of its network interface (mapping)"
    if address(own.bind) is not None:
        return f"machine {own.machine} listens on {own.bind}, which only itself can reach, not {other}: {give}"
    return (
        f"machine {own.machine} listens on {own.bind!r}, which is {found} here: {other} cannot reach that; {give}, or "
        f"correct what this machine's /etc/hosts says of {own.bind!r}"
    )
