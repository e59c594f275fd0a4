"""Where the nodes of a run listen: binds this node's sockets, keeps the others' endpoints, and names nodes in
reasons."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence

import zmq

from decentnode.communication.parts import BindPlan, Endpoints
from decentnode.communication.zeromq.protocol.link_state import BULK, CONTROL
from decentnode.communication.zeromq.sockets.connections import listen
from decentnode.errors import EnvironmentFault
from decentnode.mapping.hosts import endpoint, host_of, unknown_name


class Addresses:
    """The endpoints that one node knows: its own, according to its `BindPlan`, and those of the others."""

    def __init__(self, uid: int, machine_of: Mapping[int, int], plan: BindPlan) -> None:
        self.others: dict[int, Endpoints] = {}
        """uid -> where that node listens; without this node itself."""
        self._uid, self._machine_of, self._plan = uid, machine_of, plan

    def describe(self, uid: int) -> str:
        """Returns the name of a node for messages: its uid, its machine if there are several, and its TCP address."""
        machine = self._machine_of.get(uid)
        where = [] if machine is None or len(set(self._machine_of.values())) == 1 else [f"machine {machine}"]
        if uid in self.others and self.others[uid][CONTROL].startswith("tcp://"):
            where.append(self.others[uid][CONTROL].removeprefix("tcp://"))
        return f"node {uid}" + (f" ({', '.join(where)})" if where else "")

    def add(self, endpoints: Mapping[int, Endpoints]) -> None:
        """Adds where other nodes listen; an entry for this node itself is ignored."""
        self.others.update((uid, address) for uid, address in endpoints.items() if uid != self._uid)

    def over_tcp(self) -> list[set[int]]:
        """Returns, for each plane, the other nodes that are reached over TCP."""
        return [{uid for uid, address in self.others.items() if address[plane].startswith("tcp://")}
                for plane in (CONTROL, BULK)]  # fmt: skip

    def bind(self, listeners: Sequence[zmq.Socket[bytes]]) -> Endpoints:
        """Binds the sockets of both planes and returns the endpoints for nodes on the same host. Raises
        EnvironmentFault if a port is taken."""
        plan, local = self._plan, []
        for plane, listener in enumerate(listeners):
            if plan.ipc_dir is not None:
                local.append(f"ipc://{plan.ipc_dir}/{self._uid}{'cb'[plane]}")
                self._listen(listener, local[-1])
            if plan.port is not None:
                self._listen(listener, plan.host, plan.port + plane)
            elif plan.ipc_dir is None and plan.again:
                self._listen(listener, host_of(plan.again[plane]), int(plan.again[plane].rpartition(":")[2]))
            elif plan.ipc_dir is None:
                self._listen(listener, plan.host)
            if plan.ipc_dir is None:
                local.append(listener.getsockopt_string(zmq.LAST_ENDPOINT))
        return local[CONTROL], local[BULK]

    def _listen(self, listener: zmq.Socket[bytes], host: str, port: int | None = None) -> None:
        """Binds a socket. host: a host name, or a complete ipc:// endpoint. Raises EnvironmentFault."""
        try:
            if host.startswith("ipc://"):
                listener.bind(host)
            else:
                listen(listener, host, port)
        except zmq.ZMQError as error:
            what = f"host or bind of machine {self._machine_of[self._uid]}"
            if not host.startswith("ipc://") and (unknown := unknown_name(host, what)):
                raise EnvironmentFault(f"node {self._uid} cannot listen: {unknown}") from error
            where = host if host.startswith("ipc://") else endpoint(host, "*" if port is None else port)
            before = ", where it listened before it was started again" if self._plan.again else ""
            why, advice = str(error.strerror).partition(" (addr=")[0], "free the port or choose another "
            if error.errno == errno.EADDRNOTAVAIL:
                advice = f"no interface of this machine has this address: is it machine {self._machine_of[self._uid]}? "
            raise EnvironmentFault(
                f"node {self._uid} cannot listen on {where}{before}: {why}; "
                f"{advice}(mapping.base_port, mapping.bind)"
            ) from error
