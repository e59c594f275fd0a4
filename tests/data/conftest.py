from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Converted samples of a test go into its own folder."""
    monkeypatch.setenv("DECENTNODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
