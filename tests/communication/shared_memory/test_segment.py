"""Segments of shared memory: creation, attaching, access rights, and removal of the files of dead owners."""

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


def test_readers_see_what_the_owner_writes_and_header_words_are_shared_both_ways(tmp_path: Path) -> None:
    owner = Segment.create(tmp_path / "segment", SIZE, HEADER)
    reader = Segment.attach(tmp_path / "segment", SIZE, HEADER)
    assert (tmp_path / "segment").stat().st_mode & 0o777 == 0o600
    owner.unlink()
    owner.unlink()
    assert not list(tmp_path.iterdir())
    owned, seen = (segment.tensor(torch.float32, 5, HEADER + ALIGNMENT) for segment in (owner, reader))
    owned.copy_(torch.arange(5.0))
    assert torch.equal(owned, seen) and owned.data_ptr() != seen.data_ptr()
    assert owner.tensor(torch.float32, 0, SIZE).numel() == 0
    owner.words(2, 3)[1] = -7
    assert list(reader.words(0, 5)) == [0, 0, 0, -7, 0]
    reader.words(0, 1)[0] = 1 << 62
    assert owner.words(0, 1)[0] == 1 << 62
    owner.write(HEADER, b"offer")
    assert reader.read(HEADER, 5) == b"offer" and len(reader.read(SIZE - 2, 100)) == 2


def test_tensors_outlive_their_segment(tmp_path: Path) -> None:
    view = Segment.create(tmp_path / "segment", SIZE, HEADER).tensor(torch.int64, 4, HEADER)
    view.fill_(3)
    assert Segment.attach(tmp_path / "segment", SIZE, HEADER).tensor(torch.int64, 4, HEADER).tolist() == [3] * 4


def test_a_segment_needs_a_free_name_and_enough_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Segment.create(tmp_path / "taken", SIZE, HEADER)
    with pytest.raises(FileExistsError):
        Segment.create(tmp_path / "taken", SIZE, HEADER)
    free = namedtuple("free", "f_bavail f_frsize")
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda _: free(20, 1 << 20))
        with pytest.raises(OSError, match=r"has 20 MiB left, shared memory needs 5 MiB") as raised:
            Segment.create(tmp_path / "large", 5 << 20, HEADER)
        assert raised.value.errno == errno.ENOSPC

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    open_files = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(OSError, match="No space"):
        Segment.create(tmp_path / "late", SIZE, HEADER, watched=True)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert set(os.listdir("/proc/self/fd")) == open_files


def test_a_file_of_another_size_or_a_link_is_not_attached(tmp_path: Path) -> None:
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
    assert sorted(mappings_of(path)) == [("r--s", SIZE - HEADER), ("rw-s", HEADER), ("rw-s", SIZE)]
    assert owner.size == reader.size


def mappings_of(path: Path) -> list[tuple[str, int]]:
    """Returns (rights, bytes) of every mapping that this process has of a file."""
    mappings = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_, name = line.split(None, 5)
        if name.startswith(str(path)):
            start, end = (int(address, 16) for address in span.split("-"))
            mappings.append((rights, end - start))
    return mappings


OWNER = """
import sys
from pathlib import Path
from decentnode.communication.shared_memory.segment import Segment
segment = Segment.create(Path(sys.argv[1]), {size}, {header}, watched=True)
segment.words(0, 1)[0] = 1
print("created", flush=True)
sys.stdin.read()
"""


def start_owner(path: Path) -> subprocess.Popen[str]:
    """Returns a process that has created a watched segment and lives until it is killed."""
    script = OWNER.format(size=SIZE, header=HEADER)
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               text=True)  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "created\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_the_death_of_an_owner_is_noticed_and_its_file_is_removed_once_it_is_old(tmp_path: Path) -> None:
    """Files of live owners, young files, files with other names, and links and folders stay."""
    paths = [tmp_path / f"segment-{number}" for number in range(3)]
    owners = [start_owner(path) for path in paths[:2]]
    try:
        readers = [Segment.attach(path, SIZE, HEADER, watched=True) for path in paths[:2]]
        assert not any(reader.owner_is_gone() for reader in readers)
        kill(owners[1])
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
        for owner in owners:
            kill(owner)


def test_placed_sizes_are_aligned() -> None:
    assert placed([], 7) == ([], 7)
    assert placed([1, ALIGNMENT, 300, 0], PAGE) == ([PAGE, PAGE + 128, PAGE + 256, PAGE + 640], PAGE + 640)
    assert [rounded(size, 8) for size in (0, 1, 8, 9)] == [0, 8, 8, 16]
