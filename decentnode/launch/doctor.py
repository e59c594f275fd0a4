"""Checks whether this machine can run its share of an experiment and can reach the others. Every check has a deadline.

Across machines one doctor runs on each. They listen on the first port of the run itself and ask each other small
questions: [kind, number, payload] as msgpack, sizes bounded, nothing else is answered.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import psutil
import zmq

from decentnode import clock
from decentnode.build import schemas_of, shared_model, threads_of
from decentnode.communication.shared_memory.layout import Layout
from decentnode.communication.shared_memory.segment import FOLDER
from decentnode.communication.zeromq.sockets.connections import listen
from decentnode.communication.zeromq.sockets.security import load_keyring
from decentnode.errors import DecentnodeError
from decentnode.experiment import Experiment
from decentnode.experiment.initial_model import module_without_values
from decentnode.formatting import size
from decentnode.launch import open_files
from decentnode.mapping.hosts import by_ipv6, endpoint, only_first_tried, resolved, unreachable

ASK_SECONDS = 2.0
MAX_PAYLOAD = 1 << 20
PINGS, BLOCKS = 20, 8
SMALLEST_BLOCK, BLOCK_SECONDS = 1 << 14, 10.0
"""A block of many packets, and the longest time for its answer."""
MEASURED_SECONDS, REPEATED_SECONDS = 0.5, 4.0
"""Blocks grow until one takes the former time longer than a ping; then they are repeated for the latter time."""
MAX_SKEW_SECONDS = 1.0


@dataclass(frozen=True)
class Finding:
    """The result of one check. `ok` is False where a run would fail, None where it would only be slower."""

    what: str
    ok: bool | None
    detail: str
    link: dict[str, Any] | None = None
    """Of a connection to another machine: an entry of simulate.links.machines."""


def local(experiment: Experiment, machine: int) -> Iterator[Finding]:
    """Yields findings about this machine: cores, memory, shared memory, open files and keys that its nodes need."""
    mapping = experiment.make_mapping()
    uids = mapping.local(machine)
    yield _check_cores(experiment, uids)
    experiment.open_data().shares()  # raises what is wrong with the data
    shared = shared_model(experiment, module_without_values(experiment, experiment.open_data().spec))
    model = shared.model
    need, free = 3 * model.parameters.nbytes * len(uids), psutil.virtual_memory().available
    yield Finding("memory", need < free, f"{len(uids)} nodes need about {size(need)} for models and gradients, "
                                         f"{size(free)} are free")  # fmt: skip
    schemas = schemas_of(shared.make_rules(), model, shared.fragments, experiment.node.schedule)
    yield from _check_shared_memory(experiment, schemas, len(uids))
    files = open_files.count(experiment, machine)
    yield Finding("open files", files.fit, str(files))
    yield from _check_keys(experiment, uids)


def _check_cores(experiment: Experiment, uids: Any) -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = sum(threads_of(experiment, uid) for uid in uids)
    fits = threads <= cores or None
    return Finding("cores", fits, f"{cores} cores for {len(uids)} nodes with {threads} threads in all")


def _check_shared_memory(experiment: Experiment, schemas: Any, nodes: int) -> Iterator[Finding]:
    config = experiment.communication
    if nodes < 2 or config.shared_memory is False:
        return
    required = config.shared_memory is True
    if not FOLDER.is_dir():
        yield Finding("shared memory", None if not required else False, f"{FOLDER} does not exist: payloads use ipc "
                                                                        "instead")
        return
    need = Layout(schemas, experiment.make_graph().num_nodes).size * nodes
    free = shutil.disk_usage(FOLDER).free
    enough: bool | None = need + (16 << 20) <= free
    if not enough and not required:
        enough = None
    yield Finding("shared memory", enough, f"{FOLDER}: {nodes} nodes need {size(need)}, {size(free)} are free")


def _check_keys(experiment: Experiment, uids: Any) -> Iterator[Finding]:
    config = experiment.communication
    folder = config.key_folder
    if folder is None:
        return
    try:
        for uid in uids:
            load_keyring(experiment.base_dir / folder, uid, experiment.make_mapping().num_nodes)
    except DecentnodeError as error:
        yield Finding("keys", False, str(error))
    else:
        yield Finding("keys", True, f"{folder}: complete for the {len(uids)} nodes of this machine")


def names(experiment: Experiment, machine: int) -> Finding:
    """Returns whether machines can reach each other by the mapping's hosts, as they resolve here. Blocking for a few
    seconds at most."""
    mapping = experiment.make_mapping()
    error, warning = unreachable(mapping, machine)
    if error or warning:
        return Finding("addresses", False if error else None, error or warning)
    own = mapping.place(mapping.local(machine)[0])
    return Finding("addresses", True, f"machine {machine} is {own.host}, listens on {own.bind}")


def address_of(host: str, port: int | None) -> str:
    """Returns "host:port", with an IPv6 address in brackets."""
    return endpoint(host, port or 0).removeprefix("tcp://")


def ports(experiment: Experiment, machine: int) -> Finding:
    """Returns whether every port of this machine's nodes is free."""
    mapping = experiment.make_mapping()
    addresses = [(p.bind, p.port + k) for u in mapping.local(machine) if (p := mapping.place(u)).port is not None
              for k in (0, 1)]  # fmt: skip
    unusable = []
    with zmq.Context() as context:
        for host, port in addresses:
            with context.socket(zmq.ROUTER) as probe:
                try:
                    listen(probe, host, port)
                except zmq.ZMQError as error:
                    unusable.append(f"{address_of(host, port)} ({error.strerror})")
    if not addresses:
        return Finding("ports", True, "none needed: Unix sockets, or free ports")
    listed = ", ".join(unusable[:5]) + (", ..." if len(unusable) > 5 else "")
    return Finding("ports", not unusable, f"{len(unusable)} of {len(addresses)} cannot be used: {listed}" if unusable
                   else f"{len(addresses)} ports from {address_of(*addresses[0])} are free")  # fmt: skip


class DoctorServer:
    """Answers the questions of other machines' doctors, in a thread, while the block of this context manager runs."""

    def __init__(self, bind: str, port: int, machine: int, others: Iterable[int] = ()) -> None:
        """machine: this one. others: the machines whose doctors may ask."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.maxmsgsize = 2 * MAX_PAYLOAD
        self._router.linger = 0
        listen(self._router, bind, port)
        self._machine, self._others = machine, frozenset(others)
        self._over = threading.Event()
        self.heard: set[int] = set()
        """Machines that have asked."""
        self.done: set[int] = set()
        """Machines that have asked all their questions."""
        self._thread = threading.Thread(target=self._answer, daemon=True)

    def __enter__(self) -> DoctorServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(5)
        self._router.close(linger=500)
        self._context.term()

    def _answer(self) -> None:
        while not self._over.is_set():
            if not self._router.poll(100):
                continue
            who, *frames = self._router.recv_multipart()
            question = _unpack(frames[0]) if len(frames) == 1 else None
            if question is None:
                continue
            kind, number, payload = question
            if isinstance(payload, int) and payload in self._others:
                (self.done if kind == "done" else self.heard).add(payload)
            reply = {"time": clock.wall(), "ping": None, "block": None, "done": None, "who": self._machine}.get(kind)
            self._router.send_multipart([who, msgpack.packb([kind, number, reply])])


def _unpack(data: bytes) -> tuple[str, int, Any] | None:
    try:
        found = msgpack.unpackb(data, max_bin_len=MAX_PAYLOAD, max_str_len=16, max_array_len=3, max_map_len=0,
                                max_ext_len=0)  # fmt: skip
    except Exception:
        return None
    if not isinstance(found, list) or len(found) != 3 or type(found[0]) is not str or type(found[1]) is not int:
        return None
    return found[0], found[1], found[2]


class DoctorClient:
    """A connection to the doctor of one other machine."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, port: int) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.maxmsgsize = 2 * MAX_PAYLOAD
        self._socket.linger = 500
        self.host = host
        self._socket.ipv6 = by_ipv6(resolved(host))
        self._socket.connect(endpoint(host, port))
        self._number = 0

    def ask(self, kind: str, payload: Any = None, timeout_seconds: float = ASK_SECONDS) -> tuple[Any, float] | None:
        """Ask a question. Returns (answer, seconds of the round trip), or None when no answer came in time.
        Blocking."""
        self._number += 1
        started = clock.now()
        self._socket.send(msgpack.packb([kind, self._number, payload]))
        while (left := started + timeout_seconds - clock.now()) > 0 and self._socket.poll(int(1000 * left) + 1):
            answer = _unpack(self._socket.recv())
            if answer is not None and answer[0] == kind and answer[1] == self._number:
                return answer[2], clock.now() - started
        return None

    def speed(self, trip: float) -> float | None:
        """Measures the bandwidth to the other machine in bytes per second; None if even the smallest block had no
        answer in time. Blocking. trip: seconds of the shortest round trip of a small message; with a longer one,
        blocks could seem to take less than no time.

        On a slow link, a block of 1 MiB would take longer than any deadline that suits a broken one."""
        count = SMALLEST_BLOCK
        found = self.ask("block", bytes(count), BLOCK_SECONDS)
        while found is not None and found[1] - trip < MEASURED_SECONDS and count < MAX_PAYLOAD:
            count *= 2
            found = self.ask("block", bytes(count), BLOCK_SECONDS)
        if found is None:
            return None
        repeats = min(BLOCKS, int(REPEATED_SECONDS / found[1]))
        again = [self.ask("block", bytes(count), BLOCK_SECONDS) for _ in range(repeats)]
        seconds = statistics.median(each[1] for each in (found, *again) if each is not None)
        return count / max(1e-9, seconds - trip)

    def close(self) -> None:
        self._socket.close()


def remote(experiment: Experiment, machine: int, wait_seconds: float) -> Iterator[Finding]:
    """Yields findings about the connection to every other machine, whose doctor must run at the same time. Blocking for
    at most `wait_seconds` until they answer."""
    mapping = experiment.make_mapping()
    first = mapping.first_places()
    own = first[machine]
    assert own.port is not None
    others = [m for m in range(mapping.num_machines) if m != machine]
    deadline = clock.now() + wait_seconds
    with DoctorServer(own.bind, own.port, machine, others) as server, zmq.Context() as context:
        clients: dict[int, DoctorClient] = {}
        for other in others:
            if first[other].behind_nat:
                yield Finding(f"machine {other}", True, "behind NAT: other nodes send to it through relays")
                continue
            port = first[other].port
            assert port is not None
            clients[other] = DoctorClient(context, first[other].host, port)
        try:
            for other, client in clients.items():
                where = f"machine {other} ({address_of(first[other].host, first[other].port)})"
                way = where, interface_to(first[other].host)
                yield from _check_machine(client, server.heard, (machine, other), way, deadline)
            for other, client in clients.items():
                client.ask("done", machine, 0.5 if other not in server.done else ASK_SECONDS)
            while not set(others) <= server.done and clock.now() < deadline:
                clock.sleep(0.05)
        finally:
            for client in clients.values():
                client.close()


def interface_to(host: str) -> str | None:
    """Returns the name of the network interface by which this machine reaches a host, as its routes say; None where
    there is no way. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram socket: chooses the way, and no more
            own = probe.getsockname()[0].partition("%")[0]
    except OSError:
        return None
    return next((name for name, addresses in sorted(psutil.net_if_addrs().items())
                 if any(each.address.partition("%")[0] == own for each in addresses)), None)  # fmt: skip


def _no_answer(addresses: list[str], has_asked: bool) -> str:
    """Returns why a machine may not answer. addresses: those of its host, as resolved here. has_asked: whether it has
    asked this machine."""
    if not addresses:
        return "its name cannot be resolved here: correct it, or add it to the name server or to this machine's " \
               "/etc/hosts"  # fmt: skip
    return "no answer: " + (
        "it reaches this machine, but connections to it do not pass: check its address in the mapping, open its ports "
        "in its firewall or router, or list it under mapping.behind_nat"
        if has_asked else "start decentnode doctor there too, check address, port and firewall"
    ) + only_first_tried("this name", addresses)


def _check_machine(
    client: DoctorClient, heard: set[int], pair: tuple[int, int], way: tuple[str, str | None], deadline: float
) -> Iterator[Finding]:
    """heard: machines that have asked this one. pair: this machine and the other. way: the other's name in messages,
    and the interface that leads to it."""
    (own, other), (where, interface) = pair, way
    hello = None
    while hello is None and clock.now() < deadline:
        hello = client.ask("who", own, min(ASK_SECONDS, max(0.1, deadline - clock.now())))
    if hello is None:
        yield Finding(where, False, _no_answer(resolved(client.host), other in heard))
        return
    if hello[0] != other:
        yield Finding(where, False, f"answers as machine {hello[0]}: the mapping's addresses are mixed up")
        return
    trips = [found[1] for _ in range(PINGS) if (found := client.ask("ping")) is not None]
    before = clock.wall()
    clock_reply = client.ask("time")
    if not trips or clock_reply is None or not isinstance(clock_reply[0], float):
        yield Finding(where, False, "answers, but not every time: packets get lost")
        return
    skew = clock_reply[0] - (before + clock_reply[1] / 2)
    trip = statistics.median(trips)
    by = f" by {interface}" if interface else ""
    speed = client.speed(min(trips))
    if speed is None:
        yield Finding(where, False, f"answers small messages{by} in {1e3 * trip:.2f} ms, but a larger one not within "
                                    f"{BLOCK_SECONDS:g} s: large packets get lost (try a smaller MTU on both machines, "
                                    "such as ip link set dev INTERFACE mtu 1280), or the link is too slow")  # fmt: skip
        return
    link = {"machines": [own, other], "mbit_per_second": round(8e-6 * speed, 3), "latency_seconds": round(trip / 2, 7),
            "interface": interface}  # fmt: skip
    yield Finding(where, True, f"round trip {1e3 * trip:.2f} ms (worst {1e3 * max(trips):.2f}), "
                               f"about {size(speed)}/s{by}", link)  # fmt: skip
    yield Finding(f"clock of machine {other}", abs(skew) < MAX_SKEW_SECONDS or None, f"{1e3 * skew:+.1f} ms from ours")
