"""Chooses the engine of a simulated run and its method for the local steps: as requested, or by timing a few steps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from decentnode import clock, native
from decentnode.errors import Diverged
from decentnode.experiment import Experiment
from decentnode.experiment.initial_model import make_model
from decentnode.samples import LazySamples
from decentnode.simulate.engines.batched import Batched, unsupported_feature
from decentnode.simulate.engines.forward import Forward, Layers, Unsuitable, Vmap, random_part
from decentnode.simulate.engines.population import Population
from decentnode.simulate.engines.stacked_steps import StackedSteps
from decentnode.simulate.engines.steps import LocalSteps, RowSteps

TIMED_NODES = 100
"""Largest number of nodes that are timed."""
TIMED_ROUNDS = 3
TIMED_SECONDS = 2.0
"""A method that has taken this long is not timed again."""
MAX_TIME_RATIO = 0.95
"""Another method is chosen instead of `stepped` only if its steps take less than this share of the time."""


@dataclass(frozen=True)
class EngineChoice:
    """The chosen engine of a run."""

    name: str
    reason: str
    batched: Batched | None = None
    """None if every node is stepped by its own code."""
    threads: int = 1
    """Number of threads for torch's operations."""


@dataclass(frozen=True)
class StepMethod:
    """A method for the local steps, and the number of threads on which each of torch's operations runs."""

    name: str
    threads: int

    def __str__(self) -> str:
        return f"{self.name} on {self.threads} threads" if self.threads > 1 else self.name


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def workers_for(experiment: Experiment) -> int:
    """Returns how many nodes may make steps by their own code at the same time: one if they draw from torch's global
    generator, if the training is compiled, or if samples are made by user code."""
    data = experiment.open_data()
    draws = random_part(make_model(experiment, data.spec)) or getattr(experiment.training, "compile", False)
    if draws or isinstance(data.of(0).train, LazySamples):
        return 1
    return min(cores(), data.num_nodes)


def choose(experiment: Experiment, resume: bool = False) -> EngineChoice:
    """Returns the engine for a run, as section `simulate` of the experiment says. Blocking for some seconds if methods
    are timed. If it chooses `batched`, it sets the number of torch's threads to that of the choice."""
    wanted = experiment.simulate.engine
    if wanted == "stepped":
        return EngineChoice("stepped", "as requested")
    reason = "--resume" if resume else unsupported_feature(experiment)
    if reason:
        return EngineChoice("stepped", f"batched cannot compute {reason}")
    try:
        method, reason_for_method = _choose_method(experiment)
        if method is None:
            return EngineChoice("stepped", reason_for_method)
        torch.set_num_threads(method.threads)
        population = Population(experiment, workers_for(experiment) if method.name == "rows" else 1)
        batched = Batched(population, WAYS[method.name](population))
    except Unsuitable as unsuitable:
        return EngineChoice("stepped", f"batched cannot compute {unsuitable}")
    mixing = f"; models are mixed row by row: {batched.rows_reason}" if batched.rows_reason else ""
    return EngineChoice("batched", f"{reason_for_method}{mixing}", batched, method.threads)


def _choose_method(experiment: Experiment) -> tuple[StepMethod | None, str]:
    """Returns (the method for the local steps, or None for the engine `stepped`; the reason). Raises Unsuitable."""
    engine, steps = experiment.simulate.engine, experiment.simulate.steps
    times: dict[StepMethod, float] = {}
    why: dict[str, str] = {}
    for name in WAYS if steps == "auto" else (steps,):
        try:
            times |= time_method(experiment, name)
        except Unsuitable as unsuitable:
            why[name] = str(unsuitable)
    if not times:
        raise Unsuitable(why[steps])
    fastest = min(times, key=lambda method: times[method])
    stepped = StepMethod("stepped", 1)
    if engine == "auto":
        times |= time_method(experiment, stepped.name)
        if times[fastest] > MAX_TIME_RATIO * times[stepped]:
            fastest = stepped
    reason_for_method = ", ".join(f"{method} {1e6 * each:.0f} us" for method, each in times.items())
    reason_for_method = f"local steps by {fastest}; per node and round {reason_for_method}"
    reason_for_method += "".join(f"; no {name}: {text}" for name, text in why.items())
    return None if fastest == stepped else fastest, reason_for_method


def time_method(experiment: Experiment, name: str) -> dict[StepMethod, float]:
    """Returns the seconds per node and round that the local steps take by a method, with one thread and, for methods
    that parallelize single operations, also with as many threads as cores. Raises Unsuitable. Blocking."""
    workers = workers_for(experiment) if name == "rows" else 1
    found: dict[StepMethod, float] = {}
    population = Population(experiment, workers, nodes=TIMED_NODES)
    try:
        with native.torch_threads(1):
            steps = WAYS["rows" if name == "stepped" else name](population)
        for count in (1, cores()) if name in ("layers", "vmap") and cores() > 1 else (1,):
            with native.torch_threads(count):
                found[StepMethod(name, count)] = _seconds(steps)
        return found
    finally:
        population.close()


def _seconds(steps: LocalSteps) -> float:
    """Returns the shortest time of a few rounds, per node, after a warm-up round."""
    durations, timing_began = [], clock.now()
    for round in range(1 + TIMED_ROUNDS):
        started = clock.now()
        with contextlib.suppress(Diverged):  # the run itself will report it
            steps.run(round)
        durations.append((clock.now() - started) / steps.population.num_nodes)
        if clock.now() - timing_began > TIMED_SECONDS:
            break
    return min(durations[1:] or durations)


def _stacked(kind: type[Forward]) -> Callable[[Population], LocalSteps]:
    return lambda population: StackedSteps(population, kind(population.model))


WAYS: dict[str, Callable[[Population], LocalSteps]] = {
    "layers": _stacked(Layers), "vmap": _stacked(Vmap), "rows": RowSteps,
}  # fmt: skip
"""By name of the method, a function that makes the `LocalSteps` of a population."""
