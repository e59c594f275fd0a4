"""The scenarios of `bash eval/chaos.sh`: what faults cost a run of 16 nodes, and whether anything is left behind.

Each scenario is a run of its own with `faults` in its YAML, so that the history of its payloads is checked at its end.
During the run, its processes, memory and open files are sampled; afterwards nothing of it may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from common import machine

from decentnode.launch.children.sockets import BUFFERS, PREFIX
from decentnode.metrics.reader import read, read_kind

ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT / "docs" / "tables"
NODES = 16
KILLED, NEVER_KILLED = tuple(range(8)), tuple(range(8, NODES))
"""Nodes that are killed, node 0 among them, and nodes that never are."""
ENDLESS = 10_000_000
"""Rounds of a run that is stopped after some seconds."""
STOP_SECONDS = 60.0
"""Longest time from Ctrl-C to the end of a run."""
ENDING_SECONDS = 10.0
FAULT_FREE: list[dict[str, Any]] = []


@dataclass
class ObservedRun:
    """A run and what was observed of it."""

    exit_code: int
    folder: Path
    summary: dict[str, Any]
    seconds: float
    """From the first round on."""
    left: list[str]
    """What the run left behind: processes, folders, shared memory."""
    memory: list[float] = field(default_factory=list)
    """MB of all its processes, once per second."""
    files: list[int] = field(default_factory=list)
    """Open files of all its processes, once per second."""

    def rounds(self, uid: int) -> list[tuple[float, int]]:
        """Returns (time, round) of a node's rounds."""
        path = self.folder / "nodes" / f"{uid:03d}" / "metrics.jsonl"
        return [(float(each["time"]), int(each["round"])) for each in read_kind(path, "round")]

    def rate(self, uids: Sequence[int] = NEVER_KILLED) -> float:
        """Returns the mean rounds per second of these nodes between their first and last round."""
        found = []
        for uid in uids:
            times = self.rounds(uid)
            if len(times) > 1:
                found.append((len(times) - 1) / (times[-1][0] - times[0][0]))
        return statistics.mean(found) if found else 0.0

    def out_of_order(self, uids: Sequence[int] = NEVER_KILLED) -> tuple[int, int, int]:
        """Returns for these nodes: the number of skipped rounds, of rounds whose local steps were repeated, and of
        rounds with local steps."""
        skipped = repeated = made = 0
        for uid in uids:
            events = self.folder / "nodes" / f"{uid:03d}" / "events.jsonl"
            steps = [int(each["round"]) for each in read_kind(events, "steps")]
            skipped += sum(max(0, b - a - 1) for a, b in itertools.pairwise(steps))
            repeated, made = repeated + len(steps) - len({*steps}), made + len(steps)
        return skipped, repeated, made

    def longest_gap(self, uids: Sequence[int]) -> float:
        """Returns the longest time between two rounds of a node, in seconds."""
        return max(b - a for uid in uids for (a, _), (b, _) in itertools.pairwise(self.rounds(uid)))

    def recoveries(self) -> list[float]:
        """Returns the seconds from each kill of a node to the end of its next round."""
        found = []
        for uid in KILLED:
            events = read_kind(self.folder / "nodes" / f"{uid:03d}" / "events.jsonl", "fault")
            killed = [float(each["time"]) for each in events if '"kill"' in each["detail"]]
            ends = [when for when, _ in self.rounds(uid)]
            for at, again in itertools.pairwise([*killed, float("inf")]):
                back = next((when for when in ends if at < when < again), None)
                found += [] if back is None else [back - at]
        return found

    def distances(self) -> list[float]:
        """Returns the consensus distances of the evaluations, as recorded by node NEVER_KILLED[0]."""
        path = self.folder / "nodes" / f"{NEVER_KILLED[0]:03d}" / "metrics.jsonl"
        return [each["consensus_distance"] for each in read_kind(path, "evaluation") if "consensus_distance" in each]

    @property
    def accuracy(self) -> float:
        """Accuracy of the merged model, in percent."""
        return 100 * float(self.summary.get("accuracy_merged") or 0.0)

    @property
    def checked(self) -> int:
        """Number of payloads that were verified to be what their sources sent; -1 if the check failed."""
        return int((self.summary.get("checked") or {}).get("payloads", -1))


def config(folder: Path, name: str, faults: list[dict[str, Any]], **sections: Any) -> Path:
    path = folder / f"{name}.yaml"
    node = {"rounds": ENDLESS, "evaluate_every": 200, "missing": "regroup", "restarts": 100_000}
    path.write_text(yaml.safe_dump({
        "extends": str(ROOT / "configs" / "quickstart.yaml"), "name": name, "faults": faults,
        "run": {"dir": str(folder / "runs"), "record": True}, **sections, "node": {**node, **sections.get("node", {})},
    }))  # fmt: skip
    return path


class Sampler(threading.Thread):
    """A thread that samples the number of processes, memory and files of a run, and remembers its processes."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root, self._stopped = psutil.Process(pid), threading.Event()
        self.processes: dict[tuple[int, float], psutil.Process] = {}
        self.memory: list[float] = []
        self.files: list[int] = []

    def run(self) -> None:
        while not self._stopped.wait(1.0):
            self._sample()

    def _sample(self) -> None:
        memory = files = 0
        with contextlib.suppress(psutil.Error):
            for each in (self._root, *self._root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    self.processes[each.pid, each.create_time()] = each
                    memory += each.memory_info().rss
                    files += each.num_fds()
        self.memory.append(memory / 1e6)
        self.files.append(files)

    def close(self) -> list[str]:
        """Stops sampling and returns the processes that are still running after at most ENDING_SECONDS, as the fork
        server ends only after the run. Blocking."""
        self._stopped.set()
        self.join()
        deadline = time.monotonic() + ENDING_SECONDS
        while time.monotonic() < deadline and any(map(_is_running, self.processes.values())):
            time.sleep(0.1)
        return [f"process {pid}" for (pid, _), each in self.processes.items() if _is_running(each)]


def _is_running(process: psutil.Process) -> bool:
    """Returns whether a process is running; a zombie has ended, as only its parent could reap it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@contextlib.contextmanager
def temporary() -> Iterator[Path]:
    """Yields a folder for runs and for their temporary files, and removes it."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    (folder / "tmp").mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def watch(folder: Path, path: Path, seconds: float | None) -> ObservedRun:
    """Runs an experiment, interrupted by Ctrl-C after `seconds` of rounds (None: to its end). Blocking."""
    temporary_folder = folder / "tmp"
    buffers = {each.name for each in BUFFERS.glob(f"{PREFIX}*")}
    (folder / "runs" / path.stem / "latest").unlink(missing_ok=True)  # else the previous run is taken for this one
    command = [sys.executable, "-m", "decentnode", "run", str(path), "--plain", "--quiet"]
    environ = {**os.environ, "TMPDIR": str(temporary_folder)}
    with (folder / "out.txt").open("ab") as out:
        child = subprocess.Popen(command, env=environ, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
    sampler = Sampler(child.pid)
    sampler.start()
    names: set[str] = set()
    try:
        run = _wait_for_first_round(folder / "runs" / path.stem, child)
        began = time.monotonic()
        while child.poll() is None and (seconds is None or time.monotonic() < began + seconds):
            names |= {each.name for each in temporary_folder.glob(f"{PREFIX}*")}
            time.sleep(0.5)
        ran_seconds = time.monotonic() - began
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
        code = child.wait(STOP_SECONDS)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    left = sampler.close()
    left += [each.name for each in temporary_folder.iterdir() if not each.name.startswith("torchinductor")]
    left += [each.name for each in BUFFERS.glob(f"{PREFIX}*") if each.name not in buffers
             and any(each.name.startswith(name) for name in names)]  # fmt: skip
    try:
        summary = json.loads((run / "summary.json").read_text())
    except (OSError, ValueError):
        summary = {}
    return ObservedRun(code, run, summary, ran_seconds, left, sampler.memory, sampler.files)


def _wait_for_first_round(runs: Path, child: subprocess.Popen[bytes]) -> Path:
    """Waits until a node has finished a round. Returns the run's folder."""
    while child.poll() is None:
        for metrics in sorted((runs / "latest" / "nodes").glob(f"{NEVER_KILLED[0]:03d}/metrics.jsonl")):
            if any(each.get("kind") == "round" for each in read(metrics)):
                return metrics.parents[2].resolve()
        time.sleep(0.2)
    return (runs / "latest").resolve()


# -- the scenarios -----------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One line of the table."""

    scenario: str
    measured: str
    target: str
    holds: bool


class Suite:
    """The scenarios, with their results."""

    def __init__(self, folder: Path, scale: float) -> None:
        self.folder, self.scale = folder, scale
        self.rows: list[Row] = []
        self.fault_free_runs: list[ObservedRun] = []

    def add(self, scenario: str, measured: str, target: str, holds: bool) -> None:
        self.rows.append(Row(scenario, measured, target, holds))
        print(line(self.rows[-1]), flush=True)

    def watch(self, name: str, faults: list[dict[str, Any]], seconds: float | None, **sections: Any) -> ObservedRun:
        """Runs an experiment and checks what must hold in every scenario."""
        found = watch(self.folder, config(self.folder, name, faults, **sections), seconds)
        wanted = 0 if seconds is None else 130
        if found.exit_code != wanted or not found.summary:
            self.add(name, f"exit code {found.exit_code}", f"{wanted}, and a summary", False)
        if found.left:
            self.add(name, f"left behind: {', '.join(found.left[:5])}", "nothing", False)
        if faults and found.checked < 0:
            self.add(name, f"checked: {found.summary.get('checked')}", "every payload is what its source sent", False)
        return found

    def fault_free(self, seconds: float = 30.0) -> float:
        """Measures the rounds per second without faults again, beside a scenario; returns the mean so far."""
        self.fault_free_runs.append(self.watch("calm", FAULT_FREE, seconds * max(self.scale, 0.3)))
        return statistics.mean(each.rate() for each in self.fault_free_runs)

    def kills(self, interval: float, seconds: float, least: float) -> None:
        seconds = max(seconds * self.scale, 3 * interval)
        before = self.fault_free()
        kill = {"do": "kill", "nodes": list(KILLED), "count": 1, "every_seconds": interval, "until_seconds": seconds}
        found = self.watch(f"kill_{interval:g}", [kill], seconds)
        after = self.fault_free()
        calm, name = (before + after) / 2, f"SIGKILL every {interval:g} s"
        share = found.rate() / calm
        count = found.summary.get("process_faults", {}).get("kill", 0)
        self.add(name, f"{share:.2f} of {calm:.1f} rounds/s ({count} kills)", f">= {least:g}", share >= least)
        skipped, repeated, made = found.out_of_order()
        self.add(name, f"{skipped} of {made:,} rounds skipped, {repeated} repeated", "none", not (skipped or repeated))
        recoveries = found.recoveries()
        median = statistics.median(recoveries) if recoveries else float("inf")
        self.add(name, f"back in a round after {median:.1f} s (median of {len(recoveries)})", "< 5 s", median < 5)
        wanted = statistics.mean(each.accuracy for each in self.fault_free_runs)
        self.add(name, f"merged accuracy {found.accuracy:.1f} %, {wanted:.1f} % without faults", "within .5 points",
                 found.accuracy >= wanted - 0.5)  # fmt: skip
        self.add(name, f"{found.checked:,} payloads were what their sources sent", "all", found.checked > 0)

    def kill_10(self) -> None:
        self.kills(10, 300, 0.9)

    def kill_3(self) -> None:
        self.kills(3, 120, 0.7)

    def interrupt(self) -> None:
        """Interrupts runs early, and while a node comes back."""
        kills = [{"do": "kill", "nodes": list(KILLED), "count": 1, "every_seconds": 1.0, "until_seconds": 60}]
        for seconds in (0.0, 0.7, 2.3):
            found = self.watch("interrupt", kills, seconds)
            is_interrupted = found.exit_code == 130 and found.summary.get("status") == "interrupted"
            text = f"exit code {found.exit_code}, merged accuracy {found.accuracy:.1f} %"
            self.add(f"Ctrl-C after {seconds:g} s", text, "130, a summary", is_interrupted and found.accuracy > 0)

    def pause(self) -> None:
        seconds = max(30 * self.scale, 8.0)
        uid = 3
        pause = {"do": "pause", "nodes": [uid], "at_seconds": 5, "seconds": seconds}
        found = self.watch("pause", [pause], seconds + 20)
        others = [each for each in range(NODES) if each != uid]
        gap = found.longest_gap(others)
        self.add(f"SIGSTOP of {seconds:.0f} s", f"the others stand still for {gap:.1f} s at most",
                 "one detection, < 12 s", gap < 12)  # fmt: skip
        back = found.rounds(uid)[-1][1] >= found.rounds(others[0])[-1][1] - 2
        self.add(f"SIGSTOP of {seconds:.0f} s", f"node {uid} is {'back' if back else 'not back'}", "back", back)

    def cut(self) -> None:
        seconds = max(60 * self.scale, 12.0)
        sides = [list(range(5)), list(range(5, NODES))]
        zeromq = {"communication": {"name": "zeromq"}, "node": {"evaluate_every": 25}}
        calm = self.watch("calm_cut", FAULT_FREE, max(20 * self.scale, 10), **zeromq)
        found = self.watch("cut", [{"do": "cut", "sides": sides, "at_seconds": 5, "seconds": seconds}],
                           seconds + max(30, 40 * self.scale), **zeromq)  # fmt: skip
        band = max(calm.distances()[len(calm.distances()) // 2 :])
        last = found.distances()[-1]
        members = found.summary.get("members", [])
        self.add(f"cut of {seconds:.0f} s", f"{len(members)} of {NODES} nodes at the end", "all", len(members) == NODES)
        self.add(f"cut of {seconds:.0f} s", f"consensus distance {last:.1e}, {band:.1e} without faults",
                 "in the band of without", last <= 1.5 * band)  # fmt: skip

    def both(self) -> None:
        """Partitions the network as `cut` does, but both sides train on, and their models must merge afterwards."""
        seconds = max(60 * self.scale, 12.0)
        sides = [list(range(5)), list(range(5, NODES))]
        zeromq: dict[str, Any] = {"communication": {"name": "zeromq"}, "node": {"evaluate_every": 25}}
        both = {**zeromq, "node": {**zeromq["node"], "on_partition": "both"}}
        name, cut = f"cut of {seconds:.0f} s, both go on", {"do": "cut", "sides": sides, "at_seconds": 5}
        calm = self.watch("calm_both", FAULT_FREE, max(20 * self.scale, 10), **zeromq)
        found = self.watch("both", [{**cut, "seconds": seconds}], seconds + max(30, 40 * self.scale), **both)
        round_counts = []
        for side in sides:
            path = found.folder / "nodes" / f"{side[0]:03d}" / "metrics.jsonl"
            generations = [(float(each["time"]), each["members"]) for each in read_kind(path, "generation")]
            began = next((when for when, members in generations if members == side), math.inf)
            ended = next((when for when, members in generations if when > began), math.inf)
            times = [when for when, _ in found.rounds(side[0])] if ended < math.inf else []
            round_counts.append(sum(began < when <= ended for when in times))
        self.add(name, f"{round_counts[0]:,} and {round_counts[1]:,} rounds of the two sides meanwhile", "both go on",
                 min(round_counts) > 10)  # fmt: skip
        members = found.summary.get("members", [])
        self.add(name, f"{len(members)} of {NODES} nodes at the end, in one generation", "all",
                 len(members) == NODES and "apart" not in found.summary)  # fmt: skip
        band = max(calm.distances()[len(calm.distances()) // 2 :])
        last = found.distances()[-1]
        self.add(name, f"consensus distance {last:.1e}, {band:.1e} without faults", "in the band of without",
                 last <= 1.5 * band)  # fmt: skip
        self.add(name, f"merged accuracy {found.accuracy:.1f} %, {calm.accuracy:.1f} % without faults",
                 "within .5 points", found.accuracy >= calm.accuracy - 0.5)  # fmt: skip

    def lossy(self) -> None:
        sections = {"communication": {"name": "zeromq"}, "node": {"rounds": 40, "missing": "fail", "restarts": 0,
                                                                  "evaluate_every": 0}}  # fmt: skip
        calm = self.watch("calm_lossy", FAULT_FREE, None, **sections)
        found = self.watch("lossy", [{"do": "corrupt", "share": 0.01, "plane": "bulk"},
                                     {"do": "drop", "share": 0.05, "plane": "bulk"}], None, **sections)  # fmt: skip
        same = [a.read_bytes() == b.read_bytes() for a, b in (
            (each.folder / "models" / f"{uid:03d}.safetensors" for each in (calm, found)) for uid in range(NODES)
        )]  # fmt: skip
        self.add("1 % corrupted, 5 % dropped", f"{sum(same)} of {NODES} models the same to the bit", "all", all(same))

    def thousand(self) -> None:
        """Kills nodes 1,000 times, several at once to save time, but never so many that no majority is left."""
        count, together, interval = max(int(1000 * self.scale), 20), 4, 3.0
        seconds = interval * count / together
        kill = {"do": "kill", "nodes": list(KILLED), "count": together, "every_seconds": interval,
                "until_seconds": seconds}  # fmt: skip
        found = self.watch("thousand", [kill], seconds + 10)
        killed = found.summary.get("process_faults", {}).get("kill", 0)
        self.add(f"{count} kills", f"{killed} kills; left behind: {len(found.left)}", "nothing left",
                 killed >= 0.9 * count and not found.left)  # fmt: skip

    def mixed(self) -> None:
        seconds = max(1800 * self.scale, 60)
        repeated = {"every_seconds": 15, "until_seconds": seconds}
        found = self.watch("mixed", [
            {"do": "kill", "nodes": list(KILLED), "count": 1, **repeated},
            {"do": "pause", "nodes": list(NEVER_KILLED), "count": 1, "seconds": 5, **repeated, "every_seconds": 50},
            {"do": "slow", "nodes": "all", "count": 2, "factor": 4, "seconds": 5, **repeated},
            {"do": "cut", "sides": [[0, 1, 2], [3, 4, 5]], "seconds": 3, "every_seconds": 60, "until_seconds": seconds},
            {"do": "drop", "share": 0.01}, {"do": "corrupt", "share": 0.01, "plane": "bulk"},
        ], seconds, communication={"name": "zeromq"})  # fmt: skip
        for what, series in (("MB of memory", found.memory), ("open files", found.files)):
            third = len(series) // 3
            first, last = (statistics.median(each) for each in (series[third : 2 * third], series[2 * third :]))
            self.add(f"{seconds / 60:.0f} minutes of everything", f"{first:,.0f} {what}, {last:,.0f} later", "flat",
                     last <= 1.1 * first)  # fmt: skip


QUICK = ("kill_10", "kill_3", "interrupt", "pause", "cut", "both", "lossy")
LONG = ("thousand", "mixed")


def line(row: Row) -> str:
    return f"{row.scenario:28} {row.measured:64} {row.target:28} {'holds' if row.holds else 'MISSED'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"of {', '.join((*QUICK, *LONG))}")
    parser.add_argument("--short", action="store_true", help="a tenth of the time, to try it")
    parser.add_argument("--long", action="store_true", help=f"also {', '.join(LONG)}")
    options = parser.parse_args()
    wanted = options.scenarios or [*QUICK, *(LONG if options.long else ())]
    unknown = sorted({*wanted} - {*QUICK, *LONG})
    if unknown:
        parser.error(f"there is no scenario {unknown[0]}; there are {', '.join((*QUICK, *LONG))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else its run, in a session of its own, never ends
    about = [machine(), "torchft: 82.3 % of steps with a kill per 60 s on 30 groups (its own figure); decentralizepy "
             "stops for ever with the first kill", ""]  # fmt: skip
    print("\n".join(about))
    with temporary() as folder:
        suite = Suite(folder, 0.1 if options.short else 1.0)
        found: dict[str, list[Row]] = {}
        for name in wanted:
            scenario: Callable[[], None] = getattr(suite, name)
            before = len(suite.rows)
            try:
                scenario()
            except (OSError, LookupError, ValueError) as error:  # a failed run lacks the files that are compared
                suite.add(name, f"not measured: {error!r}"[:64], "a run to its end", False)
            found[name] = suite.rows[before:]
    for name, scenarios in {"chaos": QUICK, **{f"chaos_{each}": (each,) for each in LONG}}.items():
        if not options.short and {*scenarios} <= {*wanted}:
            rows = [line(row) for each in scenarios for row in found[each]]
            (TABLES / f"{name}.txt").write_text("".join(f"{each}\n" for each in (*about, *rows)))
    missed = [row for row in suite.rows if not row.holds]
    print(f"\n{len(suite.rows) - len(missed)} of {len(suite.rows)} hold")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
