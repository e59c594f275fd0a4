from __future__ import annotations

import os
from pathlib import Path

import pytest

from decentnode.launch.files import provenance


def test_the_environment_is_written_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "hunter2")
    provenance.write(tmp_path, {"name": "ring"}, tmp_path)
    text = (tmp_path / "env.json").read_text()
    assert '"torch"' in text and '"cpu"' in text
    assert "hunter2" not in text
    assert "numpy==" in (tmp_path / "pip-freeze.txt").read_text()


def test_where_a_module_lies_is_looked_up_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node of a process asks at its end: of 1,000 nodes with 2,500 modules each."""
    before = provenance.local_modules()
    assert __name__ in before and "decentnode" not in before and "torch" not in before
    looked: list[str] = []
    monkeypatch.setattr(provenance.os.path, "realpath", looked.append)
    assert provenance.local_modules() == before and not looked


def test_a_file_that_pythons_folder_links_to_is_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "etc" / "site.py").write_text("")
    (tmp_path / "lib" / "site.py").symlink_to(tmp_path / "etc" / "site.py")
    monkeypatch.setattr(provenance, "_elsewhere", lambda: (f"{tmp_path / 'lib'}{os.sep}",))
    assert provenance._own_file(str(tmp_path / "lib" / "site.py")) == ""
    assert provenance._own_file(str(tmp_path / "etc" / "site.py")) == str((tmp_path / "etc" / "site.py").resolve())
