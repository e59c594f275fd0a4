from __future__ import annotations

import pytest


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file into the current directory; shown paths are then short."""
    monkeypatch.chdir(tmp_path)

    def _write(text: str | bytes, name: str = "a.yaml") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return _write
