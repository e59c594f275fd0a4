"""Checkpoints on disk: writing, finding and removing them, damaged ones, and agreement on the one to resume from."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decentnode import system
from decentnode.checkpoint import agreement, store
from decentnode.checkpoint.store import Cut, Snapshot
from decentnode.checkpoint.writer import Writer
from decentnode.errors import CheckpointError


def make_cut(round: int, generation: int = 0, members: tuple[int, ...] = (0, 1, 2), run: str = "ab") -> Cut:
    return Cut(run, round, generation, "00" * 12, members)


def make_snapshot(uid: int, at: Cut, value: float = 1.0) -> Snapshot:
    tree = {"part": {"x": {"#": ["tensor", "part.x"]}, "pairs": {"#": ["tuple", [1, 2]]}, "third": 1 / 3}}
    return Snapshot(uid, at, {"seed": 1}, tree, {"part.x": torch.full((5,), value)})


def test_written_checkpoints_are_found_newest_first(tmp_path: Path) -> None:
    for round in (20, 40):
        for uid in range(3):
            assert store.write(tmp_path, make_snapshot(uid, make_cut(round), round)) > 20
    found, problems = store.scan([tmp_path], 1)
    assert [checkpoint.cut.round for checkpoint in found] == [40, 20] and not problems
    assert found[0].config == {"seed": 1} and torch.equal(found[0].load()["part.x"], torch.full((5,), 40.0))
    assert found[0].tree == json.loads(json.dumps(make_snapshot(1, make_cut(40)).tree))
    assert store.scan([tmp_path / "none"], 1) == ([], [])


def test_only_checkpoints_of_the_requested_runs_are_found(tmp_path: Path) -> None:
    for run in ("ab", "cd"):
        store.write(tmp_path / run, make_snapshot(0, make_cut(20, run=run)))
    folders = [tmp_path / "ab", tmp_path / "cd"]
    assert [checkpoint.cut.run for checkpoint in store.scan(folders, 0, {"cd"})[0]] == ["cd"]
    assert len(store.scan(folders, 0)[0]) == 2


def test_checkpoints_of_the_same_round_in_two_generations_are_different(tmp_path: Path) -> None:
    """A round may be completed in two generations; the checkpoint of the later generation is newer."""
    cuts = [make_cut(20), make_cut(20, 1, (0, 2)), replace(make_cut(20, 1, (0, 2)), origin="11" * 12)]
    assert len({cut.key for cut in cuts}) == len({cut.folder for cut in cuts}) == 3
    for cut in cuts[:2]:
        store.write(tmp_path, make_snapshot(0, cut))
    assert [checkpoint.cut for checkpoint in store.scan([tmp_path], 0)[0]] == [cuts[1], cuts[0]]


def flip_bit(path: Path, index: int) -> None:
    data = bytearray(path.read_bytes())
    data[index] ^= 1
    path.write_bytes(data)


def test_damaged_and_incomplete_checkpoints_are_reported(tmp_path: Path) -> None:
    for round in (10, 20, 30, 40, 50):
        store.write(tmp_path, make_snapshot(0, make_cut(round)))
    folders = {round: tmp_path / make_cut(round).folder for round in (20, 30, 40, 50)}
    os.truncate(folders[50] / "000.safetensors", 10)
    flip_bit(folders[40] / "000.json", 60)
    (folders[30] / "000.json").unlink()
    flip_bit(folders[20] / "000.safetensors", -1)
    found, problems = store.scan([tmp_path], 0)
    assert [checkpoint.cut.round for checkpoint in found] == [20, 10]
    assert [word in line for word, line in zip(("partial", "damaged", "bytes"), problems, strict=True)] == [True] * 3
    assert all(str(tmp_path) in line for line in problems)
    with pytest.raises(CheckpointError, match="is damaged"):
        found[0].load()


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FORMAT", 99)
    store.write(tmp_path, make_snapshot(0, make_cut(10)))
    monkeypatch.undo()
    found, problems = store.scan([tmp_path], 0)
    assert not found and "has format 99" in problems[0]


def test_a_checkpoint_that_a_second_run_adopted_survives_its_removal_from_the_first(tmp_path: Path) -> None:
    store.write(tmp_path / "a", make_snapshot(0, make_cut(10), 3.0))
    (original,), _ = store.scan([tmp_path / "a"], 0)
    store.adopt(original, tmp_path / "b")
    store.adopt(original, tmp_path / "a")  # it is there already
    store.remove(tmp_path / "a", make_cut(10).folder, 0)
    (adopted,), _ = store.scan([tmp_path / "b"], 0)
    assert torch.equal(adopted.load()["part.x"], torch.full((5,), 3.0))
    assert not list((tmp_path / "a").iterdir())


def test_the_oldest_checkpoints_beyond_the_number_to_keep_are_surplus() -> None:
    cuts = [make_cut(round) for round in (30, 10, 40, 20)]
    assert {cut.round for cut in store.surplus(cuts, 2, ())} == {10, 20}
    assert {cut.round for cut in store.surplus(cuts, 1, {make_cut(20)})} == {10, 30}
    assert not store.surplus(cuts, 4, ())


def test_differences_between_two_configs_are_listed() -> None:
    before, now = {"a": 1, "b": [1, 2], "gone": True}, {"a": 1, "b": [1, 3], "new": "x"}
    lines = store.differences(before, now)
    assert lines == ["b: [1, 2] in the checkpoint, [1, 3] now", "gone: true in the checkpoint, null now",
                     'new: null in the checkpoint, "x" now']  # fmt: skip
    assert not store.differences(before, dict(before))


def test_the_writer_writes_snapshots_and_does_work_in_order(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for round in (10, 20, 30):
        assert writer.wait(10)
        writer.give(make_snapshot(0, make_cut(round), round))
    writer.do(lambda: store.remove(tmp_path, make_cut(10).folder, 0))
    assert writer.close(10)
    written = writer.results()
    assert [result.cut.round for result in written] == [10, 20, 30] and not writer.results()
    assert all(result.bytes > 0 and result.cpu_seconds > 0 and not result.problem for result in written)
    assert [checkpoint.cut.round for checkpoint in store.scan([tmp_path], 0)[0]] == [30, 20]
    writer.give(make_snapshot(0, make_cut(40)))  # a closed writer starts again
    assert writer.close(10) and len(writer.results()) == 1


def test_an_error_of_the_disk_is_reported_and_does_not_stop_the_writer(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    writer = Writer(tmp_path / "file")
    writer.give(make_snapshot(0, make_cut(10)))
    assert writer.wait(10) and writer.close(10)
    (written,) = writer.results()
    assert written.problem and written.bytes == 0


def test_no_file_is_left_of_a_checkpoint_for_which_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_full = iter([False, True])  # there is room for the tensors, but none for the manifest
    monkeypatch.setattr(system, "disk_full_checks", [lambda: next(is_full)])
    with pytest.raises(OSError, match="No space left"):
        store.write(tmp_path, make_snapshot(0, make_cut(10)))
    assert not list(tmp_path.iterdir())


def test_a_node_whose_write_fails_does_not_remove_the_folder_of_one_that_is_about_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = make_cut(10)

    def another_node_fails() -> bool:  # called before this node creates its file
        if checks.pop():
            store.remove(tmp_path, cut.folder, 1)
        return False

    checks = [False, False, True]
    monkeypatch.setattr(system, "disk_full_checks", [another_node_fails])
    store.write(tmp_path, make_snapshot(0, cut))
    assert len(store.scan([tmp_path], 0)[0]) == 1 and not checks


def gather_rows(cuts: dict[int, list[Cut]], nodes: int) -> list[list[int]]:
    """Returns the rows that every node gathers when each of them contributes the cuts that it has, by way of a mean."""
    total = sum(agreement.row(agreement.offers(own), uid, nodes, agreement.MAX_CUTS) for uid, own in cuts.items())
    return agreement.gathered(total / nodes, nodes)  # type: ignore[operator]


def agreed_round(cuts: dict[int, list[Cut]], nodes: int) -> int | None:
    """Returns the round on whose checkpoint nodes with these cuts agree."""
    rows = gather_rows(cuts, nodes)
    without = [uid for uid, row in enumerate(rows) if not any(row)]
    votes = []
    for uid in range(nodes):
        votes.append(agreement.row(agreement.vote(agreement.complete(cuts.get(uid, []), rows, without)), uid, nodes, 3))
    chosen = agreement.chosen(agreement.gathered(sum(votes) / nodes, nodes))  # type: ignore[operator]
    return None if chosen is None else chosen[0]


@pytest.mark.parametrize("nodes", [3, 7, 100])
def test_keys_of_cuts_are_exact_after_the_mean(nodes: int) -> None:
    cuts = {uid: [make_cut(round, members=tuple(range(nodes))) for round in range(uid % 5)] for uid in range(nodes)}
    for uid, row in enumerate(gather_rows(cuts, nodes)):
        assert row[: len(cuts[uid])] == [cut.key + 1 for cut in cuts[uid]] and not any(row[len(cuts[uid]) :])


def test_nodes_agree_on_the_newest_checkpoint_that_all_have() -> None:
    all_nodes = {uid: [make_cut(30), make_cut(20), make_cut(10)] for uid in range(3)}
    assert agreed_round(all_nodes, 3) == 30
    assert agreed_round({**all_nodes, 1: [make_cut(20), make_cut(10)]}, 3) == 20
    assert agreed_round({**all_nodes, 1: [make_cut(10)], 2: [make_cut(30)]}, 3) is None
    assert agreed_round({0: [], 1: [], 2: []}, 3) is None
    assert agreed_round({uid: [make_cut(0)] for uid in range(3)}, 3) == 0


def test_only_the_members_of_its_generation_need_to_have_a_checkpoint() -> None:
    later = make_cut(40, 1, (0, 2))
    cuts = {0: [later, make_cut(20)], 1: [make_cut(20)], 2: [later, make_cut(20)]}
    assert agreed_round(cuts, 3) == 40
    assert agreed_round({**cuts, 2: [make_cut(20)]}, 3) == 20


def test_a_node_without_any_checkpoint_does_not_prevent_agreement() -> None:
    assert agreed_round({0: [make_cut(30), make_cut(20)], 1: [], 2: [make_cut(30)]}, 3) == 30


def test_members_outside_the_mapping_do_not_prevent_agreement() -> None:
    """Newcomers are not present when a run is resumed, and have no row."""
    both = {uid: [make_cut(30, 1, (0, 1, 2, 4)), make_cut(20)] for uid in range(3)}
    assert agreed_round(both, 3) == 30
    both[1] = [make_cut(20)]
    assert agreed_round(both, 3) == 20


def test_the_folder_of_a_run_that_was_renamed_is_not_made_again(tmp_path: Path) -> None:
    """Else its checkpoints would be in a folder without the run's config, which cannot be resumed, and nobody is
    told."""
    (tmp_path / "run").mkdir()
    checkpoints = tmp_path / "run" / "checkpoints"
    store.write(checkpoints, make_snapshot(0, make_cut(5)))
    (tmp_path / "run").rename(tmp_path / "renamed")
    with pytest.raises(FileNotFoundError):
        store.write(checkpoints, make_snapshot(0, make_cut(10)))
    with pytest.raises(FileNotFoundError):
        store.mark_best(checkpoints, 0, make_cut(10), "accuracy_mean", 0.5)
    assert not (tmp_path / "run").exists()
