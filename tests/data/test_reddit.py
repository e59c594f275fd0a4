"""Reddit in LEAF's format: sequences, next words, the vocabulary, and a model that learns from them."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from decentnode.build import build_in_process, step_all
from decentnode.cli import main
from decentnode.data import DATASETS, leaf
from decentnode.data.opened import OpenedData
from decentnode.data.reddit import RedditConfig
from decentnode.data.vocabulary import count_words
from decentnode.errors import DataError
from decentnode.experiment import load

from .files import leaf_text, open_dataset, write_leaf, write_reddit

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
REDDIT = {"name": "reddit", "folder": "d/data"}
"""A data section; the vocabulary is where LEAF's scripts put it."""


def read_by_decentralizepys_rule(path: Path, words: list[str]) -> tuple[list[list[int]], list[int]]:
    """Returns inputs and targets of a file by decentralizepy's rule: the target is the last word that follows."""
    inputs, targets = [], []
    numbers = {word: number for number, word in enumerate(words)}
    for user in json.loads(path.read_text())["user_data"].values():
        for comment, behind in zip(user["x"], user["y"], strict=True):
            for sequence, following in zip(comment, behind["target_tokens"], strict=True):
                there = [word for word in following if word != "<PAD>"]
                if there:
                    inputs.append([numbers.get(word, 1) for word in sequence])
                    targets.append(numbers.get(there[-1], 1))
    return inputs, targets


def test_reddit_sequences_and_next_words_follow_decentralizepys_rule(tmp_path: Path) -> None:
    words = write_reddit(tmp_path / "d")
    data = open_dataset(REDDIT, tmp_path)
    found = data.train(np.arange(data.num_train()))
    paths = sorted((tmp_path / "d" / "data" / "train").iterdir())
    parts = [read_by_decentralizepys_rule(path, words) for path in paths]
    assert found.inputs.tolist() == [row for inputs, _ in parts for row in inputs]  # type: ignore[union-attr]
    assert found.targets.tolist() == [each for _, targets in parts for each in targets]  # type: ignore[union-attr]
    assert found.ids and found.inputs.dtype == np.int16 and data.spec.vocabulary == len(words)
    assert data.spec.input_shape == (10,) and data.spec.task == "next_token" and len(np.unique(data.train_keys())) == 4
    fewer = open_dataset({**REDDIT, "test_every": 3}, tmp_path)
    assert fewer.num_test() == len(fewer.test()) == -(-data.num_test() // 3)


def test_sequences_without_a_next_word_are_left_out(tmp_path: Path) -> None:
    row = ["a"] * 10
    behind = [["<PAD>"] * 10, [*row[:3], *["<PAD>"] * 7], ["zebra", *["<PAD>"] * 9]]
    user: tuple[list[Any], list[Any]] = ([[row, row, row]], [{"target_tokens": behind}])
    write_leaf(tmp_path / "d" / "data", {"me": user}, {"me": user})
    (tmp_path / "v.json").write_text(json.dumps({"vocab": {"a": 2, "<PAD>": 0}, "pad_symbol": 0, "unk_symbol": 1}))
    data = open_dataset({**REDDIT, "vocabulary": "v.json"}, tmp_path)
    assert data.train(np.arange(2)).targets.tolist() == [2, 1] and data.num_train() == 2 and data.spec.vocabulary == 3


def test_words_are_counted_if_there_is_no_vocabulary_file(tmp_path: Path) -> None:
    write_reddit(tmp_path / "d", vocabulary=False)
    data = open_dataset({**REDDIT, "vocabulary_size": 6}, tmp_path)
    assert data.spec.vocabulary == 6 and data.train(np.arange(4)).inputs.max() == 5  # type: ignore[union-attr]
    assert open_dataset(REDDIT, tmp_path).spec.vocabulary == 22  # 18 words, begin and end, <PAD>, <UNK>
    counted = count_words([["b", "a", "<PAD>", "c", "c"], ["b", "<UNK>", "d"]], 5)
    assert counted.numbers == {"<PAD>": 0, "<UNK>": 1, "b": 2, "c": 3, "a": 4}


def test_a_vocabulary_file_added_later_is_used(tmp_path: Path) -> None:
    words = write_reddit(tmp_path / "d")
    path = tmp_path / "d" / "vocab" / "reddit_vocab.pck"
    content = path.read_bytes()
    path.unlink()
    counted = open_dataset(REDDIT, tmp_path).train(np.arange(3))
    path.write_bytes(content)
    read = open_dataset(REDDIT, tmp_path).train(np.arange(3))
    assert not np.array_equal(counted.inputs, read.inputs) and words[read.inputs[0, 0]] == "<BOS>"


@pytest.mark.slow
def test_a_node_holds_only_its_share_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaf, "CHUNK", 1 << 14)
    row = [f"w{n}" for n in range(10)]
    users: dict[str, tuple[list[Any], list[Any]]] = {
        f"u{user:03}": ([[row] * 200], [{"target_tokens": [row] * 200}]) for user in range(64)
    }
    write_leaf(tmp_path / "d" / "data", users, {"u000": users["u000"]}, files=1)
    config = RedditConfig.model_validate({**REDDIT, "partition": {"name": "by_key"}})
    tracemalloc.start()
    OpenedData(config, DATASETS, tmp_path, [0] * 64, 1).dataset()  # converts
    converting = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    mine = OpenedData(config, DATASETS, tmp_path, [0] * 64, 1).of(5)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    text = len(leaf_text({"u": users["u000"]}))
    assert len(mine.train) == 200 and converting < 32 * text  # of 64 users
    assert isinstance(mine.test.inputs, np.memmap)  # type: ignore[union-attr]
    assert mine.train.inputs.nbytes == 200 * 10 * 2 and held < 2 << 20  # type: ignore[union-attr]


@pytest.mark.parametrize("x, y, problem", [
    (["no"], [{"target_tokens": []}], "'x' must be lists of sequences, got 'no'"),
    ([[["a"] * 9]], [{"target_tokens": [["a"] * 10]}], r"'x' must have sequences of 10 words \(data.length\), got"),
    ([[["a"] * 10]], [{"target_tokens": [["a"] * 11]}], "'y' must have sequences of 10 words"),
    ([[[1] * 10]], [{"target_tokens": [["a"] * 10]}], "'x' must have words, got"),
    ([[["a"] * 10]], [["a"] * 10], "'y' must be dicts with 'target_tokens'"),
    ([[["a"] * 10]], [{"target_tokens": 3}], "'y' must be dicts with 'target_tokens'"),
    ([[["a"] * 10]], [{"target_tokens": []}], "has 1 sequences and 0 following sequences"),
])
def test_malformed_comments_are_refused(tmp_path: Path, x: Any, y: Any, problem: str) -> None:
    write_leaf(tmp_path / "d" / "data", {"me": (x, y)}, {"me": (x, y)})
    with pytest.raises(DataError, match=f"user 'me': {problem}"):
        open_dataset(REDDIT, tmp_path)


@pytest.mark.parametrize("name, content, problem", [
    ("v.json", b"[]", "must have 'vocab', words and their numbers"),
    ("v.json", b"{", "cannot be read as a vocabulary"),
    ("v.json", b'{"vocab": {"a": -1}}', "must have 'vocab', words and their numbers"),
    ("v.json", b'{"vocab": {"a": true}}', "must have 'vocab', words and their numbers"),
    ("v.json", b'{"vocab": {"a": 4194304}}', "must have 'vocab', words and their numbers below 4194304"),
    ("v.json", b'{"vocab": {"a": 3}, "pad_symbol": "<PAD>"}', "'pad_symbol' and 'unk_symbol' must be numbers"),
    ("v.pck", b"cos\nsystem\n(S'ls'\ntR.", "not a vocabulary of LEAF in Python's format: .* names os.system"),
])
def test_malformed_vocabularies_are_refused(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    write_reddit(tmp_path / "d")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=problem):
        open_dataset({**REDDIT, "vocabulary": name}, tmp_path)


def test_private_files_need_a_given_vocabulary(tmp_path: Path) -> None:
    write_reddit(tmp_path / "d")
    with pytest.raises(DataError, match="vocabulary must be given where each node has private files"):
        open_dataset(REDDIT, tmp_path).check_private()
    with pytest.raises(DataError, match=r"none\.pck: no such file; expected a vocabulary"):
        open_dataset({**REDDIT, "vocabulary": "none.pck"}, tmp_path)


def test_data_commands_on_reddit(tmp_path: Path) -> None:
    write_reddit(tmp_path / "d")
    found = CliRunner().invoke(main, ["data", "prepare", "reddit", "--from", str(tmp_path / "d" / "data")])
    assert found.exit_code == 0 and "4 users" in found.output and "all readable" in found.output, found.output
    got = CliRunner().invoke(main, ["data", "get", "reddit"])
    assert got.exit_code == 2 and "reddit cannot be downloaded" in got.output and "TalwalkarLab/leaf" in got.output
    text = (f"graph: {{name: ring, nodes: 2}}\ndata: {{name: reddit, folder: {tmp_path / 'd' / 'data'}, partition: "
            "{name: by_key}}\nmodel: reddit_rnn\ntraining: {}\n")  # fmt: skip
    (tmp_path / "e.yaml").write_text(text)
    info = CliRunner().invoke(main, ["data", "info", str(tmp_path / "e.yaml")])
    assert info.exit_code == 0 and "next_token" in info.output and "by_key on 2 nodes" in info.output, info.output


@pytest.mark.slow
def test_a_recurrent_model_learns_reddit_comments(tmp_path: Path) -> None:
    """The accuracy is far above that of always predicting the most frequent word."""
    write_reddit(tmp_path / "d", users=6)
    experiment = load(QUICKSTART, [
        "graph={name: ring, nodes: 3}", "mapping={machines: 1, nodes_per_machine: 3}",
        f"data={{name: reddit, folder: {tmp_path / 'd' / 'data'}, partition: {{name: by_key}}}}",
        "model={name: reddit_rnn, embedding: 16, hidden: 32, layers: 1}",
        "training={batch_size: 8, local_steps: 5, optimizer: {name: adam, lr: 0.02}}",
        "node={rounds: 15, evaluate_every: 0}", "communication={name: inproc}",
    ])
    data = experiment.open_data().dataset()
    targets = data.test().targets
    trivial = np.unique(targets, return_counts=True)[1].max() / len(targets)
    nodes = build_in_process(experiment)
    step_all(nodes)
    assert float(nodes[0].figures()["accuracy_merged"]) > trivial + 0.3
