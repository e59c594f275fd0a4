"""Shared parts of the cases of gpu.py: figures as rows, timing, the device, and runs with the command line."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"


@dataclass(frozen=True)
class Row:
    """One figure, or one fact."""

    case: str
    what: str
    value: float | None
    """None: absent or failed; `note` says why."""
    unit: str = ""
    ceiling: float | None = None
    """What the machine reached in the same process, in the same unit."""
    asked: str = ""
    """The target, as a bound on `value` or on value / ceiling."""
    note: str = ""

    def text(self) -> str:
        if self.value is None:
            return f"{self.case:9} {self.what:58} {self.note}"
        ratio = f"{self.value / self.ceiling:5.2f} of {self.ceiling:.4g}" if self.ceiling else ""
        return f"{self.case:9} {self.what:58} {self.value:10.4g} {self.unit:8} {ratio:18} {self.asked:8} {self.note}"

    @property
    def reached(self) -> float | None:
        """The number that `asked` bounds."""
        return self.value / self.ceiling if self.value is not None and self.ceiling else self.value

    @property
    def missed(self) -> bool:
        """Whether the figure exists and violates its target."""
        if self.reached is None or not self.asked:
            return False
        bound = float(self.asked.strip("<>= "))
        if self.asked.startswith(">="):
            return self.reached < bound
        return self.reached > bound if self.asked.startswith("<=") else self.reached != bound

    @property
    def failed(self) -> bool:
        return self.note.startswith(("failed", "stopped"))


def failure(case: str, what: str, error: BaseException) -> Row:
    return Row(case, what, None, note=f"failed: {type(error).__name__}: {' '.join(str(error).split())[-300:]}")


def with_failures(case: str, what: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Yields these rows; an error ends them with a row that says why, so that later rows can still be measured."""
    try:
        yield from rows
    except Exception as error:
        yield failure(case, what, error)


def python_header() -> Path:
    """Returns where this Python's Python.h would be, which is where Triton makes the C compiler look for it."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    return Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


AHEAD_CYCLES = 2_000_000
"""Cycles of the GPU's clock, about 1 ms: the GPU is kept busy this long while the host queues the timed work."""


def cache_filler() -> Callable[[], object]:
    """Returns a function that fills the GPU's cache with other memory by reading it, so that nothing has to be written
    back."""
    import torch

    size = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 0)
    other = torch.zeros(size, device="cuda")  # four times as many bytes
    return other.sum


def milliseconds(
    work: Callable[[], object], gpu: bool, repeats: int = 20, warm: int = 3, *, queued: bool = False
) -> float:
    """Returns the median time of one call: by CUDA events on a GPU, by the host's clock elsewhere, after `warm` calls.

    queued: time the GPU alone, with work that the host has queued before it starts, and with none of its operands in
    the GPU's cache. Otherwise an idle GPU waits for the host inside of the call, for tens of microseconds before each
    kernel: as long as it takes to mix 25 M elements. And a cache of 50 MB would hold half of a copy of them in
    bfloat16.
    """
    import torch

    times = []
    fill_cache = cache_filler() if gpu and queued else None
    for _ in range(repeats + warm):
        if gpu:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if fill_cache is not None:
                fill_cache()
                torch.cuda._sleep(AHEAD_CYCLES)
            start.record()
            work()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            began = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[warm:])


def run_summary(overrides: list[str], folder: str, config: str) -> dict[str, Any]:
    """Makes a run with the command line and returns its summary.json. Raises RuntimeError with the end of its
    output."""
    command = [sys.executable, "-m", "decentnode", "run", config, "--run-dir", folder, "--plain",
               *(part for override in overrides for part in ("--set", override))]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"a run ended with {done.returncode}: {(done.stdout + done.stderr)[-600:]}")
    summary: dict[str, Any] = json.loads((next(Path(folder).glob("*/latest")) / "summary.json").read_text())
    return summary
