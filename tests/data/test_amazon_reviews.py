"""Reviews: both file formats, three tokenizers, and models that learn the ratings."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from decentnode.build import build_in_process, step_all
from decentnode.cli import main
from decentnode.data.tokens import FrequentWords, TransformersTokenizer, WordPiece
from decentnode.errors import DataError
from decentnode.experiment import load
from decentnode.samples import Rows

from .files import open_dataset, write_reviews

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
REVIEWS = {"name": "amazon_reviews", "folder": "d", "length": 9}
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "love", "##ly", "book", "##s", "!", ".", "awful", "un",
          "##aff", "##able", "cafe", "\u4e2d", "it", "'", "s"]  # fmt: skip
TEXTS = ["A lovely book!", "unaffable books.", "Caf\u00e9\u4e2d, it's", "awful\tx\u0000y \u00a0 lovelyawful", "", "  ",
         "a" * 120, "books" * 30, "\ufffd \u200d a\u0301 $a^b`", "LOVELY \u0130\u00df"]  # fmt: skip
installed = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")


def write_vocabulary(folder: Path) -> Path:
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    return folder / "vocab.txt"


class MeanOfWords(nn.Module):
    """Classifies by the mean embedding of the tokens that are not padding."""

    def __init__(self, vocabulary: int, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, num_classes, padding_idx=0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens).sum(1) / (tokens != 0).sum(1, keepdim=True)


@pytest.mark.parametrize("lines", [False, True], ids=["csv", "jsonl"])
def test_reviews_are_read_from_csv_and_json_lines(tmp_path: Path, lines: bool) -> None:
    write_reviews(tmp_path / "d", lines=lines)
    data = open_dataset(REVIEWS, tmp_path)
    total = data.num_train() + data.num_test()
    assert total == 80 and (data.num_train() == 60 or lines) and set(np.unique(data.train_targets())) <= {0, 2, 4}  # type: ignore[arg-type]
    assert len(np.unique(data.train_keys())) == 4 and data.spec.padding == 0 and data.spec.num_classes == 5  # type: ignore[arg-type]
    some = data.train(np.arange(10))
    assert isinstance(some.inputs, Rows) and isinstance(some.inputs.values, np.memmap), "nothing is copied"
    assert len(some.inputs.lengths) == 10 and some.inputs.longest <= 9  # type: ignore[arg-type]
    other = open_dataset({**REVIEWS, "split_seed": 3}, tmp_path)
    assert (other.num_train() == data.num_train()) != lines or not np.array_equal(other.train_keys(), data.train_keys())  # type: ignore[arg-type]


def test_the_vocabulary_is_counted_in_training_reviews_only(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for split, text in (("train", "Good, good book"), ("test", "other")):
        (tmp_path / "d" / split).mkdir()
        (tmp_path / "d" / split / "me.csv").write_text(f'text,rating\n"{text}",5\n')
    data = open_dataset(REVIEWS, tmp_path)
    inputs = data.train(np.array([0])).inputs
    assert isinstance(inputs, Rows) and inputs.padded().tolist() == [[2, 3, 2, 4]]  # good , good book
    tested = data.test().inputs
    assert isinstance(tested, Rows) and tested.padded().tolist() == [[1]] and data.spec.vocabulary == 5
    assert FrequentWords(["b a a"], 3).encode("a b", 9) == [2, 1] and FrequentWords(["a"], 9).encode("", 9) == [1]


def test_wordpiece_tokenization(tmp_path: Path) -> None:
    pieces = WordPiece(write_vocabulary(tmp_path))
    number = {piece: index for index, piece in enumerate(PIECES)}

    def encode(text: str, most: int = 99) -> list[str]:
        return [PIECES[each] for each in pieces.encode(text, most)]

    assert encode("A lovely book!") == ["[CLS]", "a", "love", "##ly", "book", "!", "[SEP]"]
    assert encode("unaffable BOOKS") == ["[CLS]", "un", "##aff", "##able", "book", "##s", "[SEP]"]
    assert encode("caf\u00e9\u4e2d") == ["[CLS]", "cafe", "\u4e2d", "[SEP]"] and encode("") == ["[CLS]", "[SEP]"]
    assert encode("lovelyx it's") == ["[CLS]", "[UNK]", "it", "'", "s", "[SEP]"]
    assert encode("a a a a", 4) == ["[CLS]", "a", "a", "[SEP]"] and encode("unaffable", 3) == ["[CLS]", "un", "[SEP]"]
    assert encode("a" * 101) == ["[CLS]", "[UNK]", "[SEP]"]
    assert (pieces.size, pieces.padding) == (len(PIECES), number["[PAD]"])
    (tmp_path / "vocab.txt").write_text("[PAD]\na\n")
    with pytest.raises(DataError, match=r"must have a piece in each line, \[UNK\], \[CLS\], \[SEP\] among them"):
        WordPiece(tmp_path / "vocab.txt")


@installed
def test_wordpiece_tokens_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers import BertTokenizer

    theirs, ours = BertTokenizer(vocab=str(write_vocabulary(tmp_path))), WordPiece(tmp_path / "vocab.txt")
    for text in TEXTS:
        for most in (4, 64):
            assert ours.encode(text, most) == theirs(text, truncation=True, max_length=most)["input_ids"], text
    theirs.save_pretrained(tmp_path / "saved")
    found = TransformersTokenizer(str(tmp_path / "saved"))
    assert found.encode("A lovely book!", 64) == ours.encode("A lovely book!", 64)
    assert (found.size, found.padding) == (ours.size, ours.padding)


@installed
def test_bert_learns_the_ratings_of_reviews(tmp_path: Path) -> None:
    nodes = run_on_reviews(tmp_path, "model={name: 'hf:bert', arguments: {hidden_size: 16, num_hidden_layers: 1, "
                  "num_attention_heads: 2, intermediate_size: 16}}", "node={rounds: 12, evaluate_every: 0}")
    assert float(nodes[0].figures()["accuracy_merged"]) > 0.8


def test_a_missing_tokenizer_is_an_error(tmp_path: Path) -> None:
    write_reviews(tmp_path / "d")
    has = importlib.util.find_spec("transformers") is not None
    missing = "neither in the local cache" if has else "needs the package transformers"
    with pytest.raises(DataError, match=missing):
        open_dataset({**REVIEWS, "tokenizer": str(tmp_path / "none")}, tmp_path)


def run_on_reviews(folder: Path, *overrides: str) -> list[Any]:
    write_reviews(folder / "d", users=4)
    experiment = load(QUICKSTART, [
        "graph={name: ring, nodes: 4}", "mapping={machines: 1, nodes_per_machine: 4}", "communication=inproc",
        f"data={{name: amazon_reviews, folder: {folder / 'd'}, partition: {{name: by_key}}}}",
        "training={batch_size: 5, local_steps: 3, optimizer: {name: adam, lr: 0.02}}", *overrides,
    ])  # fmt: skip
    nodes = build_in_process(experiment)
    step_all(nodes)
    return nodes


@pytest.mark.slow
def test_a_custom_model_learns_the_ratings_of_reviews(tmp_path: Path) -> None:
    """No rating is that of more than half of the reviews, so a constant prediction is below 0.9."""
    model = "model={name: 'tests.data.test_amazon_reviews:MeanOfWords'}"
    nodes = run_on_reviews(tmp_path, model, "node={rounds: 20, evaluate_every: 0}")
    assert float(nodes[0].figures()["accuracy_merged"]) > 0.9


def test_batches_of_reviews_are_padded(tmp_path: Path) -> None:
    seen: list[Tensor] = []
    nodes = run_on_reviews(tmp_path, "model={name: 'tests.data.test_amazon_reviews:MeanOfWords'}", "node={rounds: 0}")
    nodes[0].training.model.module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    nodes[0].training.local_update(0)
    assert all(each.dtype == torch.int64 and (each[:, 0] != 0).all() for each in seen)
    assert any((each == 0).any() for each in seen)


@pytest.mark.parametrize("name, text, problem", [
    ("a.csv", "text,rating\nx,6\n", r"a\.csv:2: a rating must be 1 to 5 stars, got '6'"),
    ("a.csv", "text,rating\nx,2.5\n", "a rating must be 1 to 5 stars, got '2.5'"),
    ("a.csv", "text,rating\nx,nan\n", "a rating must be 1 to 5 stars"),
    ("a.csv", "words,rating\nx,5\n", r"a\.csv:2: must have one of data_path, reviewText, text, got words, rating"),
    ("a.csv", "rating,text\n5\n", "a review must be a text, got None"),
    ("a.jsonl", "[1]\n", r"a\.jsonl:1: must be an object, got list"),
    ("a.jsonl", '{"text": "x", "rating": true}\n', "a rating must be 1 to 5 stars, got True"),
    ("a.jsonl", '{"text": 3, "rating": 3}\n', "a review must be a text, got 3"),
    ("a.jsonl", "{\n", "cannot be read as lines of JSON"),
    ("a.jsonl", "\n\n", "no review for the train samples in 1 files"),
    ("a.txt", "x", "train: no such folder; expected reviews .*amazon-reviews-2023"),
])
def test_malformed_reviews_are_refused(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / name).write_text(text)
    with pytest.raises(DataError, match=problem):
        open_dataset(REVIEWS, tmp_path)


def test_options_that_exclude_each_other_are_refused(tmp_path: Path) -> None:
    both = {"vocabulary": "v.txt", "tokenizer": "x"}
    for keys, problem in ((both, "got both"), ({"folder": None}, "must have folder")):
        with pytest.raises(pydantic.ValidationError, match=problem):
            open_dataset({**REVIEWS, **keys}, tmp_path)
    write_reviews(tmp_path / "d")
    with pytest.raises(DataError, match=r"data\.vocabulary or data\.tokenizer must be given where each node"):
        open_dataset(REVIEWS, tmp_path).check_private()


def test_data_prepare_and_data_info_on_reviews(tmp_path: Path) -> None:
    write_reviews(tmp_path / "d")
    found = CliRunner().invoke(main, ["data", "prepare", "amazon_reviews", "--from", str(tmp_path / "d")])
    assert found.exit_code == 0 and "60 training samples, 20 test samples" in found.output, found.output
    (tmp_path / "a.yaml").write_text(
        f"graph: {{name: ring, nodes: 2}}\ndata: {{name: amazon_reviews, folder: {tmp_path / 'd'}}}\ntraining: {{}}\n"
        "model: {name: 'tests.data.test_amazon_reviews:MeanOfWords'}\n")  # fmt: skip
    info = CliRunner().invoke(main, ["data", "info", str(tmp_path / "a.yaml"), "--json"])
    assert info.exit_code == 0 and sum(json.loads(info.output)["nodes"][0]["classes"]) == 30, info.output
