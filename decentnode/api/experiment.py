"""`Experiment`, which a program makes from a file, plain data or objects, and `run`."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml

from decentnode import clock
from decentnode.api import progress as display
from decentnode.api import run_errors
from decentnode.api.results import Run
from decentnode.api.sections import Sections
from decentnode.cli.start import config_of, default_config, environ
from decentnode.errors import DecentnodeError, UsageError
from decentnode.launch.children import forkserver
from decentnode.launch.children.messages import Request
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.reporting.outcome import Outcome
from decentnode.launch.supervisor import supervise

if TYPE_CHECKING:  # modules that import torch are imported only when needed, which is never if nodes have own processes
    from decentnode.experiment import Experiment as Tree

    Config: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Tree | None


class Experiment:
    """An experiment as a YAML file describes it, made from such a file, from plain data, or from objects.

    Experiments are immutable; sections that are passed to `run` are merged over the experiment's for that run only.
    """

    def __init__(self, config: Config = None, **sections: Any) -> None:
        """Makes the experiment as `from_config` does."""
        converter = Sections()
        self._layers: list[dict[str, Any]] = []
        self._config, self._environ = "", environ()
        if isinstance(config, Mapping):
            self._layers.append(converter.plain(config))
        elif config is not None and not isinstance(config, str | os.PathLike):
            self._layers.append(yaml.safe_load(config.resolved_yaml()))
        else:
            given: str = default_config() if config is None else os.fspath(config)
            self._config, self._environ = config_of(given, self._environ)
        if sections:
            self._layers.append(converter.plain(sections))
        self._objects = converter.objects

    @classmethod
    def from_config(
        cls, config: Config = None, **sections: Any
    ) -> Experiment:
        """Returns the experiment of a YAML file, of a run (given by its folder), of a dict with the same sections, or
        of an experiment that `decentnode.experiment.load` returned; without `config`, the quickstart.

        sections: merged over it key by key; a section with another `name` is replaced as a whole. A class may be given
        instead of a name (`sharing=MyRule`, `sharing={"name": MyRule, "keep": 0.2}`,
        `functools.partial(MyRule, keep=0.2)`), and as `model` a module or a function that makes one. Paths in sections
        are relative to the current directory. Raises UsageError for values that are neither plain data nor components;
        everything else is checked by `check` and `run`.
        """
        return cls(config, **sections)

    @classmethod
    def from_yaml(cls, text: str, **sections: Any) -> Experiment:
        """Returns the experiment of a YAML text; otherwise like `from_config`. Raises ConfigError for invalid YAML."""
        from decentnode.config.yaml_source import parse

        found = parse(text, "YAML").plain()
        if not isinstance(found, dict):
            raise UsageError(f"the YAML must hold keys and values, got {type(found).__name__}")
        return cls(found, **sections)

    @classmethod
    def from_objects(
        cls, model: Any, train: Any, test: Any = None, *, graph: Any = "ring", nodes: int | None = None,
        partition: Any = None, optimizer: Any = "sgd", loss: Any = None, batch_size: int = 16,
        local_steps: int | None = None, rounds: int | None = None, **sections: Any,
    ) -> Experiment:
        """Returns an experiment made of Python objects.

        model: a module, of which every node gets a copy; a class or a function that makes one; or a section.
        train, test: map-style Datasets, (inputs, targets) as arrays or tensors, or iterables of batches; without `test`
        a tenth of `train` is held out for testing. A Dataset class, or a section, as `train` provides both.
        graph: a networkx graph, a graph of decentnode, or a name, a class or a section, which take `nodes`.
        partition: how the training samples are divided among the nodes, such as {"name": "dirichlet", "alpha": 0.5};
        default: equally.
        optimizer: a class of torch.optim, `functools.partial` of one, a function of parameters, or a section.
        loss: a module or a function of outputs and targets that returns the mean loss; default: the task's loss.
        sections: as in `from_config`. Raises UsageError, DataError.
        """
        converter, plain = Sections(), dict[str, Any]()
        if isinstance(graph, str | type):
            graph = {"name": graph}
        if isinstance(graph, Mapping) and nodes is not None:
            graph = {"nodes": nodes, **graph}
        described = isinstance(train, type | str | Mapping | functools.partial)
        if described and test is not None:
            raise UsageError("test must not be given if data is a section or a class, which provides both")
        plain["data"] = converter.plain({"data": train})["data"] if described else converter.keep("data", train, test)
        if isinstance(plain["data"], str):
            plain["data"] = {"name": plain["data"]}
        training = {"optimizer": optimizer, "loss": loss, "batch_size": batch_size, "local_steps": local_steps}
        training = {key: value for key, value in training.items() if value is not None}
        plain |= converter.plain({"model": model, "graph": graph, "training": training})
        if partition is not None:
            plain["data"]["partition"] = converter.plain({"data": {"partition": partition}})["data"]["partition"]
        if rounds is not None:
            plain["node"] = {"rounds": rounds}
        experiment = cls(plain)
        experiment._objects = converter.objects
        return experiment._merged_with(sections) if sections else experiment

    def _merged_with(self, sections: Mapping[str, Any], *layers: dict[str, Any]) -> Experiment:
        """Returns a copy of this experiment with `sections`, then `layers`, merged over it."""
        converter, copy = Sections(self._objects), object.__new__(Experiment)
        plain = converter.plain(sections)
        copy._config, copy._environ = self._config, self._environ
        copy._layers = [*self._layers, *([plain] if plain else []), *(layer for layer in layers if layer)]
        copy._objects = converter.objects
        return copy

    # -- checking and inspecting ------------------------------------------------------------------------------

    @functools.cached_property
    def _tree(self) -> Tree:
        from decentnode.launch.loading import load_request

        with _bound(self._objects):
            return load_request(self._request())

    def check(self) -> Experiment:
        """Checks everything that can be checked without running, and returns this experiment. Raises ConfigError with
        all problems found."""
        _ = self._tree
        return self

    @property
    def config(self) -> dict[str, Any]:
        """All values of the experiment, including defaults, as plain data. Raises as `check` does."""
        return self._tree.resolved()

    def __repr__(self) -> str:
        given = f" of {', '.join(sorted(self._objects))} given as objects" if self._objects else ""
        name = next((layer["name"] for layer in reversed(self._layers) if "name" in layer), None)
        where = f" from {self._config}" if self._config else ""
        return f"<Experiment{f' {name}' if name else ''}{where}{given}>"

    # -- running ----------------------------------------------------------------------------------------------

    def _request(self, **more: Any) -> Request:
        return Request(self._config, [], self._environ, layers=self._layers, **more)

    def run(
        self, *, rounds: int | None = None, seed: int | None = None, name: str | None = None,
        run_dir: str | os.PathLike[str] | None = None, resume: bool | str | os.PathLike[str] | Run | None = None,
        processes: bool | None = None, machine: int | str | None = None, progress: bool | Observer = True,
        **sections: Any,
    ) -> Run:
        """Runs the experiment to its end and returns its results. Blocking.

        rounds: short for `node={"rounds": ...}`. run_dir: folder of all runs. sections: as in `from_config`. resume:
        continue from the checkpoints of this run; True: of the latest run of this name.
        processes: True: each node runs in its own process. False: all nodes are stepped in this process, with the same
        results, for debuggers. Default: experiments made of objects run in this process, all others in processes. The
        processes of an experiment made of objects are forked from this one; changes that they make to the objects are
        not visible here.
        machine: the number of this machine, or "auto", if the mapping has several.
        progress: whether to show progress, as a bar in a notebook and as the command line does elsewhere; or an
        Observer, which receives the events of the run.

        Ctrl-C lets the nodes finish their round and write their results, then raises RunInterrupted; a second Ctrl-C
        kills them. Raises the errors of decentnode.errors with the texts of the command line; a run that failed is in
        `error.run`.
        """
        chosen = self._with_options(sections, rounds=rounds, seed=seed, name=name, run_dir=run_dir)
        source = resume.path if isinstance(resume, Run) else resume
        resume_from = None if source is None or source is False else "" if source is True else os.fspath(source)
        with display.progress_observer(progress) as observer, _bound(chosen._objects):
            outcome = chosen._outcome(resume_from, processes, machine, observer)
            observer.ended(outcome)
        return chosen._result_of(outcome)

    def _with_options(
        self, sections: Mapping[str, Any], *, rounds: int | None = None, seed: int | None = None,
        name: str | None = None, run_dir: str | os.PathLike[str] | None = None,
    ) -> Experiment:
        """Returns this experiment with sections, and the values for which `run` has own parameters, merged over it."""
        short: dict[str, Any] = {"seed": seed, "name": name, "run": run_dir and {"dir": os.path.abspath(run_dir)},
                                 "node": None if rounds is None else {"rounds": rounds}}  # fmt: skip
        return self._merged_with(sections, {key: value for key, value in short.items() if value is not None})

    def _sweep_request(self, sections: Mapping[str, Any], **short: Any) -> Request:
        """Returns the request that all points of a sweep share. Raises UsageError for an experiment made of objects."""
        chosen = self._with_options(sections, **short)
        if chosen._objects:
            raise UsageError(f"{_subject(chosen._objects)} other processes cannot access, so no sweep can run the "
                             "experiment: put the class into a module and name it package.module:Class")  # fmt: skip
        return chosen._request(folder=os.getcwd(), variables=forkserver.changed_variables())

    def _outcome(
        self, resume: str | None, processes: bool | None, machine: int | str | None, observer: Observer
    ) -> Outcome:
        started, command = clock.now(), " ".join(["python", *sys.argv])
        has_objects = bool(self._objects)
        if has_objects and machine is not None:
            raise UsageError(f"{_subject(self._objects)} cannot be sent to another machine: put the class into a "
                             "module and name it package.module:Class")  # fmt: skip
        if processes is None:
            processes = not has_objects
        request = self._request(resume=resume, machine=machine)
        if not processes:
            from decentnode.launch.calling_process import run_in_calling_process

            self._check_one_machine()
            return run_in_calling_process(request, observer, command=command, started=started)
        if multiprocessing.current_process().daemon:
            raise UsageError("a daemonic process, such as one of multiprocessing.Pool, cannot start processes; "
                             "processes=False runs all nodes in this one")  # fmt: skip
        try:
            if has_objects:
                return supervise(self._fork_request(request), observer, command=command, started=started,
                                 context=multiprocessing.get_context("fork"))  # fmt: skip
            forkserver.start(request)
            request = self._request(resume=resume, machine=machine, folder=os.getcwd(),
                                    variables=forkserver.changed_variables())  # fmt: skip
            return supervise(request, observer, command=command, started=started)
        except DecentnodeError as error:
            raise run_errors.loading_error(error) from None

    def _check_one_machine(self) -> None:
        """Raises UsageError if objects would have to be sent to another machine."""
        if not self._objects:
            return
        from decentnode.launch.loading import load_request

        try:
            machines = load_request(self._request(), check=False).make_mapping().num_machines
        except UsageError:  # it is raised again, with all other problems, when the experiment is loaded for the run
            return
        if machines > 1:
            raise UsageError(f"{_subject(self._objects)} cannot be sent to another machine, and mapping.machines is "
                             f"{machines}: put the class into a module and name it package.module:Class")  # fmt: skip

    def _fork_request(self, request: Request) -> Request:
        """Returns a request for forks of this process. Raises UsageError if it cannot be forked."""
        import torch

        self._check_one_machine()
        if "fork" not in multiprocessing.get_all_start_methods():
            raise UsageError(f"{_subject(self._objects)} can be passed to processes only on systems that fork them; "
                             "processes=False runs all nodes in this one")  # fmt: skip
        reason = "uses CUDA" if torch.cuda.is_initialized() else "has computed gradients" if _autograd_threads() else ""
        if reason:
            raise UsageError(f"{_subject(self._objects)} cannot be passed to processes, because this process {reason}, "
                             "after which its forks cannot; processes=False runs all nodes in this "
                             "one")  # fmt: skip
        return self._request(resume=request.resume, forked=True)

    def _result_of(self, outcome: Outcome) -> Run:
        run = None if outcome.run_dir is None else Run(outcome.run_dir, outcome.summary, self._objects)
        if outcome.exit_code > 128:
            raise run_errors.interrupted(outcome, run) from None
        if outcome.exit_code:
            raise run_errors.failure(outcome, run) from outcome.error
        assert run is not None
        return run


def _bound(given: Mapping[str, type[Any]]) -> contextlib.AbstractContextManager[None]:
    if not given:
        return contextlib.nullcontext()
    from decentnode import objects

    return objects.bound(given)


def _autograd_threads() -> bool:
    """Returns whether torch has started its threads that compute gradients on devices, which a fork lacks. If there is
    a GPU, torch starts them for the first gradient, even for one on the CPU (`Experiment.check` computes one)."""
    names = []
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            names.append((task / "comm").read_text())
    return any(name.startswith("pt_autograd") for name in names)


def _subject(given: Mapping[str, Any]) -> str:
    return f"{', '.join(sorted(given))} {'is an object' if len(given) == 1 else 'are objects'} of this process, which"


def run(config: Config | Experiment = None, **options: Any) -> Run:
    """Runs an experiment to its end and returns its results: `Experiment.from_config(config).run(...)`.

    options: sections that are merged over it (`sharing={"name": "choco"}`), `rounds`, and everything else that
    `Experiment.run` takes. Blocking. Raises as `Experiment.run` does.
    """
    experiment = config if isinstance(config, Experiment) else Experiment.from_config(config)
    return experiment.run(**options)
