"""Merges the parts of a run, which each of its machines has in its own folder (a `Share`), into one folder.

The other folders are not trusted: no link in them is followed, only regular files are read, and only files with names
that a run uses are copied. Nothing here imports torch unless there are checkpoints.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from decentnode import entropy
from decentnode.errors import CheckpointError, EnvironmentFault, UsageError
from decentnode.launch.collecting.share import MAX_DEPTH, MAX_STATUS_BYTES, RECORDS, STATUS, Parts, Share
from decentnode.launch.files import supervisor_file
from decentnode.metrics.machines import FILES, FOLDER, mapping_of
from decentnode.metrics.run_folder import node_dir

RUN_FILES = (("summary.json",), *(("models", *more, f"{name}.safetensors") for more in ((), ("ema",))
                               for name in ("merged", "adapters", "folded")))  # fmt: skip
"""Files about the whole run, which only one of its machines writes."""
CUT = re.compile(r"\d{8,12}-[0-9a-f]{12}")
BLOCK = 1 << 20
MAX_DIGITS = 7
"""Longest number of a machine that is accepted."""


@dataclass
class CopiedShare:
    """What was copied from one folder."""

    folder: Path
    uids: list[int] = field(default_factory=list)
    """Nodes of which something was copied."""
    size: int = 0
    """Bytes copied."""
    whole: list[str] = field(default_factory=list)
    """Copied files about the whole run."""
    machines: list[int] = field(default_factory=list)
    """Machines whose environment files (versions, git state) were copied."""


@dataclass
class Collected:
    """What `collect` copied, and what the run's folder still lacks."""

    run: Path
    taken: list[CopiedShare]
    """One entry for every folder of the run that was found, even if nothing in it was new."""
    missing: dict[int, list[int]]
    """machine -> nodes in the mapping that have no files in the run's folder."""
    left_out: list[str]
    """Files that were not copied, each with the reason."""


def collect(run: Path, others: Sequence[Path]) -> Collected:
    """Copies the nodes' records, models and checkpoints from other folders of the same run into `run`.

    others: folders of the run that were copied from other machines, or folders that contain such; folders of other runs
    below them are skipped. Existing files are kept, except those that the run has extended or replaced since. All
    records are compared before anything is copied. A node's folder appears atomically, and a command that was
    interrupted can be repeated. Blocking while files are read and copied.

    Raises UsageError for a folder of another run, for one that does not say its run, and for records of a node that
    contradict existing ones; EnvironmentFault if the disk refuses, or while another command copies into `run`.
    """
    run = run.resolve()
    with contextlib.ExitStack() as stack:
        own = _open_share(run, stack)
        run_id = _run_id(own)
        found: dict[Path, Share] = {}
        for given in others:
            for share in _find_shares(given, run, run_id, stack):
                found.setdefault(share.path, share)
        shares = list(found.values())
        with _temporary(run) as place:
            _refuse_conflicts(run, own, shares)
            copy = _Copy(run, own, place)
            try:
                taken = [copy.take(share, run_id) for share in shares]
            except OSError as error:
                raise EnvironmentFault(f"cannot copy into {run}: {error.strerror or error}") from error
        left_out = [f"{share.path / name}: not a regular file" for share in shares for name in sorted(share.left_out)]
        return Collected(run, taken, _missing(mapping_of(run), own.uids), [*left_out, *copy.problems])


# -- finding the folders of the run -------------------------------------------------------------------------------


def _open_share(path: Path, stack: contextlib.ExitStack) -> Share:
    try:
        share = Share(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    stack.callback(share.close)
    return share


def _run_id(share: Share, into: Path | None = None) -> str:
    """Returns the id of a folder's run. Raises UsageError if its nodes have none, or several. into: the folder to copy
    into, for the text of the error."""
    run_ids = share.runs()
    if len(run_ids) == 1:
        return run_ids.pop()
    if run_ids:
        raise UsageError(f"{share.path} must hold one run, got the nodes of {', '.join(sorted(run_ids))}")
    raise UsageError(f"no status.json in {share.path / 'nodes'} has the run's id: its nodes never joined, or an "
                     "earlier version or a script (decentnode.parallel) wrote it. Only you can tell then which run "
                     "it belongs to. If all folders are of one run, copy the files that only this folder has by hand: "
                     f"cp -rn {share.path / 'nodes'} {share.path / 'models'} {into or 'RUN'}/")  # fmt: skip


def _find_shares(given: Path, run: Path, run_id: str, stack: contextlib.ExitStack) -> list[Share]:
    """Returns the folders of the run that are `given` itself or below it. Raises UsageError if there are none."""
    top = given.resolve()
    if top == run:
        return []
    if (top / "nodes").is_dir():
        share = _open_share(top, stack)
        if (other := _run_id(share, run)) != run_id:
            raise UsageError(f"{given} belongs to another run than {run}: run {other}, not {run_id}")
        return [share]
    found, passed, nameless = [], 0, 0
    for folder in _folders_with_nodes(top):
        if folder == run:
            continue
        with contextlib.suppress(UsageError):
            share = _open_share(folder, stack)
            if share.runs() == {run_id}:
                found.append(share)
                continue
            nameless += not share.runs()
        passed += 1
    if not found:
        there = f", but {passed} of other runs" if passed else ""
        there += f" ({nameless} of them do not say their run: give one of them to see what to do)" if nameless else ""
        raise UsageError(f"{given} holds no other folder of the run {run}{there}")
    return found


def _folders_with_nodes(top: Path) -> Iterator[Path]:
    """Yields the folders below `top` that contain a folder `nodes`. Raises UsageError if `top` is not a folder."""
    if not top.is_dir():
        raise UsageError(f"there is no folder {top}")
    for folder, below, _ in os.walk(top):
        depth = len(Path(folder).relative_to(top).parts)
        if "nodes" in below:
            yield Path(folder)
        if "nodes" in below or depth >= MAX_DEPTH:
            below.clear()
        below.sort()


def _missing(machine_of: Mapping[int, int], present: Sequence[int]) -> dict[int, list[int]]:
    """Returns machine -> nodes of the run's mapping that are not in `present`."""
    missing: dict[int, list[int]] = {}
    for uid, machine in machine_of.items():
        if uid not in present:
            missing.setdefault(machine, []).append(uid)
    return missing


# -- comparing files ----------------------------------------------------------------------------------------------


def _compare_contents(own: BinaryIO, other: BinaryIO) -> int | None:
    """Compares two files: returns 0 for the same bytes, 1 if `other` continues after the end of `own`, -1 if it ends
    earlier, None if their common bytes differ."""
    sizes = [os.fstat(file.fileno()).st_size for file in (own, other)]
    left = min(sizes)
    while left:
        mine, theirs = (file.read(min(BLOCK, left)) for file in (own, other))
        if mine != theirs:
            return None
        if not mine:  # both files were truncated meanwhile
            break
        left -= len(mine)
    return (sizes[1] > sizes[0]) - (sizes[1] < sizes[0])


def _compare(own: Share, other: Share, parts: Parts) -> int | None:
    """Compares a file in two folders as `_compare_contents` does; 1 if only `own` lacks it, -1 if only `other` does."""
    if not (own.has(parts) and other.has(parts)):
        return other.has(parts) - own.has(parts)
    with own.open(parts) as mine, other.open(parts) as theirs:
        return _compare_contents(mine, theirs)


def _model_files(uid: int) -> list[Parts]:
    return [("models", f"{uid:03d}.safetensors"), ("models", "ema", f"{uid:03d}.safetensors")]


def _status_time(share: Share, uid: int) -> float:
    """Returns when a node's status.json was written; 0 if unknown."""
    seconds = share.status(uid).get("time")
    return float(seconds) if isinstance(seconds, int | float) else 0.0


def _is_newer(own: Share, other: Share, uid: int) -> bool:
    """Returns whether a node's state in `other` is newer than in `own`: by its records, which only grow, and if they
    are equal by the time of status.json, as the clock may have been set back since."""
    for name in RECORDS:
        if found := _compare(own, other, ("nodes", f"{uid:03d}", name)):
            return found > 0
    return _status_time(other, uid) > _status_time(own, uid)


def _refuse_conflicts(run: Path, own: Share, shares: Sequence[Share]) -> None:
    """Raises UsageError, with a line per file, if two folders have contradicting records or models of a node."""
    lines = []
    known = [own]
    for share in shares:
        lines += [f"node {uid}: {'/'.join(parts)} in {share.path} differs from the one in {before.path}"
                  for uid in share.uids for before in known for parts in _conflicts(before, share, uid)]  # fmt: skip
        known.append(share)
    if lines:
        raise UsageError("\n".join([
            f"nothing was copied into {run}: a node can have only one record, and these differ (a machine that "
            "rejoined the run wrote two; give the one that counts)", *lines,
        ]))  # fmt: skip


def _conflicts(one: Share, other: Share, uid: int) -> Iterator[Parts]:
    for name in RECORDS:
        parts: Parts = ("nodes", f"{uid:03d}", name)
        if _compare(one, other, parts) is None:
            yield parts
    if _status_time(one, uid) == _status_time(other, uid):
        for parts in _model_files(uid):
            if one.has(parts) and other.has(parts) and _compare(one, other, parts) != 0:
                yield parts


# -- copying ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _temporary(run: Path) -> Iterator[Path]:
    """Yields a temporary folder inside the run's folder, from which files are moved to their places, and removes those
    of commands that were killed. Raises EnvironmentFault if another command copies into the run's folder, which is
    locked until this one ends, and if the temporary folder cannot be created."""
    descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    place = run / f".collect-{os.getpid()}-{entropy.word(3)}"
    try:
        with contextlib.suppress(OSError):  # a disk on which folders have no locks: then nothing is removed
            _lock(descriptor, run)
            for left in run.glob(".collect-*"):
                shutil.rmtree(left, ignore_errors=True)
        try:
            place.mkdir()
        except OSError as error:
            raise EnvironmentFault(f"cannot write into {run}: {error.strerror}") from error
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.close(descriptor)


def _lock(descriptor: int, run: Path) -> None:
    """Locks the run's folder until its descriptor is closed or the process ends. Raises EnvironmentFault if it is
    locked, OSError if it cannot be."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise EnvironmentFault(f"another collect copies into {run}: repeat this one when it has ended") from None


class _Copy:
    """Copies new files from shares into a run's folder."""

    def __init__(self, run: Path, own: Share, place: Path) -> None:
        """place: an empty temporary folder on the same disk."""
        self._run, self._own, self._temporary_dir = run, own, place
        self._machine_of = mapping_of(run)
        self.problems: list[str] = []

    def take(self, share: Share, run_id: str) -> CopiedShare:
        """Copies the new files of one share. Raises OSError."""
        taken = CopiedShare(share.path)
        self._copy_environments(share, taken)
        for uid in share.uids:
            # The node's own folder is copied last: without it the node counts as missing, so a repeat completes it.
            newer = _is_newer(self._own, share, uid)
            # status.json is read first and written last: all other files are then at least as new as its time says.
            status: Parts = ("nodes", f"{uid:03d}", STATUS)
            size = self._stage(share, status) if self._is_new(share, status, newer) else 0
            models = [parts for parts in _model_files(uid) if self._is_new(share, parts, newer)]
            size += sum(self._copy_file(share, parts) for parts in models)
            size += self._copy_checkpoints(share, uid, run_id, newer)
            size += self._copy_records(share, uid, newer)
            if size:
                taken.uids.append(uid)
            taken.size += size
        for parts in RUN_FILES:
            if share.has(parts) and not self._own.has(parts):
                taken.size += self._copy_file(share, parts)
                taken.whole.append("/".join(parts))
        return taken

    def _copy_environments(self, share: Share, taken: CopiedShare) -> None:
        """Copies the environment files of a share's machine, and of machines whose shares were merged into it before.
        """
        uids = share.uids
        number = _machine_of_share(share)
        if number is None and uids:
            number = self._machine_of_node(uids[0])
        folders = {number: ()} if number is not None and share.has(("env.json",)) else {}
        others = [name for name in share.names(FOLDER) if name.isdecimal() and len(name) <= MAX_DIGITS]
        found: dict[int, Parts] = {**{int(name): (FOLDER, name) for name in others}, **folders}
        newer = any(_is_newer(self._own, share, uid) for uid in uids)
        for machine, place in sorted(found.items()):
            if self._own.has(("env.json",)) and machine == self._own_machine:
                continue
            size = 0
            for name in FILES:
                there: Parts = (FOLDER, str(machine), name)
                if share.has((*place, name)) and (newer or not self._own.has(there)):
                    size += self._copy_file(share, (*place, name), there)
            if size:
                taken.machines.append(machine)
                taken.size += size

    @functools.cached_property
    def _own_machine(self) -> int | None:
        """The machine that the run's folder is from. It is read from env.json, because `collect` adds nodes of other
        machines to the folder."""
        return _machine_of_share(self._own)

    def _machine_of_node(self, uid: int) -> int | None:
        """Returns the machine of a node; each newcomer has its own. None if the mapping cannot be read."""
        if not self._machine_of:
            return None
        beyond = uid - max(self._machine_of)
        return self._machine_of.get(uid, max(self._machine_of.values()) + beyond)

    def _is_new(self, share: Share, parts: Parts, newer: bool) -> bool:
        """Returns whether to copy a file that is replaced if the share's state of the node is newer or the share's file
        is a longer one that begins with the whole of the own one."""
        found = _compare(self._own, share, parts)
        return share.has(parts) and (found == 1 or (newer and found != 0))

    def _copy_records(self, share: Share, uid: int, newer: bool) -> int:
        """Copies a node's folder, or what is new in it, and the staged status.json. Returns the number of bytes."""
        name = f"{uid:03d}"
        files = [parts for parts in share.files("nodes", name)
                 if not parts[-1].startswith(".") and parts[-1] not in (STATUS, supervisor_file.FILE)]  # fmt: skip
        new = [parts for parts in files
               if (_compare(self._own, share, parts) == 1 if parts[2:] in [(each,) for each in RECORDS]
                   else self._is_new(share, parts, newer))]  # fmt: skip
        size = sum(self._stage(share, parts) for parts in new)
        folder, staged = node_dir(self._run, uid), self._temporary_dir / "nodes" / name
        if staged.exists():
            folder.parent.mkdir(exist_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()  # succeeds only if the folder is empty; it then appears with all its files at once
            if not folder.exists():
                os.rename(staged, folder)
        for parts in (*new, ("nodes", name, STATUS)):
            if (file := self._temporary_dir.joinpath(*parts)).exists():
                (target := self._run.joinpath(*parts)).parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)
        return size

    def _stage(self, share: Share, parts: Parts) -> int:
        """Copies one file of a node's folder to the temporary folder. Returns its bytes."""
        (target := self._temporary_dir.joinpath(*parts)).parent.mkdir(parents=True, exist_ok=True)
        return self._copy_bytes(share, parts, target)

    def _copy_checkpoints(self, share: Share, uid: int, run_id: str, newer: bool) -> int:
        """Copies a node's valid checkpoints of this run. Returns the number of bytes."""
        size = 0
        for cut in share.names("checkpoints"):
            parts: Parts = ("checkpoints", cut, f"{uid:03d}.json")
            if CUT.fullmatch(cut) and share.has(parts) and not self._own.has(parts):
                size += self._copy_checkpoint(share, parts, run_id)
        best: Parts = ("checkpoints", f"best-{uid:03d}.json")
        return size + (self._copy_file(share, best) if self._is_new(share, best, newer) else 0)

    def _copy_checkpoint(self, share: Share, parts: Parts, run_id: str) -> int:
        from decentnode.checkpoint import store

        tensors: Parts = (*parts[:-1], parts[-1].removesuffix(".json") + ".safetensors")
        staging = self._temporary_dir / "checkpoint"
        staging.mkdir(exist_ok=True)
        if not share.has(tensors):
            self.problems.append(f"{share.path.joinpath(*tensors)} is missing: its checkpoint was left out")
            return 0
        size = sum(self._copy_bytes(share, each, staging / each[-1]) for each in (tensors, parts))
        try:
            manifest = store.read_manifest(staging / parts[-1])
        except CheckpointError as error:
            self.problems.append(f"{share.path.joinpath(*parts)} was left out: {error}")
            return 0
        uid = int(parts[-1].removesuffix(".json"))
        if (manifest.cut.run, manifest.cut.folder, manifest.uid) != (run_id, parts[1], uid):
            self.problems.append(f"{share.path.joinpath(*parts)} was left out: it belongs to another run, time or node")
            return 0
        target = self._run.joinpath(*parts[:-1])
        target.mkdir(parents=True, exist_ok=True)
        for each in (tensors, parts):  # the manifest last: it marks a complete checkpoint
            os.replace(staging / each[-1], target / each[-1])
        return size

    def _copy_file(self, share: Share, parts: Parts, place: Parts | None = None) -> int:
        """Copies one file to the same path in the run's folder, or to `place`, atomically. Returns its bytes."""
        target = self._run.joinpath(*(place or parts))
        target.parent.mkdir(parents=True, exist_ok=True)
        size = self._copy_bytes(share, parts, self._temporary_dir / "file")
        os.replace(self._temporary_dir / "file", target)
        return size

    def _copy_bytes(self, share: Share, parts: Parts, target: Path) -> int:
        """Copies as many bytes as a file has now, as it may still grow. Returns how many."""
        with share.open(parts) as source, open(target, "wb") as file:
            left = size = os.fstat(source.fileno()).st_size
            while left and (block := source.read(min(BLOCK, left))):
                file.write(block)
                left -= len(block)
        return size - left


def _machine_of_share(share: Share) -> int | None:
    """Returns the number of a share's machine from its env.json; None if there is no valid one."""
    try:
        with share.open(("env.json",)) as file:
            number = json.loads(file.read(MAX_STATUS_BYTES))["machine"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return number if type(number) is int and 0 <= number < 10**MAX_DIGITS else None
