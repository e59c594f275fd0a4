"""`decentnode convert` turns config files of decentralizepy into experiments that load and run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from decentnode.build import build_in_process, step_all
from decentnode.cli import main
from decentnode.experiment import load
from tests.data.files import (
    write_celeba,
    write_cifar10,
    write_cifar10_python,
    write_femnist,
    write_movielens,
    write_reddit,
    write_reviews,
    write_shakespeare,
)

STEP = {
    "DATASET": {"dataset_package": "decentralizepy.datasets.CIFAR10", "dataset_class": "CIFAR10",
                "model_class": "LeNet", "train_dir": "data", "test_dir": "data", "sizes": "",
                "random_seed": "99", "partition_niid": "iid"},
    "OPTIMIZER_PARAMS": {"optimizer_package": "torch.optim", "optimizer_class": "SGD", "lr": "0.001"},
    "TRAIN_PARAMS": {"training_package": "decentralizepy.training.Training", "training_class": "Training",
                     "rounds": "65", "full_epochs": "False", "batch_size": "8", "shuffle": "True",
                     "loss_package": "torch.nn", "loss_class": "CrossEntropyLoss"},
    "COMMUNICATION": {"comm_package": "decentralizepy.communication.TCP", "comm_class": "TCP",
                      "addresses_filepath": "ip.json"},
    "SHARING": {"sharing_package": "decentralizepy.sharing.Sharing", "sharing_class": "Sharing"},
}  # fmt: skip
JWINS = {
    "sharing_package": "decentralizepy.sharing.JWINS.JWINS", "sharing_class": "JWINS", "change_based_selection": "True",
    "alpha_list": "[0.1,0.2,1.0]", "wavelet": "sym2", "level": "4", "accumulation": "True",
    "accumulate_averaging_changes": "True", "metadata_cap": "0.5", "compress": "True",
    "compression_package": "decentralizepy.compression.EliasFpzip", "compression_class": "EliasFpzip",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of the test, with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DECENTNODE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def write(folder: Path, name: str = "config.ini", **changes: dict[str, str | None]) -> Path:
    """Writes the config STEP with some keys changed: None leaves a key out, a given section SHARING replaces all of
    it."""
    lines = []
    for section in {**STEP, **changes}:
        keys: dict[str, Any] = {**STEP.get(section, {}), **changes.get(section, {})}
        if section == "SHARING" and section in changes:
            keys = changes[section]
        lines += [f"[{section}]", *(f"{key} = {value}" for key, value in keys.items() if value is not None), ""]
    path = folder / name
    path.write_text("\n".join(["; a step config", *lines]))
    return path


def convert(*words: str) -> Result:
    return CliRunner().invoke(main, ["convert", "config.ini", *words])


def converted(*words: str) -> dict[str, Any]:
    """Converts config.ini, checks that the result loads, and returns it."""
    result = convert("--force", *words)
    assert result.exit_code == 0, result.output
    plain: dict[str, Any] = yaml.safe_load(Path("config.yaml").read_text())
    load("config.yaml", check=False)
    return plain


def write_cifar(folder: Path) -> None:
    train, test = write_cifar10(folder / "made", per_file=40, files=5)
    (folder / "data").mkdir()
    write_cifar10_python(folder / "data" / "cifar-10-batches-py", train, test, files=5)


@pytest.mark.slow
def test_a_step_config_is_converted_and_runs(folder: Path) -> None:
    write_cifar(folder)
    write(folder)
    result = convert("-ps", "4", "-is", "7", "-ta", "2")
    assert result.exit_code == 0 and result.output.endswith("config.yaml: ok\n"), result.output
    assert yaml.safe_load(Path("config.yaml").read_text()) == {
        "name": "config", "seed": 99, "graph": {"name": "ring", "nodes": 4},
        "mapping": {"name": "linear", "machines": 1, "nodes_per_machine": 4},
        "data": {"name": "cifar10", "folder": "data/cifar-10-batches-py", "partition": {"name": "iid"}},
        "model": "gn_lenet",
        "training": {"batch_size": 8, "local_steps": 65, "shuffle": True, "optimizer": {"name": "sgd", "lr": 0.001},
                     "reset_optimizer": True},
        "sharing": {"name": "full"}, "node": {"rounds": 7, "evaluate_every": 2},
    }  # fmt: skip
    nodes = build_in_process(load("config.yaml", ["node.rounds=1", "training.local_steps=2"]))
    step_all(nodes)
    assert nodes[0].round == 1
    assert convert("-ps", "4").exit_code == 2  # config.yaml exists already, and there is no --force


@pytest.mark.parametrize("section, sharing", [
    ({"sharing_class": "Sharing"}, {"name": "full"}),
    ({"sharing_class": "PartialModel", "alpha": "0.1"},
     {"name": "topk", "fraction": 0.1, "accumulate": "none", "full_from": 1.0}),
    ({"sharing_class": "PartialModel", "alpha": "0.1", "accumulation": "True", "metadata_cap": "0.6"},
     {"name": "topk", "fraction": 0.1, "accumulate": "training", "full_from": 0.6}),
    ({"sharing_class": "SubSampling", "alpha": "0.3"}, {"name": "subsample", "fraction": 0.3, "layerwise": False}),
    ({"sharing_class": "SubSampling", "alpha": "0.3", "metadata_cap": "0.2"},
     {"name": "subsample", "fraction": 0.3, "layerwise": False, "full_above": 0.2}),
    ({**JWINS, "change_based_selection": "False"},
     {"name": "jwins", "fractions": [0.1, 0.2, 1.0], "scored": "value", "full_from": 0.5, "wavelet": "sym2",
      "level": 4}),
    (JWINS, {"name": "jwins", "fractions": [0.1, 0.2, 1.0], "accumulate": "all", "cleared": "before_mixing",
             "full_from": 0.5, "wavelet": "sym2", "level": 4}),
    ({"sharing_class": "PartialModel", "alpha": "0.1", "save_shared": "True"},
     {"name": "topk", "fraction": 0.1, "accumulate": "none", "full_from": 1.0,
      "dump": {"shared": True, "scores": False, "nodes": [0, 1]}}),
    ({"sharing_class": "PartialModel", "alpha": "0.1", "save_accumulated": "True"},
     {"name": "topk", "fraction": 0.1, "accumulate": "none", "full_from": 1.0,
      "dump": {"shared": False, "scores": True, "nodes": "all"}}),
    ({"sharing_class": "SubSampling", "alpha": "0.3", "save_shared": "True"},
     {"name": "subsample", "fraction": 0.3, "layerwise": False,
      "dump": {"shared": True, "scores": False, "nodes": [0, 1]}}),
    ({"sharing_class": "Wavelet", "alpha": "0.2"},
     {"name": "wavelet", "fraction": 0.2, "accumulate": "none", "full_from": 1.0, "wavelet": "haar", "level": 4}),
    ({"sharing_class": "FFT", "alpha": "0.2"},
     {"name": "fft", "fraction": 0.2, "accumulate": "none", "full_from": 1.0}),
    ({"sharing_class": "Choco", "alpha": "0.3", "step_size": "0.4"},
     {"name": "choco", "fraction": 0.3, "step_size": 0.4}),
    ({"sharing_class": "Sharing", "compress": "True", "compression_class": "Quantization"},
     {"name": "full", "compression": "float16"}),
    ({"sharing_class": "Sharing", "compress": "True", "compression_class": "EliasFpzipLossy", "float_precision": "16"},
     {"name": "full", "compression": {"name": "truncate", "bits": 16}}),
])
def test_every_sharing_class_is_converted(folder: Path, section: dict[str, Any], sharing: dict[str, Any]) -> None:
    write(folder, SHARING=section)
    assert converted()["sharing"] == sharing


def test_plain_average_sharing_becomes_uniform_weights(folder: Path) -> None:
    write(folder, SHARING={"sharing_class": "PlainAverageSharing"})
    assert converted()["weights"] == {"name": "uniform"}


@pytest.mark.parametrize("keys, partition", [
    ({"partition_niid": None}, {"name": "ordered"}),
    ({"partition_niid": "False"}, {"name": "iid"}),
    ({"partition_niid": "iid", "sizes": "[0.5, 0.25, 0.25]"}, {"name": "fractions", "fractions": [0.5, 0.25, 0.25]}),
    ({"partition_niid": "simple", "sizes": "[0.5, 0.5]"}, {"name": "ordered", "fractions": [0.5, 0.5]}),
    ({"partition_niid": "iid", "only_local": "True"}, {"name": "only_local", "within": {"name": "iid"}}),
    ({"partition_niid": "kshard", "shards": "2"}, {"name": "shards", "shards": 2}),
    ({"partition_niid": "True"}, {"name": "shards", "shards": 1}),
    ({"partition_niid": "dirichlet", "alpha": "0.1"}, {"name": "dirichlet", "alpha": 0.1}),
])
def test_every_partition_is_converted(folder: Path, keys: dict[str, Any], partition: dict[str, Any]) -> None:
    write(folder, DATASET=keys)
    assert converted()["data"]["partition"] == partition


def test_models_of_cifar_are_converted(folder: Path) -> None:
    for name, model in (("LeNet", "gn_lenet"), ("CNN", "cnn"), ("ResNet8", {"name": "resnet", "depth": 8})):
        write(folder, DATASET={"model_class": name})
        assert converted()["model"] == model


def leaf(name: str, model: str) -> dict[str, str | None]:
    """Returns the keys of the section DATASET for a data set in LEAF's format."""
    return {"dataset_class": name, "dataset_package": f"decentralizepy.datasets.{name}", "model_class": model,
            "partition_niid": None, "train_dir": "leaf/train", "test_dir": "leaf/test"}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model, name", [("CNN", "femnist_cnn"), ("RNET", "rnet"), ("LogisticRegression", "logistic")])
def test_femnist_is_converted_and_opens(folder: Path, model: str, name: str) -> None:
    write_femnist(folder / "leaf")
    write(folder, DATASET=leaf("Femnist", model), TRAIN_PARAMS={"batch_size": "2"})
    plain = converted("-ps", "2", "--output", "config.yaml")
    assert plain["model"] == name and plain["training"]["drop_last"]
    assert plain["data"] == {"name": "femnist", "train_folder": "leaf/train", "test_folder": "leaf/test",
                             "partition": {"name": "by_key", "even": "keys"}}  # fmt: skip
    assert load("config.yaml").open_data().shares()[0].size > 0


def test_celeba_is_converted_and_loads(folder: Path) -> None:
    write_celeba(folder / "leaf", folder / "images")
    write(folder, DATASET={**leaf("Celeba", "CNN"), "images_dir": "images"})
    plain = converted("-ps", "3")
    assert plain["data"]["images"] == "images" and plain["data"]["pixels"] == "raw" and plain["model"] == "celeba_cnn"
    load("config.yaml")


@pytest.mark.slow
def test_shakespeare_and_movielens_are_converted_and_load(folder: Path) -> None:
    write_shakespeare(folder / "leaf")
    write(folder, DATASET=leaf("Shakespeare", "LSTM"))
    plain = converted("-ps", "3")
    assert plain["model"] == "shakespeare_lstm" and plain["data"]["test_every"] == 30
    load("config.yaml")
    write_movielens(folder / "films" / "ml-latest-small")
    keys = {**leaf("MovieLens", "MatrixFactorization"), "train_dir": "films", "test_dir": "films"}
    write(folder, DATASET=keys, TRAIN_PARAMS={"loss_class": "MSELoss"})
    plain = converted("-ps", "3")
    assert plain["model"] == "matrix_factorization" and "loss" not in plain["training"]
    shares = load("config.yaml").open_data()
    assert [set(shares.dataset().train_keys()[shares.shares()[uid]]) for uid in range(3)] == [{0, 1}, {2, 3}, {4, 5}]


@pytest.mark.slow
@pytest.mark.parametrize("sharing", [
    {"sharing_class": "Sharing"}, {"sharing_class": "PartialModel", "alpha": "0.1"},
    {"sharing_class": "SubSampling", "alpha": "0.1"},
], ids=["full", "topk", "subsample"])  # fmt: skip
def test_the_step_configs_of_reddit_are_converted_and_run(folder: Path, sharing: dict[str, Any]) -> None:
    """Training files are by user, and the vocabulary lies beside them."""
    words = write_reddit(folder / "reddit_new")
    keys = {**leaf("Reddit", "RNN"), "train_dir": "reddit_new/data/train", "test_dir": "reddit_new/data/test",
            "random_seed": "97"}  # fmt: skip
    write(folder, DATASET=keys, TRAIN_PARAMS={"rounds": "47", "batch_size": "16"}, SHARING=sharing)
    result = convert("-ps", "4")
    assert result.exit_code == 0 and result.output.endswith("config.yaml: ok\n"), result.output
    plain = yaml.safe_load(Path("config.yaml").read_text())
    assert plain["model"] == "reddit_rnn" and plain["data"] == {
        "name": "reddit", "train_folder": "reddit_new/data/train", "test_folder": "reddit_new/data/test",
        "vocabulary": "reddit_new/vocab/reddit_vocab.pck", "partition": {"name": "by_key", "even": "keys"}}
    experiment = load("config.yaml", ["node.rounds=1", "training.local_steps=1", "communication=inproc"])
    assert experiment.open_data().spec.vocabulary == len(words)
    nodes = build_in_process(experiment)
    step_all(nodes)
    assert nodes[0].round == 1


def test_amazon_reviews_are_converted(folder: Path) -> None:
    """Models and tokenizers are those of the package transformers, which this test does not need."""
    write_reviews(folder / "reviews")
    keys = {**leaf("AmazonReview", "BERT"), "dataset_package": "decentralizepy.datasets.text.AmazonReview",
            "train_dir": "reviews/train", "test_dir": "reviews/test", "tokenizer": "BERT"}  # fmt: skip
    write(folder, DATASET=keys, TRAIN_PARAMS={"training_class": "LLMTraining", "loss_class": None})
    plain = converted("-ps", "4")
    assert plain["model"] == {"name": "hf:bert-base-uncased", "pretrained": True} and "loss" not in plain["training"]
    assert plain["data"] == {
        "name": "amazon_reviews", "train_folder": "reviews/train", "test_folder": "reviews/test", "length": 512,
        "tokenizer": "bert-base-uncased", "partition": {"name": "by_key", "keys_per_node": 1}}
    write(folder, DATASET={**keys, "tokenizer": "GPT"}, TRAIN_PARAMS={"training_class": "LLMTraining"})
    assert "[DATASET] tokenizer: must be one of BERT, MobileBERT, got 'GPT'" in convert("--force").output


def test_graph_files_and_addresses_are_converted(folder: Path) -> None:
    write_cifar(folder)
    write(folder, COMMUNICATION={"offset": "9100"})
    (folder / "g.edges").write_text("6\n0 1\n1 2\n2 3\n3 4\n4 5\n5 0\n")
    (folder / "g.adj").write_text("6\n1 5\n0 2\n1 3\n2 4\n3 5\n4 0\n")
    (folder / "ip.json").write_text(json.dumps({"0": "10.0.0.1", "1": "10.0.0.2"}))
    plain = converted("-gf", "g.edges", "-ms", "2", "-ps", "3")
    assert plain["graph"] == {"file": "g.edges"}
    assert plain["mapping"] == {"name": "linear", "machines": 2, "nodes_per_machine": 3, "addresses": "ip.json",
                                "base_port": 9100}  # fmt: skip
    assert load("config.yaml").make_graph().num_nodes == 6
    plain = converted("-gf", "g.adj", "-gt", "adjacency", "-ms", "2", "-ps", "4", "-ps", "2")
    assert plain["mapping"] == {"name": "table", "machines": [
        {"nodes": 4, "host": "10.0.0.1", "base_port": 9100}, {"nodes": 2, "host": "10.0.0.2", "base_port": 9100}]}
    mapping = load("config.yaml").make_mapping()
    assert mapping.num_nodes == 6 and mapping.place(5).machine == 1
    result = convert("--force", "-gf", "g.edges", "-gt", "adjacency")
    assert result.exit_code == 2 and "a file of adjacency lists must be named .adj here" in result.output


def test_paths_become_relative_to_the_output_file(folder: Path) -> None:
    write_cifar(folder)
    write(folder)
    (folder / "g.edges").write_text("2\n0 1\n")
    (folder / "out").mkdir()
    result = convert("-gf", "g.edges", "-ps", "2", "-o", "out/new.yaml")
    assert result.exit_code == 0 and result.output.endswith("new.yaml: ok\n"), result.output
    plain = yaml.safe_load(Path("out/new.yaml").read_text())
    assert plain["graph"]["file"] == "../g.edges" and plain["data"]["folder"] == "../data/cifar-10-batches-py"


def test_epidemic_learning_with_inline_comments_is_converted(folder: Path) -> None:
    write(folder, OPTIMIZER_PARAMS={"lr": "0.05 ; gamma", "momentum": "0.9", "nesterov": "True"},
          NODE={"graph_degree": "7 ; s"}, SHARING={"sharing_class": "PlainAverageSharing", "compress": "False"})
    plain = converted("-ro", "0")
    assert plain["graph"] == {"name": "random_regular", "nodes": 16, "degree": 7}
    assert plain["training"]["optimizer"] == {"name": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True}
    assert plain["training"]["reset_optimizer"] is False


def test_epidemic_learning_with_a_time_out_becomes_the_epidemic_schedule(folder: Path) -> None:
    write(folder, NODE={"graph_degree": "5", "timeout": "2"}, SHARING={"sharing_class": "PlainAverageSharing"})
    plain = converted()
    assert plain["graph"] == {"name": "el_local", "nodes": 16, "degree": 5} and "weights" not in plain
    assert plain["node"]["schedule"] == "epidemic" and plain["node"]["asynchronous"]["deadline_seconds"] == 2


def test_epochs_validation_and_losses_are_converted(folder: Path) -> None:
    write(folder, TRAIN_PARAMS={"full_epochs": "True", "rounds": "2", "loss_class": "NLLLoss"},
          DATASET={"validation_source": "Test", "validation_size": "0.2"})
    training = converted()["training"]
    assert training["local_epochs"] == 2 and "local_steps" not in training and training["loss"] == "nll"
    assert training["validation"] == {"source": "test", "fraction": 0.2}


@pytest.mark.parametrize("changes, problem", [
    ({"DATASET": {"shard": "2"}}, "[DATASET] shard: is not a key of this section; did you mean 'shards'?"),
    ({"DATASET": {"images_dir": "x"}}, "[DATASET] images_dir: is not a key of this section"),
    ({"DATASET": {"model_class": "LeNett"}}, "[DATASET] model_class: must be one of LeNet, CNN, ResNet8, got 'LeNett'"),
    ({"DATASET": {"dataset_class": "Cifar"}}, "[DATASET] dataset_class: must be one of CIFAR10, Femnist"),
    ({"DATASET": {"partition_niid": "kshards"}}, "must be one of iid, simple, kshard, dirichlet, got 'kshards'"),
    ({"DATASET": {"sizes": "__import__('os').system('false')"}}, "[DATASET] sizes: must be a list of numbers, got"),
    ({"DATASET": {"train_dir": ""}}, "[DATASET] train_dir and test_dir: must both be given"),
    ({"DATASET": {"random_seed": "x"}}, "[DATASET] random_seed: must be a whole number, got 'x'"),
    ({"TRAIN_PARAMS": {"round": "2"}}, "[TRAIN_PARAMS] round: is not a key of this section; did you mean 'rounds'?"),
    ({"TRAIN_PARAMS": {"shuffle": "maybe"}}, "[TRAIN_PARAMS] shuffle: must be True or False, got 'maybe'"),
    ({"TRAIN_PARAMS": {"loss_class": "Loss"}}, "[TRAIN_PARAMS] loss_class: must be one of CrossEntropyLoss"),
    ({"OPTIMIZER_PARAMS": {"optimizer_package": "mine"}}, "optimizer_package: must be torch.optim, got 'mine'"),
    ({"COMMUNICATION": {"port": "1"}}, "[COMMUNICATION] port: is not a key of this section"),
    ({"SHARING": {"sharing_class": "STC"}}, "[SHARING] sharing_class: must be one of Sharing, PlainAverageSharing"),
    ({"SHARING": {**JWINS, "alphalist": "[1]"}}, "alphalist: is not a key of this section; did you mean 'alpha_list'?"),
    ({"SHARING": {"sharing_class": "PartialModel", "change_based_selection": "False"}},
     "[SHARING] change_based_selection: is not a key of this section"),
    ({"NODE": {"timeout": "2 s"}}, "[NODE] timeout: must be a number, got '2 s'"),
    ({"SHARE": {}}, "[SHARE]: is not a section of decentralizepy; did you mean 'SHARING'?"),
])
def test_keys_and_values_that_cannot_be_converted_are_named(
    folder: Path, changes: dict[str, Any], problem: str
) -> None:
    write(folder, **changes)
    result = convert()
    assert result.exit_code == 2 and problem in result.output, result.output
    assert not Path("config.yaml").exists()


def test_all_problems_are_reported_at_once(folder: Path) -> None:
    write(folder, DATASET={"shard": "2"}, TRAIN_PARAMS={"round": "2"}, SHARING={"sharing_class": "x"})
    assert "config.ini: 3 problems" in convert().output
    write(folder, NODE={"timeouts": "2"})
    output = convert("-ms", "3", "-ps", "1", "-ps", "1", "-ps", "2").output  # there is no file of addresses
    assert "config.ini: 2 problems" in output, output
    (folder / "config.ini").write_text("no section = 1")
    assert "cannot be read as a config file" in convert().output


def test_missing_data_is_reported_and_the_converted_file_is_kept(folder: Path) -> None:
    write(folder)
    result = convert()
    assert result.exit_code == 0 and "written, but it cannot run here yet" in result.output
    assert "data/cifar-10-batches-py: no such folder" in result.output and Path("config.yaml").exists()


@pytest.mark.skipif("DECENTRALIZEPY" not in os.environ, reason="DECENTRALIZEPY names no copy of its repository")
def test_decentralizepys_own_step_configs_are_converted(folder: Path) -> None:
    """All but one, in which a key is misspelled."""
    configs = sorted((Path(os.environ["DECENTRALIZEPY"]) / "eval" / "step_configs").glob("*.ini"))
    failed = {path.name: result.output for path in configs
              if (result := CliRunner().invoke(main, ["convert", str(path), "-ps", "16"])).exit_code}  # fmt: skip
    assert len(configs) == 22
    assert "[DATASET] shard: is not a key of this section; did" in failed.pop("config_cifar_partialmodel.ini")
    assert not failed and len(list(Path().glob("*.yaml"))) == 21


def test_flags_for_the_log_level_and_evaluation_of_training_samples_are_converted(folder: Path) -> None:
    write(folder)
    plain = converted("-ps", "4", "-ll", "DEBUG", "-tea", "2")
    assert plain["run"] == {"log_level": "debug"} and plain["training"]["evaluate_train"] == "all"
    plain = converted("-ps", "4")
    assert "run" not in plain and "evaluate_train" not in plain["training"]
