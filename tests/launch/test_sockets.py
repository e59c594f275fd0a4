"""Socket folders and publish buffers of killed runs are removed, and nothing else is."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from decentnode.communication.shared_memory.publish_buffer import buffer_path, buffer_run_name
from decentnode.launch.children import sockets
from decentnode.launch.children.sockets import UNFINISHED_SECONDS, SocketDir, remove_stale
from decentnode.wire.generation import FIRST, Name, new_origin


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /tmp, beside one in place of /dev/shm."""
    base, buffers = tmp_path / "t", tmp_path / "shm"
    base.mkdir()
    buffers.mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(base))
    monkeypatch.setattr(sockets, "BUFFERS", buffers)
    monkeypatch.setattr(sockets, "MAX_PATH_BYTES", 1000)
    return base


@pytest.mark.parametrize("generation", [FIRST, (12, new_origin(3, os.urandom))], ids=["first", "later"])
@pytest.mark.parametrize("lent", [False, True])
def test_socket_folders_and_publish_buffers_of_killed_runs_are_removed_by_the_next(
    shared: Path, generation: Name, lent: bool
) -> None:
    alive, killed = SocketDir(), SocketDir()
    buffers = [sockets.BUFFERS / buffer_path(buffer_run_name(Path(socket_dir.path), generation), 3, lent).name
               for socket_dir in (alive, killed)]  # fmt: skip
    for buffer in buffers:
        buffer.touch()
    os.close(killed._lock)  # what the system does with the files of a killed process
    remove_stale(shared)
    assert Path(alive.path).exists() and not Path(killed.path).exists()
    assert buffers[0].exists() and not buffers[1].exists()
    alive.remove()
    assert not buffers[0].exists()
    alive.remove()
    assert not Path(alive.path).exists()


def test_the_folder_of_a_run_that_is_starting_is_not_removed(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run removes stale folders before and after every step of the start."""
    removals, is_removing = 0, False

    def remove() -> None:
        nonlocal removals, is_removing
        if not is_removing:
            is_removing = True
            remove_stale(shared)
            is_removing = False
            removals += 1

    def remove_around(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            remove()
            result = function(*args, **kwargs)
            remove()
            return result

        return call

    with monkeypatch.context() as patch:
        for module, name in ((os, "open"), (os, "rename"), (os, "mkdir"), (fcntl, "flock")):
            patch.setattr(module, name, remove_around(getattr(module, name)))
        made = SocketDir()
    assert removals >= 6 and Path(made.path, "lock").exists()
    remove_stale(shared)
    assert Path(made.path, "lock").exists()
    made.remove()
    assert not list(shared.iterdir())


def test_unexpected_names_links_and_fifos_are_not_removed_or_followed(shared: Path, tmp_path: Path) -> None:
    buffers = tmp_path / "shm"
    live = buffers / "decentnode-abcd1234-0-00-0"
    mine = tmp_path / "mine"
    mine.write_text("keep")
    for name in ("decentnode-*", "decentnode-abcd12?4", "decentnode-abcd123", "decentnode-"):
        (shared / name).mkdir()
        (shared / name / "lock").touch()  # a name that SocketDir does not give
    (shared / "decentnode-linklock").mkdir()
    (shared / "decentnode-linklock" / "lock").symlink_to(mine)
    (shared / "decentnode-fifolock").mkdir()
    os.mkfifo(shared / "decentnode-fifolock" / "lock")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (shared / "decentnode-linkfold").symlink_to(elsewhere)
    stale = shared / "decentnode-stale000"
    stale.mkdir()
    (stale / "lock").touch()
    (stale / "link").symlink_to(elsewhere)
    kept = [live, buffers / "decentnode-stale000-x", buffers / "decentnode-stale0001-0-00-0"]
    removed = [buffers / "decentnode-stale000-0-00-3", buffers / "decentnode-stale000-1-0a-3-lent"]
    for buffer in kept + removed:
        buffer.touch()
    before = {path for path in shared.iterdir() if path != stale}
    remove_stale(shared)
    assert set(shared.iterdir()) == before and mine.read_text() == "keep" and (elsewhere / "lock").exists()
    assert sorted(buffers.iterdir()) == sorted(kept)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")
def test_files_of_another_user_are_not_removed(shared: Path, tmp_path: Path) -> None:
    for name, owner in (("decentnode-theirs00", 12345), ("decentnode-itslock0", os.getuid())):
        (shared / name).mkdir()
        (shared / name / "lock").touch()
        os.chown(shared / name / "lock", 12345, 12345)
        os.chown(shared / name, owner, -1)
    gone = shared / "decentnode-gone0000"
    gone.mkdir()
    (gone / "lock").touch()
    theirs = tmp_path / "shm" / "decentnode-gone0000-0-00-0"
    theirs.touch()
    os.chown(theirs, 12345, 12345)
    remove_stale(shared)
    assert len(list(shared.iterdir())) == 2 and not gone.exists() and theirs.exists()


def test_a_folder_without_a_lock_is_removed_only_when_it_is_old(shared: Path) -> None:
    for name, age in (("decentnode-young000", 60), ("decentnode-old00000", 2 * UNFINISHED_SECONDS)):
        (shared / name).mkdir()
        os.utime(shared / name, (time.time() - age,) * 2)
    remove_stale(shared)
    assert [path.name for path in shared.iterdir()] == ["decentnode-young000"]
