"""Writes the events of a node to events.jsonl, a JSON object per line; their number is bounded whatever peers send.

If the run is recorded (`run.record`), the file also has the records of what the node did with models (history.py)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from decentnode import clock
from decentnode.metrics.history_kinds import HISTORY
from decentnode.metrics.writer import MetricsWriter

PER_KIND = 50
"""How many events of one kind are written; later ones are only counted."""
MAX_DETAIL = 300

EVENTS: dict[str, str] = {
    "joined": "the node joined the run",
    "stopped": "the node stopped before its last round, on request",
    "finished": "the node finished its last round",
    "left_run": "this node left before its last round, on request",
    "failed": "the node failed",
    "peer_lost": "a peer did not answer in time, or failed",
    "diverged": "the model held NaN or infinity",
    "loss_overflowed": "a loss of an evaluation was NaN or infinity, while the model was not; the run continues",
    "connection_lost": "a connection to this node broke",
    "connection_renewed": "nothing reached the peer, so a new connection was made",
    "no_files": "the process has reached its limit of open files, so no connection to a peer was made; the node tries "
                "again",
    "handshake_failed": "an unknown client connected that does not use the protocol or the right keys",
    "stranger": "a client connected whose key is not listed",
    "replayed_login": "a connection logged in to the bulk socket with the login of an earlier connection",
    "wrong_identity": "a node sent a message in another node's name",
    "not_encrypted": "a payload was not encrypted although it must be",
    "checksum_mismatch": "bytes were damaged in transit; they are sent again",
    "malformed_header": "bytes that are not a message",
    "malformed_multipart": "a message with too many parts",
    "oversized_header": "a header beyond the limit",
    "protocol_version": "a message of another version of the protocol",
    "unknown_type": "a message of an unknown type",
    "unknown_uid": "a message from, or about, a uid that is not in the run",
    "unexpected_message": "a message that is not allowed in this state",
    "wrong_sender": "a message from a node that may not send it",
    "wrong_plane": "a message on the wrong socket",
    "wrong_run": "a message of another run",
    "wrong_generation": "a message of a generation of members that has not begun",
    "stale_generation": "a message of a generation of members that is over",
    "wrong_seat": "a node asked to join under the uid of another admitted node",
    "knocked": "a node that is not in the mapping was granted a uid",
    "uninvited": "a node that is not in the mapping asked to be admitted without a valid invitation",
    "turned_away": "a node that is not in the mapping was not admitted, and why",
    "wrong_config": "a node with another config or graph asked to join",
    "generation_over": "the generation of members ended, and why",
    "generation": "a generation of members is in force",
    "apart": "without the absent nodes the graph is disconnected; its parts, and the edges added to connect them",
    "refused": "the run that the node asked to join can never admit it, and why",
    "outside": "the node belongs to no generation, and why",
    "wrong_acknowledgement": "an acknowledgement of something that was never sent",
    "sequence_jump": "a message numbered far ahead of its turn",
    "hello_flood": "more hellos than needed",
    "window_exceeded": "more bytes than the window allows",
    "stale_round": "a payload of a round that is over",
    "stale_part": "a part of a mean that is complete already",
    "duplicate_chunk": "a chunk that had arrived already",
    "wrong_shape": "a payload that does not fit the schema",
    "wrong_size": "a chunk with too few or too many bytes",
    "malformed": "a payload over torch.distributed that differs from its announcement",
    "communicator_broken": "an operation of torch.distributed failed, and why: no more payloads are sent that way",
    "send_window": "a payload was dropped because the peer does not accept any",
    "overwritten": "a payload changed in shared memory while it was read; it counted as missing",
    "receive_window": "a payload is no longer expected because the peer is too far behind",
    "no_board": "a doorbell of a node whose shared memory is not mapped here",
    "wrong_board": "shared memory that does not match the schema",
    "malformed_payload": "a payload that cannot be decoded; it counted as missing",
    "non_finite": "a payload with NaN or infinity was rejected",
    "fault": "a fault of the experiment occurred: which one, or how many messages were affected by this kind",
    "suspected": "the node counts a member of its generation as gone, and why",
    **HISTORY,
}
"""Every kind of event with its meaning."""


class EventLog:
    """Appends events to a file: `log(kind, peer, detail)`. Thread-safe; does not raise if the disk is full."""

    def __init__(self, path: Path, uid: int) -> None:
        """Opens the file. Raises OSError if that fails."""
        self.uid = uid
        self.counts: dict[str, int] = {}
        self._writer = MetricsWriter(path, spared=True)
        self._lock = threading.Lock()
        self._open = True

    def __call__(self, kind: str, peer: int | None = None, detail: str = "") -> None:
        """Writes or counts an event. kind: a key of EVENTS. peer: the uid that it concerns."""
        with self._lock:
            count = self.counts[kind] = self.counts.get(kind, 0) + 1
            if count > PER_KIND or not self._open:
                return
            self._write({"kind": kind, "peer": peer, "detail": detail[:MAX_DETAIL]})

    def record(self, kind: str, fields: dict[str, Any]) -> None:
        """Writes a record of what the node did: a key of HISTORY, with its fields. The number of records is not
        limited, because a node makes only a few per round."""
        with self._lock:
            if self._open:
                self._write({"kind": kind, **fields})

    def _write(self, record: dict[str, object]) -> None:
        self._writer.write({"time": clock.recorded(), "uid": self.uid, **record})

    def close(self) -> None:
        """Writes how many events of each kind were only counted, and closes the file. Idempotent."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            for kind, count in self.counts.items():
                if count > PER_KIND:
                    self._write({"kind": kind, "peer": None, "detail": "not written", "count": count - PER_KIND})
            self._writer.close()
