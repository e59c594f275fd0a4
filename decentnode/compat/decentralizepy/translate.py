"""Translates a config file of decentralizepy, with its command line, into an experiment.

Every key is translated, left out with a note if nothing here needs it, or reported: a key that decentralizepy does not
know (its classes would raise TypeError for it), or one that has no equivalent here. A method translates each part of
the experiment.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decentnode.compat.decentralizepy.config_file import ConfigFile
from decentnode.compat.decentralizepy.keys import (
    CODECS,
    DATASETS,
    KEYS,
    LOSSES,
    OF_EVERY_DATASET,
    OF_EVERY_SHARING,
    SHARINGS,
    TOKENIZERS,
    USUAL_LOSS,
)
from decentnode.errors import ConfigError

Section = dict[str, Any]


@dataclass(frozen=True)
class CommandLine:
    """decentralizepy's command line flags, with its defaults."""

    graph_file: Path | None = None
    graph_type: str = "edges"
    machines: int = 1
    procs_per_machine: tuple[int, ...] = (16,)
    addresses: Path | None = None
    """Replaces the file's addresses_filepath, which is relative to the folder that the command was run in."""
    iterations: int = 1
    test_after: int = 5
    reset_optimizer: bool = True
    train_evaluate_after: int | None = None
    log_level: str = "INFO"


@dataclass
class Translation:
    """An experiment as plain data, and notes for the user."""

    experiment: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def translate(path: Path, command: CommandLine, out_dir: Path) -> Translation:
    """Returns the experiment of a config file. out_dir: the folder that its paths are relative to.

    Raises ConfigError with every key that is unknown, misspelled or cannot be translated.
    """
    file, found = ConfigFile(path), Translation()
    _Translator(file, command, found, out_dir).translate()
    if file.problems:
        raise ConfigError([f"{path}: {each}" for each in file.problems], str(path))
    return found


class _Translator:
    def __init__(self, file: ConfigFile, command: CommandLine, found: Translation, out_dir: Path) -> None:
        self.file, self.command, self.found, self.out_dir = file, command, found, out_dir

    def translate(self) -> None:
        self.found.experiment["name"] = self.file.path.stem
        steps: tuple[Callable[[], None], ...] = (
            self._graph, self._mapping, self._dataset, self._training, self._sharing, self._rounds)
        for step in steps:
            step()

    def _relative_path(self, text: str, base: Path) -> str:
        """Returns a path of the file, relative to the folder of the experiment."""
        path = Path(text)
        return str(path) if path.is_absolute() else os.path.relpath(base / path, self.out_dir)

    def _note(self, text: str) -> None:
        self.found.notes.append(text)

    # -- the parts -------------------------------------------------------------------------------------------------

    @property
    def _nodes(self) -> int:
        procs = self.command.procs_per_machine
        return sum(procs) if len(procs) > 1 else procs[0] * self.command.machines

    def _graph(self) -> None:
        node = self.file.section("NODE")
        degree = self.file.value("NODE", "graph_degree", None, int)
        if "timeout" in node:
            self.found.experiment["graph"] = {"name": "el_local", "nodes": self._nodes, "degree": degree or 2}
            self._note("[NODE] timeout: EL_Local_Timeout is graph el_local with schedule: epidemic; nodes wait this "
                       "long, then average what has arrived")  # fmt: skip
            return
        if self.command.graph_file is not None:
            if self.command.graph_type == "adjacency" and self.command.graph_file.suffix != ".adj":
                self.file.problem(f"{self.command.graph_file}: a file of adjacency lists must be named .adj here")
            graph: Section = {"file": self._relative_path(str(self.command.graph_file), Path.cwd())}
            if degree is not None:
                self._note(f"graph_degree {degree} is left out for the graph file; graph: {{name: random_regular, "
                           f"nodes: {self._nodes}, degree: {degree}}} would draw a graph in every round")  # fmt: skip
        elif degree is not None:
            graph = {"name": "random_regular", "nodes": self._nodes, "degree": degree}
            self._note("a new graph in every round, as EL_Oracle and PeerSamplerDynamic draw it, without a "
                       "coordinator; for EL_Local the name is el_local")  # fmt: skip
        else:
            graph = {"name": "ring", "nodes": self._nodes}
            self._note("no graph file was given: a ring")
        self.found.experiment["graph"] = graph

    def _mapping(self) -> None:
        self.file.section("COMMUNICATION")
        self.file.one_of("COMMUNICATION", "comm_class", ("TCP", "TCP_ACK"))
        machines, procs = self.command.machines, self.command.procs_per_machine
        offset = self.file.value("COMMUNICATION", "offset", 9000, int)
        addresses = self._addresses()
        if len(procs) > 1:
            if len(procs) != machines:
                self.file.problem(f"--procs-per-machine must have one number, or {machines} of them, got {len(procs)}")
            rows: list[Section] = [{"nodes": count} for count in procs]
            if machines > 1:
                hosts = self._hosts(addresses)
                for number, row in enumerate(rows):
                    row |= {"host": hosts.get(str(number), ""), "base_port": offset}
            self.found.experiment["mapping"] = {"name": "table", "machines": rows}
            return
        mapping: Section = {"name": "linear", "machines": machines, "nodes_per_machine": procs[0]}
        if machines > 1:
            mapping |= {"addresses": self._relative_path(str(addresses), Path.cwd()), "base_port": offset}
        self.found.experiment["mapping"] = mapping

    def _addresses(self) -> Path:
        if self.command.addresses is not None:
            return self.command.addresses
        return self.file.path.parent / self.file.value("COMMUNICATION", "addresses_filepath", "ip.json", str)

    def _hosts(self, addresses: Path) -> dict[str, str]:
        try:
            found = json.loads(addresses.read_text(encoding="utf-8"))
            return {str(key): str(value) for key, value in found.items()}
        except (OSError, ValueError, AttributeError) as error:
            self.file.problem(f"{addresses}: cannot be read as a file of addresses: {error}")
            return {}

    def _dataset(self) -> None:
        chosen = DATASETS.get(self.file.one_of("DATASET", "dataset_class", DATASETS))
        if chosen is None:
            return
        self.file.section("DATASET", (*OF_EVERY_DATASET, *chosen.keys))
        self.found.experiment["seed"] = self.file.value("DATASET", "random_seed", 97, int)
        train, test = (self.file.value("DATASET", key, "", str) for key in ("train_dir", "test_dir"))
        if not train or not test:
            self.file.problem("[DATASET] train_dir and test_dir: must both be given")
        data: Section = {"name": chosen.name, **self._folders(chosen.name, train, test or train)}
        data["partition"] = self._partition(chosen.name)
        if self.file.value("DATASET", "only_local", False, bool):
            data["partition"] = {"name": "only_local", "within": data["partition"]}
        self.found.experiment["data"] = data
        model = self.file.one_of("DATASET", "model_class", chosen.models)
        self.found.experiment["model"] = chosen.models.get(model)
        if model == "ResNet8":
            self._note("resnet leaves out the two layers of ResNet8 that nothing uses")

    def _folders(self, name: str, train: str, test: str) -> Section:
        if name == "cifar10":
            if train != test:
                self.file.problem("[DATASET] test_dir: must be train_dir for CIFAR10, whose files are in one folder")
            return {"folder": self._relative_path(f"{train}/cifar-10-batches-py", self.file.path.parent)}
        if name == "movielens":
            self._note("each node is tested on the other ratings of its own users, as in decentralizepy")
            return {"folder": self._relative_path(f"{train}/ml-latest-small", self.file.path.parent), "test": "own"}
        folders: Section = {key: self._relative_path(place, self.file.path.parent) for key, place in
                            (("train_folder", train), ("test_folder", test))}  # fmt: skip
        if name == "shakespeare":
            folders["test_every"] = 30
        if name == "reddit":
            vocabulary = f"{train}/../../vocab/reddit_vocab.pck"
            folders["vocabulary"] = os.path.normpath(self._relative_path(vocabulary, self.file.path.parent))
        if name == "amazon_reviews":
            tokenizer = self.file.value("DATASET", "tokenizer", "BERT", str)
            if tokenizer not in TOKENIZERS:
                self.file.problem(f"[DATASET] tokenizer: must be one of {', '.join(TOKENIZERS)}, got {tokenizer!r}")
            folders |= {"tokenizer": TOKENIZERS.get(tokenizer), "length": 512}
            self._note("cross entropy over the five stars, where decentralizepy has five binary outputs; all test "
                       "reviews, where it takes one batch; weights and tokenizer come from the local cache")
        if name == "celeba":
            images = self.file.value("DATASET", "images_dir", "", str)
            folders["images"] = self._relative_path(images, self.file.path.parent)
            folders["pixels"] = "raw"
            self._note("pixels from 0 to 255, as decentralizepy feeds CelebA's images; unit is the usual range")
        return folders

    def _partition(self, name: str) -> Any:
        sizes = self.file.numbers("DATASET", "sizes")
        if name != "cifar10":
            if sizes is not None:
                self.file.problem("[DATASET] sizes: given fractions of users have no equivalent here; leave it empty")
            if name == "amazon_reviews":
                return {"name": "by_key", "keys_per_node": 1}
            order = {"order": "ascending"} if name == "movielens" else {}
            return {"name": "by_key", "even": "keys", **order}
        kind = self.file.value("DATASET", "partition_niid", "simple", str)
        fractions = {"fractions": sizes} if sizes is not None else {}
        if kind in ("iid", "False"):
            return {"name": "fractions", **fractions} if fractions else {"name": "iid"}
        if kind == "simple":
            return {"name": "ordered", **fractions}
        if fractions:
            self.file.problem(f"[DATASET] sizes: go with partition_niid iid or simple, got {kind}")
        if kind in ("kshard", "True"):
            return {"name": "shards", "shards": self.file.value("DATASET", "shards", 1, int)}
        if kind == "dirichlet":
            return {"name": "dirichlet", "alpha": self.file.value("DATASET", "alpha", 100.0, float)}
        self.file.problem(f"[DATASET] partition_niid: must be one of iid, simple, kshard, dirichlet, got {kind!r}")
        return {"name": "iid"}

    def _training(self) -> None:
        self.file.section("TRAIN_PARAMS")
        self.file.one_of("TRAIN_PARAMS", "training_class", ("Training", "LLMTraining"))
        steps = "local_epochs" if self.file.value("TRAIN_PARAMS", "full_epochs", False, bool) else "local_steps"
        training: Section = {
            "batch_size": self.file.value("TRAIN_PARAMS", "batch_size", 1, int),
            steps: self.file.value("TRAIN_PARAMS", "rounds", 1, int),
            "shuffle": self.file.value("TRAIN_PARAMS", "shuffle", False, bool),
            "optimizer": self._optimizer(),
            "reset_optimizer": self.command.reset_optimizer,
        }
        dataset = self.found.experiment.get("data", {}).get("name", "")
        key = "loss_class" if self.file.value("TRAIN_PARAMS", "loss_class", "", str) else "loss"
        loss = "" if dataset == "amazon_reviews" else LOSSES.get(self.file.one_of("TRAIN_PARAMS", key, LOSSES), "")
        if loss and loss != USUAL_LOSS.get(dataset, "cross_entropy"):
            training["loss"] = loss
        if size := self.file.value("DATASET", "validation_size", None, float):
            source = self.file.value("DATASET", "validation_source", "Train", str).lower()
            training["validation"] = {"source": source, "fraction": size}
        if dataset == "femnist":
            training["drop_last"] = True
        self.found.experiment["training"] = training

    def _optimizer(self) -> Section:
        values = self.file.section("OPTIMIZER_PARAMS")
        package = self.file.value("OPTIMIZER_PARAMS", "optimizer_package", "torch.optim", str)
        if package != "torch.optim":
            self.file.problem(f"[OPTIMIZER_PARAMS] optimizer_package: must be torch.optim, got {package!r}")
        name = self.file.value("OPTIMIZER_PARAMS", "optimizer_class", "", str)
        arguments = {key: _literal(value) for key, value in values.items() if key not in KEYS["OPTIMIZER_PARAMS"]}
        return {"name": name.lower(), **arguments}

    def _sharing(self) -> None:
        name = self.file.one_of("SHARING", "sharing_class", SHARINGS)
        if not name:
            return
        rule, keys = SHARINGS[name]
        self.file.section("SHARING", (*OF_EVERY_SHARING, *keys))
        sharing: Section = {"name": rule}
        if name == "PlainAverageSharing" and self.found.experiment["graph"].get("name") != "el_local":
            self.found.experiment["weights"] = {"name": "uniform"}
        if "alpha" in keys and rule != "jwins":
            sharing["fraction"] = self.file.value("SHARING", "alpha", 1.0, float)
        if "alpha_list" in keys:
            sharing["fractions"] = self.file.numbers("SHARING", "alpha_list") or [0.1, 0.2, 0.3, 0.4, 1.0]
        if "accumulation" in keys:
            sharing |= self._scores()
            sharing["full_from"] = self.file.value("SHARING", "metadata_cap", 1.0, float)
        if "wavelet" in keys:
            sharing["wavelet"] = self.file.value("SHARING", "wavelet", "haar", str)
            sharing["level"] = self.file.value("SHARING", "level", 4, int)
        if rule == "choco" and (step := self.file.value("SHARING", "step_size", None, float)) is not None:
            sharing["step_size"] = step
        if rule == "subsample":
            sharing["layerwise"] = self.file.value("SHARING", "layerwise", False, bool)
            if (cap := self.file.value("SHARING", "metadata_cap", 1.0, float)) < 1:
                sharing["full_above"] = cap
        sharing |= self._dumps(rule)
        if self.file.value("SHARING", "compress", False, bool):
            codec, note = CODECS[self.file.one_of("SHARING", "compression_class", CODECS) or "Elias"]
            self._note(f"compression: {note}")
            if codec is not None and sharing["name"] != "choco":
                sharing["compression"] = codec
        self.found.experiment["sharing"] = sharing

    def _dumps(self, rule: str) -> Section:
        """Returns what is dumped of the selection. In decentralizepy two nodes of every machine write the positions,
        and all nodes the accumulated changes."""
        shared, scores = (self.file.value("SHARING", key, False, bool) for key in ("save_shared", "save_accumulated"))
        if not shared and not scores:
            return {}
        if rule == "subsample":
            self._note("save_shared writes the positions that are sent; in decentralizepy a bug keeps "
                       "SubSampling from writing them")  # fmt: skip
        first, uids = 0, list[int]()
        procs = self.command.procs_per_machine
        for count in procs if len(procs) > 1 else procs * self.command.machines:
            uids += range(first, first + min(2, count))
            first += count
        return {"dump": {"shared": shared, "scores": scores, "nodes": "all" if scores else uids}}

    def _scores(self) -> Section:
        """Returns how the entries that are sent are selected."""
        if not self.file.value("SHARING", "change_based_selection", True, bool):
            if self.file.value("SHARING", "accumulation", False, bool):
                self._note("accumulation is left out: without change_based_selection nothing depends on it")
            return {"scored": "value"}
        if not self.file.value("SHARING", "accumulation", False, bool):
            return {"accumulate": "none"}
        if not self.file.value("SHARING", "accumulate_averaging_changes", False, bool):
            return {"accumulate": "training"}
        return {"accumulate": "all", "cleared": "before_mixing"}

    def _rounds(self) -> None:
        self.found.experiment["node"] = {
            "rounds": self.command.iterations, "evaluate_every": min(self.command.test_after, self.command.iterations),
        }
        if "timeout" in self.file.sections.get("NODE", {}):
            seconds = self.file.value("NODE", "timeout", 1.0, float)
            self.found.experiment["node"] |= {
                "schedule": "epidemic", "asynchronous": {"arrivals": self._nodes, "deadline_seconds": seconds},
            }
        if self.command.train_evaluate_after is not None:
            self.found.experiment["training"]["evaluate_train"] = "all"
            self._note("training samples are measured with every test; the loss of a round's batches always is")
        if self.command.log_level != "INFO":
            self.found.experiment["run"] = {"log_level": self.command.log_level.lower()}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False}.get(text.lower(), text)
