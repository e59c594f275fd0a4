"""Decides which nodes are relays, which nodes are reached through them, and at which endpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from decentnode.communication.counters import Counters
from decentnode.communication.parts import Endpoints
from decentnode.communication.zeromq.protocol.link_state import CONTROL
from decentnode.communication.zeromq.relays.relay_end import RelayEnd
from decentnode.communication.zeromq.relays.relay_uplinks import RelayPlan
from decentnode.communication.zeromq.sockets.node_sockets import NodeSockets
from decentnode.communication.zeromq.sockets.security import Keyring
from decentnode.wire.relay import RelayHub


class Relays:
    """One node's use of relays. Every node of the mapping to which others can connect is a relay."""

    def __init__(
        self, uid: int, machine_of: Mapping[int, int], relayed: Collection[int], founders: int,
        *, others: Mapping[int, Endpoints], io: NodeSockets, keyring: Keyring | None,
    ) -> None:
        """relayed: nodes of the mapping to which no other machine can connect. founders: number of nodes in the
        mapping. others: uid -> where the node listens."""
        self.relayed = set(relayed)
        """Nodes that are reached through relays; newcomers are added when they get a seat."""
        self.is_newcomer: Callable[[int], bool] = lambda _uid: False
        self._uid, self._machine_of, self._founders = uid, machine_of, founders
        self._others, self._io, self._keyring = others, io, keyring
        self._relays = [each for each in range(founders) if each not in self.relayed]
        self._own: Endpoints = ("", "")
        self._relay_end: RelayEnd | None = None

    def set_up(self, grows: bool, counters: Counters) -> None:
        """Makes this node a relay if any node may need one; called before the start. grows: whether newcomers may
        join."""
        if (grows or self.relayed) and self._uid in self._relays:
            hub = RelayHub(self._is_known)
            counters.relayed = lambda: hub.relayed_bytes
            self._io.listening.become_relay(hub)

    def begin(self, own: Endpoints) -> None:
        """Starts to use relays, to reach other nodes and to be reached at `own`, as far as needed.

        Called before the start, once the endpoints of the others are known.
        """
        self._own = own
        for uid in self.relayed - {self._uid}:
            if uid in self._others:
                self._io.peers.endpoints[uid] = self.endpoints_to(uid, self._others[uid])
        if self._uid in self.relayed and any(self._is_on_other_machine(each) for each in range(self._founders)):
            self._started_relay_end()

    def endpoints_to(self, uid: int, endpoints: Endpoints) -> Endpoints:
        """Returns the endpoints to which this node connects to reach `uid`, which listens at `endpoints`. May be called
        from any thread; not blocking."""
        if uid in self.relayed and self._is_on_other_machine(uid):
            return self._started_relay_end().reach(uid)
        return endpoints

    def close(self) -> None:
        """Closes the connections to relays; blocks for a second or two if there are any."""
        if self._relay_end is not None:
            self._relay_end.close()

    def _is_on_other_machine(self, uid: int) -> bool:
        return self._machine_of.get(uid) != self._machine_of.get(self._uid)

    def _started_relay_end(self) -> RelayEnd:
        if self._relay_end is None:
            self._relay_end = RelayEnd(RelayPlan(
                uid=self._uid, identity=self._identity, relays=tuple(self._relays), control_of=self._control_of,
                own=self._own, registers=self._uid in self.relayed, keyring=self._keyring,
            ))  # fmt: skip
            self._relay_end.start()
        return self._relay_end

    def _identity(self, uid: int) -> bytes:
        return b"%d" % uid if self._keyring is None else self._keyring.public[uid]

    def _is_known(self, identity: bytes) -> bool:
        if self._keyring is not None:
            return identity in self._keyring.uid_of
        uid = int(identity) if identity.isdigit() and len(identity) < 8 else -1
        return 0 <= uid < self._founders or self.is_newcomer(uid)

    def _control_of(self, uid: int) -> tuple[str, bool]:
        at = self._own[CONTROL] if uid == self._uid else self._others[uid][CONTROL]
        return at, self._io.peers.by_ipv6(at)
