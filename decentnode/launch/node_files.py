"""The files that a node writes: metrics.jsonl and status.json while it runs, its model at the end."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from decentnode import clock
from decentnode.errors import EnvironmentFault
from decentnode.launch.messages import ChildMessage, Progress
from decentnode.metrics.reader import read
from decentnode.metrics.writer import MetricsWriter, encode, finite
from decentnode.models.lora import adapter_names, folded
from decentnode.node.node import Node
from decentnode.system import replacing, write_atomic
from decentnode.tensors import FlatModel

Send = Callable[[ChildMessage], None]
STATUS_SECONDS = 1.0
"""Time between two writings of status.json."""


class Reporter:
    """Writes a node's records to metrics.jsonl and sends some of them to the supervisor. A supervisor that is gone does
    not stop the training."""

    def __init__(self, uid: int, path: Path | None, send: Send, progress_seconds: float) -> None:
        """path: metrics.jsonl, or None to write nothing. Raises OSError when it cannot be opened."""
        self.uid = uid
        self._writer = MetricsWriter(path) if path is not None else None
        self._send = send
        self._progress_seconds = progress_seconds
        self._sent = 0.0
        self._unsent: dict[str, Any] | None = None

    def record(self, record: dict[str, Any]) -> None:
        """Write one record. Sent are all but rounds that follow the last one sent by less than `progress_seconds`; such
        a round is sent late, before a record of another kind."""
        if self._writer is not None:
            self._writer.write(record)
        now = clock.now()
        if record.get("kind") == "round" and now - self._sent < self._progress_seconds:
            self._unsent = record
            return
        self._sent = now
        with contextlib.suppress(OSError):
            for each in (self._unsent, record) if record.get("kind") != "round" else (record,):
                if each is not None:
                    self._send(Progress(self.uid, finite(each)))
        self._unsent = None

    def take_over(self, path: Path, round: int) -> None:
        """Write, and do not send, the records that another run's metrics.jsonl has of the rounds below `round`. Without
        such a file nothing happens."""
        if self._writer is None:
            return
        with contextlib.suppress(OSError):
            for record in read(path):
                last = record.get("round", 0) - (0 if record.get("kind") == "round" else 1)
                if last < round:
                    self._writer.write(record)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class StatusWriter(threading.Thread):
    """Writes status.json once per second until `close`, in a thread of its own: the training thread is neither asked
    nor waits, so that a node that hangs is seen to hang, with the nodes that it waits for."""

    def __init__(self, node: Node, path: Path) -> None:
        super().__init__(name="status", daemon=True)
        self._node, self._path = node, path
        self._over = threading.Event()
        self._last: dict[str, Any] = {}

    def run(self) -> None:
        while not self._over.wait(STATUS_SECONDS):
            self._write("")
        self._write(self._final)

    def _write(self, doing: str) -> None:
        found = snapshot(self._node, doing)
        if {k: v for k, v in found.items() if k != "time"} != {k: v for k, v in self._last.items() if k != "time"}:
            self._last = found
            with contextlib.suppress(OSError):
                write_atomic(self._path, encode(found).decode())

    def close(self, doing: str) -> None:
        """Write once more, with `doing` as the node's end (finished, stopped, failed), and end the thread. Blocking for
        5 s at most."""
        self._final = doing
        self._over.set()
        if self.is_alive():
            self.join(5)

    _final = "ended"


def snapshot(node: Node, doing: str = "") -> dict[str, Any]:
    """Returns the state of a node as plain numbers and texts. Any thread may call it."""
    communication = node.communication
    waiting = communication.waiting
    whom, since = waiting if waiting is not None else ((), 0.0)
    return {
        "uid": node.uid, "pid": os.getpid(), "time": clock.wall(), "round": node.round, "rounds": node.config.rounds,
        "doing": doing or node.doing, "waiting_for": list(whom),
        "waiting_seconds": round(clock.now() - since, 1) if whom else 0.0,
        "edges": {
            str(uid): {
                "sent": edge.payload_bytes_sent, "received": edge.payload_bytes_received,
                "chunks": edge.frames_sent, "resends": edge.resends, "wait_seconds": round(edge.wait_seconds, 3),
            }
            for uid, edge in sorted(communication.counters.known())
            if edge.frames_sent or edge.frames_received or edge.wait_seconds
        },
        "faults": dict(communication.counters.faults),
    }  # fmt: skip


def save(module: nn.Module, path: Path, without: Collection[str] = ()) -> None:
    """Write a module's state_dict as safetensors, atomically. without: names that are left out. Raises EnvironmentFault
    when the disk refuses."""
    save_tensors({name: value for name, value in module.state_dict().items() if name not in without}, path)


def save_tensors(state: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors as safetensors, atomically. Raises EnvironmentFault when the disk refuses."""
    tensors = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in state.items()}
    try:
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt"})
    except Exception as error:  # safetensors wraps the system's errors in its own
        raise EnvironmentFault(f"cannot write the model {path}: {error}") from error


def load_merged(model: FlatModel, merged: Tensor) -> None:
    """Copy `merged` [P + B] (parameters, then float buffers) into the model."""
    model.parameters.copy_(merged[: model.num_parameters])
    model.buffers.copy_(merged[model.num_parameters :])


def save_node(node: Node, run_dir: Path) -> None:
    """Write models/<uid>.safetensors, and on the lowest uid models/merged.safetensors, which has no parameters that the
    nodes kept to themselves; of a model with adapters also adapters.safetensors, what of the merged model was trained,
    and folded.safetensors, the merged model with the adapters added to its weights. In models/ema/ likewise the moving
    averages, where there are any, without what follows from adapters. What dumps count is written, too.

    The node's model may be overwritten by another one: it must not be used afterwards.
    """
    if node.dumps is not None:
        node.dumps.close()
    model, lowest = node.training.model, node.uid == node.generation.members[0]
    kept = set(model.names_from(node.shared))
    save(model.module, run_dir / "models" / f"{node.uid:03d}.safetensors")
    if lowest and node.merged is not None:
        load_merged(model, node.merged)
        save(model.module, run_dir / "models" / "merged.safetensors", without=kept)
        if adapter_names(model.module):
            frozen = {name for name, each in model.module.named_parameters() if not each.requires_grad}
            save(model.module, run_dir / "models" / "adapters.safetensors", without=kept | frozen)
            if not kept:
                save_tensors(folded(model.module), run_dir / "models" / "folded.safetensors")
    if node.averages is None:
        return
    own, merged = node.averages
    place = run_dir / "models" / "ema"
    place.mkdir(parents=True, exist_ok=True)
    load_merged(model, own)
    save(model.module, place / f"{node.uid:03d}.safetensors")
    if lowest and merged is not None:
        load_merged(model, merged)
        save(model.module, place / "merged.safetensors", without=kept)
