"""The GPU tests as a case of gpu.py. Each file has a process of its own, as a driver fault breaks everything that its
process does afterwards; without a GPU one process runs all files, and the tests are skipped."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import psutil
from gpu_rows import ROOT, Row, failure, on_gpu

AT_ONCE = max(4, len(os.sched_getaffinity(0)) // 2)
"""More than cores would suggest: the tests wait for processes and CUDA contexts to start more than they compute."""
CASE_UNTIL = "GPU_CASE_UNTIL"
"""The environment variable with the time, by time.monotonic(), when gpu.py stops the case."""
REPORT_SECONDS = 10.0
"""A file that is still running this long before that time is stopped, and its results so far are reported."""
LEAST_SECONDS = 10.0
"""With less time left no file is started."""
END_SECONDS = 2.0
"""Longest wait for the end of a process that was killed; one that hangs in the driver stays."""
FIRST = (
    "test_cuda_ipc.py", "test_nccl.py", "test_mixing.py", "test_runs.py", "test_members.py", "test_compat.py",
    "test_recorded.py", "test_ranks.py", "test_staging.py", "test_devices.py",
)  # fmt: skip
"""Started first: tests that need a real GPU, and files whose tests start processes."""
KEPT = 200_000
"""Characters kept of the beginning, and of the end, of pytest's output for one file."""
_DONE = re.compile(r"^(\S+?::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")


def files(folder: Path = ROOT / "tests" / "gpu") -> list[Path]:
    found = {path.name: path for path in folder.glob("test_*.py") if path.name != "test_pretended.py"}
    return [found.pop(name) for name in FIRST if name in found] + [found[name] for name in sorted(found)]


def tests(_tiny: bool) -> Iterator[Row]:
    """Yields rows: the tests of each file that passed, and each failed test with the reason. pytest's whole output goes
    to the file named by the environment variable GPU_TESTS_LOG."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        until = float(os.environ[CASE_UNTIL]) - REPORT_SECONDS
        running = {pool.submit(run_files, paths, until): paths[0] for paths in groups(files(), on_gpu())}
        for done in as_completed(running):
            try:
                text, rows = done.result()
            except Exception as error:  # the results of the other files still count
                yield failure("tests", running[done].name, error)
                continue
            if log := os.environ.get("GPU_TESTS_LOG"):
                with Path(log).open("a") as file:
                    file.write(text if len(text) <= 2 * KEPT else f"{text[:KEPT]}\n[...]\n{text[-KEPT:]}")
            yield from rows


def groups(paths: Sequence[Path], separate: bool) -> list[Sequence[Path]]:
    """Returns the files of each process."""
    return [[path] for path in paths] if separate else [paths]


def run_files(paths: Sequence[Path], until: float) -> tuple[str, list[Row]]:
    """Runs the GPU tests of some files. Returns (pytest's output, rows). until: by time.monotonic(), when they are
    stopped; tests that have ended by then count."""
    name = paths[0].name if len(paths) == 1 else f"all {len(paths)} files"
    began = time.monotonic()
    limit_seconds = until - began
    if limit_seconds < LEAST_SECONDS:
        return "", [Row("tests", f"{name}: the file", None, note="not run: no time left")]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *map(str, paths), "-p", "no:cacheprovider",
               "-o", "addopts=", "-v", "-rfEs", "--tb=short", "--color=no", "--durations=10",
               f"--timeout={0.8 * limit_seconds:g}"]  # fmt: skip
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT,
                                   env={**os.environ, "COLUMNS": "250", "PYTHONUNBUFFERED": "1"})  # fmt: skip
        try:
            ended: int | None = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            ended = None
            for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        output.seek(0)
        text = output.read()
    return text, list(rows_of(name, text, ended, time.monotonic() - began))


def rows_of(name: str, text: str, ended: int | None, seconds: float) -> Iterator[Row]:
    """Yields the rows of pytest's output. text: of `pytest -v -rfEs`, possibly truncated. ended: pytest's exit code,
    None if it was stopped."""
    lines = text.splitlines()
    outcomes = [match[2] for line in lines if (match := _DONE.match(line))]
    skipped, passed = outcomes.count("SKIPPED"), outcomes.count("PASSED")
    note = f"{seconds:.0f} s" + (f", {skipped} skipped" if skipped else "")
    yield Row("tests", f"{name}: passed", passed, "", asked=f"= {len(outcomes) - skipped}", note=note)
    has_summary = False
    for line in lines:
        if match := re.match(r"(FAILED|ERROR) (\S+?::.+?)(?: - (.*))?$", line):
            has_summary = True
            yield Row("tests", match[2].rpartition("/")[2][:58], None, note=f"failed: {(match[3] or match[1])[:300]}")
        elif match := re.match(r"SKIPPED \[(\d+)\] (\S+?):? (.*)$", line):
            yield Row("tests", f"{name}: {match[1]} skipped", None, note=f"absent: {match[3]}")
    if ended in (0, 1, 5):  # 0: all passed; 1: some failed; 5: none is marked gpu
        return
    for match in filter(None, map(_DONE.match, lines)):
        if match[2] in ("FAILED", "ERROR") and not has_summary:  # the summary is missing
            yield Row("tests", match[1].rpartition("/")[2][:58], None, note=f"failed: {match[2]}")
    last = next((line for line in reversed(lines) if "::" in line and not _DONE.match(line)), "before a test began")
    how = "stopped at its limit" if ended is None else f"failed: pytest ended with {ended}"
    yield Row("tests", f"{name}: the file", None, note=f"{how}, in {last.rpartition('/')[2].strip()[:200]}")
