"""Explains handshakes that fail while a run starts, naming the nodes at both ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from decentnode.communication.zeromq.sockets import connections
from decentnode.mapping.hosts import address, host_of
from decentnode.wire.session import Session

logger = logging.getLogger(__name__)


class HandshakeFailures:
    """Tells a node's session which of the missing nodes a failed handshake probably belongs to, and why it failed.

    ZeroMQ does not identify the other end of a failed handshake; a node concludes it from the address and from the
    nodes that it misses. The result is noted in the session, which sends it to the root of the control tree and
    includes it in the error of a start that failed.
    """

    def __init__(self, session: Session, endpoints: Mapping[int, tuple[str, str]]) -> None:
        self._session, self._endpoints = session, endpoints
        self._guessed: set[int] = set()
        """Peers whose handshake failed for an unknown reason. If only one of two nodes uses keys, it is a race which of
        them learns the reason."""

    def note_own_refusal(self, kind: str, where: str, detail: str) -> None:
        """Handles a handshake that failed at this node's own listening socket.

        kind: "stranger" if the key or login was refused. where: the address of a stranger; otherwise that of the
        listening socket.
        """
        session = self._session
        missing = [uid for uid in session.tree.children if uid not in session.present]
        if kind == "stranger":
            missing = [uid for uid in missing if self._may_listen_at(uid, where)]
        if session.state != "joining" or not missing:
            return
        who = " or ".join(map(session.describe, missing[:3])) + (" or another" if missing[3:] else "")
        own, known = f"node {session.uid}", True
        if kind == "stranger":
            why = f" came from {where or 'this host'} with {detail}, which is not in the public.keys of {own}"
        elif detail == connections.HANDSHAKE_FAILURES[connections.CRYPTOGRAPHIC]:
            why = f" expects another key for {own}: the public.keys files differ"
        elif detail == connections.HANDSHAKE_FAILURES[connections.MECHANISM_MISMATCH]:
            why = f" does not use keys as {own} does: communication.security differs"
        else:
            known = False
            why = f", or an unknown process, broke off a handshake with {own}: do public.keys or " \
                  "communication.security differ?"
        self._note(missing[0], who + why, known)

    def _may_listen_at(self, uid: int, where: str) -> bool:
        host = address(host_of(self._endpoints[uid][0])) if uid in self._endpoints else None
        return host is None or host.is_loopback or str(host) == str(address(where) or where)

    def note_peer_refusal(self, uid: int, code: int) -> None:
        """Handles a handshake that `uid`, to which this node connected, broke off. code: ZeroMQ's, or 0."""
        session = self._session
        if session.state != "joining" or uid != session.tree.parent:
            return
        if code == connections.REFUSED:
            why = f"does not have the key of node {session.uid} in its public.keys"
        elif code == connections.MECHANISM_MISMATCH:
            why = f"does not use keys as node {session.uid} does: communication.security differs"
        else:
            why = "broke off the handshake: does its key differ from the one in this node's public.keys, or does " \
                  "communication.security differ?"
        self._note(uid, f"{session.describe(uid)} {why}", bool(code))

    def _note(self, uid: int, text: str, known: bool) -> None:
        """Notes a refusal in the session and logs it: once for each peer, so that strangers cannot fill the log, and a
        second time if the reason is known only then."""
        if uid in self._session.refusals and not (known and uid in self._guessed):
            return
        (self._guessed.discard if known else self._guessed.add)(uid)
        if self._session.note_refusal(uid, text):
            logger.warning("%s", text)
