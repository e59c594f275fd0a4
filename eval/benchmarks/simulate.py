"""bash eval/bench.sh simulate [--gossipy PATH] [--epfl PATH] [--exo PATH] [CASE...]: node-updates per second of
simulated runs, in turn.

100 nodes on a random regular graph of degree 4, batch 8, one local step per round, all cores. A node-update is one
local step and one mixing of one node. `engine`: whole rounds of the batched engine, with its records written to files;
`steps`: its local steps alone; `W X`: its mixing alone; `rest`: everything else. Beside it in the same run, in turn:
`vmap`, a bare loop of torch.func.vmap(grad) and plain SGD over the stacked parameters; `bare`, a bare loop of forward,
backward and SGD, one process per core. After the node-updates per second of wall-clock time come those per second of
CPU of all processes: on a busy machine these are the ones to compare.

--gossipy, --epfl, --exo PATH: folders separated by colons that hold gossipy, EPFL's Decentralized Learning Simulator or
EXO Gym, and their dependencies; beside_NAME.py says what of it is run. EXO Gym has a process per node, and runs with 8
nodes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from common import cores, machine

from decentnode.experiment import Experiment, load
from decentnode.experiment.initial_model import make_model
from decentnode.launch.children.messages import Request, Task
from decentnode.launch.files.run_dir import node_dir
from decentnode.launch.one_process.batched_run import BatchedOutput
from decentnode.launch.supervising.entry import die_with_parent
from decentnode.simulate.engines.batched import Batched
from decentnode.simulate.engines.choice import choose
from decentnode.simulate.engines.exchange import StackedExchange
from decentnode.tensors import keep_freed_memory

NODES, BATCH = 100, 8
CASES: dict[str, list[str]] = {
    "logistic": ["model=logistic", "data.input_shape=[64]"],
    "mlp": ["model={name: mlp, hidden: [100]}", "data.input_shape=[64]"],
    "gn_lenet": ["model=gn_lenet", "data.input_shape=[3, 32, 32]"],
}
NAMES = {"logistic": "logistic regression (650)", "mlp": "MLP (7,510)", "gn_lenet": "GN-LeNet (89,834)"}
HERE = Path(__file__).resolve().parent


def experiment(case: str) -> Experiment:
    return load(None, [
        "graph={name: regular, nodes: 100, degree: 4}", "mapping={name: linear, nodes_per_machine: 100}",
        "data={name: synthetic, train_samples: 50000, test_samples: 1000, partition: iid}", *CASES[case],
        f"training={{name: supervised, batch_size: {BATCH}, local_steps: 1, optimizer: {{name: sgd, lr: 0.05}}}}",
        "node={rounds: 1000000, evaluate_every: 0, check_finite: false}", "simulate.engine=batched",
    ], environ={}, check=False)  # fmt: skip


class Engine:
    """Whole rounds of the engine, with their records."""

    def __init__(self, case: str, folder: Path) -> None:
        choice = choose(experiment(case))
        assert choice.batched is not None, choice.reason
        self.engine: Batched = choice.batched
        self.reason = choice.reason
        self.threads = choice.threads
        for uid in range(NODES):
            node_dir(folder, uid).mkdir(parents=True)
        task = Task(Request(""), [*range(NODES)], 0, str(folder), 1, "00" * 8, True, 2.0, "")
        self._sink = BatchedOutput(self.engine, task, lambda _: None, lambda: None)

    def round(self) -> None:
        torch.set_num_threads(self.threads)
        self._sink.take_round(self.engine.step())

    def parts(self, seconds: float) -> tuple[Cost, Cost]:
        """Returns the costs of a round's local steps alone, and of W X alone."""
        torch.set_num_threads(self.threads)
        exchange, at = self.engine.exchange, self.engine.round
        assert isinstance(exchange, StackedExchange)
        exchange.begin(at, 0.05)
        plan = exchange._round_edges()[0][0]
        with torch.no_grad():
            mixing = mean_cost(lambda: plan(self.engine.population.rows), seconds)
        return mean_cost(lambda: self.engine.steps.run(at), seconds), mixing


@dataclass(frozen=True)
class Cost:
    """The cost of one round of all nodes."""

    seconds: float
    cpu: float
    """CPU seconds of all processes that compute it."""


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and its children, among them the engine's forks."""
    own = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in (own, *own.children(recursive=True)))


def mean_cost(work: Callable[[], object], seconds: float) -> Cost:
    """Returns the mean cost of `work`, called repeatedly for `seconds`."""
    work()
    count, started, before = 0, time.perf_counter(), cpu_seconds()
    while (elapsed := time.perf_counter() - started) < seconds or not count:
        work()
        count += 1
    return Cost(elapsed / count, (cpu_seconds() - before) / count)


def vmap_loop(case: str) -> Callable[[], object] | None:
    """Returns a bare loop: gradients of all nodes by torch.func and plain SGD, without gathering data, mixing or
    writing."""
    config = experiment(case)
    spec = config.open_data().spec
    module = make_model(config, spec)
    names = [name for name, _ in module.named_parameters()]
    stacked = {name: p.detach().expand(NODES, *p.shape).clone() for name, p in module.named_parameters()}
    inputs, targets = torch.randn(NODES, BATCH, *spec.input_shape), torch.randint(10, (NODES, BATCH))

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        outputs = torch.func.functional_call(module, parameters, (x,))
        return torch.nn.functional.cross_entropy(outputs, y)

    gradient = torch.func.vmap(torch.func.grad(loss))

    def work() -> None:
        found = gradient(stacked, inputs, targets)
        for name in names:
            stacked[name].sub_(found[name], alpha=0.05)

    try:
        work()
    except RuntimeError:
        return None
    return work


def bare_share(case: str, nodes: int, seconds: float, ready: Any, results: Any) -> None:
    """One process of the bare loop: the steps of its nodes, one after the other, on one thread."""
    die_with_parent(getattr(multiprocessing.parent_process(), "pid", None))
    torch.set_num_threads(1)
    keep_freed_memory()
    config = experiment(case)
    spec = config.open_data().spec
    modules = [make_model(config, spec) for _ in range(nodes)]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05, fused=True) for module in modules]
    inputs, targets = torch.randn(nodes, BATCH, *spec.input_shape), torch.randint(10, (nodes, BATCH))

    def work() -> None:
        for module, optimizer, x, y in zip(modules, optimizers, inputs, targets, strict=True):
            torch.nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    work()
    ready.wait(120)
    found = mean_cost(work, seconds)
    results.put((found.seconds, found.cpu))


def bare_cost(case: str, seconds: float) -> Cost:
    """Returns the cost of a round of all nodes in the bare loop on all cores."""
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(cores()), context.Queue()
    started = [context.Process(target=bare_share, args=(case, NODES // cores(), seconds, ready, results))
               for _ in range(cores())]  # fmt: skip
    for process in started:
        process.start()
    found = [Cost(*results.get(timeout=300)) for _ in started]
    for process in started:
        process.join(60)
    updates = sum(NODES // cores() / each.seconds for each in found)
    return Cost(NODES / updates, sum(each.cpu for each in found))


PEERS = {"gossipy": (("logistic", "mlp"), NODES), "epfl": (("gn_lenet",), NODES), "exo": (tuple(CASES), 8)}
"""The other simulators: (the cases that they support, the number of nodes they run with)."""


def peer_cost(name: str, case: str, path: str, seconds: float) -> Cost:
    """Returns what as many node-updates as a round of all nodes has cost another simulator."""
    words = [sys.executable, str(HERE / f"beside_{name}.py"), path, case, str(PEERS[name][1]), str(BATCH), str(seconds)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{name} did not run:\n{done.stderr[-2000:]}")
    return Cost(*(NODES / float(each) for each in done.stdout.split()[-2:]))


def measure(case: str, turns: int, seconds: float, paths: Mapping[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine, loop = Engine(case, Path(folder)), vmap_loop(case)
        found: dict[str, list[Cost]] = {name: [] for name in ("engine", "steps", "W X", "vmap", "bare", *PEERS)}
        for _ in range(turns):
            found["engine"].append(mean_cost(engine.round, seconds))
            for name, each in zip(("steps", "W X"), engine.parts(seconds / 2), strict=True):
                found[name].append(each)
            if loop is not None:
                torch.set_num_threads(cores())
                found["vmap"].append(mean_cost(loop, seconds))
            found["bare"].append(bare_cost(case, seconds))
            for name, path in paths.items():
                if path and case in PEERS[name][0]:
                    found[name].append(peer_cost(name, case, path, seconds))
        engine.engine.population.close()
    show(case, engine.reason, {name: each for name, each in found.items() if each})


def show(case: str, reason: str, found: dict[str, list[Cost]]) -> None:
    print(f"{NAMES[case]}: {reason}")
    for name, each in found.items():
        seconds, cpu = (statistics.median(values) for values in zip(*((one.seconds, one.cpu) for one in each),
                                                                    strict=True))  # fmt: skip
        share = ""
        if name not in ("engine", "steps", "W X"):
            pairs = [*zip(each, found["engine"], strict=True)]
            share = (f"; engine / {name}: {statistics.median(a.seconds / b.seconds for a, b in pairs):.2f}, by CPU "
                     f"{statistics.median(a.cpu / b.cpu for a, b in pairs):.2f}")  # fmt: skip
        print(f"  {name:8} {NODES / seconds:10,.0f} node-updates/s, {NODES / cpu:9,.0f} per s of CPU; "
              f"{1e3 * seconds:8.3f} ms per round of {NODES}{share}")  # fmt: skip
    parts = [*zip(found["engine"], found["steps"], found["W X"], strict=True)]
    rest = statistics.median(max(0.0, 1 - (steps.cpu + mixing.cpu) / whole.cpu) for whole, steps, mixing in parts)
    mixed = statistics.median(mixing.cpu / whole.cpu for whole, _, mixing in parts)
    print(f"  by CPU: W X is {mixed:.1%} of a round, the rest {rest:.1%}", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    for name in PEERS:
        arguments.add_argument(f"--{name}", default="", metavar="PATH")
    arguments.add_argument("--turns", type=int, default=5, metavar="N")
    arguments.add_argument("--rounds-seconds", type=float, default=2.0, metavar="S")
    chosen = arguments.parse_args()
    if unknown := [case for case in chosen.cases if case not in CASES]:
        arguments.error(f"cases must be of {', '.join(CASES)}, got {', '.join(unknown)}")
    keep_freed_memory()
    print(machine())
    for case in chosen.cases or CASES:
        measure(case, chosen.turns, chosen.rounds_seconds, {name: getattr(chosen, name) for name in PEERS})


if __name__ == "__main__":
    main()
