"""Tests and benchmarks of a GPU, each figure beside a ceiling measured in the same run; bash eval/gpu.sh runs this.

    python eval/benchmarks/gpu.py [--tiny] [--out FILE.json] [--limit SECONDS] [CASE...]

Every case is a process of its own with a deadline, so that a hanging kernel or a driver fault costs only one case. Rows
are printed, and FILE.json is written, as soon as each is known, so that a killed run leaves what it has measured. Rows
that missed their target are profiled at the end, into profiles.txt beside FILE.json. Finally all rows are printed once
more, shortened, after the main results of the profiles. With --tiny all sizes are tiny, on the GPU if there is one.
Without CUDA they are tiny too, and on the CPU: Triton's interpreter (if Triton is installed) for the kernel, gloo for
NCCL, shared memory for CUDA IPC. Tiny figures only show that the code runs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_mixing import KERNEL, ipc, mix_named, mixing, profile_ipc, profile_mixing
from gpu_nccl import nccl
from gpu_profiles import Profile
from gpu_report import Report
from gpu_rows import CONFIGS, ROOT, Row, milliseconds, on_gpu, python_header, run_summary, with_failures
from gpu_steps import bare_milliseconds, profile_wrapper, training, wrapper
from gpu_tests import CASE_UNTIL, tests
from gpu_waits import host, profile_host

sys.path.insert(0, str(ROOT))
LIMITS = {"tests": 150, "bits": 150, "host": 140, "ceilings": 30, "mixing": 60, "ipc": 50, "codecs": 40, "rounds": 120,
          "wrapper": 90, "nccl": 60, "staging": 30, "simulator": 60, "training": 120}  # fmt: skip
"""Time limit of each case in seconds."""
CONCURRENT = frozenset({"tests", "bits", "host"})
"""Cases about correctness, not speed: they run concurrently, before all others."""
ABSENT = {
    "several nodes under MPS": "the daemon is not started here: the line above says whether it runs",
}
"""Figures that are wanted but cannot be measured here, with the reason."""


def ceilings(tiny: bool) -> Iterator[Row]:
    import torch

    gpu = on_gpu()
    device = torch.device("cuda" if gpu else "cpu")
    elements, side = (1 << 20, 256) if tiny else (1 << 30, 8192)
    x, y = torch.randn(elements, device=device), torch.empty(elements, device=device)
    copied = milliseconds(lambda x=x, y=y: y.copy_(x), gpu, queued=True)  # type: ignore[misc]
    yield Row("ceilings", f"copy of {4e-6 * elements:.0f} MB, bytes read and written", 8e-6 * elements / copied, "GB/s")
    del x, y
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    yield Row("ceilings", f"bfloat16 matrix product of side {side}",
              2e-9 * side**3 / milliseconds(lambda: a @ b, gpu, queued=True), "TFLOP/s")  # fmt: skip


def bits(tiny: bool) -> Iterator[Row]:
    """Compares the models of a run over the memory of one GPU (on the CPU: shared memory) with those of the same run
    over inproc."""
    device = "cuda" if on_gpu() else "cpu"
    for n in (2,) if tiny else (2, 16, 8, 4):
        yield from with_failures("bits", f"{n} nodes on one {device}", _bit_rows(n, device))


def _bit_rows(n: int, device: str) -> Iterator[Row]:
    import torch
    from safetensors.torch import load_file

    graph = f"graph={{name: {'ring' if n < 5 else 'regular'}, nodes: {n}{', degree: 4' if n > 4 else ''}}}"

    def models(way: str) -> tuple[list[dict[str, Any]], str]:
        with tempfile.TemporaryDirectory() as folder:
            run_summary([graph, f"mapping={{name: linear, nodes_per_machine: {n}, device: {device}}}",
                         "node.rounds=10", "node.evaluate_every=0", f"communication={way}"],
                        folder, str(CONFIGS / "quickstart.yaml"))  # fmt: skip
            latest = next(Path(folder).glob("*/latest"))
            found = [load_file(path) for path in sorted(latest.glob("models/[0-9]*.safetensors"))]
            return found, _why_no_shared_memory(latest)

    with ThreadPoolExecutor() as pool:
        (found, why), (expected, _) = pool.map(models, ("auto", "inproc"))
    if len(found) != n or len(expected) != n:
        raise RuntimeError(f"{n} nodes left {len(found)} and {len(expected)} models")
    most = max(float((a[key] - b[key]).abs().max()) for a, b in zip(found, expected, strict=True) for key in a
               if torch.is_floating_point(a[key]))  # fmt: skip
    yield Row("bits", f"{n} nodes on one {device}, largest difference to inproc", most, "", asked="0",
              note=f"failed: not by shared memory: {why}" if why else "")  # fmt: skip


def _why_no_shared_memory(latest: Path) -> str:
    """Returns why payloads of a run were not sent by shared memory, if a node's log says so; else ""."""
    for log in sorted(latest.glob("nodes/*/log.txt")):
        for line in log.read_text().splitlines():
            for mark in ("payloads leave over ipc", "no shared memory from node"):
                if mark in line:
                    return line[line.index(mark):][:300]
    return ""


def rounds(tiny: bool) -> Iterator[Row]:
    """Whole rounds of 8 nodes on one GPU, beside the same local steps in one process without any exchange. With small
    kernels also all nodes in one process, as a GPU time-slices the work of several processes."""
    gpu = on_gpu()
    nodes, count = (2, 4) if tiny else (8, 40)
    for name, batch in (("gn_lenet", 8),) if tiny else (("gn_lenet", 8), ("resnet, depth: 18", 128), ("gn_lenet", 128)):
        yield from with_failures("rounds", f"{nodes} nodes with {name}, batch {batch}",
                                 _round_rows(name, nodes, batch, count, gpu))  # fmt: skip


def _round_rows(name: str, nodes: int, batch: int, count: int, gpu: bool) -> Iterator[Row]:
    from common import CONFIG, floor_seconds, round_records

    graph = "{name: ring, nodes: 2}" if nodes == 2 else f"{{name: regular, nodes: {nodes}, degree: 4}}"
    overrides = [f"graph={graph}", f"model={{name: {name}}}", f"node.rounds={count}", f"training.batch_size={batch}",
                 f"mapping.nodes_per_machine={nodes}", f"mapping.device={'cuda' if gpu else 'cpu'}"]  # fmt: skip
    floor = floor_seconds(overrides, nodes, max(4, count // 2), processes=1)
    for together in (1, nodes) if batch == 8 else (1,):
        with tempfile.TemporaryDirectory() as folder:
            run_summary([*overrides, f"mapping.nodes_per_process={together}"], folder, str(CONFIG))
            latest = next(Path(folder).glob("*/latest"))
            seconds = statistics.median(
                statistics.median(record["seconds"] for record in records) for records in round_records(latest)
                if records
            )  # fmt: skip
        where = ", in one process" if together > 1 else ""
        yield Row("rounds", f"{nodes} nodes with {name}, batch {batch}{where}: round", 1e3 * seconds, "ms", 1e3 * floor,
                  note="ceiling: the local steps of all nodes one after the other")  # fmt: skip


def codecs(tiny: bool) -> Iterator[Row]:
    """Selection, index coding and quantization, in multiples of a copy of the model measured in the same process."""
    import torch

    from decentnode.compression import CODECS, indices, select
    from decentnode.config.component import load_class

    gpu = on_gpu()
    elements = 100_000 if tiny else 25_000_000
    device = torch.device("cuda" if gpu else "cpu")
    model = torch.randn(elements, device=device)
    target = torch.empty_like(model)
    repeats = 2 if tiny else 10
    copy = milliseconds(lambda: target.copy_(model), gpu, repeats, queued=True)
    note = f"one copy: {copy:.3f} ms"

    def of_the_largest(fraction: float) -> Iterator[Row]:
        count = select.count_of(fraction, elements)
        at = select.largest(model.abs(), count)
        for what, work in (("choosing", lambda: select.largest(model.abs(), count)),
                           ("Rice coding of indices", lambda: indices.encode(at, elements))):  # fmt: skip
            taken = milliseconds(work, gpu, repeats, queued=True)
            yield Row("codecs", f"top {fraction:.0%}: {what}", taken / copy, "copies", note=note)

    for fraction in (0.01, 0.1):
        yield from with_failures("codecs", f"top {fraction:.0%}", of_the_largest(fraction))

    def both_ways(name: str) -> Iterator[Row]:
        found = load_class(name, CODECS, "compression")
        codec = found(found.Config.model_validate({"name": name}))
        draw = torch.Generator(device).manual_seed(1)
        coded = codec.encode(model, draw)
        for what, work in (("encode", lambda: codec.encode(model, draw)),
                           ("decode", lambda: codec.decode(coded, elements, model.dtype))):  # fmt: skip
            taken = milliseconds(work, gpu, repeats, queued=True)
            yield Row("codecs", f"{name}: {what}", taken / copy, "copies", note=note)

    for name in ("float16", "int8", "int4", "qsgd", "sign"):
        yield from with_failures("codecs", name, both_ways(name))


def staging(tiny: bool) -> Iterator[Row]:
    """Copies of a model to host memory and back through pinned slots, beside torch's own copies."""
    if not on_gpu():
        yield Row("staging", "pinned slots", None, note="needs a GPU")
        return
    import torch

    from decentnode.communication.receive.chunking import TensorPlan, to_bytes
    from decentnode.communication.receive.staging import CudaCopies, Staging
    from decentnode.payload import TensorSpec

    elements = 100_000 if tiny else 32_000_000
    spec, x = TensorSpec(torch.float32, elements), torch.randn(elements, device="cuda")
    plan, pinned_staging = TensorPlan("x", spec, 1 << 20), Staging(CudaCopies(torch.device("cuda", 0)))
    pinned_staging.take([spec])
    host, pinned = torch.empty(elements), torch.empty(elements, pin_memory=True)

    def fetch() -> None:
        fetched = pinned_staging.fetch(plan, x)
        assert fetched is not None
        for chunk in range(plan.count(elements)):
            fetched.piece(chunk)

    def speed(work: Callable[[], object]) -> float:
        def ended() -> None:
            work()
            torch.cuda.synchronize()

        return 4e-6 * elements / milliseconds(ended, False)

    ceiling = speed(lambda: pinned.copy_(x))
    for what, work in (("out, pinned slots", fetch), ("out, pageable", lambda: to_bytes(x)),
                       ("in, pinned slots", lambda: pinned_staging.upload(host)),
                       ("in, pageable", lambda: host.to("cuda"))):  # fmt: skip
        yield Row("staging", f"{4e-6 * elements:.0f} MB {what}", speed(work), "GB/s", ceiling)


def simulator(tiny: bool) -> Iterator[Row]:
    """Node-updates per second of the batched engine (one local step and one mixing of one node), beside bare steps of
    SGD of one node after the other, without gathering data, mixing or recording."""
    for nodes in (16,) if tiny else (64, 1024, 256, 16, 4096):
        yield from with_failures("simulator", f"{nodes} nodes", _simulator_rows(nodes, tiny))


def _simulator_rows(nodes: int, tiny: bool) -> Iterator[Row]:
    import torch

    from decentnode.experiment import load
    from decentnode.experiment.initial_model import make_model
    from decentnode.simulate.engines.choice import choose

    gpu = on_gpu()
    device, batch = torch.device("cuda" if gpu else "cpu"), 8
    experiment = load(None, [
        f"graph={{name: regular, nodes: {nodes}, degree: 4}}", "model=gn_lenet",
        f"mapping={{name: linear, nodes_per_machine: {nodes}, device: {device.type}}}",
        "data={name: synthetic, train_samples: 50000, test_samples: 1000, partition: iid}",
        "data.input_shape=[3, 32, 32]",
        f"training={{name: supervised, batch_size: {batch}, local_steps: 1, optimizer: {{name: sgd, lr: 0.05}}}}",
        "node={rounds: 1000000, evaluate_every: 0, check_finite: false}", "simulate.engine=batched",
    ], environ={}, check=False)  # fmt: skip
    engine = choose(experiment).batched
    assert engine is not None
    times = []
    for _ in range(4 if tiny else 12):  # a step ends with the losses of all nodes on the host
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    module = make_model(experiment, experiment.open_data().spec).to(device)
    floor = 1e-3 * bare_milliseconds(module, batch, tiny, gpu)
    yield Row("simulator", f"{nodes} nodes with gn_lenet, batch {batch}: node-updates",
              nodes / statistics.median(times[2:]), "/s", 1 / floor,
              note=f"beside it: bare steps, one node after the other{_peak(gpu)}")  # fmt: skip


def _peak(gpu: bool) -> str:
    """Returns the peak GPU memory since the last call, as the end of a note."""
    import torch

    if not gpu:
        return ""
    most = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return f"; peak {most:.2f} GiB"


CASES: dict[str, Callable[[bool], Iterator[Row]]] = {
    "tests": tests, "bits": bits, "host": host, "ceilings": ceilings, "mixing": mixing, "ipc": ipc, "wrapper": wrapper,
    "rounds": rounds, "codecs": codecs, "nccl": nccl, "staging": staging, "simulator": simulator, "training": training,
}  # fmt: skip
"""In the order in which they run: the most important first, as the time may run out."""
PROFILES: dict[str, Callable[[Sequence[str], bool], Iterator[Profile]]] = {
    "mixing": profile_mixing, "ipc": profile_ipc, "wrapper": profile_wrapper, "host": profile_host,
}  # fmt: skip
"""For cases whose rows have a speed as target: the function that profiles the work of the named rows."""
MAX_PROFILED = 4
"""Most rows of a case that are profiled."""
PROFILE_SECONDS = 30.0
"""Time limit of the profiles of a case, and of ncu."""
NCU_METRICS = (
    "gpu__time_duration.sum", "dram__throughput.avg.pct_of_peak_sustained_elapsed", "dram__bytes_read.sum",
    "dram__bytes_write.sum", "sm__warps_active.avg.pct_of_peak_sustained_active", "launch__registers_per_thread",
)  # fmt: skip
MARK, PROFILE_MARK = "row: ", "profile: "
END_SECONDS = 5.0
"""Longest wait for the end of a process that was killed."""


def environment() -> list[str]:
    """Returns what the figures depend on, a line each. Never fails."""
    import platform

    import psutil
    import torch
    from common import machine

    found = [f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"]
    try:
        found.insert(0, machine())
    except Exception as error:  # only this line is lost
        found.append(f"machine not found out: {error}")
    for name in ("triton", "numpy"):
        is_present = importlib.util.find_spec(name) is not None
        found.append(f"{name} {importlib.metadata.version(name) if is_present else 'absent'}")
    carried = [Path(each) / "Python.h" for each in os.environ.get("C_INCLUDE_PATH", "").split(os.pathsep) if each]
    is_present = any(each.exists() for each in (python_header(), *carried))
    compiler = next((name for name in ("gcc", "clang") if shutil.which(name)), "absent")
    found.append(f"for Triton's launchers: C compiler {compiler}, Python.h {'there' if is_present else 'absent'}")
    try:
        for n in range(torch.cuda.device_count()):
            seen = torch.cuda.get_device_properties(n)
            found.append(f"GPU {n}: {seen.name}, {seen.total_memory / 2**30:.0f} GiB, compute capability {seen.major}."
                         f"{seen.minor}, {seen.multi_processor_count} multiprocessors")  # fmt: skip
        if torch.cuda.is_available() and torch.distributed.is_nccl_available():
            found.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
        query = ["nvidia-smi", "--query-gpu=driver_version,compute_mode,clocks.sm,clocks.mem", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
        found += [f"nvidia-smi: {line}" for line in (answer.stdout + answer.stderr).splitlines()[:4]]
    except Exception as error:  # only these lines are lost
        found.append(f"not found out: {error}")
    with contextlib.suppress(Exception):
        names = [process.info["name"] for process in psutil.process_iter(["name"])]
        found.append(f"MPS: {'running' if 'nvidia-cuda-mps-control' in names else 'not running'}")
    return found


_running: set[subprocess.Popen[str]] = set()


def _kill(process: subprocess.Popen[str]) -> None:
    """Kills a process with all processes that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _run(command: list[str], limit: float, take: Callable[[str], None]) -> str:
    """Runs a command for at most `limit` seconds, kills all processes that it started, and passes each line of its
    output to take(). Returns why it did not end normally, else ""."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    known = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=known,
                                   start_new_session=True)  # fmt: skip
        _running.add(process)
        lines = process.stdout
        assert lines is not None

        def read() -> None:
            for line in lines:
                take(line)

        # In a thread: surviving children of the command may keep the other end of the pipe open
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        stopped = ""
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            stopped = f"stopped after {limit:.0f} s"
        _kill(process)  # also the children that it left behind
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that hangs in the driver stays
            process.wait(END_SECONDS)
        reader.join(END_SECONDS)
        _running.discard(process)
        if stopped or not process.returncode:
            return stopped
        errors.seek(0)
        return f"failed: it ended with {process.returncode}: {' '.join(errors.read().split())[-300:]}"


def _this_script(*arguments: str, tiny: bool) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), *arguments, *(["--tiny"] if tiny else [])]


def run_case(name: str, tiny: bool, limit: float, add: Callable[[Row], None]) -> None:
    """Runs one case in a process of its own and adds its rows as they arrive; a failure becomes a row with the
    reason."""
    began = time.monotonic()

    def take(line: str) -> None:
        if line.startswith(MARK):
            add(Row(**json.loads(line.removeprefix(MARK))))

    command = _this_script("--case", name, str(began + limit), tiny=tiny)
    if why := _run(command, limit, take):
        add(Row(name, "the case", None, note=why))
    print(f"  {name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


def run_all(options: argparse.Namespace, report: Report, until: float) -> None:
    """Runs the cases in the order of CASES, those of CONCURRENT concurrently first. until: by time.monotonic(); some of
    the time before it is reserved for profiling what has missed its target so far."""
    names = options.cases

    def run(name: str) -> None:
        missed = {row.case for row in report.rows if row.missed and row.case in PROFILES}
        extra = "mixing" in missed and shutil.which("ncu") is not None
        reserved_seconds = PROFILE_SECONDS * (options.patience * len(missed) + extra)
        left = until - time.monotonic() - reserved_seconds
        if left < 5:
            report.add(Row(name, "the case", None, note="not measured: no time left"))
        else:
            run_case(name, options.tiny, min(options.patience * LIMITS[name], left), report.add)

    first = [threading.Thread(target=run, args=(name,)) for name in CASES if name in names and name in CONCURRENT]
    for thread in first:
        thread.start()
    for thread in first:
        thread.join()
    for name in CASES:
        if name in names and name not in CONCURRENT:
            run(name)


def profile_all(options: argparse.Namespace, report: Report, until: float) -> None:
    """Profiles the rows that missed their target, the worst of each case, in a process per case. With tiny sizes, whose
    figures mean nothing, it takes the first rows that have a target. until: by time.monotonic()."""
    for case in PROFILES:
        asked = [row for row in report.rows if row.case == case and row.asked and row.value is not None]
        rows = asked if options.tiny else sorted((row for row in asked if row.missed), key=_missed_factor, reverse=True)
        whats = [row.what for row in rows[:MAX_PROFILED]]
        left = until - time.monotonic()
        if not whats:
            continue
        if left < 5:
            report.add_profile(Profile(case, f"{len(rows)} rows", ["no time left"], ["not profiled: no time left"]))
            continue

        def take(line: str) -> None:
            if line.startswith(PROFILE_MARK):
                report.add_profile(Profile(**json.loads(line.removeprefix(PROFILE_MARK))))

        command = _this_script("--profile", case, *whats, tiny=options.tiny)
        if why := _run(command, min(options.patience * PROFILE_SECONDS, left), take):
            report.add_profile(Profile(case, "profiles", [why], [why]))
        if case == "mixing" and shutil.which("ncu"):
            report.add_profile(_ncu_profile(whats, min(PROFILE_SECONDS, until - time.monotonic())))


def _missed_factor(row: Row) -> float:
    """Returns by which factor a row missed its target."""
    bound, reached = float(row.asked.strip("<>= ")), row.reached or 0.0
    ends = (bound, reached) if row.asked.startswith(">") else (reached, bound)
    return ends[0] / ends[1] if ends[1] else math.inf


def _ncu_profile(whats: list[str], limit: float) -> Profile:
    """Returns the hardware counters of one launch of the kernel, for the smallest of these rows: some counters need
    several runs of it, between which ncu restores the memory that it wrote."""
    what = min(whats, key=lambda what: float(what.split()[2]) if what[0].isdigit() else math.inf)
    output_lines: list[str] = []
    command = ["ncu", "--clock-control", "none", "--kernel-name", f"regex:{KERNEL}", "--launch-skip", "2",
               "--launch-count", "1", "--metrics", ",".join(NCU_METRICS),
               *_this_script("--launch", what, tiny=False)]  # fmt: skip
    why = _run(command, limit, output_lines.append) if limit >= 5 else "no time left"
    found = [" ".join(line.split()) for line in output_lines if line.strip().startswith(NCU_METRICS)]
    lines = [line.rstrip() for line in output_lines[-40:]] + ([why] if why else [])
    return Profile("mixing", f"ncu, {what}", lines, found or [why or "ncu counted nothing of the kernel"])


def _terminated(report: Report) -> None:
    for process in list(_running):
        _kill(process)
    os.write(1, f"\nstopped from outside\n{report.table()}\n".encode())  # not print, which may be what was interrupted
    os._exit(143)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"any of {', '.join(CASES)}")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes")
    parser.add_argument("--out", type=Path, help="where the rows go as JSON, and profiles.txt beside it")
    parser.add_argument("--limit", type=float, default=420, help="seconds that all cases together may take")
    parser.add_argument("--patience", type=float, default=1, help="times which each case's own limit is: slow machines")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--profile", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--launch", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.cases) - CASES.keys():
        parser.error(f"no case {', '.join(sorted(unknown))}; there is: {', '.join(CASES)}")
    if options.case or options.profile or options.launch:
        _run_as_child(options)
        return 0
    began = time.monotonic()
    about = environment()
    options.tiny = options.tiny or not on_gpu()
    if options.tiny:
        about.append("tiny sizes: no figure here counts")
    print(*about, sep="\n", flush=True)
    report = Report(options.out, about)
    signal.signal(signal.SIGTERM, lambda *_: _terminated(report))
    run_all(options, report, began + options.limit)
    for what, why in ABSENT.items():
        report.add(Row("absent", what, None, note=why))
    profile_all(options, report, began + options.limit)
    print(report.table(), flush=True)
    return 1 if any(row.failed for row in report.rows) else 0


def _run_as_child(options: argparse.Namespace) -> None:
    """The main function of a process that `_this_script` starts."""
    tiny = options.tiny or not on_gpu()
    if options.case:
        name, os.environ[CASE_UNTIL] = options.case
        for row in CASES[name](tiny):
            print(MARK + json.dumps(asdict(row)), flush=True)
    elif options.profile:
        case, *whats = options.profile
        for profile in PROFILES[case](whats, tiny):
            print(PROFILE_MARK + json.dumps(asdict(profile)), flush=True)
    else:
        work = mix_named(options.launch)
        for _ in range(4 if work is not None else 0):
            work()


if __name__ == "__main__":
    sys.exit(main())
