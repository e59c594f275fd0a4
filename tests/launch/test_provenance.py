from __future__ import annotations

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
