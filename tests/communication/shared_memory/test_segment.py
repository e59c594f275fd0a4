"""Segments of shared memory: made where there is room, seen by others, named only while it has to be, cleared away."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from decentnode.communication.shared_memory.segment import (
    ALIGNMENT,
    PAGE,
    STALE_SECONDS,
    Segment,
    placed,
    remove_stale,
    rounded,
)  # fmt: skip

SIZE, HEADER = 3 * PAGE, PAGE
NAMES = re.compile(r"segment-[0-9]+")


def test_what_the_owner_writes_is_seen_and_words_go_both_ways(tmp_path: Path) -> None:
    owner = Segment.create(tmp_path / "segment", SIZE, HEADER)
    reader = Segment.attach(tmp_path / "segment", SIZE, HEADER)
    assert (tmp_path / "segment").stat().st_mode & 0o777 == 0o600
    owner.unlink()
    owner.unlink()
    assert not list(tmp_path.iterdir())
    ours, theirs = (each.tensor(torch.float32, 5, HEADER + ALIGNMENT) for each in (owner, reader))
    ours.copy_(torch.arange(5.0))
    assert torch.equal(ours, theirs) and ours.data_ptr() != theirs.data_ptr()
    assert owner.tensor(torch.float32, 0, SIZE).numel() == 0
    owner.words(2, 3)[1] = -7
    assert list(reader.words(0, 5)) == [0, 0, 0, -7, 0]
    reader.words(0, 1)[0] = 1 << 62
    assert owner.words(0, 1)[0] == 1 << 62
    owner.write(HEADER, b"offer")
    assert reader.read(HEADER, 5) == b"offer" and len(reader.read(SIZE - 2, 100)) == 2


def test_views_outlive_the_segment(tmp_path: Path) -> None:
    view = Segment.create(tmp_path / "segment", SIZE, HEADER).tensor(torch.int64, 4, HEADER)
    view.fill_(3)
    assert Segment.attach(tmp_path / "segment", SIZE, HEADER).tensor(torch.int64, 4, HEADER).tolist() == [3] * 4


def test_no_segment_without_room_or_under_a_name_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Segment.create(tmp_path / "taken", SIZE, HEADER)
    with pytest.raises(FileExistsError):
        Segment.create(tmp_path / "taken", SIZE, HEADER)
    free = namedtuple("free", "f_bavail f_frsize")
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda _: free(20, 1 << 20))
        with pytest.raises(OSError, match=r"has 20 MiB left, shared memory needs 5 MiB") as raised:
            Segment.create(tmp_path / "large", 5 << 20, HEADER)
        assert raised.value.errno == errno.ENOSPC

    def no(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    opened = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", no)
    with pytest.raises(OSError, match="No space"):
        Segment.create(tmp_path / "late", SIZE, HEADER, watched=True)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"] and set(os.listdir("/proc/self/fd")) == opened


def test_only_the_file_that_was_agreed_on_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    Segment.create(path, SIZE, HEADER)
    with pytest.raises(ValueError, match=f"{SIZE} bytes of user {os.geteuid()}"):
        Segment.attach(path, SIZE + PAGE, HEADER)
    (tmp_path / "link").symlink_to(path)
    for name in ("link", "nothing"):
        with pytest.raises(OSError, match=name):
            Segment.attach(tmp_path / name, SIZE, HEADER)


def test_readers_cannot_write_the_body(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    owner, reader = Segment.create(path, SIZE, HEADER), Segment.attach(path, SIZE, HEADER)
    assert sorted(mapped(path)) == [("r--s", SIZE - HEADER), ("rw-s", HEADER), ("rw-s", SIZE)]
    assert owner.size == reader.size


def mapped(path: Path) -> list[tuple[str, int]]:
    """(rights, bytes) of this process's mappings of a file."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_, name = line.split(None, 5)
        if name.startswith(str(path)):
            start, end = (int(each, 16) for each in span.split("-"))
            found.append((rights, end - start))
    return found


OWNER = """
import sys
from pathlib import Path
from decentnode.communication.shared_memory.segment import Segment
made = Segment.create(Path(sys.argv[1]), {size}, {header}, watched=True)
made.words(0, 1)[0] = 1
print("made", flush=True)
sys.stdin.read()
"""


def owner_of(path: Path) -> subprocess.Popen[str]:
    """A process that has made a watched segment and lives until it is killed."""
    script = OWNER.format(size=SIZE, header=HEADER)
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               text=True)  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "made\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_an_owner_that_is_killed_is_gone_and_its_file_with_it(tmp_path: Path) -> None:
    """And nothing else: a living owner's, a young one, another name, what is no file."""
    paths = [tmp_path / f"segment-{number}" for number in range(3)]
    owners = [owner_of(path) for path in paths[:2]]
    try:
        readers = [Segment.attach(path, SIZE, HEADER, watched=True) for path in paths[:2]]
        assert not any(reader.owner_is_gone() for reader in readers)
        end(owners[1])
        assert [reader.owner_is_gone() for reader in readers] == [False, True]
        assert readers[1].words(0, 1)[0] == 1, "what it wrote is still there"
        paths[2].write_bytes(b"")
        remove_stale(NAMES, tmp_path)
        assert all(path.exists() for path in paths), "all are young"
        (tmp_path / "segment-3").symlink_to(paths[0])
        (tmp_path / "segment-4").mkdir()
        (tmp_path / "other-5").write_bytes(b"")
        old = time.time() - 2 * STALE_SECONDS
        for path in tmp_path.iterdir():
            os.utime(path, (old, old), follow_symlinks=False)
        remove_stale(NAMES, tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["other-5", "segment-0", "segment-3", "segment-4"]
    finally:
        for each in owners:
            end(each)


def test_places_are_aligned() -> None:
    assert placed([], 7) == ([], 7)
    assert placed([1, ALIGNMENT, 300, 0], PAGE) == ([PAGE, PAGE + 128, PAGE + 256, PAGE + 640], PAGE + 640)
    assert [rounded(size, 8) for size in (0, 1, 8, 9)] == [0, 8, 8, 16]
