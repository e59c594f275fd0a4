"""Files are replaced atomically, and no temporary files are left."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from decentnode import system
from decentnode.checkpoint import store
from decentnode.errors import DecentnodeError
from decentnode.graph import file as graph_file


def raise_disk_full(*_: object) -> None:
    raise OSError(28, "No space left on device")


WRITERS: dict[str, Callable[[Path], object]] = {
    "text": lambda path: system.write_atomic(path, "new"),
    "durable text": lambda path: system.write_atomic(path, "new", durable=True),
    "graph": lambda path: graph_file.write([(1,), (0,)], path),
    "best checkpoint": lambda path: store.mark_best(path.parent, 3, store.Cut("", 1, 0, "", (3,)), "loss", 0.5),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_failed_replacement_keeps_the_old_file_and_no_temporary_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "best-003.json"
    WRITERS[name](path)
    path.write_text("old")
    monkeypatch.setattr(os, "replace", raise_disk_full)
    with pytest.raises((OSError, DecentnodeError), match="No space left"):
        WRITERS[name](path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name] and path.read_text() == "old"


def test_a_durable_file_is_synced_before_it_replaces_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    sync, replace = os.fsync, os.replace

    def synced(file: int) -> None:
        order.append(os.readlink(f"/proc/self/fd/{file}"))
        sync(file)

    def replaced(source: Path, target: Path) -> None:
        assert source.read_text() == "new", "written as a whole before"
        order.append("replaced")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    system.write_atomic(tmp_path / "x", "new")
    assert order == ["replaced"]
    system.write_atomic(tmp_path / "x", "new", durable=True)
    (file, middle, folder), where = order[1:], str(tmp_path)
    assert (middle, folder) == ("replaced", where) and file.startswith(f"{where}/.x.")


def test_a_symbolic_link_is_replaced_atomically(tmp_path: Path) -> None:
    for target in ("one", "two"):
        with system.replacing(tmp_path / "latest") as temporary:
            os.symlink(target, temporary)
    assert os.readlink(tmp_path / "latest") == "two" and len(list(tmp_path.iterdir())) == 1


def test_the_boot_id_is_a_uuid_that_does_not_change() -> None:
    assert uuid.UUID(system.boot_id()) and system.boot_id() == system.boot_id()


def test_surrogates_in_file_names_are_written_as_their_bytes(tmp_path: Path) -> None:
    """In an ASCII locale, Python represents other bytes of a file name as surrogates."""
    name = "Größe".encode().decode("ascii", "surrogateescape")
    system.write_atomic(tmp_path / "x", f"run {name}")
    assert (tmp_path / "x").read_text(encoding="utf-8") == "run Größe"
