"""The events of a node beside its rounds, in events.jsonl: a JSON object per line, bounded whatever strangers send.

Where the run is recorded (`run.record`), the file also has what the node did with models (history.py)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from decentnode import clock
from decentnode.metrics.history_kinds import HISTORY
from decentnode.metrics.writer import MetricsWriter

PER_KIND = 50
"""Most events of one kind that are written; later ones are only counted."""
MAX_DETAIL = 300

EVENTS: dict[str, str] = {
    "joined": "the node joined the run",
    "stopped": "the node stopped before its last round, because it was asked to",
    "finished": "the node finished its last round",
    "left_run": "the node left before its last round, because it alone was asked to",
    "failed": "the node failed",
    "peer_lost": "a peer did not answer in time, or failed",
    "diverged": "the model held NaN or infinity",
    "loss_overflowed": "a loss of an evaluation was NaN or infinity, while the model was not; the run goes on",
    "connection_lost": "a connection to this node broke",
    "connection_renewed": "nothing came through to the peer, and a new connection was made",
    "no_files": "no connection to a peer was made, as the process has as many open files as it may; it is tried again",
    "handshake_failed": "somebody connected who does not speak the protocol, or not with the right keys",
    "stranger": "somebody connected whose key is on no list",
    "replayed_login": "somebody logged in to the bulk socket as another connection had before",
    "wrong_identity": "a node spoke in another node's name",
    "not_encrypted": "a payload was not encrypted where it has to be",
    "checksum_mismatch": "bytes were not what was sent; they are sent again",
    "malformed_header": "bytes that are no message",
    "malformed_multipart": "a message with too many parts",
    "oversized_header": "a header beyond the limit",
    "protocol_version": "a message of another version of the protocol",
    "unknown_type": "a message of an unknown type",
    "unknown_uid": "a message from, or about, a uid that is not in the run",
    "unexpected_message": "a message that may not come in this state",
    "wrong_sender": "a message from a node that may not send it",
    "wrong_plane": "a message on the wrong socket",
    "wrong_run": "a message of another run",
    "wrong_generation": "a message of a generation of members that is not there yet",
    "stale_generation": "a message of a generation of members that is over",
    "wrong_seat": "a node asked to join as one that was admitted, and is another",
    "knocked": "a node that is not in the mapping was granted a uid",
    "uninvited": "a node that is not in the mapping asked to be admitted without an invitation that holds",
    "turned_away": "a node that is not in the mapping was not admitted, and why",
    "wrong_config": "a node with another config or graph asked to join",
    "generation_over": "the generation of members ended, and why",
    "generation": "a generation of members is in force",
    "apart": "without the absent nodes the graph falls apart; into which parts, and which edges join them again",
    "refused": "the run that the node asked to join can never let it in, and why",
    "outside": "the node belongs to no generation, and why",
    "wrong_acknowledgement": "an acknowledgement of what was never sent",
    "sequence_jump": "a message numbered far ahead of its turn",
    "hello_flood": "more hellos than anybody needs",
    "window_exceeded": "more bytes than the window allows",
    "stale_round": "a payload of a round that is over",
    "stale_part": "a piece of a mean that is over",
    "duplicate_chunk": "a chunk that was there already",
    "wrong_shape": "a payload that does not fit the schema",
    "wrong_size": "a chunk with too few or too many bytes",
    "malformed": "a payload over torch.distributed that is not what was announced",
    "communicator_broken": "an operation of torch.distributed failed, and why: no more payloads pass there",
    "send_window": "a payload was dropped because the peer takes none",
    "overwritten": "a payload changed in shared memory while it was read; it counted as missing",
    "receive_window": "a payload is no longer expected because the peer is too far behind",
    "no_board": "a doorbell of a node whose shared memory is not mapped here",
    "wrong_board": "shared memory that is not what the schema says",
    "malformed_payload": "a payload that cannot be decoded; it counted as missing",
    "non_finite": "a payload with NaN or infinity was rejected",
    "fault": "a fault of the experiment came about: what it is, or how many messages met with one of its kind",
    "suspected": "the node counts a member of its generation as gone, and why",
    **HISTORY,
}
"""Every kind of event, and its meaning."""


class EventLog:
    """Appends events to a file: `log(kind, peer, detail)`. Any thread may call it; it never raises on a full disk."""

    def __init__(self, path: Path, uid: int) -> None:
        """Raises OSError when the file cannot be opened."""
        self.uid = uid
        self.counts: dict[str, int] = {}
        self._writer = MetricsWriter(path, spared=True)
        self._lock = threading.Lock()
        self._open = True

    def __call__(self, kind: str, peer: int | None = None, detail: str = "") -> None:
        """kind: a key of EVENTS. peer: the uid it concerns."""
        with self._lock:
            count = self.counts[kind] = self.counts.get(kind, 0) + 1
            if count > PER_KIND or not self._open:
                return
            self._write({"kind": kind, "peer": peer, "detail": detail[:MAX_DETAIL]})

    def record(self, kind: str, fields: dict[str, Any]) -> None:
        """Write what the node did: a key of HISTORY, with fields of its own. However many there are, all are written: a
        node makes a few in each of its rounds."""
        with self._lock:
            if self._open:
                self._write({"kind": kind, **fields})

    def _write(self, record: dict[str, object]) -> None:
        self._writer.write({"time": clock.wall(), "uid": self.uid, **record})

    def close(self) -> None:
        """Write how many events of each kind were only counted, and close the file. Idempotent."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            for kind, count in self.counts.items():
                if count > PER_KIND:
                    self._write({"kind": kind, "peer": None, "detail": "not written", "count": count - PER_KIND})
            self._writer.close()
