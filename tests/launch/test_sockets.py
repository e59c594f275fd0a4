"""Folders of sockets that runs leave, and what may be removed of them."""

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
    """A folder that stands for /tmp, beside one that stands for /dev/shm."""
    base, boards = tmp_path / "t", tmp_path / "shm"
    base.mkdir()
    boards.mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(base))
    monkeypatch.setattr(sockets, "BUFFERS", boards)
    monkeypatch.setattr(sockets, "MAX_PATH_BYTES", 1000)
    return base


@pytest.mark.parametrize("generation", [FIRST, (12, new_origin(3, os.urandom))], ids=["first", "later"])
@pytest.mark.parametrize("lent", [False, True])
def test_socket_folders_and_boards_of_killed_runs_are_removed_by_the_next(
    shared: Path, generation: Name, lent: bool
) -> None:
    alive, killed = SocketDir(), SocketDir()
    boards = [sockets.BUFFERS / buffer_path(buffer_run_name(Path(each.path), generation), 3, lent).name
              for each in (alive, killed)]  # fmt: skip
    for buffer in boards:
        buffer.touch()
    os.close(killed._lock)  # what the system does with the files of a killed process
    remove_stale(shared)
    assert Path(alive.path).exists() and not Path(killed.path).exists()
    assert boards[0].exists() and not boards[1].exists()
    alive.remove()
    assert not boards[0].exists()
    alive.remove()
    assert not Path(alive.path).exists()


def test_a_run_that_is_just_starting_is_not_taken_for_gone(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run starts before and after every step of the start."""
    looks, looking = 0, False

    def look() -> None:
        nonlocal looks, looking
        if not looking:
            looking = True
            remove_stale(shared)
            looking = False
            looks += 1

    def watched(whole: Callable[..., object]) -> Callable[..., object]:
        def step(*words: object, **named: object) -> object:
            look()
            done = whole(*words, **named)
            look()
            return done

        return step

    with monkeypatch.context() as patch:
        for module, name in ((os, "open"), (os, "rename"), (os, "mkdir"), (fcntl, "flock")):
            patch.setattr(module, name, watched(getattr(module, name)))
        made = SocketDir()
    assert looks >= 6 and Path(made.path, "lock").exists()
    remove_stale(shared)
    assert Path(made.path, "lock").exists()
    made.remove()
    assert not list(shared.iterdir())


def test_names_and_links_in_the_shared_folder_are_not_trusted(shared: Path, tmp_path: Path) -> None:
    boards = tmp_path / "shm"
    live = boards / "decentnode-abcd1234-0-00-0"
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
    others = [live, boards / "decentnode-stale000-x", boards / "decentnode-stale0001-0-00-0"]
    its = [boards / "decentnode-stale000-0-00-3", boards / "decentnode-stale000-1-0a-3-lent"]
    for buffer in others + its:
        buffer.touch()
    before = {path for path in shared.iterdir() if path != stale}
    remove_stale(shared)
    assert set(shared.iterdir()) == before and mine.read_text() == "keep" and (elsewhere / "lock").exists()
    assert sorted(boards.iterdir()) == sorted(others)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")
def test_what_another_user_made_is_left_alone(shared: Path, tmp_path: Path) -> None:
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


def test_a_folder_whose_run_was_killed_before_its_lock_is_removed_when_it_is_old(shared: Path) -> None:
    for name, age in (("decentnode-young000", 60), ("decentnode-old00000", 2 * UNFINISHED_SECONDS)):
        (shared / name).mkdir()
        os.utime(shared / name, (time.time() - age,) * 2)
    remove_stale(shared)
    assert [path.name for path in shared.iterdir()] == ["decentnode-young000"]
