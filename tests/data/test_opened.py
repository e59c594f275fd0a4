"""The training and test samples of each node, for shared, sharded, own and private data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decentnode.config.component import Config, load_class
from decentnode.data import DATASETS
from decentnode.data.base import Partition
from decentnode.data.opened import OpenedData
from decentnode.errors import DataError
from decentnode.samples import Samples

from . import files


def open_data(folder: Path, machines: list[int], seed: int = 1, /, **section: Any) -> OpenedData:
    config = load_class(section["name"], DATASETS, "data").Config.model_validate(section)
    return OpenedData(config, DATASETS, folder, machines, seed)


def arrays_of(samples: Any) -> tuple[np.ndarray, np.ndarray]:
    assert isinstance(samples, Samples) and isinstance(samples.inputs, np.ndarray)
    return samples.inputs, np.asarray(samples.targets)


def open_digits(nodes: int = 4, **keys: Any) -> OpenedData:
    return open_data(Path(), [0] * nodes, name="digits", **keys)


def test_all_nodes_share_the_global_test_set() -> None:
    found = [open_digits().of(uid) for uid in range(4)]
    assert all(each.shared_test and not each.pooled and len(each.test) == 360 and each.own is None for each in found)


def test_shards_of_the_test_set_contain_every_sample_once() -> None:
    data = open_digits(shard_test=True)
    found = [data.of(uid) for uid in range(4)]
    assert data.sharded and all(each.pooled and not each.shared_test for each in found)
    whole = arrays_of(data.dataset().test())[0]
    parts = np.concatenate([arrays_of(each.test)[0] for each in found])
    assert np.array_equal(np.sort(parts.reshape(360, -1), 0), np.sort(whole.reshape(360, -1), 0))
    assert np.array_equal(arrays_of(found[1].test)[0], whole[1::4])


def test_sample_test_draws_the_same_samples_for_all_nodes_and_seeds() -> None:
    found = [open_digits(sample_test=50).of(uid) for uid in range(4)]
    assert all(each.shared_test and len(each.test) == 50 for each in found)
    config = load_class("digits", DATASETS, "data").Config.model_validate({"sample_test": 50})
    other = OpenedData(config, DATASETS, Path(), [0] * 4, 99).of(1)
    assert all(np.array_equal(arrays_of(each.test)[0], arrays_of(other.test)[0]) for each in found), "whatever the seed"
    whole = arrays_of(open_digits().dataset().test())[0].reshape(360, -1)
    drawn = arrays_of(other.test)[0].reshape(50, -1)
    at = [int(np.flatnonzero((whole == row).all(1))[0]) for row in drawn]
    assert at == sorted(at) and len(set(at)) == 50 and max(at) > 300


def test_shards_of_sampled_tests_contain_every_sampled_test_once() -> None:
    parts = [open_digits(sample_test=50, shard_test=True).of(uid) for uid in range(4)]
    assert [len(each.test) for each in parts] == [13, 13, 12, 12] and all(each.pooled for each in parts)
    whole = arrays_of(open_digits(sample_test=50).of(0).test)[0]
    assert all(np.array_equal(arrays_of(each.test)[0], whole[uid::4]) for uid, each in enumerate(parts))


def test_invalid_sample_test_is_refused() -> None:
    with pytest.raises(DataError, match="sample_test must be at most the 360 test samples, got 361"):
        open_digits(sample_test=361).check()
    with pytest.raises(DataError, match="sample_test draws from the global test set"):
        open_digits(sample_test=5, test="own").check()
    assert len(open_digits(sample_test=5, test="both").of(0).own or []) > 5


def test_own_test_samples_have_the_label_distribution_of_the_training_samples() -> None:
    data = open_digits(test="own", partition={"name": "dirichlet", "alpha": 0.1})
    found = [data.of(uid) for uid in range(4)]
    assert sum(len(each.test) for each in found) == 360 and not any(each.shared_test for each in found)
    for each in found:
        train, test = (np.bincount(arrays_of(part)[1], minlength=10) / len(part) for part in (each.train, each.test))
        assert np.abs(train - test).sum() < 0.3
    own, again = (arrays_of(open_digits(test="own").of(2).test)[1] for _ in range(2))
    assert np.array_equal(own, again)


def test_test_both_gives_the_global_and_an_own_test_set() -> None:
    found = open_digits(test="both", partition={"name": "shards"}).of(3)
    assert found.shared_test and len(found.test) == 360 and found.own is not None and 0 < len(found.own) < 200


def test_own_test_samples_have_the_keys_of_the_training_samples(tmp_path: Path) -> None:
    inputs, targets = files.make_samples(40)
    owners = np.arange(40) % 8
    np.savez(tmp_path / "d.npz", train_inputs=inputs, train_targets=targets, test_inputs=inputs[:16],
             test_targets=targets[:16], owner=owners, test_owner=owners[:16])  # fmt: skip
    data = open_data(tmp_path, [0, 0], name="npz", file="d.npz", train_keys="owner", test_keys="test_owner", test="own",
                  partition="by_key")  # fmt: skip
    shares = data.shares()
    for uid in range(2):
        mine = np.flatnonzero(np.isin(owners[:16], owners[shares[uid]]))
        assert np.array_equal(arrays_of(data.of(uid).test)[0], inputs[mine])


def write_private_files(folder: Path, names: list[str], targets: np.ndarray | None = None) -> None:
    for number, name in enumerate(names):
        draw = np.random.default_rng(number)
        y = draw.integers(0, 3, 12) if targets is None else targets
        inputs = draw.normal(size=(16, 2))
        np.savez(folder / name, train_inputs=inputs[:12], train_targets=y, test_inputs=inputs[12:], test_targets=y[:4])


def test_private_files_are_read_by_their_owners_only(tmp_path: Path) -> None:
    write_private_files(tmp_path, ["p0.npz", "p2.npz"])  # node 1's file is on another machine
    data = open_data(tmp_path, [0, 1, 0], name="npz", file="p{uid}.npz", num_classes=3)
    data.check()
    assert data.private and data.test == "own"
    assert {uid: len(part) for uid, part in data.shares().items()} == {0: 12, 2: 12}
    with np.load(tmp_path / "p2.npz") as stored:
        mine = data.of(2)
        assert np.array_equal(arrays_of(mine.train)[0], stored["train_inputs"].astype(np.float32))
        assert np.array_equal(arrays_of(mine.test)[1], stored["test_targets"]) and not mine.shared_test
    with pytest.raises(DataError, match=r"p1\.npz: no such file"):
        data.of(1)
    assert data.spec.num_classes == 3
    assert data.private_problems([0, 2]) == []
    with pytest.raises(DataError, match=r"^data: node 1: .*p1\.npz: no such file; expected a \.npz file"):
        data.check_private_files(range(3))


def test_the_list_of_missing_private_files_is_bounded(tmp_path: Path) -> None:
    write_private_files(tmp_path, ["p4.npz"])
    (tmp_path / "p9.npz").write_bytes(b"no archive")
    by_node: dict[str, Any] = {"name": "npz", "file": "p{uid}.npz", "num_classes": 3}
    by_machine: dict[str, Any] = {"name": "npz", "file": "p{machine}.npz", "num_classes": 3}
    problems = open_data(tmp_path, [0] * 10, **by_node).private_problems(range(10))
    assert [each.split(":")[0] for each in problems] == [
        "node 0", "node 1", "node 2", "node 3", "node 5", "and 4 more of this kind"]  # fmt: skip
    problems = open_data(tmp_path, [4, 4, 9], **by_machine).private_problems(range(3))
    assert len(problems) == 1 and problems[0].startswith("node 2: ") and "p9.npz" in problems[0]
    problems = open_data(tmp_path, [4, 4, 5, 5], **by_machine).private_problems([2, 3])
    assert len(problems) == 1 and problems[0].startswith("nodes 2, 3: ")


def test_nodes_of_a_machine_split_its_files(tmp_path: Path) -> None:
    write_private_files(tmp_path, ["m0.npz", "m1.npz"])
    data = open_data(tmp_path, [0, 0, 1, 1], name="npz", file="m{machine}.npz", num_classes=3)
    shares = data.shares()
    for pair in ((0, 1), (2, 3)):
        assert sorted(np.concatenate([shares[uid] for uid in pair])) == list(range(12))
        assert sum(len(data.of(uid).test) for uid in pair) == 4
    assert not np.array_equal(arrays_of(data.of(0).train)[0], arrays_of(data.of(2).train)[0])


@pytest.mark.parametrize(("keys", "text"), [
    ({"test": "global", "num_classes": 3}, "data.test must be own where each node has private files, got global"),
    ({}, "data.num_classes must be given where each node has private files"),
])  # fmt: skip
def test_options_that_private_files_exclude_are_refused(tmp_path: Path, keys: dict[str, Any], text: str) -> None:
    write_private_files(tmp_path, ["p0.npz"])
    with pytest.raises(DataError, match=text):
        open_data(tmp_path, [0], name="npz", file="p{uid}.npz", **keys).check()


def test_data_without_classes_allows_only_partitions_by_number(tmp_path: Path) -> None:
    write_private_files(tmp_path, ["r.npz"], np.linspace(0, 1, 12))
    data = open_data(tmp_path, [0, 0], name="npz", file="r.npz", test="own")
    assert data.spec.task == "regression" and data.spec.num_classes is None
    assert [len(part) for part in data.shares().values()] == [6, 6]
    assert [len(data.of(uid).test) for uid in range(2)] == [2, 2]
    assert arrays_of(data.of(0).train)[1].dtype == np.float32
    for partition in ("shards", {"name": "only_local", "within": "shards"}):
        with pytest.raises(DataError, match=r"shards deals by classes, .*; use iid, fractions or ordered"):
            open_data(tmp_path, [0, 0], name="npz", file="r.npz", partition=partition).shares()
    for partition in ("iid", "fractions", "ordered"):
        assert [len(part) for part in open_data(tmp_path, [0, 0], name="npz", file="r.npz",
                                             partition=partition).shares().values()] == [6, 6]  # fmt: skip
    with np.load(tmp_path / "r.npz") as stored:
        np.savez(tmp_path / "k.npz", **stored, owner=np.arange(12))
    with pytest.raises(DataError, match="use iid, fractions, ordered or by_key"):
        open_data(tmp_path, [0, 0], name="npz", file="k.npz", train_keys="owner", partition="shards").shares()


def test_movielens_refuses_private_folders(tmp_path: Path) -> None:
    for uid in range(2):
        files.write_movielens(tmp_path / f"m{uid}")
    with pytest.raises(DataError, match=r"data\.folder must be the same for all nodes"):
        open_data(tmp_path, [0, 0], name="movielens", folder="m{uid}", cache="cache").check()


class Given(Partition):
    """A partition of a user, which returns what a test sets."""

    parts: Any = None

    def __init__(self, config: Config) -> None:
        pass

    def split(self, targets: np.ndarray, num_nodes: int, generator: object, keys: object = None) -> Any:
        return self.parts


def deal_as_given(parts: Any, monkeypatch: pytest.MonkeyPatch) -> dict[int, np.ndarray]:
    monkeypatch.setattr(Given, "parts", parts)
    return open_digits(2, partition={"name": f"{__name__}:Given"}).shares()


def test_a_partition_may_return_plain_lists_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = deal_as_given([[9, 2, 4], (3, 1)], monkeypatch)
    assert {uid: list(part) for uid, part in shares.items()} == {0: [2, 4, 9], 1: [1, 3]}
    assert all(part.dtype == np.int64 for part in shares.values())


@pytest.mark.parametrize("parts, message", [
    (None, "Given must return a list of arrays of indices, got NoneType"),
    ([[1, 2]], "Given must return one array of indices for each of 2 nodes, got 1"),
    ([[1, 2], []], "Given gave node 1 no training sample"),
    ([[1, 2], [0.5]], r"must return lists of integers, got float64 \(1,\) for node 1"),
    ([[-1, 2], [0]], r"must return indices in 0\.\.1436, got -1\.\.2 for node 0"),
    ([[1, 2], [1437]], r"must return indices in 0\.\.1436, got 1437\.\.1437 for node 1"),
])  # fmt: skip
def test_wrong_parts_are_refused(parts: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=message):
        deal_as_given(parts, monkeypatch)
