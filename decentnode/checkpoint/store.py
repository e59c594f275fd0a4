"""Checkpoints on the disk: a folder per cut, and in it two files per node, the manifest last.

    <run>/checkpoints/00000040-1f0c2d3e4b5a/003.safetensors    the tensors of node 3 after 40 rounds
                                            003.json           everything else, and what the tensors must be
                      best-003.json                            the cut whose evaluation was the best so far

A node's checkpoint is whole once its manifest is there: it is written under another name and renamed when the tensors
are on the disk. A process may be killed at any moment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from decentnode import clock
from decentnode.checkpoint import tensor_file
from decentnode.errors import CheckpointError
from decentnode.system import write_atomic

FOLDER = "checkpoints"
"""Its name in the folder of a run."""
FORMAT = 1


@dataclass(frozen=True)
class Cut:
    """One moment of a run: between two rounds, on all members of a generation, with no payload that was received and
    not sent."""

    run: str
    """The run's id in hex, "" where it has none."""
    round: int
    """How many rounds are over; where nodes are in different ones, a number that grows from cut to cut."""
    generation: int
    origin: str
    """Of the generation's name, in hex."""
    members: tuple[int, ...]

    @property
    def key(self) -> int:
        """48 bits that stand for the cut where nodes agree on one."""
        text = json.dumps(asdict(self), sort_keys=True)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")

    @property
    def folder(self) -> str:
        return f"{self.round:08d}-{self.key:012x}"

    @property
    def age(self) -> tuple[int, int]:
        """Sorts cuts: later rounds are newer, and of equal ones later generations."""
        return self.round, self.generation


@dataclass(frozen=True)
class Snapshot:
    """The state of a node at a cut, in memory that nothing changes any more."""

    uid: int
    cut: Cut
    config: Mapping[str, Any]
    """The experiment's keys and values that decide what is computed; see `differences`."""
    tree: Any
    tensors: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint of one node, as its manifest describes it; `load` reads the tensors."""

    path: Path
    uid: int
    cut: Cut
    time: float
    """Seconds since 1970."""
    config: Mapping[str, Any] = field(repr=False)
    tree: Any = field(repr=False)
    tensor_bytes: int
    tensor_digest: str

    @property
    def round(self) -> int:
        """How many rounds the node itself had finished: those of the cut, unless nodes were in different ones."""
        return int(self.tree["progress"].get("round", self.cut.round))

    def load(self) -> dict[str, Tensor]:
        """Returns the tensors. Raises CheckpointError where they are not those that were written."""
        return tensor_file.read(self.path.with_suffix(".safetensors"), self.tensor_bytes, self.tensor_digest)


def _sum(body: Any) -> str:
    return hashlib.blake2b(json.dumps(body, separators=(",", ":")).encode(), digest_size=16).hexdigest()


def write(folder: Path, snapshot: Snapshot) -> int:
    """Write a node's checkpoint into `folder` (checkpoints/ of a run). Returns its bytes. Raises OSError,
    CheckpointError, and leaves nothing then. Blocking until the disk has it."""
    place = folder / snapshot.cut.folder
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{snapshot.uid:03d}.json"
    path.unlink(missing_ok=True)
    try:
        return _write(path, snapshot)
    except BaseException:
        remove(folder, snapshot.cut.folder, snapshot.uid)  # on a full disk its bytes are what the others need
        raise


def _write(path: Path, snapshot: Snapshot) -> int:
    size, digest = tensor_file.write(path.with_suffix(".safetensors"), snapshot.tensors)
    body = {"format": FORMAT, "uid": snapshot.uid, "cut": asdict(snapshot.cut), "time": clock.wall(),
            "config": dict(snapshot.config), "tensors": {"bytes": size, "blake2b": digest},
            "state": snapshot.tree}  # fmt: skip
    # As reading gives it back: what it is checked against must not depend on tuples or the kind of a key.
    body = json.loads(json.dumps(body))
    text = json.dumps({"blake2b": _sum(body), "body": body}, separators=(",", ":"))
    write_atomic(path, text + "\n", durable=True)
    return size + len(text)


def read_manifest(path: Path) -> Manifest:
    """Raises CheckpointError where the file is not a whole manifest beside tensors of the right size."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        body = found["body"]
        if _sum(body) != found["blake2b"]:
            raise CheckpointError(f"{path} is damaged: its contents are not those that were written")
        if body["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {body['format']}, this version reads format {FORMAT}")
        cut = Cut(**{**body["cut"], "members": tuple(body["cut"]["members"])})
        manifest = Manifest(path, int(body["uid"]), cut, float(body["time"]), body["config"], body["state"],
                            int(body["tensors"]["bytes"]), str(body["tensors"]["blake2b"]))  # fmt: skip
        size = path.with_suffix(".safetensors").stat().st_size
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if size != manifest.tensor_bytes:
        raise CheckpointError(f"{path.with_suffix('.safetensors')} must have {manifest.tensor_bytes} bytes, got {size}")
    return manifest


def scan(folders: Iterable[Path], uid: int, runs: Collection[str] | None = None) -> tuple[list[Manifest], list[str]]:
    """Returns (the whole checkpoints of node `uid`, the newest first; a line about each that is damaged or partial).

    folders: checkpoints/ of some runs. runs: ids of the runs whose cuts count; all when None.
    """
    found: dict[Cut, Manifest] = {}
    problems: list[str] = []
    for folder in folders:
        for tensors in sorted(folder.glob(f"*/{uid:03d}.safetensors")):
            path = tensors.with_suffix(".json")
            if not path.exists():
                problems.append(f"{tensors} is partial: it has no manifest")
                continue
            try:
                manifest = read_manifest(path)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            if manifest.uid == uid and (runs is None or manifest.cut.run in runs):
                found.setdefault(manifest.cut, manifest)
    return sorted(found.values(), key=lambda each: (*each.cut.age, each.time), reverse=True), problems


def adopt(manifest: Manifest, folder: Path) -> None:
    """Let a whole checkpoint of another run stand in `folder`, too, so that the run there can be resumed from it: a
    second name of the same file where the disk allows it, else a copy. Raises OSError."""
    place = folder / manifest.cut.folder
    if place.resolve() == manifest.path.parent.resolve():
        return
    place.mkdir(parents=True, exist_ok=True)
    for path in (manifest.path.with_suffix(".safetensors"), manifest.path):  # the manifest last
        target = place / path.name
        target.unlink(missing_ok=True)
        try:
            os.link(path, target)
        except OSError:
            target.write_bytes(path.read_bytes())


def remove(folder: Path, cut_folder: str, uid: int) -> None:
    """Remove a node's checkpoint, the manifest first. Raises nothing."""
    path = folder / cut_folder / f"{uid:03d}.json"
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        path.with_suffix(".safetensors").unlink(missing_ok=True)
        path.parent.rmdir()  # while other nodes have files there, it stays


def mark_best(folder: Path, uid: int, cut: Cut, figure: str, value: float) -> None:
    """Note the cut whose evaluation was the best. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {"cut": cut.folder, "round": cut.round, "figure": figure, "value": value}
    write_atomic(folder / f"best-{uid:03d}.json", json.dumps(found) + "\n", durable=True)


def read_best(folder: Path, uid: int) -> dict[str, Any] | None:
    """Returns what `mark_best` noted: "cut" (its folder), "round", "figure" and "value"; None without a whole note."""
    try:
        found = json.loads((folder / f"best-{uid:03d}.json").read_text(encoding="utf-8"))
        return {"cut": str(found["cut"]), "round": int(found["round"]), "figure": str(found["figure"]),
                "value": float(found["value"])}  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError):
        return None


def surplus(cuts: Iterable[Cut], keep: int, protected: Collection[Cut]) -> list[Cut]:
    """Returns the cuts that are neither protected nor among the `keep` newest."""
    ordered = sorted(cuts, key=lambda cut: cut.age, reverse=True)
    return [cut for cut in ordered[keep:] if cut not in protected]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a line per key of an experiment whose value is another one than in a checkpoint."""
    lines = []
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            lines.append(f"{key}: {json.dumps(before.get(key))} in the checkpoint, {json.dumps(now.get(key))} now")
    return lines
