from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from decentnode.launch.children import own_modules


def test_where_a_module_lies_is_looked_up_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node asks at its end, with 3,000 modules that the fork server has loaded and looked at."""
    before = own_modules.local_modules()
    assert __name__ in before and "decentnode" not in before and "torch" not in before
    assert len(own_modules._own_modules._new_modules()) == 0
    looked: list[str] = []
    monkeypatch.setattr(own_modules, "_own_file", looked.append)
    assert own_modules.local_modules() == before and not looked


def test_modules_that_come_and_go_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def imported(name: str, folder: str) -> str:
        monkeypatch.delitem(sys.modules, name, raising=False)
        made = ModuleType(name)
        (tmp_path / folder).mkdir(exist_ok=True)
        made.__file__ = str(tmp_path / folder / f"{name}.py")
        Path(made.__file__).touch()
        monkeypatch.setitem(sys.modules, name, made)
        return os.path.realpath(made.__file__)

    before = own_modules.local_modules()
    first = {"one": imported("one", "a"), "two": imported("two", "a")}
    assert own_modules.local_modules() == before | first
    again = {"three": imported("three", "b"), "two": imported("two", "b")}  # the last one seen is the last one again
    assert own_modules.local_modules() == before | first | again
    monkeypatch.delitem(sys.modules, "one")
    Path(again["three"]).unlink()
    assert own_modules.local_modules() == before | {"two": again["two"]}


def test_a_link_to_a_module_is_the_module(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").touch()
    (tmp_path / "file.py").symlink_to(tmp_path / "code" / "mine.py")
    (tmp_path / "folder").symlink_to(tmp_path / "code")
    real = os.path.realpath(tmp_path / "code" / "mine.py")
    assert [own_modules._own_file(str(tmp_path / each)) for each in ("file.py", "folder/mine.py")] == [real, real]


def test_a_file_that_pythons_folder_links_to_is_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "etc" / "site.py").write_text("")
    (tmp_path / "lib" / "site.py").symlink_to(tmp_path / "etc" / "site.py")
    monkeypatch.setattr(own_modules, "_foreign_folders", lambda: (f"{tmp_path / 'lib'}{os.sep}",))
    assert own_modules._own_file(str(tmp_path / "lib" / "site.py")) == ""
    assert own_modules._own_file(str(tmp_path / "etc" / "site.py")) == str((tmp_path / "etc" / "site.py").resolve())
