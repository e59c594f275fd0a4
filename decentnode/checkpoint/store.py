"""Stores checkpoints on disk: a folder per cut, and in it two files per node, of which the manifest is written last.

    <run>/checkpoints/00000040-1f0c2d3e4b5a/003.safetensors    the tensors of node 3 after 40 rounds
                                            003.json           everything else, and size and digest of the tensors
                      best-003.json                            the cut whose evaluation was the best so far

A node's checkpoint is complete once its manifest exists: the manifest is written under another name, and renamed after
the tensors are on the disk. A process may be killed at any moment.
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
"""Name of the folder of checkpoints in the folder of a run."""
FORMAT = 1


@dataclass(frozen=True)
class Cut:
    """A consistent cut of a run: a moment between two rounds on all members of a generation, such that no payload was
    received by one node that another has not sent yet."""

    run: str
    """The run's id in hex; "" if it has none."""
    round: int
    """The number of finished rounds; if nodes are in different rounds, a number that grows from cut to cut."""
    generation: int
    origin: str
    """The origin in the generation's name, in hex."""
    members: tuple[int, ...]

    @property
    def key(self) -> int:
        """A hash of 48 bits that represents the cut when nodes agree on one."""
        text = json.dumps(asdict(self), sort_keys=True)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")

    @property
    def folder(self) -> str:
        return f"{self.round:08d}-{self.key:012x}"

    @property
    def age(self) -> tuple[int, int]:
        """Sort key: later rounds are newer, and among equal rounds later generations."""
        return self.round, self.generation


@dataclass(frozen=True)
class Snapshot:
    """The state of a node at a cut, in memory that is not changed any more."""

    uid: int
    cut: Cut
    config: Mapping[str, Any]
    """The experiment's keys and values that determine what is computed; see `differences`."""
    tree: Any
    tensors: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint of one node as described by its manifest; `load` reads the tensors."""

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
        """The number of rounds that this node had finished: the cut's, unless nodes were in different rounds."""
        return int(self.tree["progress"].get("round", self.cut.round))

    def load(self) -> dict[str, Tensor]:
        """Reads and returns the tensors. Raises CheckpointError if their size or digest is wrong."""
        return tensor_file.read(self.path.with_suffix(".safetensors"), self.tensor_bytes, self.tensor_digest)


def _checksum(body: Any) -> str:
    return hashlib.blake2b(json.dumps(body, separators=(",", ":")).encode(), digest_size=16).hexdigest()


def _make(place: Path) -> None:
    """Makes the folder of a cut, but not that of its run. Raises OSError."""
    place.parent.mkdir(exist_ok=True)
    place.mkdir(exist_ok=True)


def write(folder: Path, snapshot: Snapshot) -> int:
    """Writes a node's checkpoint into `folder` (checkpoints/ of a run). Returns its bytes. Blocking until the disk has
    it. Raises OSError or CheckpointError, and then leaves no file. The run's folder must exist: if it was renamed, a
    new one with checkpoints alone could not be resumed."""
    place = folder / snapshot.cut.folder
    path = place / f"{snapshot.uid:03d}.json"
    others = len(snapshot.cut.members) - 1
    while True:
        _make(place)
        path.unlink(missing_ok=True)
        try:
            return _write(path, snapshot)
        except FileNotFoundError:  # another node, whose own write failed, removed the folder before it had a file here
            if not others:
                raise
            others -= 1
        except BaseException:
            remove(folder, snapshot.cut.folder, snapshot.uid)  # on a full disk, this frees space that other nodes need
            raise


def _write(path: Path, snapshot: Snapshot) -> int:
    size, digest = tensor_file.write(path.with_suffix(".safetensors"), snapshot.tensors)
    body = {"format": FORMAT, "uid": snapshot.uid, "cut": asdict(snapshot.cut), "time": clock.wall(),
            "config": dict(snapshot.config), "tensors": {"bytes": size, "blake2b": digest},
            "state": snapshot.tree}  # fmt: skip
    # Through JSON, as it will be read: the checksum must not depend on tuples or the types of keys.
    body = json.loads(json.dumps(body))
    text = json.dumps({"blake2b": _checksum(body), "body": body}, separators=(",", ":"))
    write_atomic(path, text + "\n", durable=True)
    return size + len(text)


def read_manifest(path: Path) -> Manifest:
    """Reads and returns a manifest. Raises CheckpointError if it is not valid, or the file of tensors beside it does
    not have the right size."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        body = found["body"]
        if _checksum(body) != found["blake2b"]:
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
    """Returns (the complete checkpoints of node `uid`, the newest first; a line about each damaged or partial one).

    folders: checkpoints/ of some runs. runs: ids of the runs whose cuts are included; None for all.
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
    """Adds a checkpoint of another run to `folder`, so that the run of that folder can be resumed from it: as a hard
    link if the file system allows it, else as a copy. Raises OSError."""
    place = folder / manifest.cut.folder
    if place.resolve() == manifest.path.parent.resolve():
        return
    _make(place)
    for path in (manifest.path.with_suffix(".safetensors"), manifest.path):  # the manifest last
        target = place / path.name
        target.unlink(missing_ok=True)
        try:
            os.link(path, target)
        except OSError:
            target.write_bytes(path.read_bytes())


def remove(folder: Path, cut_folder: str, uid: int) -> None:
    """Removes a node's checkpoint, the manifest first. Never raises."""
    path = folder / cut_folder / f"{uid:03d}.json"
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        path.with_suffix(".safetensors").unlink(missing_ok=True)
        path.parent.rmdir()  # fails while other nodes have files there


def mark_best(folder: Path, uid: int, cut: Cut, figure: str, value: float) -> None:
    """Records the cut with the best evaluation so far. Raises OSError."""
    folder.mkdir(exist_ok=True)
    best = {"cut": cut.folder, "round": cut.round, "figure": figure, "value": value}
    write_atomic(folder / f"best-{uid:03d}.json", json.dumps(best) + "\n", durable=True)


def read_best(folder: Path, uid: int) -> dict[str, Any] | None:
    """Returns what `mark_best` recorded: "cut" (its folder), "round", "figure" and "value"; None without a valid
    record."""
    try:
        best = json.loads((folder / f"best-{uid:03d}.json").read_text(encoding="utf-8"))
        return {"cut": str(best["cut"]), "round": int(best["round"]), "figure": str(best["figure"]),
                "value": float(best["value"])}  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError):
        return None


def surplus(cuts: Iterable[Cut], keep: int, protected: Collection[Cut]) -> list[Cut]:
    """Returns the cuts that are neither protected nor among the `keep` newest."""
    ordered = sorted(cuts, key=lambda cut: cut.age, reverse=True)
    return [cut for cut in ordered[keep:] if cut not in protected]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a line for each key of an experiment whose value differs between a checkpoint (`before`) and `now`."""
    lines = []
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            lines.append(f"{key}: {json.dumps(before.get(key))} in the checkpoint, {json.dumps(now.get(key))} now")
    return lines
