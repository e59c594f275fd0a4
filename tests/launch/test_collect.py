from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from decentnode.checkpoint import store
from decentnode.checkpoint.store import Cut, Snapshot
from decentnode.errors import EnvironmentFault, UsageError
from decentnode.launch.collecting import collect as module
from decentnode.launch.collecting.collect import Collected, collect
from decentnode.metrics.machines import differences, machines_of

RUN, OTHER = "0123456789abcdef", "fedcba9876543210"
PLACES = [{"uid": uid, "machine": uid // 2} for uid in range(6)]


def share(folder: Path, *uids: int, run: str | None = RUN, rounds: int = 3, **files: bytes) -> Path:
    """What a machine keeps of a run: for each node `rounds` records, a status of that time, and a model."""
    (folder / "models").mkdir(parents=True)
    (folder / "mapping.yaml").write_text(json.dumps(PLACES))
    for uid in uids:
        node(folder, uid, rounds, run)
        (folder / "models" / f"{uid:03d}.safetensors").write_bytes(b"model %d" % uid)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


def node(folder: Path, uid: int, rounds: int, run: str | None = RUN, doing: str = "finished") -> Path:
    place = folder / "nodes" / f"{uid:03d}"
    place.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"kind": "round", "round": r, "time": 100.0 * uid + r}) + "\n" for r in range(rounds)]
    (place / "metrics.jsonl").write_text("".join(lines))
    status: dict[str, Any] = {"uid": uid, "time": float(rounds), "doing": doing}
    (place / "status.json").write_text(json.dumps({**status, **({"run": run} if run else {})}))
    (place / "log.txt").write_text(f"{rounds}\n")
    return place


def content(folder: Path) -> dict[str, bytes]:
    """Every regular file, by its path; what collecting leaves behind would be among them."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def uids(found: Collected) -> list[list[int]]:
    return [each.uids for each in found.taken]


def test_nodes_come_together_and_what_is_missing_is_told(tmp_path: Path) -> None:
    run, other = share(tmp_path / "run", 0, 1), share(tmp_path / "copies" / "deep" / "other", 2, 3)
    share(tmp_path / "copies" / "stranger", 4, run=OTHER)
    before = content(run)
    found = collect(run, [tmp_path / "copies"])
    assert uids(found) == [[2, 3]] and found.missing == {2: [4, 5]} and found.left_out == []
    assert content(run) == {**before, **content(other)}
    assert found.taken[0].size == sum(len(data) for name, data in content(other).items() if name != "mapping.yaml")
    again = collect(run, [other, tmp_path / "copies", run])
    assert uids(again) == [[]] and again.taken[0].size == 0 and content(run) == {**before, **content(other)}


def test_the_first_machine_s_results_come_to_another_one_once(tmp_path: Path) -> None:
    run = share(tmp_path / "run", 2)
    first = share(tmp_path / "first", 0, summary__json=b"{}")
    (first / "models" / "merged.safetensors").write_bytes(b"merged")
    (first / "models" / "strange.safetensors").write_bytes(b"strange")
    assert collect(run, [first]).taken[0].whole == ["summary.json", "models/merged.safetensors"]
    assert content(run).keys() == {*content(first), *content(run)} - {"models/strange.safetensors"}
    (first / "summary.json").write_bytes(b"{} ")
    assert collect(run, [first]).taken[0].whole == [] and (run / "summary.json").read_bytes() == b"{}"


@pytest.mark.parametrize("run_id", [OTHER, None, 7, "../../etc", "0123456789ABCDEF"])
def test_a_folder_of_another_run_or_of_none_is_refused(tmp_path: Path, run_id: Any) -> None:
    run, other = share(tmp_path / "run", 0), share(tmp_path / "other", 2, run=run_id)
    share(tmp_path / "more", 3, run=OTHER)
    before = content(run)
    with pytest.raises(UsageError, match="belongs to another run" if run_id == OTHER else "has the run's id"):
        collect(run, [other])
    with pytest.raises(UsageError, match=r"no other folder of the run .*, but 2 of other runs"):
        collect(run, [tmp_path])
    with pytest.raises(UsageError, match="there is no folder"):
        collect(run, [tmp_path / "nowhere"])
    assert content(run) == before


def test_a_folder_with_the_nodes_of_two_runs_is_refused(tmp_path: Path) -> None:
    run, other = share(tmp_path / "run", 0), share(tmp_path / "other", 2)
    node(other, 3, 3, OTHER)
    for pair in ((run, other), (other, run)):
        with pytest.raises(UsageError, match=f"other must hold one run, got the nodes of {RUN}, {OTHER}"):
            collect(pair[0], [pair[1]])


def test_what_a_run_that_goes_on_added_replaces_what_was_there(tmp_path: Path) -> None:
    run, other = share(tmp_path / "run", 0), share(tmp_path / "other", 2, rounds=3)
    early = content(other)
    collect(run, [other])
    node(other, 2, 5)
    (other / "models" / "002.safetensors").write_bytes(b"a later model")
    assert uids(collect(run, [other])) == [[2]]
    assert {name: content(run)[name] for name in content(other)} == content(other)
    late = content(run)
    for name, data in early.items():  # the copy of an earlier moment
        (other / name).write_bytes(data)
    assert uids(collect(run, [other])) == [[]] and content(run) == late


def test_a_copy_of_half_a_line_is_completed(tmp_path: Path) -> None:
    run, other = share(tmp_path / "run", 0), share(tmp_path / "other", 2)
    metrics = Path("nodes/002/metrics.jsonl")
    whole = (other / metrics).read_bytes()
    (other / metrics).write_bytes(whole[:-9])
    collect(run, [other])
    (other / metrics).write_bytes(whole)
    assert uids(collect(run, [other])) == [[2]] and (run / metrics).read_bytes() == whole


@pytest.mark.parametrize("name", ["nodes/002/metrics.jsonl", "nodes/002/events.jsonl", "models/002.safetensors"])
@pytest.mark.parametrize("both_new", [False, True])
def test_other_records_of_a_node_are_refused_before_anything_is_copied(
    tmp_path: Path, name: str, both_new: bool
) -> None:
    run, one = share(tmp_path / "run", 0), share(tmp_path / "one", 2)
    two = share(tmp_path / "two", 2, 3)
    for folder, data in ((one, b"one\n"), (two, b"two, longer\n")):
        (folder / name).write_bytes(data)
    if not both_new:
        collect(run, [one])
    before = content(run)
    with pytest.raises(UsageError, match=rf"nothing was copied(.|\n)*node 2: {name} in .*two differs from the one in"):
        collect(run, [one, two] if both_new else [two])
    assert content(run) == before


def test_no_link_is_followed_and_no_name_leads_elsewhere(tmp_path: Path) -> None:
    run, other = share(tmp_path / "run", 0), share(tmp_path / "other", 2)
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_bytes(b"secret")
    place = other / "nodes" / "002"
    (place / "events.jsonl").symlink_to(secret / "key")
    (place / "dumps").symlink_to(secret)
    os.mkfifo(place / "stderr.txt")
    (other / "nodes" / "003").symlink_to(secret)
    (other / "models" / "ema").symlink_to(secret)
    (other / "summary.json").symlink_to(secret / "key")
    (place / "supervisor.json").write_text("{}")
    (place / ".metrics.jsonl.17.abcdef").write_text("half")
    for name in ("x04", "4", "0005"):
        (other / "nodes" / name).mkdir()
        (other / "nodes" / name / "metrics.jsonl").write_bytes(b"{}\n")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "run").symlink_to(share(tmp_path / "behind", 4))
    found = collect(run, [other])
    assert uids(found) == [[2]]
    assert [line.split(":")[0].removeprefix(f"{other}/nodes/002/") for line in found.left_out] == [
        "dumps", "events.jsonl", "stderr.txt"]  # fmt: skip
    assert names(run / "nodes" / "002") == ["log.txt", "metrics.jsonl", "status.json"]
    assert names(run / "nodes") == ["000", "002"]
    assert b"secret" not in content(run).values() and not any(path.is_symlink() for path in run.rglob("*"))
    with pytest.raises(UsageError, match="no other folder"):
        collect(run, [tmp_path / "links"])


def checkpoint(folder: Path, uid: int, run: str = RUN, round: int = 2) -> Path:
    cut = Cut(run, round, 1, "", (0, 2))
    store.write(folder / "checkpoints", Snapshot(uid, cut, {}, {}, {"x": torch.ones(3)}))
    return folder / "checkpoints" / cut.folder / f"{uid:03d}.json"


def test_whole_checkpoints_of_the_run_come_along(tmp_path: Path) -> None:
    run, other = share(tmp_path / "run", 0), share(tmp_path / "other", 2)
    good = checkpoint(other, 2)
    checkpoint(other, 2, OTHER, 3)
    checkpoint(other, 2, round=4).with_suffix(".safetensors").write_bytes(b"torn")
    checkpoint(other, 2, round=5).with_suffix(".safetensors").unlink()
    (other / "checkpoints" / "elsewhere").symlink_to(good.parent)
    store.mark_best(other / "checkpoints", 2, Cut(RUN, 2, 1, "", (0, 2)), "loss", 0.5)
    found = collect(run, [other])
    (kept,) = store.scan([run / "checkpoints"], 2)[0]
    assert torch.equal(kept.load()["x"], torch.ones(3)) and kept.cut.run == RUN
    assert store.read_best(run / "checkpoints", 2) == store.read_best(other / "checkpoints", 2)
    assert [sum(part in line for line in found.left_out) for part in (
        "another run, time or node", "must have", "is missing", good.parent.name)] == [1, 1, 1, 0]  # fmt: skip
    assert names(run / "checkpoints") == [good.parent.name, "best-002.json"]
    assert uids(collect(run, [other])) == [[]]


def test_a_disk_that_refuses_leaves_no_half_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = share(tmp_path / "run", 0), share(tmp_path / "other", 2, 3)
    copied = module._Copy._copy_bytes
    left = [5]

    def full(self: Any, *given: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return copied(self, *given)

    monkeypatch.setattr(module._Copy, "_copy_bytes", full)
    with pytest.raises(EnvironmentFault, match="No space left"):
        collect(run, [other])
    assert names(run / "nodes") == ["000", "002"]
    assert not list(run.glob(".collect*"))
    left[0] = 100
    assert uids(collect(run, [other])) == [[3]] and content(run).items() >= content(other).items()


def environment(machine: int, torch: str = "2.13.0", source: str = "aaaa") -> bytes:
    return json.dumps({"machine": machine, "host": f"host-{machine}", "time": f"t{machine}", "source": source,
                       "versions": {"decentnode": "0.1.0", "torch": torch}}).encode()  # fmt: skip


def test_what_other_machines_ran_on_comes_along_under_their_numbers(tmp_path: Path) -> None:
    commit = "5" * 40
    run = share(tmp_path / "run", 0, env__json=environment(0), git__txt=f"repo {commit}\n".encode())
    files = {"env__json": environment(1, "2.12.0"), "git__txt": f"repo {commit} (changed)\n M a.py\n".encode(),
             "git__diff": b"+ a\n", "command__txt": b"decentnode launch\n"}  # fmt: skip
    second = share(tmp_path / "second", 2, **files)
    newcomer = share(tmp_path / "newcomer", 7, env__json=environment(4))
    own = (run / "env.json").read_bytes()
    taken = collect(run, [second, newcomer]).taken
    assert [each.machines for each in taken] == [[1], [4]], "machine 2 is the mapping's last: node 7 is the second more"
    assert (run / "env.json").read_bytes() == own
    for name in ("env.json", "git.txt", "git.diff", "command.txt"):
        assert (run / "machines" / "1" / name).read_bytes() == (second / name).read_bytes()
    assert names(run / "machines" / "4") == ["env.json"]
    found = machines_of(run)
    assert [each.number for each in found] == [0, 1, 4] and found[1].environment["host"] == "host-1"
    told = differences(found)
    assert told[0] == "torch: 2.13.0 on machine 0, 4; 2.12.0 on machine 1"
    assert told[1].startswith(f"git commit: {commit[:12]} on machine 0; {commit[:12]} with changes ")
    assert "; unknown on machine 4" in told[1] and len(told) == 2
    again = collect(run, [second, newcomer]).taken
    assert [each.machines for each in again] == [[], []] and again[0].size == 0
    third = share(tmp_path / "third", 4, env__json=environment(2))
    assert collect(third, [run]).taken[0].machines == [0, 1, 4], "and what the other folder collected itself"


def test_changes_of_the_same_commit_are_told_apart(tmp_path: Path) -> None:
    git = f"repo {'5' * 40} (changed)\n M a.py\n".encode()
    run = share(tmp_path / "run", 0, env__json=environment(0), git__txt=git, git__diff=b"+ a\n")
    same = share(tmp_path / "same", 2, env__json=environment(1), git__txt=git, git__diff=b"+ a\n")
    other = share(tmp_path / "other", 4, env__json=environment(2), git__txt=git, git__diff=b"+ b\n")
    collect(run, [same])
    assert differences(machines_of(run)) == []
    collect(run, [other])
    (told,) = differences(machines_of(run))
    assert "with changes" in told and "on machine 0-1; " in told and told.endswith("on machine 2")


@pytest.mark.parametrize("content", [
    b"", b"[]", b'{"versions": 7, "machine": "x", "modules": []}', b"{" * 10000, b"\xff",
])  # fmt: skip
def test_nothing_in_another_machine_s_environment_is_trusted(tmp_path: Path, content: bytes) -> None:
    run = share(tmp_path / "run", 0, env__json=environment(0))
    collect(run, [share(tmp_path / "other", 2, env__json=content)])
    assert all(each.number in (0, 1) for each in machines_of(run)) and isinstance(differences(machines_of(run)), list)


def test_a_link_in_place_of_an_environment_is_not_followed(tmp_path: Path) -> None:
    run, other = share(tmp_path / "run", 0, env__json=environment(0)), share(tmp_path / "other", 2)
    (tmp_path / "secret").write_text("{}")
    (other / "env.json").symlink_to(tmp_path / "secret")
    assert collect(run, [other]).taken[0].machines == [] and not (run / "machines").exists()


def test_a_folder_that_tells_no_run_says_what_to_do(tmp_path: Path) -> None:
    run, old = share(tmp_path / "run", 0), share(tmp_path / "old" / "other", 2, run=None)
    with pytest.raises(UsageError, match=rf"only this folder has by hand: cp -rn {old}/nodes {old}/models {run}/$"):
        collect(run, [old])
    with pytest.raises(UsageError, match=r"1 of other runs \(1 of them do not say their run: give one"):
        collect(run, [tmp_path / "old"])


def test_a_share_that_collected_others_stays_the_machine_that_it_says(tmp_path: Path) -> None:
    first = share(tmp_path / "first", 0, env__json=environment(0, "A"))
    second = share(tmp_path / "second", 2, env__json=environment(1, "B"))
    third = share(tmp_path / "third", 4, env__json=environment(2, "C"))
    collect(second, [first])  # its first node is machine 0's now
    collect(third, [second])
    assert {each.number: each.versions["torch"] for each in machines_of(third)} == {0: "A", 1: "B", 2: "C"}


def test_words_of_other_machines_reach_no_terminal_as_they_are(tmp_path: Path) -> None:
    run = share(tmp_path / "run", 0, env__json=environment(0))
    collect(run, [share(tmp_path / "other", 2, env__json=environment(1, "2\x1b[2J\n13\x07"))])
    (told,) = differences(machines_of(run))
    assert told == "torch: 2.13.0 on machine 0; 2?[2J?13? on machine 1"


def test_own_modules_are_compared_where_they_are_known(tmp_path: Path) -> None:
    known = {"modules": {"mine": {"sha256": "aa"}}}
    run = share(tmp_path / "run", 0, env__json=json.dumps({**json.loads(environment(0)), **known}).encode())
    newcomer = share(tmp_path / "newcomer", 7, env__json=environment(4))
    collect(run, [newcomer])
    assert differences(machines_of(run)) == []
    known["modules"]["mine"]["sha256"] = "bb"
    other = share(tmp_path / "other", 2, env__json=json.dumps({**json.loads(environment(1)), **known}).encode())
    collect(run, [other])
    (told,) = differences(machines_of(run))
    assert told.startswith("own modules: ") and "machine 4" not in told
