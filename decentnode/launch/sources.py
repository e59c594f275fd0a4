"""Modules of the user's own that a run imported: found, and kept in the run directory so that it can be repeated."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import decentnode

CODE = "code"
"""The folder in the run directory; `experiment.load` looks there first (see experiment.CODE)."""


def local_modules() -> dict[str, str]:
    """Name -> path of every imported Python file that is neither installed, nor Python's, nor decentnode's."""
    installed = tuple({os.path.realpath(sysconfig.get_path(kind)) + os.sep
                       for kind in ("stdlib", "platstdlib", "purelib", "platlib")})  # fmt: skip
    ours = os.path.realpath(os.path.dirname(decentnode.__file__)) + os.sep
    found = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.endswith(".py") or name in ("__main__", "__mp_main__"):
            continue
        real = os.path.realpath(path)
        parts = Path(real).parts
        if real.startswith((*installed, ours)) or "site-packages" in parts or "dist-packages" in parts:
            continue
        if os.path.isfile(real):
            found[name] = real
    return found


def keep(modules: Mapping[str, str], run_dir: Path) -> dict[str, dict[str, str]]:
    """Copy them to run_dir/code, laid out as they are imported; their files and hashes by name. Raises OSError."""
    kept = {}
    for name, path in sorted(modules.items()):
        folder = run_dir.joinpath(CODE, *name.split("."))
        target = folder / "__init__.py" if os.path.basename(path) == "__init__.py" else folder.with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        digest = hashlib.sha256(target.read_bytes()).hexdigest()
        kept[name] = {"file": str(target.relative_to(run_dir)), "sha256": digest}
    return kept
