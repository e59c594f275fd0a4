"""What passed between a node and its peers, counted by purpose, and what it refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field

from decentnode.metrics.figures import PURPOSES, Purpose
from decentnode.payload import SCALAR_BYTES, Payload, PayloadBytes

EVALUATION = "evaluation/"
"""How the keys of means begin whose bytes count as evaluation; those of other means count as control."""


@dataclass
class EdgeCounters:
    """What passed between this node and one peer since the start, by purpose (metrics/figures.py).

    Data and metadata are the payloads' own bytes, the others those that sockets were given. Every field has one
    writing thread, or one lock, because `+=` is not atomic.
    """

    data_bytes_sent: int = 0
    """The training thread's, as are metadata and announced bytes: counted as a payload is given to the transport."""
    metadata_bytes_sent: int = 0
    announced_bytes_sent: int = 0
    """Of protocol: doorbells, and headers of payloads inside a clique."""
    framing_bytes_sent: int = 0
    """The rest of protocol. With `LinkDriver.lock` held, as are evaluation and control."""
    evaluation_bytes_sent: int = 0
    control_bytes_sent: int = 0
    saved_bytes: int = 0
    """Of data and metadata: what one collective call of a whole clique did without
    (communication/torch_distributed/group_collective.py)."""
    payload_bytes_received: int = 0
    """Data and metadata together: which is which only the sender's rule knows."""
    frames_sent: int = 0
    """Pieces that payloads travelled in."""
    frames_received: int = 0
    wait_seconds: float = 0.0
    """Time this node's rounds waited for the peer when it was the last one missing."""
    late_payloads: int = 0
    """Payloads of the peer that came after this node had gone on without them. With the inbox's lock held."""
    resends: int = 0
    """Frames sent again because the peer did not get them the first time."""
    resent_bytes: int = 0
    """Of protocol: those of these frames."""

    @property
    def payload_bytes_sent(self) -> int:
        """Data and metadata."""
        return self.data_bytes_sent + self.metadata_bytes_sent

    def received(self, size: int, scalars: Sized = ()) -> None:
        """Count what came of a payload: so many bytes of tensors, and scalars, which count as they do where they were
        sent (`Payload.bytes`)."""
        self.payload_bytes_received += size + SCALAR_BYTES * len(scalars)


@dataclass
class Counters:
    """Totals of one node; `faults` counts refused bytes by reason."""

    edges: dict[int, EdgeCounters] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    earlier: dict[str, int] = field(default_factory=dict)
    """Totals of the run that this one goes on from, as `totals` returned them."""
    relayed: Callable[[], int] = lambda: 0
    """Any thread: returns how many bytes this node has passed on between others as their relay (wire/relay.py), which
    are none of its own in `edges`."""
    on_event: Callable[[str, int | None, str], None] = lambda _kind, _peer, _detail: None
    """Any thread: called with (kind, peer, detail) for every fault and for what happens to connections."""

    def edge(self, uid: int) -> EdgeCounters:
        found = self.edges.get(uid)
        return self.edges.setdefault(uid, EdgeCounters()) if found is None else found

    def sent(self, outgoing: Mapping[int, Payload]) -> None:
        """Training thread, once per exchange: payloads are handed to the transport, by neighbor."""
        last, size = None, PayloadBytes(0, 0)
        for uid, payload in outgoing.items():
            if payload is not last:  # one payload for all, as a rule
                last, size = payload, payload.bytes()
            edge = self.edges.get(uid) or self.edge(uid)
            edge.data_bytes_sent += size.data
            edge.metadata_bytes_sent += size.metadata

    def fault(self, reason: str, peer: int | None = None, detail: str = "") -> None:
        self.faults[reason] = self.faults.get(reason, 0) + 1
        self.on_event(reason, peer, detail)

    def known(self) -> list[tuple[int, EdgeCounters]]:
        """Any thread: every peer so far; others may be met while somebody goes through the list."""
        return list(self.edges.items())

    def refused_handshakes(self) -> str:
        """Of connections that did not come about, as the end of a sentence about who is missing; "" without any."""
        strangers, broken = self.faults.get("stranger", 0), self.faults.get("handshake_failed", 0)
        told = [f"{strangers} with a key that is not in public.keys"] if strangers else []
        told += [f"{broken} that were not completed (no keys, or different ones)"] if broken else []
        return f"; refused here: {strangers + broken} handshakes, {' and '.join(told)}" if told else ""

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
        """To all peers, by purpose. Any thread."""
        data = metadata = protocol = evaluation = control = 0
        for _, edge in self.known():  # once, and not by name: every round's record asks
            data += edge.data_bytes_sent
            metadata += edge.metadata_bytes_sent
            protocol += edge.announced_bytes_sent + edge.framing_bytes_sent
            evaluation += edge.evaluation_bytes_sent
            control += edge.control_bytes_sent
        found: dict[Purpose, int] = {
            "data": data, "metadata": metadata, "protocol": protocol, "evaluation": evaluation, "control": control,
        }
        return {purpose: found[purpose] + self.earlier.get(purpose, 0) for purpose in PURPOSES}

    def totals(self) -> dict[str, int]:
        """Returns what a checkpoint keeps: bytes by purpose, saved ones, and faults."""
        faults = self.earlier.get("faults", 0) + sum(self.faults.values())
        return {**{str(purpose): sent for purpose, sent in self.bytes_sent().items()}, "saved": self.saved_bytes,
                "relayed": self.relayed_bytes, "resent": self.resent_bytes, "late": self.late_payloads,
                "faults": faults}  # fmt: skip


def purpose_of(key: str) -> Purpose:
    """What the bytes of a mean are for."""
    return "evaluation" if key.startswith(EVALUATION) else "control"
