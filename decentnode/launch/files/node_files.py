"""Writes a node's files: metrics.jsonl, events.jsonl and status.json while it runs, its model at the end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from decentnode import clock
from decentnode.errors import Diverged, EnvironmentFault, PeerLost
from decentnode.experiment import Experiment
from decentnode.experiment.records import RunConfig
from decentnode.launch.children.messages import ChildMessage, Progress
from decentnode.launch.files.node_status import StatusWriter
from decentnode.launch.files.run_dir import APART, node_dir
from decentnode.metrics.events import EventLog
from decentnode.metrics.history import History
from decentnode.metrics.reader import read
from decentnode.metrics.writer import MetricsWriter, encode
from decentnode.models.lora import adapter_names, folded
from decentnode.node.measuring.trace import NodeTrace
from decentnode.node.node import Node
from decentnode.system import replacing
from decentnode.tensors import FlatModel
from decentnode.version import __version__

Send = Callable[[ChildMessage], None]


@contextlib.contextmanager
def errors_attributed_to(uid: int) -> Iterator[None]:
    """Sets the attribute `uid` of an exception raised in the block, unless it has one, so that its node is known."""
    try:
        yield
    except Exception as error:
        error.__dict__.setdefault("uid", uid)
        raise


class Reporter:
    """Writes a node's records to metrics.jsonl and sends some of them to the supervisor. Training continues if the
    supervisor is gone."""

    def __init__(self, uid: int, path: Path | None, send: Send, progress_seconds: float) -> None:
        """path: metrics.jsonl, or None to write nothing. Raises OSError if it cannot be opened."""
        self.uid = uid
        self._writer = MetricsWriter(path) if path is not None else None
        self._send = send
        self._progress_seconds = progress_seconds
        self._sent = 0.0
        self._unsent: bytes | None = None

    def record(self, record: dict[str, Any]) -> None:
        """Writes one record, and sends it, unless it is a round less than `progress_seconds` after the last record
        sent. The last such round is sent before the next record of another kind."""
        line = encode(record)
        if self._writer is not None:
            self._writer.append(line)
        now = clock.now()
        if record.get("kind") == "round" and now - self._sent < self._progress_seconds:
            self._unsent = line
            return
        self._sent = now
        with contextlib.suppress(OSError):
            for each in (self._unsent, line) if record.get("kind") != "round" else (line,):
                if each is not None:
                    self._send(Progress(self.uid, json.loads(each)))
        self._unsent = None

    def import_earlier(self, path: Path, round: int) -> None:
        """Copies the records of rounds below `round` from another run's metrics.jsonl, without sending them. Does
        nothing if there is no such file."""
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


class NodeRecords:
    """Writes events.jsonl and status.json, and traces, of the nodes of one process, from before they join until they
    end. Writes nothing in a run without a folder."""

    def __init__(
        self, nodes: Sequence[Node], run_dir: str | None, record: bool | Literal["auto"] = False,
        run: RunConfig | None = None,
    ) -> None:
        """run: says what is traced and profiled; None for nothing.

        record: whether events.jsonl also records what the nodes do with models; auto: see `_is_recorded`. Raises
        OSError if a file cannot be opened."""
        self._events: dict[int, EventLog] = {}
        self._ends: dict[int, str] = {}
        self._traces: dict[int, NodeTrace] = {}
        self._status: StatusWriter | None = None
        if run_dir:
            folders = {node.uid: node_dir(run_dir, node.uid) for node in nodes}
            for node in nodes:
                log = self._events[node.uid] = EventLog(folders[node.uid] / "events.jsonl", node.uid)
                node.communication.counters.on_event = log
                if _is_recorded(node) if record == "auto" else record:
                    log.record("recording", {"version": __version__, "torch": torch.__version__,
                                             "threads": torch.get_num_threads()})  # fmt: skip
                    node.communication.history = History(log.record)
                profiled = run is not None and run.profile is not None and node.uid == run.profile.uid
                if run is not None and (run.trace or profiled):
                    of_round = run.profile.round if run.profile is not None and profiled else None
                    node.rounds.trace = self._traces[node.uid] = NodeTrace(folders[node.uid], run.trace, of_round)
            self._status = StatusWriter({folders[node.uid] / "status.json": node for node in nodes})
            self._status.start()

    def joined(self, uid: int) -> None:
        """Records that a node has joined the run."""
        if uid in self._events:
            self._events[uid]("joined")

    def over(self, node: Node, stopped: bool) -> None:
        """Records that a node has ended regularly: after its last round, after a stop, or because it left."""
        end = self._ends[node.uid] = "left" if node.left else "stopped" if stopped else "finished"
        if node.uid in self._events:
            injector = node.communication.fault_injector
            for kind, count in sorted(injector.touched.items() if injector is not None else ()):
                self._events[node.uid]("fault", None, f"{kind}: {count} messages")
            self._events[node.uid]("left_run" if node.left else end, None, f"{node.round} rounds")

    def failed(self, uid: int, error: BaseException, *, alone: bool = False) -> None:
        """Records that node `uid` failed with `error` and, unless it failed `alone`, that the other nodes of the
        process lost it."""
        for each, log in self._events.items():
            if each not in self._ends and (each == uid or not alone):
                self._ends[each] = "failed"
                _log_failure(log, error if each == uid else PeerLost(f"node {uid} failed: {error}", [uid]))

    def close(self) -> None:
        """Writes what is left and closes the files. Blocking for at most 5 s; idempotent."""
        status, self._status = self._status, None
        if status is not None:
            status.close(self._ends)
        for log in self._events.values():
            log.close()
        for trace in self._traces.values():
            trace.close()


def resolve_recording(experiment: Experiment) -> bool | Literal["auto"]:
    """Returns `run.record`, with "auto" resolved to True for a run with faults, because its records are checked at the
    end."""
    setting = experiment.run.record
    return True if setting == "auto" and experiment.faults else setting


def _is_recorded(node: Node) -> bool:
    """Returns whether a node is recorded with `run.record: auto`: only if nodes may be missing, and the model is in the
    host's memory. Where every node has to take part, a run is deterministic and can be repeated from its config alone.
    A record costs .15 ms of CPU time per round with four neighbors and a small model: a tenth of quickstart's rounds, a
    hundredth or less where local steps take longer; payloads on a GPU would also have to be copied."""
    return node.config.missing != "fail" and node.training.model.parameters.device.type == "cpu"


def _log_failure(log: EventLog, error: BaseException) -> None:
    kind = "peer_lost" if isinstance(error, PeerLost) else "diverged" if isinstance(error, Diverged) else "failed"
    peers: list[int | None] = [*error.missing] if isinstance(error, PeerLost) else []
    for peer in peers or [None]:
        log(kind, peer, str(error))


def save(module: nn.Module, path: Path, without: Collection[str] = ()) -> None:
    """Writes a module's state_dict as safetensors, atomically. without: names to leave out. Raises EnvironmentFault if
    the disk refuses."""
    save_tensors({name: value for name, value in module.state_dict().items() if name not in without}, path)


def save_tensors(state: Mapping[str, Tensor], path: Path) -> None:
    """Writes tensors as safetensors, atomically. Raises EnvironmentFault if the disk refuses."""
    tensors = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in state.items()}
    try:
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt"})
    except Exception as error:  # safetensors wraps OSErrors in its own exceptions
        raise EnvironmentFault(f"cannot write the model {path}: {error}") from error


def load_merged(model: FlatModel, merged: Tensor) -> None:
    """Copies `merged` [P + B] (parameters, then float buffers) into the model."""
    model.parameters.copy_(merged[: model.num_parameters])
    model.buffers.copy_(merged[model.num_parameters :])


def model_path(run_dir: Path, uid: int) -> Path:
    """Returns the path of a node's saved model."""
    return run_dir / "models" / f"{uid:03d}.safetensors"


def save_merged(module: nn.Module, folder: Path, kept: Collection[str]) -> None:
    """Writes merged.safetensors for a module that holds the merged model, for one with adapters also
    adapters.safetensors, and folded.safetensors if all parameters are shared. folder: usually the run's models/. kept:
    names of parameters that are not shared, and so left out."""
    folder.mkdir(parents=True, exist_ok=True)
    save(module, folder / "merged.safetensors", without=kept)
    if adapter_names(module):
        frozen = {name for name, each in module.named_parameters() if not each.requires_grad}
        save(module, folder / "adapters.safetensors", without={*kept} | frozen)
        if not kept:
            save_tensors(folded(module), folder / "folded.safetensors")


def save_node(node: Node, run_dir: Path) -> None:
    """Writes models/<uid>.safetensors, and on the node with the lowest uid models/merged.safetensors, without the
    parameters that the nodes did not share. A model with adapters also gets adapters.safetensors, the trained part of
    the merged model, and folded.safetensors, the merged model with the adapters added to its weights. Moving averages,
    if there are any, are written to models/ema/ likewise, but without the two files for adapters. Closes the node's
    dumps.

    The node's model may be overwritten by another one and must not be used afterwards.
    """
    if node.rounds.dumps is not None:
        node.rounds.dumps.close()
    model, lowest = node.training.model, node.uid == node.generation.members[0]
    kept = set(model.names_from(node.shared))
    save(model.module, model_path(run_dir, node.uid))
    merged_folder = run_dir / "models"
    if node.config.on_partition == "both" and node.uid:
        merged_folder /= f"{APART}{node.uid:03d}"
    if lowest and node.merged is not None:
        load_merged(model, node.merged)
        save_merged(model.module, merged_folder, kept)
    if node.averages is None:
        return
    own, merged = node.averages
    averages_folder = run_dir / "models" / "ema"
    averages_folder.mkdir(parents=True, exist_ok=True)
    load_merged(model, own)
    save(model.module, averages_folder / f"{node.uid:03d}.safetensors")
    if lowest and merged is not None:
        load_merged(model, merged)
        (merged_folder / "ema").mkdir(parents=True, exist_ok=True)
        save(model.module, merged_folder / "ema" / "merged.safetensors", without=kept)
