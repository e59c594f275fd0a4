"""Handshakes that break off while a run starts, told so that both ends are named."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from decentnode.communication.zeromq.sockets import connections
from decentnode.mapping.hosts import address, host_of
from decentnode.wire.session import Session

logger = logging.getLogger(__name__)


class Handshakes:
    """Tells the session of a node who may be whom it waits for in vain, and why.

    ZeroMQ does not let strangers say who they are, so that a node goes by where they are and whom it misses. What it
    finds is noted in the session, which sends it to the root of the control tree, and into the message of a start that
    failed.
    """

    def __init__(self, session: Session, endpoints: Mapping[int, tuple[str, str]]) -> None:
        self._session, self._endpoints = session, endpoints
        self._guessed: set[int] = set()
        """Peers of whom no more is known than that a handshake broke off. Which end hears why, where one has keys and
        the other none, is a race."""

    def refused_here(self, kind: str, where: str, detail: str) -> None:
        """Somebody at address `where`, which is this node's own socket unless it is a stranger's, did not get in."""
        session = self._session
        missing = [uid for uid in session.tree.children if uid not in session.present]
        if kind == "stranger":
            missing = [uid for uid in missing if self._may_be(uid, where)]
        if session.state != "joining" or not missing:
            return
        who = " or ".join(map(session.describe, missing[:3])) + (" or another" if missing[3:] else "")
        own, known = f"node {session.uid}", True
        if kind == "stranger":
            why = f" came from {where or 'this host'} with {detail}, which is not in the public.keys of {own}"
        elif detail == connections.WHY_BROKEN[connections.CRYPTOGRAPHIC]:
            why = f" expects another key for {own}: the public.keys files differ"
        elif detail == connections.WHY_BROKEN[connections.MECHANISM_MISMATCH]:
            why = f" does not use keys as {own} does: communication.security differs"
        else:
            known = False
            why = f", or an unknown process, broke off a handshake with {own}: do public.keys or " \
                  "communication.security differ?"
        self._note(missing[0], who + why, known)

    def _may_be(self, uid: int, where: str) -> bool:
        host = address(host_of(self._endpoints[uid][0])) if uid in self._endpoints else None
        return host is None or host.is_loopback or str(host) == str(address(where) or where)

    def refused_there(self, uid: int, code: int) -> None:
        """`uid`, to which this node connected, broke the handshake off."""
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
        """Once for each peer, so that strangers do not decide how often; a second time where more is known."""
        if uid in self._session.refusals and not (known and uid in self._guessed):
            return
        (self._guessed.discard if known else self._guessed.add)(uid)
        if self._session.note_refusal(uid, text):
            logger.warning("%s", text)
