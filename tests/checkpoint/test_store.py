"""Checkpoints on the disk: whole or named as what they are, and no more of them than asked for."""

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


def cut(round: int, generation: int = 0, members: tuple[int, ...] = (0, 1, 2), run: str = "ab") -> Cut:
    return Cut(run, round, generation, "00" * 12, members)


def snapshot(uid: int, at: Cut, value: float = 1.0) -> Snapshot:
    tree = {"part": {"x": {"#": ["tensor", "part.x"]}, "pairs": {"#": ["tuple", [1, 2]]}, "third": 1 / 3}}
    return Snapshot(uid, at, {"seed": 1}, tree, {"part.x": torch.full((5,), value)})


def test_what_is_written_is_found(tmp_path: Path) -> None:
    for round in (20, 40):
        for uid in range(3):
            assert store.write(tmp_path, snapshot(uid, cut(round), round)) > 20
    found, problems = store.scan([tmp_path], 1)
    assert [each.cut.round for each in found] == [40, 20] and not problems
    assert found[0].config == {"seed": 1} and torch.equal(found[0].load()["part.x"], torch.full((5,), 40.0))
    assert found[0].tree == json.loads(json.dumps(snapshot(1, cut(40)).tree))
    assert store.scan([tmp_path / "none"], 1) == ([], [])


def test_runs_that_are_not_asked_for_do_not_count(tmp_path: Path) -> None:
    for run in ("ab", "cd"):
        store.write(tmp_path / run, snapshot(0, cut(20, run=run)))
    folders = [tmp_path / "ab", tmp_path / "cd"]
    assert [each.cut.run for each in store.scan(folders, 0, {"cd"})[0]] == ["cd"]
    assert len(store.scan(folders, 0)[0]) == 2


def test_generations_have_cuts_of_their_own(tmp_path: Path) -> None:
    """A round may be over in two generations; the later one is newer."""
    cuts = [cut(20), cut(20, 1, (0, 2)), replace(cut(20, 1, (0, 2)), origin="11" * 12)]
    assert len({each.key for each in cuts}) == len({each.folder for each in cuts}) == 3
    for each in cuts[:2]:
        store.write(tmp_path, snapshot(0, each))
    assert [each.cut for each in store.scan([tmp_path], 0)[0]] == [cuts[1], cuts[0]]


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_damaged_and_partial_ones_are_named(tmp_path: Path) -> None:
    for round in (10, 20, 30, 40, 50):
        store.write(tmp_path, snapshot(0, cut(round)))
    place = {round: tmp_path / cut(round).folder for round in (20, 30, 40, 50)}
    os.truncate(place[50] / "000.safetensors", 10)
    damage(place[40] / "000.json", 60)
    (place[30] / "000.json").unlink()
    damage(place[20] / "000.safetensors", -1)
    found, problems = store.scan([tmp_path], 0)
    assert [each.cut.round for each in found] == [20, 10]
    assert [word in line for word, line in zip(("partial", "damaged", "bytes"), problems, strict=True)] == [True] * 3
    assert all(str(tmp_path) in line for line in problems)
    with pytest.raises(CheckpointError, match="is damaged"):
        found[0].load()


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FORMAT", 99)
    store.write(tmp_path, snapshot(0, cut(10)))
    monkeypatch.undo()
    found, problems = store.scan([tmp_path], 0)
    assert not found and "has format 99" in problems[0]


def test_a_checkpoint_may_have_a_place_in_two_runs(tmp_path: Path) -> None:
    store.write(tmp_path / "a", snapshot(0, cut(10), 3.0))
    (one,), _ = store.scan([tmp_path / "a"], 0)
    store.adopt(one, tmp_path / "b")
    store.adopt(one, tmp_path / "a")  # where it is already
    store.remove(tmp_path / "a", cut(10).folder, 0)
    (other,), _ = store.scan([tmp_path / "b"], 0)
    assert torch.equal(other.load()["part.x"], torch.full((5,), 3.0))
    assert not list((tmp_path / "a").iterdir())


def test_those_that_are_not_needed() -> None:
    cuts = [cut(round) for round in (30, 10, 40, 20)]
    assert {each.round for each in store.surplus(cuts, 2, ())} == {10, 20}
    assert {each.round for each in store.surplus(cuts, 1, {cut(20)})} == {10, 30}
    assert not store.surplus(cuts, 4, ())


def test_keys_that_differ_are_named() -> None:
    before, now = {"a": 1, "b": [1, 2], "gone": True}, {"a": 1, "b": [1, 3], "new": "x"}
    lines = store.differences(before, now)
    assert lines == ["b: [1, 2] in the checkpoint, [1, 3] now", "gone: true in the checkpoint, null now",
                     'new: null in the checkpoint, "x" now']  # fmt: skip
    assert not store.differences(before, dict(before))


def test_the_writer_writes_in_its_turn(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for round in (10, 20, 30):
        assert writer.wait(10)
        writer.give(snapshot(0, cut(round), round))
    writer.do(lambda: store.remove(tmp_path, cut(10).folder, 0))
    assert writer.close(10)
    written = writer.results()
    assert [each.cut.round for each in written] == [10, 20, 30] and not writer.results()
    assert all(each.bytes > 0 and each.cpu_seconds > 0 and not each.problem for each in written)
    assert [each.cut.round for each in store.scan([tmp_path], 0)[0]] == [30, 20]
    writer.give(snapshot(0, cut(40)))  # after the end it begins anew
    assert writer.close(10) and len(writer.results()) == 1


def test_a_disk_that_refuses_is_told_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    writer = Writer(tmp_path / "file")
    writer.give(snapshot(0, cut(10)))
    assert writer.wait(10) and writer.close(10)
    (written,) = writer.results()
    assert written.problem and written.bytes == 0


def test_nothing_is_left_of_one_that_the_disk_had_no_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([False, True])  # there is room for the tensors, and none for the manifest
    monkeypatch.setattr(system, "disk_full_checks", [lambda: next(looks)])
    with pytest.raises(OSError, match="No space left"):
        store.write(tmp_path, snapshot(0, cut(10)))
    assert not list(tmp_path.iterdir())


def rows_of(cuts: dict[int, list[Cut]], nodes: int) -> list[list[int]]:
    """What nodes gather when each tells its own cuts."""
    total = sum(agreement.row(agreement.offers(own), uid, nodes, agreement.MOST_CUTS) for uid, own in cuts.items())
    return agreement.gathered(total / nodes, nodes)  # type: ignore[operator]


def agreed(cuts: dict[int, list[Cut]], nodes: int) -> int | None:
    rows = rows_of(cuts, nodes)
    without = [uid for uid, row in enumerate(rows) if not any(row)]
    votes = []
    for uid in range(nodes):
        votes.append(agreement.row(agreement.vote(agreement.complete(cuts.get(uid, []), rows, without)), uid, nodes, 3))
    found = agreement.chosen(agreement.gathered(sum(votes) / nodes, nodes))  # type: ignore[operator]
    return None if found is None else found[0]


@pytest.mark.parametrize("nodes", [3, 7, 100])
def test_numbers_survive_the_mean(nodes: int) -> None:
    cuts = {uid: [cut(round, members=tuple(range(nodes))) for round in range(uid % 5)] for uid in range(nodes)}
    for uid, row in enumerate(rows_of(cuts, nodes)):
        assert row[: len(cuts[uid])] == [each.key + 1 for each in cuts[uid]] and not any(row[len(cuts[uid]) :])


def test_the_newest_that_all_members_have() -> None:
    everybody = {uid: [cut(30), cut(20), cut(10)] for uid in range(3)}
    assert agreed(everybody, 3) == 30
    assert agreed({**everybody, 1: [cut(20), cut(10)]}, 3) == 20
    assert agreed({**everybody, 1: [cut(10)], 2: [cut(30)]}, 3) is None
    assert agreed({0: [], 1: [], 2: []}, 3) is None
    assert agreed({uid: [cut(0)] for uid in range(3)}, 3) == 0


def test_members_alone_have_to_have_it() -> None:
    later = cut(40, 1, (0, 2))
    cuts = {0: [later, cut(20)], 1: [cut(20)], 2: [later, cut(20)]}
    assert agreed(cuts, 3) == 40
    assert agreed({**cuts, 2: [cut(20)]}, 3) == 20


def test_who_has_nothing_holds_up_nobody() -> None:
    assert agreed({0: [cut(30), cut(20)], 1: [], 2: [cut(30)]}, 3) == 30


def test_members_that_were_in_no_mapping_hold_nobody_up() -> None:
    """They are not there as a run is resumed, and have no row."""
    both = {uid: [cut(30, 1, (0, 1, 2, 4)), cut(20)] for uid in range(3)}
    assert agreed(both, 3) == 30
    both[1] = [cut(20)]
    assert agreed(both, 3) == 20
