from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from decentnode.launch.children import own_modules


def test_the_file_of_a_module_is_looked_up_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node asks at its end; the fork server has then loaded 3,000 modules and looked up their files."""
    before = own_modules.local_modules()
    assert __name__ in before and "decentnode" not in before and "torch" not in before
    assert len(own_modules._own_modules._new_modules()) == 0
    looked: list[str] = []
    monkeypatch.setattr(own_modules, "_own_file", looked.append)
    assert own_modules.local_modules() == before and not looked


def test_local_modules_follow_modules_that_are_imported_replaced_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_module(name: str, folder: str) -> str:
        monkeypatch.delitem(sys.modules, name, raising=False)
        made = ModuleType(name)
        (tmp_path / folder).mkdir(exist_ok=True)
        made.__file__ = str(tmp_path / folder / f"{name}.py")
        Path(made.__file__).touch()
        monkeypatch.setitem(sys.modules, name, made)
        return os.path.realpath(made.__file__)

    before = own_modules.local_modules()
    first = {"one": import_module("one", "a"), "two": import_module("two", "a")}
    assert own_modules.local_modules() == before | first
    again = {"three": import_module("three", "b"), "two": import_module("two", "b")}  # "two" is again the last module
    assert own_modules.local_modules() == before | first | again
    monkeypatch.delitem(sys.modules, "one")
    Path(again["three"]).unlink()
    assert own_modules.local_modules() == before | {"two": again["two"]}


def test_a_module_imported_through_a_symbolic_link_is_found_at_its_real_path(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").touch()
    (tmp_path / "file.py").symlink_to(tmp_path / "code" / "mine.py")
    (tmp_path / "folder").symlink_to(tmp_path / "code")
    real = os.path.realpath(tmp_path / "code" / "mine.py")
    assert [own_modules._own_file(str(tmp_path / each)) for each in ("file.py", "folder/mine.py")] == [real, real]


def test_a_module_in_pythons_folder_is_not_local_although_it_links_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "etc" / "site.py").write_text("")
    (tmp_path / "lib" / "site.py").symlink_to(tmp_path / "etc" / "site.py")
    monkeypatch.setattr(own_modules, "_foreign_folders", lambda: (f"{tmp_path / 'lib'}{os.sep}",))
    assert own_modules._own_file(str(tmp_path / "lib" / "site.py")) == ""
    assert own_modules._own_file(str(tmp_path / "etc" / "site.py")) == str((tmp_path / "etc" / "site.py").resolve())
