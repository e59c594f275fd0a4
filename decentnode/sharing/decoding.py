"""The one place where what a peer sent becomes what a rule mixes, or a PeerFault."""

from __future__ import annotations

from decentnode.errors import DecentnodeError, PeerFault
from decentnode.graph.base import RoundView
from decentnode.payload import Payload
from decentnode.sharing.base import Sharing

MALFORMED = "malformed_payload"


def decode(rule: Sharing, payload: Payload, uid: int, view: RoundView) -> Payload:
    """Returns what `rule.mix` receives for a payload from `uid`, whose tensors already fit the rule's schema.

    Raises PeerFault for numbers that do not fit the rule's requirements, for bytes that `rule.unpack` refuses, and for
    whatever else `unpack` or a library below it raises, with that as its cause. Errors of this program
    (DecentnodeError, a failed assertion, no memory) pass through: they are not the peer's fault.
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
