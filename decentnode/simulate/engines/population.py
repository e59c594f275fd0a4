"""The nodes of a run without their loops: a row of parameters for each, their training, and a few modules for
computing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from decentnode import native
from decentnode.build import SharedModel, device_of, make_model_on_device, shared_model
from decentnode.config.component import load_class
from decentnode.experiment import Experiment
from decentnode.simulate.engines.forward import random_part
from decentnode.simulate.engines.jobs import JOBS
from decentnode.simulate.engines.row_processes import RowProcesses, can_fork, merge_parts, shared_like
from decentnode.training import TRAININGS
from decentnode.training.base import Training

T = TypeVar("T")

ALIGNED_BYTES = 64
"""Alignment of rows: the last bits of a matrix product depend on the alignment of its operands."""


class Population:
    """The models of all nodes as rows of one tensor, and the workers that compute on them.

    Node i trains on the module of worker i % W, whose parameters are views of its row while the node is bound. There
    are as many modules as workers, and not one per node, because forward passes need memory of their own. Workers are
    forks of this process if that is possible (`can_fork`) and no rule uses gradients, because the rules' state is in
    this process; otherwise they are threads.
    """

    def __init__(self, experiment: Experiment, workers: int = 1, nodes: int | None = None) -> None:
        """nodes: number of nodes to make, the first ones, for timing; None: all. Raises what the parts of nodes
        raise."""
        self.experiment = experiment
        self._pool: ThreadPoolExecutor | None = None
        self._processes: RowProcesses | None = None
        self.graph = experiment.make_graph()
        self.num_nodes = min(self.graph.num_nodes, nodes or self.graph.num_nodes)
        workers = min(workers, self.num_nodes)
        self.task = experiment.make_task()
        place, data = experiment.make_mapping().place(0), experiment.open_data()
        self.device = device_of(place.device, place.rank)
        self.shared: list[SharedModel] = [
            shared_model(experiment, make_model_on_device(experiment, data.spec, self.device)) for _ in range(workers)
        ]
        chosen: Any = load_class(experiment.training.name, TRAININGS, "training")
        self.trainings: list[Training] = [
            chosen(experiment.training, self.shared[uid % workers].model, self.task, data.of(uid),
                   seed=experiment.seed, uid=uid)
            for uid in range(self.num_nodes)
        ]  # fmt: skip
        model = self.model
        if not random_part(model.module):
            for each in self.trainings:
                each.draws = False
        self.num_parameters = model.num_parameters
        unit = ALIGNED_BYTES // model.parameters.element_size()
        width = -(-self.num_parameters // unit) * unit
        self.rows = torch.zeros(self.num_nodes, width, dtype=model.dtype, device=self.device)
        """[N, P rounded up]: the model of every node, padded with zeros."""
        self.rows[:, : self.num_parameters] = model.parameters
        self._unbound_places = [
            tuple(shared.model.parameters.detach().clone() for _ in range(2)) for shared in self.shared
        ]
        """Where the modules' parameters are while no node is bound: two places each, because a flat model remembers its
        last two."""
        self.buffers = model.buffers.expand(self.num_nodes, -1).clone()
        """[N, B] the float buffers of every node."""
        self._counts = [b for b in model.module.buffers() if not b.dtype.is_floating_point]
        self.counts = [b.expand(self.num_nodes, *b.shape).clone() for b in self._counts]
        """[N, ...] each: integer buffers of every node, such as the number of batches that its normalization has
        seen."""
        self.forks = workers > 1 and can_fork(self.device) and not any(
            rule.requirements.gradient for rule in self.shared[0].make_rules()
        )
        """Whether nodes are computed by several processes, so that the trainings of this process are not up to date."""
        elements = self.num_parameters + model.buffers.numel()
        self._merged_model = torch.empty(elements, dtype=model.dtype, device=self.device)
        self._shared_memory: tuple[Tensor, ...] = ()
        """The shared memory of the rows, buffers, counts and `_merged_model`, which forks see."""

    @property
    def model(self) -> Any:
        """The flat model of the first worker."""
        return self.shared[0].model

    @property
    def parameters(self) -> Tensor:
        """[N, P] the models, as a view."""
        return self.rows[:, : self.num_parameters]

    def take(self, rows: Tensor) -> None:
        """Makes `rows` [N, P rounded up] the models of all nodes. No module may be bound."""
        self.rows = rows

    def views(self, rows: Tensor) -> list[Tensor]:
        """Returns the parameters [n, *shape] of some nodes, as views. rows: [n, P rounded up]."""
        found, at = [], 0
        for p in self.model.trainable:
            found.append(rows[:, at : at + p.numel()].unflatten(1, p.shape) if p.ndim else rows[:, at])
            at += p.numel()
        return found

    def release(self) -> None:
        """Unbinds all modules from the present rows, so that these can be replaced and their memory is freed."""
        for shared, (one, other) in zip(self.shared, self._unbound_places, strict=True):
            shared.model.rebind(one)
            shared.model.rebind(other)

    def run_job(self, job: str, argument: Any = None, merged: Tensor | None = None) -> list[Any]:
        """Returns the results of a job (`JOBS`) for every node, by uid, executed by all workers. Blocking. Raises as
        `run_each` does, and NodeFailed if a process ended. merged: a model [P + B], for jobs that take one."""
        if merged is not None:
            self._merged_model.copy_(merged)
        if not self.forks:
            return self.run_each(lambda uid, training: JOBS[job](uid, training, self._merged_model, argument))
        self._move_to_shared_memory()
        if self._processes is None:
            self._processes = RowProcesses(len(self.shared), self._part_of_job)
        with native.torch_threads(1):  # every worker has a core
            found = merge_parts(self._processes.run(job, argument), self.num_nodes)
        self.release()
        return found

    def _move_to_shared_memory(self) -> None:
        """Moves what forks read or change into shared memory. The rows are copied there because rules return new
        tensors, which they may keep and which must then not be changed: the copy is 2 % of a round of GN-LeNet."""
        if not self._shared_memory:
            own = self.rows, self.buffers, self._merged_model, *self.counts
            self._shared_memory = tuple(map(shared_like, own))
        else:
            self._shared_memory[0].copy_(self.rows)
            self._shared_memory[1].copy_(self.buffers)
        self.rows, self.buffers, self._merged_model, *self.counts = self._shared_memory

    def _part_of_job(self, worker: int, job: str, argument: Any) -> list[Any]:
        return self._part(worker, lambda uid, training: JOBS[job](uid, training, self._merged_model, argument))

    def _part(self, worker: int, work: Callable[[int, Training], T]) -> list[T]:
        """Returns the results of `work` for the nodes of one worker, computed one after the other."""
        found = []
        for uid in range(worker, self.num_nodes, len(self.shared)):
            with self.bound(uid) as training:
                try:
                    found.append(work(uid, training))
                except Exception as error:
                    error.__dict__.setdefault("uid", uid)
                    raise
        return found

    def run_each(self, work: Callable[[int, Training], T]) -> list[T]:
        """Calls `work` with every node's uid and training while the node is bound, on as many threads as there are
        workers. Returns its results by uid. An exception gets the node's uid as an attribute."""
        workers = len(self.shared)
        if workers == 1:
            parts = [self._part(0, work)]
        else:
            self._pool = self._pool or ThreadPoolExecutor(workers, "simulate")
            with native.torch_threads(1):  # every worker has a core
                parts = [done.result() for done in
                         [self._pool.submit(self._part, worker, work) for worker in range(workers)]]  # fmt: skip
        self.release()
        return merge_parts(parts, self.num_nodes)

    def close(self) -> None:
        """Ends the threads and processes. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown()
        if self._processes is not None:
            self._processes.close()

    @contextlib.contextmanager
    def holding(self, merged: Tensor) -> Iterator[None]:
        """In this block the modules of all workers hold one model [P + B]: parameters, then float buffers."""
        self.release()
        for shared in self.shared:
            shared.model.parameters.copy_(merged[: self.num_parameters])
            shared.model.buffers.copy_(merged[self.num_parameters :])
        yield

    @contextlib.contextmanager
    def bound(self, uid: int) -> Iterator[Training]:
        """In this block the module of the node's worker holds the node's model, and changes of it change the row. One
        node per worker at a time."""
        training = self.trainings[uid]
        model = training.model
        model.rebind(self.rows[uid, : self.num_parameters])
        counts = [b for b in model.module.buffers() if not b.dtype.is_floating_point] if self.counts else []
        if model.buffers.numel():
            model.buffers.copy_(self.buffers[uid])
        for own, kept in zip(counts, self.counts, strict=True):
            own.copy_(kept[uid])
        try:
            yield training
        finally:
            if model.buffers.numel():
                self.buffers[uid].copy_(model.buffers)
            for own, kept in zip(counts, self.counts, strict=True):
                kept[uid].copy_(own)
