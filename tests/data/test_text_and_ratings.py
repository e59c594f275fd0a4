"""Shakespeare in LEAF's format and MovieLens: reading, and models that learn from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decentnode.build import build_in_process, step_all
from decentnode.data.leaf_text import CHARACTERS, VOCABULARY
from decentnode.errors import DataError
from decentnode.experiment import load

from .files import open_dataset, write_leaf, write_movielens, write_shakespeare

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def test_shakespeare_is_read_as_characters(tmp_path: Path) -> None:
    write_shakespeare(tmp_path / "d")
    data = open_dataset({"name": "shakespeare", "folder": "d"}, tmp_path)
    some = data.train(np.array([0, 1]))
    text = "".join(CHARACTERS[each - 2] for each in some.inputs[0])
    assert text == ("To be, or not to be: " * 4)[:80]
    assert CHARACTERS[some.targets[0] - 2] == ("To be, or not to be: " * 4)[80] and some.inputs.dtype == np.uint8
    assert np.array_equal(some.inputs[0, 1:], some.inputs[1, :-1]) and len(CHARACTERS) + 2 == VOCABULARY
    assert (len(data.test()), data.num_test()) == (21, 21)
    fewer = open_dataset({"name": "shakespeare", "folder": "d", "test_every": 5}, tmp_path)
    assert fewer.num_test() == len(fewer.test()) == len(fewer.test_keys()) == 5  # type: ignore[arg-type]


@pytest.mark.parametrize("x, y, problem", [
    (["a" * 79], ["b"], "'x' must be texts of 80 characters, got 'aaa"),
    (["a" * 80], ["bc"], "'y' must be texts of 1 characters, got 'bc'"),
    ([[1] * 80], ["b"], "'x' must be texts of 80 characters"),
])
def test_malformed_shakespeare_texts_are_refused(tmp_path: Path, x: Any, y: Any, problem: str) -> None:
    write_leaf(tmp_path / "d", {"A": (x, y)}, {"A": (x, y)})
    with pytest.raises(DataError, match=f"user 'A': {problem}"):
        open_dataset({"name": "shakespeare", "folder": "d"}, tmp_path)


def test_unknown_characters_are_one_token(tmp_path: Path) -> None:
    users = {"A": (["é😀" + "a" * 78], ["\u2028"])}
    write_leaf(tmp_path / "d", users, users)
    some = open_dataset({"name": "shakespeare", "folder": "d"}, tmp_path).train(np.array([0]))
    assert some.inputs[0, :3].tolist() == [1, 1, CHARACTERS.index("a") + 2] and some.targets[0] == 1


def test_ratings_are_split_by_user(tmp_path: Path) -> None:
    write_movielens(tmp_path / "d")
    section = {"name": "movielens", "folder": "d"}
    data = open_dataset(section, tmp_path)
    assert (data.spec.users, data.spec.items) == (6, 12) and (data.num_train(), data.num_test()) == (42, 18)
    assert np.bincount(data.train_keys()).tolist() == [7] * 6  # type: ignore[arg-type]
    train, test = data.train(np.arange(42)), data.test()
    pairs = {tuple(pair) for pair in train.inputs} | {tuple(pair) for pair in test.inputs}
    assert len(pairs) == 60 and set(np.unique(train.targets)) == {1.0, 4.5}
    assert np.array_equal(train.targets == 4.5, train.inputs[:, 1] % 2 == 0)
    other = open_dataset({**section, "split_seed": 1}, tmp_path).train(np.arange(42))
    assert not np.array_equal(train.inputs, other.inputs)


@pytest.mark.parametrize("text, problem", [
    ("userId,movieId,rating,timestamp\n1,2,9.5,0\n", r"ratings\.csv:2: must be user, film and a rating from 0 to 5"),
    ("1,2\n", r"ratings\.csv:1: must be"), ("1,x,3,0\n", r"ratings\.csv:1: must be"), ("", "has no ratings"),
    ("1,2,3,0\n2,2,3,0\n1,3,3,0\n", "must be sorted by user, but user 1 occurs again"),
])
def test_malformed_ratings_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "ratings.csv").write_text(text)
    with pytest.raises(DataError, match=problem):
        open_dataset({"name": "movielens", "folder": "."}, tmp_path)


def test_a_missing_file_of_ratings_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ratings\.csv: no such file; .*small\.zip .* data prepare movielens"):
        open_dataset({"name": "movielens", "folder": "."}, tmp_path)


def figures_after_training(folder: Path, data: str, model: str, training: str, rounds: int) -> dict[str, Any]:
    nodes = build_in_process(load(QUICKSTART, [
        f"data={data}", f"model={model}", f"training={training}", "graph={name: complete, nodes: 3}",
        "mapping={machines: 1, nodes_per_machine: 3}", f"node={{rounds: {rounds}, evaluate_every: {rounds}}}",
    ]))  # fmt: skip
    step_all(nodes)
    return nodes[0].figures()


@pytest.mark.slow
def test_an_lstm_learns_shakespeare(tmp_path: Path) -> None:
    write_shakespeare(tmp_path / "d")
    figures = figures_after_training(tmp_path, f"{{name: shakespeare, folder: {tmp_path / 'd'}, partition: by_key}}",
                      "{name: shakespeare_lstm, hidden: 16, layers: 1}",
                      "{batch_size: 10, local_epochs: 1, optimizer: {name: adam, lr: 0.02}}", 15)  # fmt: skip
    assert float(figures["accuracy_mean"]) > 0.6  # the most frequent character alone: .2


@pytest.mark.slow
def test_matrix_factorization_learns_ratings(tmp_path: Path) -> None:
    write_movielens(tmp_path / "d")
    data = f"{{name: movielens, folder: {tmp_path / 'd'}, partition: {{name: by_key, even: keys}}, test: own}}"
    figures = figures_after_training(tmp_path, data, "{name: matrix_factorization, factors: 4, spread: 0.5}",
                      "{batch_size: 4, local_epochs: 2, optimizer: {name: sgd, lr: 0.05}}", 60)  # fmt: skip
    assert float(figures["rmse_mean"]) < 1.0  # the mean rating alone: 1.75
