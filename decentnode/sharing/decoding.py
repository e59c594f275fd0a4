"""The one boundary at which what a peer sent becomes what a rule mixes, or a PeerFault."""

from __future__ import annotations

from decentnode.errors import DecentnodeError, PeerFault
from decentnode.graph.base import RoundView
from decentnode.payload import Payload
from decentnode.sharing.base import Sharing

MALFORMED = "malformed_payload"


def decode(rule: Sharing, payload: Payload, uid: int, view: RoundView) -> Payload:
    """What `rule.mix` gets of a payload that came from `uid`, whose tensors fit the rule's schema.

    Raises PeerFault for everything else: numbers that do not fit `rule.scalars`, bytes that `rule.unpack` refuses, and
    whatever it or a library below it raises of them, with that as its cause. Errors of our own (DecentnodeError, a
    failed assertion, no memory) are not taken for a peer's fault.
    """
    for name, spec in rule.scalars.items():
        value = payload.scalars.get(name)
        if not spec.accepts(value):
            raise PeerFault(MALFORMED, f"{name} of {value} from {uid}")
    try:
        return rule.unpack(payload, uid, view)
    except (PeerFault, DecentnodeError, AssertionError, MemoryError):
        raise
    except Exception as error:
        raise PeerFault(MALFORMED, f"{type(error).__name__} from {uid}: {error}") from error
