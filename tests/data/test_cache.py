from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from decentnode.data import cache
from decentnode.data.cache import META, VERSION, Index, Writer, indexed, root
from decentnode.errors import DataError


def build_arrays(writer: Writer) -> None:
    writer.append("x", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.append("x", np.arange(3, dtype=np.float32).reshape(1, 3))
    writer.append("none", np.empty((0, 4), np.int64))
    writer.notes["words"] = ["a"]


def open_index(folder: Path) -> Index:
    source = folder / "source"
    if not source.exists():  # another modification time would give another index
        source.write_text("1")
    return indexed("kind", [source], {"a": 1}, build_arrays, folder / "c")


def test_indexed_arrays_are_read_back(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    assert index["x"].tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2]] and index["x"].dtype == np.float32
    assert index["none"].shape == (0, 4) and index.notes == {"words": ["a"]} and index.damaged() == []
    assert not [path for path in (tmp_path / "c").iterdir() if path.name.startswith(".") and path.is_dir()]


def test_damaged_arrays_are_found_and_truncated_indexes_rebuilt(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    content = index.folder / "x.bin"
    content.write_bytes(b"\x01" + content.read_bytes()[1:])
    assert index.damaged() == ["x"]
    content.write_bytes(b"short")
    assert open_index(tmp_path).damaged() == []
    for text in ("{", json.dumps({"version": 0}), json.dumps({"version": VERSION, "notes": {}, "arrays": 3})):
        (index.folder / META).write_text(text)
        assert open_index(tmp_path)["x"].shape == (3, 3)


def test_an_index_with_changed_content_is_rebuilt(tmp_path: Path) -> None:
    """Content of the same length: the changed modification time leads to a comparison of digests."""
    content = open_index(tmp_path).folder / "x.bin"
    whole = content.read_bytes()
    content.write_bytes(b"\x01" + whole[1:])
    os.utime(content, ns=(1, 1))
    assert open_index(tmp_path)["x"].tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2]] and content.read_bytes() == whole


def test_a_copied_index_is_verified_once_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = open_index(tmp_path)
    os.utime(index.folder / "x.bin", ns=(1, 1))
    digested: list[str] = []
    digest = cache._digest
    monkeypatch.setattr(cache, "_digest", lambda path: [digested.append(path.name), digest(path)][1])
    build_again = Index(index.folder)
    assert build_again["x"].shape == (3, 3) and sorted(digested) == ["none.bin", "x.bin"]
    Index(index.folder)
    assert len(digested) == 2, "digests must be computed only once"


BUILD_SLOWLY = """
import sys, pathlib, numpy as np
from decentnode.data import cache
from decentnode.data.cache import indexed

folder = pathlib.Path(sys.argv[1])
sys.stdin.readline()

def build(writer):
    with open(folder / "made", "a") as file:
        file.write("x")
    for n in range(200):
        writer.append("x", np.full((100, 50), n))

index = indexed("kind", [folder / "source"], {}, build, folder / "c")
sys.exit(0 if index["x"].sum() == 5000 * 199 * 100 else 1)
"""


@pytest.mark.slow
def test_processes_that_start_together_build_one_index(tmp_path: Path) -> None:
    (tmp_path / "source").write_text("1")
    command = [sys.executable, "-c", BUILD_SLOWLY, str(tmp_path)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(3)]
    for each in processes:
        assert each.stdin is not None
        each.stdin.write(b"go\n")
        each.stdin.flush()
    assert [each.wait(120) for each in processes] == [0, 0, 0]
    for each in processes:
        assert each.stdin is not None
        each.stdin.close()
    assert (tmp_path / "made").read_text() == "x"


def test_waiting_for_the_index_of_another_process_times_out(tmp_path: Path) -> None:
    folder = open_index(tmp_path).folder
    (folder / META).unlink()
    with open(folder.parent / f".{folder.name}.lock", "r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"process \d+ has been making this index for 0 s"):
            indexed("kind", [tmp_path / "source"], {"a": 1}, build_arrays, tmp_path / "c", wait_seconds=0)


def test_the_index_that_another_process_built_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = open_index(tmp_path)
    folder, text = index.folder, (index.folder / META).read_text()
    (folder / META).unlink()
    held = open(folder.parent / f".{folder.name}.lock", "r+")  # noqa: SIM115
    fcntl.flock(held, fcntl.LOCK_EX)
    start = threading.Thread.start

    def start_and_finish(thread: threading.Thread) -> None:
        start(thread)
        (folder / META).write_text(text)
        held.close()

    monkeypatch.setattr(threading.Thread, "start", start_and_finish)

    def fail_if_built(writer: Writer) -> None:
        raise AssertionError("the index was built twice")

    assert indexed("kind", [tmp_path / "source"], {"a": 1}, fail_if_built, tmp_path / "c")["x"].shape == (3, 3)


def test_a_cache_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file")
    with pytest.raises(DataError, match=r"kind cannot be indexed there: .*DECENTNODE_CACHE names another folder"):
        open_index(tmp_path)


def test_the_cache_folder_follows_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECENTNODE_CACHE", "/a/b")
    assert root() == Path("/a/b")
    monkeypatch.delenv("DECENTNODE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert root() == Path("/x/decentnode")
