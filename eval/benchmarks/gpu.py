"""Tests and figures of a GPU, each figure with the ceiling measured beside it; bash eval/gpu.sh runs this.

python eval/benchmarks/gpu.py [--tiny] [--out FILE.json] [--limit SECONDS] [CASE...]

Every case is a process of its own with a deadline, so that a kernel that hangs or a fault of the driver costs one case.
Rows are printed, and FILE.json is written, as each is known: a run that is killed leaves what was measured. With --tiny
sizes are tiny, on the GPU where there is one. Without CUDA they are tiny, too, and on the CPU: Triton's interpreter
(where Triton is installed) for the kernel, gloo for NCCL, shared memory for CUDA IPC. Tiny figures say that the code
runs, nothing else.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gpu_nccl import nccl
from gpu_rows import CONFIGS, ROOT, Row, failure, milliseconds, on_gpu, python_header, run_summary
from gpu_steps import bare_milliseconds, training, wrapper
from gpu_tests import tests
from gpu_waits import host

sys.path.insert(0, str(ROOT))
LIMITS = {"tests": 150, "bits": 150, "host": 60, "ceilings": 30, "mixing": 60, "ipc": 50, "codecs": 40, "rounds": 120,
          "wrapper": 90, "nccl": 60, "staging": 30, "simulator": 60, "training": 120}  # fmt: skip
"""Seconds that a case may take."""
TOGETHER = frozenset({"tests", "bits", "host"})
"""Cases that say what is right, not how fast: they run at once, before all others."""
ABSENT = {
    "several nodes under MPS": "the daemon is not started here: the line above says whether it runs",
}
"""What the list of wanted figures has and nothing here can measure, with the reason."""


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


def mixing(tiny: bool) -> Iterator[Row]:
    """x <- w x + sum_k w_k r_k with d arrivals, beside a copy of the same dtype and size in the same process."""
    import torch

    from decentnode.mixing import mix_into, passes

    gpu = on_gpu()
    yield from _launched() if gpu else _interpreted()
    for elements in (100_000,) if tiny else (25_000_000, 1_000_000_000):
        for dtype in (torch.float32, torch.bfloat16):
            device, bytes_each = torch.device("cuda" if gpu else "cpu"), torch.empty(0, dtype=dtype).element_size()
            x, y = torch.randn(elements, dtype=dtype, device=device), torch.empty(elements, dtype=dtype, device=device)
            took = milliseconds(lambda: y.copy_(x), gpu, queued=True)  # noqa: B023
            copy = 2e-6 * bytes_each * elements / took
            for arrivals in (1, 2, 4, 8):
                received = [(torch.randn_like(x), 1 / (arrivals + 1)) for _ in range(arrivals)]

                def mix(x: Any = x, received: Any = received) -> None:
                    mix_into(x, x, 1 / (len(received) + 1), received)

                moved = bytes_each * elements * passes(arrivals, fused=True)
                speed = 1e-6 * moved / milliseconds(mix, gpu, queued=True)
                name = str(dtype).removeprefix("torch.")
                yield Row("mixing", f"{arrivals} arrivals, {elements / 1e6:g} M elements, {name}", speed, "GB/s", copy,
                          ">= .85")  # fmt: skip
                del received, mix


def _launched() -> Iterator[Row]:
    """Why the kernel cannot be launched here, where it cannot: then figures of mixing are of several passes."""
    import torch

    try:
        from decentnode.mixing.kernel import launch_once

        launch_once(torch.device("cuda", torch.cuda.current_device()))
        torch.cuda.synchronize()
    except Exception as error:  # models are mixed without it
        yield failure("mixing", "the Triton kernel is launched", error)


def _interpreted() -> Iterator[Row]:
    """The Triton kernel itself, where only its interpreter can run it."""
    what = "Triton kernel by its interpreter, largest error"
    if importlib.util.find_spec("triton") is None:
        yield Row("mixing", what, None, note="absent: Triton is not installed")
        return
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel's module is imported
    import torch

    from decentnode.mixing.kernel import launch

    model, arrived, out = torch.randn(5000), torch.randn(5000), torch.empty(5000)
    launch(out, model, 0.5, [(arrived, 0.25)])
    yield Row("mixing", what, float((out - (0.5 * model + 0.25 * arrived)).abs().max()), "", asked="<= 1e-6")


def bits(tiny: bool) -> Iterator[Row]:
    """Models of a run over the memory of one GPU (on the CPU: shared memory) beside those of the same run inproc."""
    import torch
    from safetensors.torch import load_file

    device = "cuda" if on_gpu() else "cpu"
    config = str(CONFIGS / "quickstart.yaml")
    for n in (2,) if tiny else (2, 16, 8, 4):
        graph = f"graph={{name: {'ring' if n < 5 else 'regular'}, nodes: {n}{', degree: 4' if n > 4 else ''}}}"

        def models(way: str, n: int = n, graph: str = graph) -> tuple[list[dict[str, Any]], str]:
            with tempfile.TemporaryDirectory() as folder:
                run_summary([graph, f"mapping={{name: linear, nodes_per_machine: {n}, device: {device}}}",
                             "node.rounds=10", "node.evaluate_every=0", f"communication={way}"],
                            folder, config)  # fmt: skip
                latest = next(Path(folder).glob("*/latest"))
                found = [load_file(path) for path in sorted(latest.glob("models/[0-9]*.safetensors"))]
                return found, _without_memory(latest)

        with ThreadPoolExecutor() as pool:
            (found, why), (expected, _) = pool.map(models, ("auto", "inproc"))
        if len(found) != n or len(expected) != n:
            raise RuntimeError(f"{n} nodes left {len(found)} and {len(expected)} models")
        most = max(float((a[key] - b[key]).abs().max()) for a, b in zip(found, expected, strict=True) for key in a
                   if torch.is_floating_point(a[key]))  # fmt: skip
        yield Row("bits", f"{n} nodes on one {device}, largest difference to inproc", most, "", asked="0",
                  note=f"failed: not by shared memory: {why}" if why else "")  # fmt: skip


def _without_memory(latest: Path) -> str:
    """Why payloads of a run took no shared memory, where a node's log says so."""
    for log in sorted(latest.glob("nodes/*/log.txt")):
        for line in log.read_text().splitlines():
            for mark in ("payloads leave over ipc", "no shared memory from node"):
                if mark in line:
                    return line[line.index(mark):][:300]
    return ""


def rounds(tiny: bool) -> Iterator[Row]:
    """Whole rounds of 8 nodes on one GPU beside the same local steps by one process without any exchange."""
    gpu = on_gpu()
    nodes, count = (2, 4) if tiny else (8, 40)
    for name, batch in (("gn_lenet", 8),) if tiny else (("gn_lenet", 8), ("resnet, depth: 18", 128), ("gn_lenet", 128)):
        yield _round_row(name, nodes, batch, count, gpu)


def _round_row(name: str, nodes: int, batch: int, count: int, gpu: bool) -> Row:
    from common import CONFIG, floor_seconds, round_records

    graph = "{name: ring, nodes: 2}" if nodes == 2 else f"{{name: regular, nodes: {nodes}, degree: 4}}"
    overrides = [f"graph={graph}", f"model={{name: {name}}}", f"node.rounds={count}", f"training.batch_size={batch}",
                 f"mapping.nodes_per_machine={nodes}", f"mapping.device={'cuda' if gpu else 'cpu'}"]  # fmt: skip
    floor = floor_seconds(overrides, nodes, max(4, count // 2), processes=1)
    with tempfile.TemporaryDirectory() as folder:
        run_summary(overrides, folder, str(CONFIG))
        latest = next(Path(folder).glob("*/latest"))
        seconds = statistics.median(
            statistics.median(record["seconds"] for record in records) for records in round_records(latest) if records
        )
    return Row("rounds", f"{nodes} nodes with {name}, batch {batch}: round", 1e3 * seconds, "ms", 1e3 * floor,
               note="ceiling: the local steps of all nodes one after the other")  # fmt: skip


def codecs(tiny: bool) -> Iterator[Row]:
    """Choosing, coding of indices and quantizing, in copies of the model measured in the same process."""
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
    for fraction in (0.01, 0.1):
        count = select.count_of(fraction, elements)
        at = select.largest(model.abs(), count)
        for what, work in (
            ("choosing", lambda: select.largest(model.abs(), count)),  # noqa: B023
            ("Rice coding of indices", lambda: indices.encode(at, elements)),  # noqa: B023
        ):
            taken = milliseconds(work, gpu, repeats, queued=True)
            yield Row("codecs", f"top {fraction:.0%}: {what}", taken / copy, "copies", note=note)
    for name in ("float16", "int8", "int4", "qsgd", "sign"):
        found = load_class(name, CODECS, "compression")
        codec = found(found.Config.model_validate({"name": name}))
        draw = torch.Generator(device).manual_seed(1)
        coded = codec.encode(model, draw)
        for what, work in (
            ("encode", lambda: codec.encode(model, draw)),  # noqa: B023
            ("decode", lambda: codec.decode(coded, elements, model.dtype)),  # noqa: B023
        ):
            taken = milliseconds(work, gpu, repeats, queued=True)
            yield Row("codecs", f"{name}: {what}", taken / copy, "copies", note=note)


def staging(tiny: bool) -> Iterator[Row]:
    """A model out to the host's memory and in again through pinned slots, beside torch's own copies."""
    if not on_gpu():
        yield Row("staging", "pinned slots", None, note="needs a GPU")
        return
    import torch

    from decentnode.communication.receive.chunking import TensorPlan, to_bytes
    from decentnode.communication.receive.staging import CudaCopies, Staging
    from decentnode.payload import TensorSpec

    elements = 100_000 if tiny else 32_000_000
    spec, x = TensorSpec(torch.float32, elements), torch.randn(elements, device="cuda")
    plan, made = TensorPlan("x", spec, 1 << 20), Staging(CudaCopies(torch.device("cuda", 0)))
    made.take([spec])
    host, pinned = torch.empty(elements), torch.empty(elements, pin_memory=True)

    def fetch() -> None:
        fetched = made.fetch(plan, x)
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
                       ("in, pinned slots", lambda: made.lift(host)), ("in, pageable", lambda: host.to("cuda"))):
        yield Row("staging", f"{4e-6 * elements:.0f} MB {what}", speed(work), "GB/s", ceiling)


def ipc(tiny: bool) -> Iterator[Row]:
    """Mixing straight from the memory of other processes on the same GPU, beside a copy."""
    if not on_gpu():
        yield Row("ipc", "mixing from the neighbors' memory", None, note="needs a GPU")
        return
    from tests.gpu.processes import on_one_gpu

    for n in (2,) if tiny else (2, 4):
        what = f"mixing from the memory of {n - 1} neighbors"
        try:
            copy, mixed = on_one_gpu(n, 100_000 if tiny else 64_000_000, _mix_speed)[0]
        except Exception as error:  # the next one may run
            yield failure("ipc", what, error)
        else:
            yield Row("ipc", what, mixed, "GB/s", copy, ">= .80")


def _mix_speed(node: Any, device: Any) -> tuple[float, float]:
    """(GB/s of a copy, GB/s of mixing all neighbors); node 0 alone measures."""
    import torch

    from decentnode.mixing import mix_into, passes
    from decentnode.payload import Payload

    others = tuple(uid for uid in range(len(node._run.machine_of)) if uid != node.uid)
    elements = node.schemas[0].elements
    x = torch.randn(elements, device=device)
    for arrival in node.exchange(0, dict.fromkeys(others, Payload({"x": x})), others).arrivals(60):
        assert not arrival.missing
    node.barrier("written", 60)  # from here on only node 0 uses the GPU
    if node.uid:
        return 0.0, 0.0
    from decentnode.communication.shared_memory.path import SharedMemoryPath

    mapped = node.parts.paths.of(SharedMemoryPath)._mapped
    if unread := set(others) - mapped.keys():
        raise RuntimeError(f"no CUDA IPC here: the memory of {len(unread)} of {len(others)} neighbors cannot be mapped")
    boards = [mapped[uid].slots[0][1][0] for uid in others]  # where the first payload went, whole
    y, weighted = torch.empty_like(x), [(tensor, 1 / (1 + len(others))) for tensor in boards]
    copy = 8e-6 * elements / milliseconds(lambda: y.copy_(x), True, queued=True)
    moved = 4e-6 * elements * passes(len(others), True)
    return copy, moved / milliseconds(lambda: mix_into(x, x, 0.5, weighted), True, queued=True)


def simulator(tiny: bool) -> Iterator[Row]:
    """Node-updates per second of the batched engine (one local step and one mixing of one node), beside bare
    steps of SGD of one node after the other, with no data to gather, nothing mixed and nothing recorded."""
    import torch

    from decentnode.experiment import load
    from decentnode.experiment.initial_model import make_model
    from decentnode.simulate.engines.choice import choose

    gpu = on_gpu()
    device, batch = torch.device("cuda" if gpu else "cpu"), 8
    for nodes in (16,) if tiny else (1024, 64, 4096, 16, 256):
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
        del engine, module


def _peak(gpu: bool) -> str:
    """The most GPU memory since the last call, as the end of a note."""
    import torch

    if not gpu:
        return ""
    most = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return f"; peak {most:.2f} GiB"


CASES: dict[str, Callable[[bool], Iterator[Row]]] = {
    "tests": tests, "bits": bits, "host": host, "ceilings": ceilings, "mixing": mixing, "ipc": ipc, "codecs": codecs,
    "rounds": rounds, "wrapper": wrapper, "nccl": nccl, "staging": staging, "simulator": simulator,
    "training": training,
}  # fmt: skip
"""In the order in which they run: what matters most first, as time may end."""
MARK = "row: "


def environment() -> list[str]:
    """What the figures depend on, a line each; never fails."""
    import platform

    import psutil
    import torch
    from common import machine

    found = [f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"]
    try:
        found.insert(0, machine())
    except Exception as error:  # one line less
        found.append(f"machine not found out: {error}")
    for name in ("triton", "numpy", "torchvision", "transformers"):
        there = importlib.util.find_spec(name) is not None
        found.append(f"{name} {importlib.metadata.version(name) if there else 'absent'}")
    carried = [Path(each) / "Python.h" for each in os.environ.get("C_INCLUDE_PATH", "").split(os.pathsep) if each]
    there = any(each.exists() for each in (python_header(), *carried))
    compiler = next((name for name in ("gcc", "clang") if shutil.which(name)), "absent")
    found.append(f"for Triton's launchers: C compiler {compiler}, Python.h {'there' if there else 'absent'}")
    try:
        for n in range(torch.cuda.device_count()):
            seen = torch.cuda.get_device_properties(n)
            found.append(f"GPU {n}: {seen.name}, {seen.total_memory / 2**30:.0f} GiB, compute capability {seen.major}."
                         f"{seen.minor}, {seen.multi_processor_count} multiprocessors")  # fmt: skip
        if torch.cuda.is_available() and torch.distributed.is_nccl_available():
            found.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
        asked = ["nvidia-smi", "--query-gpu=driver_version,compute_mode,clocks.sm,clocks.mem", "--format=csv,noheader"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20)
        found += [f"nvidia-smi: {line}" for line in (said.stdout + said.stderr).splitlines()[:4]]
    except Exception as error:  # one line less
        found.append(f"not found out: {error}")
    with contextlib.suppress(Exception):
        names = [process.info["name"] for process in psutil.process_iter(["name"])]
        found.append(f"MPS: {'running' if 'nvidia-cuda-mps-control' in names else 'not running'}")
    return found


class Report:
    """Rows as they become known: printed, and written to a file that is valid JSON at any moment."""

    def __init__(self, out: Path | None, about: list[str]) -> None:
        self.rows: list[Row] = []
        self._out, self._about, self._began = out, about, time.monotonic()
        self._lock = threading.Lock()
        self._write()

    def add(self, row: Row) -> None:
        if row.value is not None and not math.isfinite(row.value):  # which JSON does not have
            row = replace(row, value=None, note=f"failed: {row.value}")
        with self._lock:
            self.rows.append(row)
            print(row.text(), flush=True)
            self._write()

    def _write(self) -> None:
        if self._out is None:
            return
        found = {"environment": self._about, "seconds": round(time.monotonic() - self._began, 1),
                 "rows": [asdict(row) for row in self.rows]}  # fmt: skip
        new = self._out.with_name(self._out.name + ".new")
        new.write_text(json.dumps(found, indent=1) + "\n")
        new.replace(self._out)


_running: set[subprocess.Popen[str]] = set()


def _kill(process: subprocess.Popen[str]) -> None:
    """With all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def run_case(name: str, tiny: bool, limit: float, add: Callable[[Row], None]) -> None:
    """One case in a process of its own, its rows as they come; a failure is a row that says why."""
    command = [sys.executable, str(Path(__file__).resolve()), "--case", name, *(["--tiny"] if tiny else [])]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    known = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    began, stopped = time.monotonic(), threading.Event()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=known,
                                   start_new_session=True)  # fmt: skip
        _running.add(process)
        clock = threading.Timer(limit, lambda: (stopped.set(), _kill(process)))
        clock.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                add(Row(**json.loads(line.removeprefix(MARK))))
        process.wait()
        clock.cancel()
        _kill(process)  # what it left behind
        _running.discard(process)
        if stopped.is_set():
            add(Row(name, "the case", None, note=f"stopped after {limit:.0f} s"))
        elif process.returncode:
            errors.seek(0)
            said = " ".join(errors.read().split())[-300:]
            add(Row(name, "the case", None, note=f"failed: it ended with {process.returncode}: {said}"))
    print(f"  {name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


def run_all(options: argparse.Namespace, report: Report) -> None:
    """Cases one after the other, in the order of CASES, but those of TOGETHER at once; no more than options.limit s."""
    until, names = time.monotonic() + options.limit, options.cases

    def run(name: str) -> None:
        left = until - time.monotonic()
        if left < 5:
            report.add(Row(name, "the case", None, note="not measured: no time left"))
        else:
            run_case(name, options.tiny, min(options.patience * LIMITS[name], left), report.add)

    first = [threading.Thread(target=run, args=(name,)) for name in CASES if name in names and name in TOGETHER]
    for thread in first:
        thread.start()
    for thread in first:
        thread.join()
    for name in CASES:
        if name in names and name not in TOGETHER:
            run(name)


def _terminated(_signal: int, _frame: object) -> None:
    for process in list(_running):
        _kill(process)
    os._exit(143)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"any of {', '.join(CASES)}")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes")
    parser.add_argument("--out", type=Path, help="where the rows go as JSON")
    parser.add_argument("--limit", type=float, default=420, help="seconds that all cases together may take")
    parser.add_argument("--patience", type=float, default=1, help="times which each case's own limit is: slow machines")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.cases) - CASES.keys():
        parser.error(f"no case {', '.join(sorted(unknown))}; there is: {', '.join(CASES)}")
    if options.case:
        for row in CASES[options.case](options.tiny or not on_gpu()):
            print(MARK + json.dumps(asdict(row)), flush=True)
        return 0
    signal.signal(signal.SIGTERM, _terminated)
    os.environ["GPU_PATIENCE"] = str(options.patience)  # for the limits within cases
    about = environment()
    if options.tiny or not on_gpu():
        about.append("tiny sizes: no figure here counts")
    print(*about, sep="\n", flush=True)
    report = Report(options.out, about)
    run_all(options, report)
    for what, why in ABSENT.items():
        report.add(Row("absent", what, None, note=why))
    return 1 if any(row.failed for row in report.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
