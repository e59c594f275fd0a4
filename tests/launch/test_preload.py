"""What the fork server imports for all nodes: everything they need, and nothing that a fork would break."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LOOK = """
import json, sys, threading
from decentnode.launch.children import preload
import gc, os, torch
print(json.dumps({
    "missing": [name for name in preload.MODULES if name not in sys.modules],
    "targets": [target for table in preload.TABLES for target in table.values()],
    "threads": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count(),
    "cuda": torch.cuda.is_initialized(), "collects": gc.isenabled(), "frozen": gc.get_freeze_count(),
}))
"""


@pytest.mark.slow
def test_children_find_their_modules_imported_and_inherit_no_thread() -> None:
    """A fork has the calling thread alone: a pool or a CUDA context made before would be broken in every child."""
    found = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr
    seen = json.loads(found.stdout)
    assert not seen["missing"]
    assert seen["threads"] == 1 and not seen["cuda"]
    assert not seen["collects"] and seen["frozen"] > 100_000, "the collector leaves the shared pages untouched"
    assert {"decentnode.sharing.full:Full", "decentnode.communication.inproc.transport:Inproc"} <= {*seen["targets"]}
