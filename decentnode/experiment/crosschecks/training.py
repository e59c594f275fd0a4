"""Checks that data, task, model and training fit each other."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from decentnode.checkpoint.config import BestConfig
from decentnode.config.component import load_class
from decentnode.config.problems import Problem, problem_from_error
from decentnode.data.partition import PARTITIONS
from decentnode.errors import UsageError
from decentnode.experiment.crosschecks.parts import graph_of, mapping_of, spec_of
from decentnode.experiment.initial_model import module_without_values
from decentnode.experiment.tree import Experiment
from decentnode.samples import DataSpec, ImageFiles
from decentnode.sharing.parameters import named, problems_of
from decentnode.training import TRAININGS
from decentnode.training.statistics import needs_two_samples
from decentnode.training.supervised_config import SupervisedConfig
from decentnode.wire.bounds import MAX_FIGURES, MAX_SCALAR_NAME

MAX_METRICS = (MAX_FIGURES - 128) // 3
"""Each metric has three figures: the node's own, the mean over the nodes, and that of the merged model. 128 are left
for all other figures, of which there are some fifty."""


def check_data(experiment: Experiment) -> Iterator[Problem]:
    if mapping_of(experiment) is None:
        return
    try:
        experiment.open_data().dataset()
        experiment.open_data().check()
    except UsageError as error:
        yield problem_from_error("data", error, type(experiment.data).model_fields)


def check_augmentation(experiment: Experiment) -> Iterator[Problem]:
    training, spec = experiment.training, spec_of(experiment)
    if not isinstance(training, SupervisedConfig) or training.augment is None or spec is None:
        return
    if problem := training.augment.problem_of(spec.input_shape, spec.inputs):
        yield Problem(("training", "augment"), problem, other=("data",))
    elif training.augment.random_resized_crop:
        first = experiment.open_data().dataset().train(np.zeros(1, np.int64))
        if not isinstance(first, ImageFiles):
            message = f"needs images that are read from their files, got {experiment.data.name}"
            yield Problem(("training", "augment", "random_resized_crop"), message, "use data: image_folder",
                          other=("data", "name"))  # fmt: skip


def check_partition(experiment: Experiment) -> Iterator[Problem]:
    """Checks that the partition fits the numbers of classes, samples and nodes.

    Private files of the nodes must all exist if the run has one machine; with several machines, each machine checks
    those of its own nodes later, when it knows which machine it is.
    """
    graph, spec, mapping = graph_of(experiment), spec_of(experiment), mapping_of(experiment)
    if graph is None or spec is None or mapping is None:
        return
    partition = getattr(experiment.data, "partition", None)
    classes = getattr(partition, "classes", None)
    known = spec.num_classes
    if isinstance(classes, int) and known is not None and classes > known:
        message = f"must be at most {known}, the classes of {experiment.data.name}, got {classes}"
        yield Problem(("data", "partition", "classes"), message, other=("data", "name"))
        return
    data = experiment.open_data()
    if data.private and mapping.num_machines == 1:
        yield from (Problem(("data",), f": {text}") for text in data.private_problems(range(mapping.num_nodes)))
        return
    try:
        data.shares()
    except UsageError as error:
        yield dataclasses.replace(problem_from_error("data.partition", error), other=("graph",))


def check_remaining_samples(experiment: Experiment) -> Iterator[Problem]:
    """Checks that every node has samples left to train and to test on after validation and drop_last."""
    training = experiment.training
    if not isinstance(training, SupervisedConfig) or not (training.validation or training.drop_last):
        return
    if graph_of(experiment) is None or spec_of(experiment) is None:
        return
    opened, servers, partition = experiment.open_data(), experiment.servers(), ("data", "partition")
    source = training.validation.source if training.validation is not None else None
    try:
        parts = opened.shares()
        tests = {uid: opened.num_test(uid) for uid in parts} if source == "test" else {}
    except UsageError:  # reported by check_partition
        return
    sizes = {uid: len(part) for uid, part in parts.items() if uid not in servers}
    for uid, size in (tests or sizes).items():
        if problem := training.problem_of_validation(size):
            yield Problem(("training", "validation", "fraction"), f"of node {uid} {problem}", other=partition)
            return
    for uid, size in sizes.items():
        left = size - (training.validation.aside(size) if training.validation and source == "train" else 0)
        if problem := training.problem_of_steps(left):
            yield Problem(("training", "drop_last"), f": node {uid} has {problem}", other=partition)
            return


def check_task(experiment: Experiment) -> Iterator[Problem]:
    """Checks that the task suits the data, and the loss the task."""
    if spec_of(experiment) is None:
        return
    try:
        task = experiment.make_task()
    except UsageError as error:
        yield Problem(("task",), f": {error}", other=("data",))
        return
    if isinstance(experiment.training, SupervisedConfig):
        try:
            experiment.training.loss_for(task.loss)
        except UsageError as error:
            yield dataclasses.replace(problem_from_error("training", error), other=("task",))


def check_parameter_patterns(experiment: Experiment) -> Iterator[Problem]:
    """Checks that every pattern of `parameters` matches a parameter, and that every shared parameter has a fragment."""
    spec, graph = spec_of(experiment), graph_of(experiment)
    if experiment.parameters is None or spec is None or graph is None:
        return
    try:
        module = module_without_values(experiment, spec)
    except UsageError:  # reported by check_model
        return
    for path, message, hint in problems_of(experiment.parameters, named(module), graph.num_nodes):
        yield Problem(("parameters", *path), message, hint, other=("model",))


def check_batch_sizes(experiment: Experiment) -> Iterator[Problem]:
    """Checks that no node trains on single samples if batch normalization in the model needs at least two."""
    training, graph, spec = experiment.training, graph_of(experiment), spec_of(experiment)
    if not isinstance(training, SupervisedConfig) or graph is None or spec is None:
        return
    if not _needs_two_samples(experiment, spec):
        return
    try:
        parts = experiment.open_data().shares()
    except UsageError:
        return
    aside = training.validation if training.validation and training.validation.source == "train" else None
    sizes = {uid: len(part) - (aside.aside(len(part)) if aside else 0) for uid, part in parts.items() if len(part)}
    uid = min(sizes, key=sizes.__getitem__)
    if problem := training.problem_of_single_sample(sizes[uid]):
        of_key = problem.startswith("training.batch_size ")
        yield Problem(("training", "batch_size") if of_key else ("data", "partition"),
                      problem.removeprefix("training.batch_size ") if of_key else f": node {uid}: {problem}",
                      other=("model",))  # fmt: skip


def _needs_two_samples(experiment: Experiment, spec: DataSpec) -> bool:
    """Returns whether a model needs two samples, tried on the meta device; False if it cannot run there."""
    with contextlib.suppress(Exception), torch.device("meta"):
        kind = torch.float32 if spec.inputs == "values" else torch.int64
        return needs_two_samples(module_without_values(experiment, spec), torch.empty(1, *spec.input_shape, dtype=kind))
    return False


def check_own_test_samples(experiment: Experiment) -> Iterator[Problem]:
    """Checks that training samples are not dealt again (resample) if nodes have test samples of their own: these match
    the training samples of the first epoch only."""
    training, spec = experiment.training, spec_of(experiment)
    if not isinstance(training, SupervisedConfig) or training.sampling != "resample" or spec is None:
        return
    data = experiment.open_data()
    if data.test != "global" and data.deals:
        message = (f"must be fixed with data.test: {data.test}, got resample: the test samples are distributed as the "
                   "shares of the first epoch, but later shares differ")  # fmt: skip
        yield Problem(("training", "sampling"), message, "use data.test: global", other=("data", "test"))


def check_learning_rate_schedule(experiment: Experiment) -> Iterator[Problem]:
    """Checks that a learning-rate schedule of fixed length (one_cycle) covers every round, or step, of the run."""
    training = experiment.training
    if not isinstance(training, SupervisedConfig) or (most := training.lr_schedule.most_ticks()) is None:
        return
    every, two, sizes = training.lr_schedule.every, False, dict[int, int]()
    if every == "step" and graph_of(experiment) is None:
        return
    if every == "step" and training.local_epochs is not None:
        try:
            sizes = {uid: len(part) for uid, part in experiment.open_data().shares().items()}
        except UsageError:
            return
        spec = spec_of(experiment)
        two = spec is not None and _needs_two_samples(experiment, spec)
    most_samples = max(sizes.values(), default=0)  # a newcomer may have those of any node
    rounds_of_nodes = experiment.trained_rounds() if every == "step" else [experiment.node.rounds]
    ticks = max(training.most_ticks(rounds, sizes.get(uid, most_samples), needs_two_samples=two)
                for uid, rounds in enumerate(rounds_of_nodes))  # fmt: skip
    if ticks > most:
        length = training.lr_schedule.arguments()
        key = ("total_steps",) if "total_steps" in length else ("epochs",) if "epochs" in length else ()
        warmup = f", {training.lr_schedule.warmup} of them warm-up," if training.lr_schedule.warmup else ""
        message = f": {training.lr_schedule.name} ends after {most} {every}s{warmup} but the run has {ticks}"
        hint = f"use total_steps: {ticks - training.lr_schedule.warmup}"
        yield Problem(("training", "lr_schedule", *key), message, hint, other=("node", "rounds"))


def check_orphans(experiment: Experiment) -> Iterator[Problem]:
    """Checks that nodes can adopt orphaned samples: every node can read every sample, and no sample is in the shares of
    two nodes or in the validation set of one."""
    training, data = experiment.training, experiment.data
    if experiment.node.orphans != "adopted" or mapping_of(experiment) is None:
        return

    def problem(message: str, *other: str, hint: str = "") -> Problem:
        return Problem(("node", "orphans"), f"must be lost {message}, got adopted", hint, other=other)

    chosen: Any = data
    partition: Any = load_class(chosen.partition.name, PARTITIONS, "partition")
    if experiment.open_data().private:
        yield problem("if each node reads files of its own: the others cannot read those of an absent node", "data")
    elif partition.needs_machines:
        yield problem(f"with partition {chosen.partition.name}: nodes of several machines have the same samples",
                      "data", "partition")  # fmt: skip
    made: Any = load_class(training.name, TRAININGS, "training")
    if not made.deals():
        yield problem(f"with training {training.name}, which cannot take over samples of other nodes", "training")
    if not isinstance(training, SupervisedConfig):
        return
    if training.sampling == "resample":
        yield problem("with sampling: resample, which redistributes all samples in every epoch", "training", "sampling")
    if training.validation is not None and training.validation.source == "train":
        yield problem("with a validation set of each node's own samples, on which others would train", "training",
                      "validation", hint="use training.validation.source: test")  # fmt: skip
    schedule = training.lr_schedule
    if schedule.every == "step" and training.local_epochs is not None and schedule.most_ticks() is not None:
        yield problem(f"with {schedule.name} over the steps of local_epochs, which grow in number with the share",
                      "training", "lr_schedule", hint="use local_steps")  # fmt: skip


def check_number_of_metrics(experiment: Experiment) -> Iterator[Problem]:
    """Checks that a node's final figures fit into one message, which it sends only at the end of the run."""
    if spec_of(experiment) is None:
        return
    try:
        metrics = experiment.measured().metrics
    except UsageError:
        return
    long = max((each.name for each in metrics), key=len)
    if len(metrics) > MAX_METRICS:
        message = f"must have at most {MAX_METRICS} metrics, with those of moving averages, training and own samples"
        yield Problem(("task",), f"{message}, got {len(metrics)}", other=("training",))
    if len(f"{long}_merged") > MAX_SCALAR_NAME:
        message = f"must have metrics with names of at most {MAX_SCALAR_NAME - len('_merged')} characters, got {long}"
        yield Problem(("task",), message, other=("training",))


def check_best_metric(experiment: Experiment) -> Iterator[Problem]:
    """Checks that the task measures the figures that choose the best checkpoint and that stop the run early."""
    checkpoint = experiment.node.checkpoint
    chosen: dict[tuple[str, ...], BestConfig | None] = {
        ("checkpoint", "best"): checkpoint.best if checkpoint is not None else None,
        ("early_stop",): experiment.node.early_stop,
    }
    named = {key: best for key, best in chosen.items() if best is not None and best.metric}
    if not named or spec_of(experiment) is None:
        return
    try:
        known = [each.name for each in experiment.measured().metrics]
    except UsageError:
        return
    for key, best in named.items():
        if best.metric not in known:
            figures = ", ".join(f"{name}_{of}" for name in known for of in ("mean", "merged"))
            message = f"must be one of {figures}, consensus_distance, consensus_rms, got {best.figure!r}"
            yield Problem(("node", *key), message, other=("task",))
