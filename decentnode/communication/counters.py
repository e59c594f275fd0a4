"""Counts what a node exchanged with its peers, by purpose, and the bytes that it refused, by reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field

from decentnode.metrics.figures import PURPOSES, Purpose
from decentnode.payload import SCALAR_BYTES, Payload, PayloadBytes

EVALUATION = "evaluation/"
"""Prefix of the keys of means whose bytes count as evaluation; the bytes of other means count as control."""


@dataclass
class EdgeCounters:
    """Counts of what passed between this node and one peer since the start, by purpose (metrics/figures.py).

    Data and metadata count the payloads' own bytes; the other purposes count the bytes given to sockets. Because `+=`
    is not atomic, every field is written by one thread only, or under one lock.
    """

    data_bytes_sent: int = 0
    """Written by the training thread, like the metadata and announced bytes: counted when a payload is given to the
    transport."""
    metadata_bytes_sent: int = 0
    announced_bytes_sent: int = 0
    """The part of the protocol bytes for doorbells and for headers of payloads inside a clique."""
    framing_bytes_sent: int = 0
    """The rest of the protocol bytes. Written with `LinkDriver.lock` held, like evaluation and control."""
    evaluation_bytes_sent: int = 0
    control_bytes_sent: int = 0
    saved_bytes: int = 0
    """The part of the data and metadata bytes that a collective call of a whole clique did not have to send
    (communication/torch_distributed/group_collective.py)."""
    payload_bytes_received: int = 0
    """Data and metadata together: only the sender's sharing rule can tell them apart."""
    frames_sent: int = 0
    """Number of frames that carried payloads."""
    frames_received: int = 0
    wait_seconds: float = 0.0
    """Seconds that this node's rounds waited for the peer while it was the last one missing."""
    late_payloads: int = 0
    """Payloads of the peer that arrived after this node had continued without them. Written with the inbox's lock
    held."""
    resends: int = 0
    """Frames sent again because the peer did not receive them the first time."""
    resent_bytes: int = 0
    """The part of the protocol bytes for these frames."""

    @property
    def payload_bytes_sent(self) -> int:
        """Data and metadata bytes."""
        return self.data_bytes_sent + self.metadata_bytes_sent

    def received(self, size: int, scalars: Sized = ()) -> None:
        """Counts a received payload, or a part of one: `size` bytes of tensors, and scalars, each of which counts as on
        the sending side (`Payload.bytes`)."""
        self.payload_bytes_received += size + SCALAR_BYTES * len(scalars)


@dataclass
class Counters:
    """Totals of one node. `faults` counts refused bytes by reason."""

    edges: dict[int, EdgeCounters] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    earlier: dict[str, int] = field(default_factory=dict)
    """Totals, as `totals` returned them, of the run that this run resumes."""
    relayed: Callable[[], int] = lambda: 0
    """Any thread: returns how many bytes this node has forwarded between other nodes as their relay (wire/relay.py).
    They are not included in `edges`."""
    on_event: Callable[[str, int | None, str], None] = lambda _kind, _peer, _detail: None
    """Any thread: called with (kind, peer, detail) for every fault and for connection events."""

    def edge(self, uid: int) -> EdgeCounters:
        found = self.edges.get(uid)
        return self.edges.setdefault(uid, EdgeCounters()) if found is None else found

    def sent(self, outgoing: Mapping[int, Payload]) -> None:
        """Counts the payloads of one exchange, by neighbor. Called by the training thread, once per exchange."""
        last, size = None, PayloadBytes(0, 0)
        for uid, payload in outgoing.items():
            if payload is not last:  # usually all neighbors get the same payload
                last, size = payload, payload.bytes()
            edge = self.edges.get(uid) or self.edge(uid)
            edge.data_bytes_sent += size.data
            edge.metadata_bytes_sent += size.metadata

    def fault(self, reason: str, peer: int | None = None, detail: str = "") -> None:
        self.faults[reason] = self.faults.get(reason, 0) + 1
        self.on_event(reason, peer, detail)

    def known(self) -> list[tuple[int, EdgeCounters]]:
        """Any thread: returns every peer so far with its counters, as a copy, because peers may be added meanwhile."""
        return list(self.edges.items())

    def refused_handshakes(self) -> str:
        """Returns a clause about failed handshakes, to end a sentence about missing nodes; "" if there were none."""
        strangers, broken = self.faults.get("stranger", 0), self.faults.get("handshake_failed", 0)
        clauses = [f"{strangers} with a key that is not in public.keys"] if strangers else []
        clauses += [f"{broken} that were not completed (no keys, or different ones)"] if broken else []
        return f"; refused here: {strangers + broken} handshakes, {' and '.join(clauses)}" if clauses else ""

    @property
    def relayed_bytes(self) -> int:
        return self.earlier.get("relayed", 0) + self.relayed()

    @property
    def resent_bytes(self) -> int:
        return self.earlier.get("resent", 0) + sum(edge.resent_bytes for _, edge in self.known())

    @property
    def saved_bytes(self) -> int:
        return self.earlier.get("saved", 0) + sum(edge.saved_bytes for _, edge in self.known())

    @property
    def late_payloads(self) -> int:
        return self.earlier.get("late", 0) + sum(edge.late_payloads for _, edge in self.known())

    def bytes_sent(self) -> dict[Purpose, int]:
        """Any thread: returns the bytes sent to all peers, by purpose."""
        data = metadata = protocol = evaluation = control = 0
        for _, edge in self.known():  # one pass without getattr: every round's record calls this
            data += edge.data_bytes_sent
            metadata += edge.metadata_bytes_sent
            protocol += edge.announced_bytes_sent + edge.framing_bytes_sent
            evaluation += edge.evaluation_bytes_sent
            control += edge.control_bytes_sent
        found: dict[Purpose, int] = {
            "data": data, "metadata": metadata, "protocol": protocol, "evaluation": evaluation, "control": control,
        }
        return {each: found[each] + self.earlier.get(each, 0) for each in PURPOSES} if self.earlier else found

    def totals(self) -> dict[str, int]:
        """Returns what a checkpoint stores: bytes by purpose, saved bytes, and the number of faults."""
        faults = self.earlier.get("faults", 0) + sum(self.faults.values())
        return {**{str(purpose): sent for purpose, sent in self.bytes_sent().items()}, "saved": self.saved_bytes,
                "relayed": self.relayed_bytes, "resent": self.resent_bytes, "late": self.late_payloads,
                "faults": faults}  # fmt: skip


def purpose_of(key: str) -> Purpose:
    """Returns the purpose that the bytes of the mean with this key count for."""
    return "evaluation" if key.startswith(EVALUATION) else "control"
