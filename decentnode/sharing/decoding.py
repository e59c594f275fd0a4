"""Decodes payloads from peers; the only place that turns malformed ones into a PeerFault."""

from __future__ import annotations

from decentnode.errors import DecentnodeError, PeerFault
from decentnode.graph.base import RoundView
from decentnode.payload import Payload
from decentnode.sharing.base import Sharing

MALFORMED = "malformed_payload"


def decode(rule: Sharing, payload: Payload, uid: int, view: RoundView) -> Payload:
    """Returns the payload that `rule.mix` receives for a payload from `uid`, whose tensors have been checked against
    the rule's schema.

    Raises PeerFault for scalars that do not match the rule's requirements, for payloads that `rule.unpack` refuses, and
    for any other exception of `unpack` or a library below it, with that as its cause. Errors of this program
    (DecentnodeError, a failed assertion, lack of memory) are passed through, as they are not the peer's fault.
    """
    for name, spec in rule.requirements.scalars.items():
        value = payload.scalars.get(name)
        if not spec.accepts(value):
            raise PeerFault(MALFORMED, f"{name} of {value} from {uid}")
    try:
        return rule.unpack(payload, uid, view)
    except (PeerFault, DecentnodeError, AssertionError, MemoryError):
        raise
    except Exception as error:
        raise PeerFault(MALFORMED, f"{type(error).__name__} from {uid}: {error}") from error
