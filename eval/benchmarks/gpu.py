"""Figures of a GPU, each with the ceiling measured beside it; bash eval/gpu.sh runs this behind the GPU tests.

python eval/benchmarks/gpu.py [--tiny] [--out FILE.json] [--limit SECONDS] [CASE...]

Every case is a process of its own with a deadline, so that a kernel that hangs or a fault of the driver costs one case.
Without CUDA, or with --tiny, the same code runs on the CPU with tiny sizes: Triton's interpreter (where Triton is
installed) for the kernel, gloo for NCCL, shared memory for CUDA IPC. Such figures say that the code runs, nothing else.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
LIMITS = {"ceilings": 30, "mixing": 60, "wrapper": 90, "bits": 90, "rounds": 120, "host": 45, "codecs": 60, "nccl": 45,
          "staging": 20, "ipc": 60, "simulator": 60}  # fmt: skip
"""Seconds that a case may take."""
ABSENT = {
    "several GPUs": "needs two GPUs (pytest -m multigpu)",
}
"""What the list of wanted figures has and nothing here can measure, with the reason."""


@dataclass(frozen=True)
class Row:
    """One figure."""

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
        return f"{self.case:9} {self.what:58} {self.value:10.4g} {self.unit:8} {ratio:18} {self.asked:12} {self.note}"


def on_gpu(tiny: bool) -> bool:
    import torch

    return torch.cuda.is_available() and not tiny


def milliseconds(work: Callable[[], object], gpu: bool, repeats: int = 20) -> float:
    """Median time of one call: by CUDA events on a GPU, by the host's clock elsewhere, after three calls."""
    import torch

    times = []
    for _ in range(repeats + 3):
        if gpu:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            began = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[3:])


def ceilings(tiny: bool) -> Iterator[Row]:
    import torch

    gpu = on_gpu(tiny)
    device = torch.device("cuda" if gpu else "cpu")
    elements, side = (1 << 30, 8192) if gpu else (1 << 20, 256)
    x, y = torch.ones(elements, device=device), torch.empty(elements, device=device)
    copied = milliseconds(lambda x=x, y=y: y.copy_(x), gpu)  # type: ignore[misc]
    yield Row("ceilings", f"copy of {4e-6 * elements:.0f} MB, bytes read and written", 8e-6 * elements / copied, "GB/s")
    del x, y
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    yield Row("ceilings", f"bfloat16 matrix product of side {side}",
              2e-9 * side**3 / milliseconds(lambda: a @ b, gpu), "TFLOP/s")  # fmt: skip


def mixing(tiny: bool) -> Iterator[Row]:
    """x <- w x + sum_k w_k r_k with d arrivals, beside a copy of the same dtype and size in the same process."""
    import torch

    from decentnode.mixing import mix_into, passes

    gpu = on_gpu(tiny)
    if not gpu:
        yield from _interpreted()
    for elements in (25_000_000, 1_000_000_000) if gpu else (100_000,):
        for dtype in (torch.float32, torch.bfloat16):
            device, bytes_each = torch.device("cuda" if gpu else "cpu"), torch.empty(0, dtype=dtype).element_size()
            x, y = torch.ones(elements, dtype=dtype, device=device), torch.empty(elements, dtype=dtype, device=device)
            copy = 2e-6 * bytes_each * elements / milliseconds(lambda: y.copy_(x), gpu)  # noqa: B023
            for arrivals in (1, 2, 4, 8):
                received = [(torch.ones_like(x), 1 / (arrivals + 1)) for _ in range(arrivals)]

                def mix(x: Any = x, received: Any = received) -> None:
                    mix_into(x, x, 1 / (len(received) + 1), received)

                speed = 1e-6 * bytes_each * elements * passes(arrivals, fused=True) / milliseconds(mix, gpu)
                name = str(dtype).removeprefix("torch.")
                yield Row("mixing", f"{arrivals} arrivals, {elements / 1e6:g} M elements, {name}", speed, "GB/s", copy,
                          ">= .85")  # fmt: skip
                del received, mix


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


def _make_models(tiny: bool, gpu: bool) -> Iterator[tuple[str, Callable[[], tuple[Any, Any, Any]] | None, str]]:
    """(name, what makes (module, inputs, loss of an output), why it is absent)."""
    import torch
    from torch.nn import functional

    device = torch.device("cuda" if gpu else "cpu")

    def resnet() -> tuple[Any, Any, Any]:
        from torchvision.models import resnet50

        y = torch.randint(0, 1000, (64,), device=device)
        images = torch.randn(64, 3, 224, 224, device=device)
        return resnet50().to(device), images, lambda out: functional.cross_entropy(out, y)

    def gpt2() -> tuple[Any, Any, Any]:
        from transformers import GPT2Config, GPT2LMHeadModel

        tokens = torch.randint(0, 50257, (8, 512), device=device)
        return GPT2LMHeadModel(GPT2Config()).to(device), tokens, lambda out: functional.cross_entropy(
            out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )

    def mlp() -> tuple[Any, Any, Any]:
        y = torch.randint(0, 10, (8,), device=device)
        module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to(device)
        return module, torch.randn(8, 64, device=device), lambda out: functional.cross_entropy(out, y)

    if tiny or not gpu:
        yield "MLP of 4,810", mlp, ""
        return
    for name, package, make in (("ResNet-50", "torchvision", resnet), ("GPT-2 small", "transformers", gpt2)):
        there = importlib.util.find_spec(package) is not None
        yield name, make if there else None, "" if there else f"absent: needs {package}"


def wrapper(tiny: bool) -> Iterator[Row]:
    """Steps of DecentralizedDataParallel in a world of one beside the same steps without it, by turns."""
    import torch

    from decentnode.parallel import DecentralizedDataParallel, initialize_dist

    gpu = on_gpu(tiny)
    initialize_dist()
    steps, turns = (5, 7) if gpu else (2, 2)
    for name, make, why in _make_models(tiny, gpu):
        if make is None:
            yield Row("wrapper", f"{name}, world of one / alone", None, note=why)
            continue
        for precision in ("float32", "bfloat16 autocast") if gpu else ("float32",):
            alone, x, loss_of = make()
            own = torch.optim.AdamW(alone.parameters(), lr=1e-4, fused=gpu)
            wrapped = DecentralizedDataParallel(
                make()[0], optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-4, fused=gpu), topology="complete",
                transport="collective",
            )  # fmt: skip

            def step(module: Any, optimizer: Any, x: Any = x, loss_of: Any = loss_of, how: str = precision) -> None:
                with torch.autocast("cuda", torch.bfloat16, enabled="bfloat16" in how):
                    loss = loss_of(module(x))
                loss.backward()
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()

            times: dict[str, list[float]] = {"alone": [], "wrapped": []}
            for _ in range(turns):
                for way, module, optimizer in (("alone", alone, own), ("wrapped", wrapped, None)):
                    several = [lambda m=module, o=optimizer: step(m, o)] * steps
                    times[way].append(milliseconds(lambda s=several: [f() for f in s], gpu, 1) / steps)  # type: ignore[misc]
            ratios = [b / a for a, b in zip(times["alone"], times["wrapped"], strict=True)]
            alone_ms = statistics.median(times["alone"])
            note = f"step alone {alone_ms:.2f} ms, least {min(ratios):.3f}, most {max(ratios):.3f}"
            yield Row("wrapper", f"{name}, {precision}, world of one / alone", statistics.median(ratios), "",
                      asked="<= 1.02", note=note)  # fmt: skip
            del alone, wrapped, own
            if gpu:
                torch.cuda.empty_cache()


def _run(overrides: list[str], folder: str, config: str) -> dict[str, Any]:
    """summary.json of a run by the command line. Raises RuntimeError with the end of its output."""
    command = [sys.executable, "-m", "decentnode", "run", config, "--run-dir", folder, "--plain",
               *(part for override in overrides for part in ("--set", override))]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"a run ended with {done.returncode}: {(done.stdout + done.stderr)[-600:]}")
    summary: dict[str, Any] = json.loads((next(Path(folder).glob("*/latest")) / "summary.json").read_text())
    return summary


def bits(tiny: bool) -> Iterator[Row]:
    """Models of a run over the memory of one GPU (on the CPU: shared memory) beside those of the same run inproc."""
    import torch
    from safetensors.torch import load_file

    device = "cuda" if on_gpu(tiny) else "cpu"
    config = str(Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml")
    for n in (2, 4, 8, 16) if device == "cuda" else (2,):
        found, seconds = [], []
        graph = f"graph={{name: {'ring' if n < 5 else 'regular'}, nodes: {n}{', degree: 4' if n > 4 else ''}}}"
        for way in ("auto", "inproc"):
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter()
                _run([graph, f"mapping={{name: linear, nodes_per_machine: {n}, device: {device}}}", "node.rounds=10",
                      "node.evaluate_every=0", f"communication={way}"], folder, config)  # fmt: skip
                seconds.append(time.perf_counter() - began)
                files = sorted(next(Path(folder).glob("*/latest")).glob("models/[0-9]*.safetensors"))
                found.append([load_file(path) for path in files])
        if len(found[0]) != n or len(found[1]) != n:
            raise RuntimeError(f"{n} nodes left {len(found[0])} and {len(found[1])} models")
        most = max(float((a[key] - b[key]).abs().max()) for a, b in zip(*found, strict=True) for key in a
                   if torch.is_floating_point(a[key]))  # fmt: skip
        yield Row("bits", f"{n} nodes on one {device}, largest difference to inproc", most, "", asked="0",
                  note=f"whole runs {seconds[0]:.1f} s and {seconds[1]:.1f} s")  # fmt: skip


def rounds(tiny: bool) -> Iterator[Row]:
    """Whole rounds of 8 nodes on one GPU beside the same local steps by one process without any exchange."""
    gpu = on_gpu(tiny)
    nodes, count = (8, 60) if gpu else (2, 4)
    from decentnode.models import MODELS

    for name in ("gn_lenet", "resnet18") if gpu else ("gn_lenet",):
        if name not in MODELS:
            yield Row("rounds", f"{nodes} nodes with {name}", None, note=f"absent: no model {name} yet")
            continue
        for batch in (8, 128) if gpu else (8,):
            yield _round_row(name, nodes, batch, count, gpu)


def _round_row(name: str, nodes: int, batch: int, count: int, gpu: bool) -> Row:
    from common import CONFIG, floor_seconds, round_records

    graph = "{name: ring, nodes: 2}" if nodes == 2 else f"{{name: regular, nodes: {nodes}, degree: 4}}"
    overrides = [f"graph={graph}", f"model={{name: {name}}}", f"node.rounds={count}", f"training.batch_size={batch}",
                 f"mapping.nodes_per_machine={nodes}", f"mapping.device={'cuda' if gpu else 'cpu'}"]  # fmt: skip
    floor = floor_seconds(overrides, nodes, max(4, count // 2), processes=1)
    with tempfile.TemporaryDirectory() as folder:
        _run(overrides, folder, str(CONFIG))
        latest = next(Path(folder).glob("*/latest"))
        seconds = statistics.median(
            statistics.median(record["seconds"] for record in records) for records in round_records(latest) if records
        )
    return Row("rounds", f"{nodes} nodes with {name}, batch {batch}: round", 1e3 * seconds, "ms", 1e3 * floor,
               note="ceiling: the local steps of all nodes one after the other")  # fmt: skip


def host(tiny: bool) -> Iterator[Row]:
    """Calls per node and round that make the host wait for the GPU, counted by torch's profiler; 1 is the loss."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from decentnode.build import build_in_process, step_all
    from decentnode.experiment import load

    gpu = on_gpu(tiny)
    config = str(Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml")
    for rule in ("{name: full}", "{name: choco}", "{name: topk}"):
        counts = []
        for length in (4, 8):
            experiment = load(config, [
                "graph={name: ring, nodes: 4}", f"mapping={{name: linear, nodes_per_machine: 4, device: "
                f"{'cuda' if gpu else 'cpu'}}}", f"node.rounds={length}", "node.evaluate_every=0", f"sharing={rule}",
                "communication=inproc", "training.local_steps=1",
            ])  # fmt: skip
            nodes = build_in_process(experiment)
            with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as seen:
                step_all(nodes)
                if gpu:
                    torch.cuda.synchronize()
            waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
            names = waits if gpu else ("aten::_local_scalar_dense",)
            counts.append(sum(each.count for each in seen.key_averages() if each.key in names))
        # the difference of two lengths leaves out start and closing evaluation
        yield Row("host", f"waits of the host per node and round, {rule}", (counts[1] - counts[0]) / (4 * 4), "",
                  asked="<= 1", note="" if gpu else "on the CPU: reads of scalars")  # fmt: skip


def codecs(tiny: bool) -> Iterator[Row]:
    """Choosing, coding of indices and quantizing, in copies of the model measured in the same process."""
    import torch

    from decentnode.compression import CODECS, indices, select
    from decentnode.config.component import load_class

    gpu = on_gpu(tiny)
    elements = 25_000_000 if gpu else 100_000
    device = torch.device("cuda" if gpu else "cpu")
    model = torch.randn(elements, device=device)
    target = torch.empty_like(model)
    repeats = 10 if gpu else 2
    copy = milliseconds(lambda: target.copy_(model), gpu, repeats)
    note = f"one copy: {copy:.3f} ms"
    for fraction in (0.01, 0.1):
        count = select.count_of(fraction, elements)
        at = select.largest(model.abs(), count)
        for what, work in (
            ("choosing", lambda: select.largest(model.abs(), count)),  # noqa: B023
            ("Rice coding of indices", lambda: indices.encode(at, elements)),  # noqa: B023
        ):
            taken = milliseconds(work, gpu, repeats)
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
            taken = milliseconds(work, gpu, repeats)
            yield Row("codecs", f"{name}: {what}", taken / copy, "copies", note=note)


def nccl(tiny: bool) -> Iterator[Row]:
    """A clique of torch.distributed: NCCL to itself on one GPU; on the CPU two gloo nodes by NCCL's batched path."""
    if on_gpu(tiny):
        import torch

        yield Row("nccl", "version", float(".".join(map(str, torch.cuda.nccl.version()[:2]))), "",
                  note=f"torch {torch.__version__}; two ranks on one GPU need NCCL 2.30")  # fmt: skip
        yield from _self_exchange()
        return
    with tempfile.TemporaryDirectory() as folder:
        summary = _run(["graph={name: ring, nodes: 2}", "mapping.nodes_per_machine=2", "node.rounds=4",
                        "node.evaluate_every=0", "communication={name: collective, backend: gloo, batched: true}"],
                       folder, str(Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"))  # fmt: skip
        yield Row("nccl", "rounds of two gloo nodes by the batched path", float(summary["rounds"]), "", asked="4")


def _self_exchange() -> Iterator[Row]:
    """all_reduce, and send and receive in one batch, of a world of one, beside a copy of the same tensor."""
    import torch
    import torch.distributed as dist

    from decentnode.parallel import initialize_dist

    initialize_dist()
    x = torch.randn(25_000_000, device="cuda")
    y = torch.empty_like(x)
    copy = 0.2 / milliseconds(lambda: y.copy_(x), True) * 1e3

    def exchange() -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0), dist.P2POp(dist.irecv, y, 0)]):
            work.wait()

    for what, call in (("all_reduce", lambda: dist.all_reduce(x)), ("send and receive", exchange)):
        yield Row("nccl", f"100 MB to itself, {what}", 0.2 / milliseconds(call, True) * 1e3, "GB/s", copy)


def staging(tiny: bool) -> Iterator[Row]:
    """A model out to the host's memory and in again through pinned slots, beside torch's own copies."""
    if not on_gpu(tiny):
        yield Row("staging", "pinned slots", None, note="needs a GPU")
        return
    import torch

    from decentnode.communication.receive.chunking import TensorPlan, to_bytes
    from decentnode.communication.receive.staging import CudaCopies, Staging
    from decentnode.payload import TensorSpec

    elements = 32_000_000
    spec, x = TensorSpec(torch.float32, elements), torch.randn(elements, device="cuda")
    plan, made = TensorPlan("x", spec, 1 << 20), Staging(CudaCopies(torch.device("cuda", 0)), [spec])
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
    if not on_gpu(tiny):
        yield Row("ipc", "mixing from the neighbors' memory", None, note="needs a GPU")
        return
    from tests.gpu.processes import on_one_gpu

    for n in (2, 4):
        copy, mixed = on_one_gpu(n, IPC_ELEMENTS, _mix_speed)[0]
        yield Row("ipc", f"mixing from the memory of {n - 1} neighbors", mixed, "GB/s", copy, ">= .80")


IPC_ELEMENTS = 64_000_000


def _mix_speed(node: Any, device: Any) -> tuple[float, float]:
    """(GB/s of a copy, GB/s of mixing all neighbors); node 0 alone measures."""
    import torch

    from decentnode.mixing import mix_into, passes
    from decentnode.payload import Payload

    others = tuple(uid for uid in range(len(node._run.machine_of)) if uid != node.uid)
    x = torch.ones(IPC_ELEMENTS, device=device)
    for arrival in node.exchange(0, dict.fromkeys(others, Payload({"x": x})), others).arrivals(60):
        assert not arrival.missing
    node.barrier("written", 60)  # from here on only node 0 uses the GPU
    if node.uid:
        return 0.0, 0.0
    from decentnode.communication.shared_memory.path import SharedMemoryPath

    mapped = node.parts.paths.of(SharedMemoryPath)._mapped
    boards = [mapped[uid].slots[0][1][0] for uid in others]  # where the first payload went, whole
    y, weighted = torch.empty_like(x), [(tensor, 1 / (1 + len(others))) for tensor in boards]
    copy = 8e-6 * IPC_ELEMENTS / milliseconds(lambda: y.copy_(x), True)
    moved = 4e-6 * IPC_ELEMENTS * passes(len(others), True)
    return copy, moved / milliseconds(lambda: mix_into(x, x, 0.5, weighted), True)


def simulator(tiny: bool) -> Iterator[Row]:
    """Node-updates per second of the batched engine (one local step and one mixing of one node), beside bare
    steps of SGD of one node after the other, with no data to gather, nothing mixed and nothing recorded."""
    import torch

    from decentnode.experiment import load
    from decentnode.experiment.initial_model import make_model
    from decentnode.simulate.choice import choose

    gpu = on_gpu(tiny)
    device, batch = torch.device("cuda" if gpu else "cpu"), 8
    for nodes in (16, 64, 256, 1024, 4096) if gpu else (16,):
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
        for _ in range(12 if gpu else 4):  # a step ends with the losses of all nodes on the host
            began = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - began)
        bare = _bare_step(make_model(experiment, experiment.open_data().spec).to(device), batch)
        floor = 1e-3 * milliseconds(bare, gpu)
        yield Row("simulator", f"{nodes} nodes with gn_lenet, batch {batch}: node-updates",
                  nodes / statistics.median(times[2:]), "/s", 1 / floor,
                  note="beside it: bare steps, one node after the other")  # fmt: skip
        del engine, bare


def _bare_step(model: Any, batch: int) -> Callable[[], object]:
    """One step of plain SGD of one model of 32 x 32 images in color, on its device."""
    import torch

    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    inputs, targets = torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)

    def work() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return work


CASES: dict[str, Callable[[bool], Iterator[Row]]] = {
    "ceilings": ceilings, "mixing": mixing, "wrapper": wrapper, "bits": bits, "rounds": rounds, "host": host,
    "codecs": codecs, "nccl": nccl, "staging": staging, "ipc": ipc, "simulator": simulator,
}  # fmt: skip
MARK = "row: "


def run_case(name: str, tiny: bool, limit: float) -> list[Row]:
    """Rows of one case in a process of its own; a failure is a row that says why."""
    command = [sys.executable, str(Path(__file__).resolve()), "--case", name, *(["--tiny"] if tiny else [])]
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
                               start_new_session=True)  # fmt: skip
    try:
        output, errors = process.communicate(timeout=limit)
        why = "" if process.returncode == 0 else f"failed: {' '.join(errors.split())[-300:]}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # its runs' children too
        output, errors = process.communicate()
        why = f"stopped after {limit:.0f} s"
    rows = [Row(**json.loads(line[len(MARK):])) for line in output.splitlines() if line.startswith(MARK)]
    if why:
        rows.append(Row(name, "the case", None, note=why))
    print(f"  {name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"any of {', '.join(CASES)}")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU, also where there is a GPU")
    parser.add_argument("--out", type=Path, help="where the rows go as JSON")
    parser.add_argument("--limit", type=float, default=420, help="seconds that all cases together may take")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.cases) - CASES.keys():
        parser.error(f"no case {', '.join(sorted(unknown))}; there is: {', '.join(CASES)}")
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    if options.case:
        for row in CASES[options.case](options.tiny):
            print(MARK + json.dumps(asdict(row)), flush=True)
        return 0
    import torch
    from common import machine

    gpu = on_gpu(options.tiny)
    device = torch.cuda.get_device_name() if gpu else "no GPU: tiny sizes"
    about = f"{machine()}; torch {torch.__version__}; {device}"
    print(about, flush=True)
    rows: list[Row] = []
    until = time.monotonic() + options.limit
    for name in options.cases:
        left = until - time.monotonic()
        if left < 5:
            rows.append(Row(name, "the case", None, note="not measured: no time left"))
        else:
            rows += run_case(name, options.tiny, min(LIMITS[name], left))
        for row in rows[-1:] if left < 5 else [r for r in rows if r.case == name]:
            print(row.text(), flush=True)
    rows += [Row("absent", what, None, note=why) for what, why in ABSENT.items()]
    for row in rows[-len(ABSENT):]:
        print(row.text(), flush=True)
    if options.out:
        options.out.write_text(json.dumps({"machine": about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    failed = [row for row in rows if row.note.startswith(("failed", "stopped"))]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
