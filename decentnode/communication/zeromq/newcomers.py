"""Nodes that are not in the mapping (newcomers): how their keys are loaded, and how a transport connects to them."""

from __future__ import annotations

from dataclasses import replace

from decentnode.communication.parts import Growth, TransportParts
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.communication.zeromq.protocol.link_state import CONTROL
from decentnode.communication.zeromq.protocol.reconfiguration import Reconfiguration
from decentnode.communication.zeromq.relays.relays import Relays
from decentnode.communication.zeromq.run_parts import RunParts
from decentnode.communication.zeromq.sockets.security import (
    Admission,
    Keyring,
    load_keyring,
    load_newcomer,
    read_secret,
)
from decentnode.wire.generation import Seated


def with_secret(config: ZeroMQConfig, parts: TransportParts) -> TransportParts:
    """Returns `parts` with the secret of invitations, if this node is in the mapping and the config requires
    invitations. Raises EnvironmentFault if the secret cannot be read."""
    growth = parts.growth
    if growth is None or growth.token or config.invitations is None:
        return parts
    return replace(parts, growth=replace(growth, secret=read_secret(parts.base_dir / config.invitations)))


def keyring_of(config: ZeroMQConfig, parts: TransportParts) -> Keyring | None:
    """Reads the keys of this node; None if nodes have no keys. A newcomer reads its own key and its list of public
    keys, another node those of all nodes of the mapping. Raises EnvironmentFault if a key cannot be read."""
    if config.key_folder is None:
        return None
    folder = parts.base_dir / config.key_folder
    if parts.growth is not None and parts.growth.token:
        return load_newcomer(folder, parts.uid)
    return load_keyring(folder, parts.uid, parts.founders)


class Newcomers:
    """Connects one node's transport to newcomers, and prepares it if the node is a newcomer itself."""

    def __init__(self, run: RunParts, relays: Relays) -> None:
        self._run, self._relays = run, relays

    def admit_through(self, reconfiguration: Reconfiguration, growth: Growth) -> None:
        """Sets up `reconfiguration` to admit newcomers and to send them the experiment; called before the start."""
        security, membership = self._run.security, reconfiguration.membership
        reconfiguration.seated, reconfiguration.config_text = self._seated, growth.experiment
        reconfiguration.control_of = lambda uid: growth.control.get(uid, "")
        reconfiguration.admission = Admission(growth.secret, security)
        membership.learn_seats(growth.seats)
        if security is not None:
            keys = security.keyring.public
            reconfiguration.founder_keys = frozenset(key.decode() for uid, key in keys.items() if uid < growth.founders)
        self._relays.is_newcomer = membership.seats.known.__contains__
        own_seat = membership.seats.known.get(self._run.uid)
        if own_seat is not None and own_seat.via:
            self._relays.relayed.add(self._run.uid)

    def _seated(self, seat: Seated) -> None:
        """Makes the sockets connect to a newcomer at its endpoints. Called with `LinkDriver.lock` held."""
        run, endpoints = self._run, (seat.control, seat.bulk)
        run.addresses.add({seat.uid: endpoints})
        for peers in run.maker.over_tcp:
            peers.add(seat.uid)
        if run.security is not None:
            run.security.keyring.public[seat.uid] = seat.key.encode()
        if seat.relayed:
            self._relays.relayed.add(seat.uid)
        else:
            self._relays.relayed.discard(seat.uid)
        run.driver.io.peers.add_peer(seat.uid, self._relays.endpoints_to(seat.uid, endpoints))
        run.driver.links.sender.control_kind = run.maker.checksum_kind(CONTROL, run.addresses.others)
