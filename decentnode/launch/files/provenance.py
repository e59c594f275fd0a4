"""Records the machine, versions and code of a run, and copies the user's own modules, so that the run can be repeated.

Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from decentnode import clock, version
from decentnode.config.run_files import CODE
from decentnode.system import write_atomic

logger = logging.getLogger(__name__)

VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "SLURM_JOB_ID", "SLURM_NODEID", "RANK")
"""Environment variables that are recorded; all others may hold secrets."""

MAX_DIFF_BYTES = 1 << 20


def _lines(path: str, key: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return [line.partition(":")[2].strip() for line in file if line.startswith(key)]
    except OSError:
        return []


def versions() -> dict[str, str]:
    found = {"decentnode": version.__version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "pyzmq", "msgpack", "pydantic", "safetensors"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `facts` together with a description of the machine and the versions."""
    memory = _lines("/proc/meminfo", "MemTotal")
    return {
        **facts,
        "time": datetime.fromtimestamp(clock.wall()).astimezone().strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": next(iter(_lines("/proc/cpuinfo", "model name")), platform.processor()),
        "cores": usable_cores(),
        "memory": memory[0] if memory else "",
        "python": sys.executable,
        "versions": versions(),
        "source": source_hash(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def source_hash() -> str:
    """Returns the SHA-256 of decentnode's installed source files, as hex."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".c")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def usable_cores() -> int:
    """Returns the number of cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pip_freeze() -> str:
    """Returns a sorted line name==version for every installed distribution."""
    lines = {f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions()}
    return "".join(f"{line}\n" for line in sorted(lines, key=str.lower))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, timeout=10, check=True,
            stdin=subprocess.DEVNULL, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout[:MAX_DIFF_BYTES].decode(errors="replace")


def _untracked(root: Path, folders: list[str]) -> str:
    """Returns up to 200 files that git neither tracks nor ignores, formatted as by `git status --short`."""
    names = _git(root, "ls-files", "--others", "--exclude-standard", "--full-name", "--", *folders) or ""
    return "".join(f"?? {name}\n" for name in names.splitlines()[:200])


def git_state(folders: list[Path]) -> tuple[str, str]:
    """Returns (commit and state, diff) of the git repositories that contain `folders`; empty strings without any."""
    states, diffs = [], []
    names = dict.fromkeys(name.strip() for folder in folders if (name := _git(folder, "rev-parse", "--show-toplevel")))
    for root in map(Path, names):
        commit = _git(root, "rev-parse", "HEAD")
        here = [str(folder) for folder in folders if folder.resolve().is_relative_to(root)]
        status = "".join(filter(None, (_git(root, "status", "--short", "-uno"), _untracked(root, here))))
        if commit is None:
            continue
        states.append(f"{root.name} {commit.strip()}{' (changed)' if status else ''}\n{status or ''}")
        if status:
            diffs.append(_git(root, "diff", "HEAD") or "")
    return "".join(states), "".join(diffs)


def write(run_dir: Path, facts: Mapping[str, Any], config_dir: Path) -> None:
    """Writes env.json, pip-freeze.txt, git.txt and git.diff. Raises OSError if the disk refuses."""
    write_atomic(run_dir / "env.json", json.dumps(describe(facts), indent=2) + "\n")
    write_atomic(run_dir / "pip-freeze.txt", pip_freeze())
    state, diff = git_state([Path(__file__).parent, config_dir])
    for name, text in (("git.txt", state), ("git.diff", diff)):
        if text:
            write_atomic(run_dir / name, text)


def begin_writing(run_dir: Path, facts: Mapping[str, Any], config_dir: Path) -> threading.Thread:
    """Calls `write` in a thread, for a node in the foreground. Errors of the disk go to the log. Returns the thread."""

    def attempt() -> None:
        try:
            write(run_dir, facts, config_dir)
        except OSError as error:
            logger.warning("the environment could not be written: %s", error)

    thread = threading.Thread(target=attempt, name="environment", daemon=True)
    thread.start()
    return thread


def keep_modules(modules: Mapping[str, str], run_dir: Path) -> dict[str, dict[str, str]]:
    """Copies modules (name -> path) to run_dir/code, in folders according to their dotted names. Returns name -> file
    and SHA-256 of the copy. Raises OSError."""
    kept = {}
    for name, path in sorted(modules.items()):
        folder = run_dir.joinpath(CODE, *name.split("."))
        target = folder / "__init__.py" if os.path.basename(path) == "__init__.py" else folder.with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        digest = hashlib.sha256(target.read_bytes()).hexdigest()
        kept[name] = {"file": str(target.relative_to(run_dir)), "sha256": digest}
    return kept
