"""Files kept between runs are read only if no other user can have written them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from decentnode import user_cache


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_kept_text_is_readable_by_its_user_only(tmp_path: Path) -> None:
    assert user_cache.read("step") is None
    user_cache.keep("step", "0.79")
    user_cache.keep("step", "0.8")
    assert user_cache.read("step") == "0.8"
    assert [path.name for path in (tmp_path / "decentnode").iterdir()] == ["step"]
    assert (tmp_path / "decentnode/step").stat().st_mode & 0o777 == 0o600


def test_files_that_other_users_may_have_written_are_not_read(tmp_path: Path) -> None:
    user_cache.keep("step", "0.8")
    path = tmp_path / "decentnode/step"
    path.chmod(0o620)
    assert user_cache.read("step") is None
    path.chmod(0o600)
    (tmp_path / "decentnode/link").symlink_to(path)
    assert user_cache.read("link") is None
    path.parent.chmod(0o777)
    assert user_cache.read("step") is None
    with pytest.raises(OSError, match="another user"):
        user_cache.folder()


def test_without_a_usable_folder_nothing_is_kept_and_nothing_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    user_cache.keep("step", "0.8")
    assert user_cache.read("step") is None
