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


def make_folder(folder: Path, *uids: int, run: str | None = RUN, rounds: int = 3, **files: bytes) -> Path:
    """Writes the run folder of one machine: for each node `rounds` records, a status and a model. files: further files,
    with "__" for "." in their names."""
    (folder / "models").mkdir(parents=True)
    (folder / "mapping.yaml").write_text(json.dumps(PLACES))
    for uid in uids:
        write_node(folder, uid, rounds, run)
        (folder / "models" / f"{uid:03d}.safetensors").write_bytes(b"model %d" % uid)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


def write_node(folder: Path, uid: int, rounds: int, run: str | None = RUN, doing: str = "finished") -> Path:
    place = folder / "nodes" / f"{uid:03d}"
    place.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"kind": "round", "round": round, "time": 100.0 * uid + round}) + "\n"
             for round in range(rounds)]  # fmt: skip
    (place / "metrics.jsonl").write_text("".join(lines))
    status: dict[str, Any] = {"uid": uid, "time": float(rounds), "doing": doing}
    (place / "status.json").write_text(json.dumps({**status, **({"run": run} if run else {})}))
    (place / "log.txt").write_text(f"{rounds}\n")
    return place


def read_files(folder: Path) -> dict[str, bytes]:
    """Returns every regular file by its path, so that a forgotten temporary file is noticed."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def collected_uids(found: Collected) -> list[list[int]]:
    return [source.uids for source in found.taken]


def test_the_nodes_of_a_run_are_collected_and_missing_nodes_are_listed_by_machine(tmp_path: Path) -> None:
    run, other = make_folder(tmp_path / "run", 0, 1), make_folder(tmp_path / "copies" / "deep" / "other", 2, 3)
    make_folder(tmp_path / "copies" / "stranger", 4, run=OTHER)
    before = read_files(run)
    found = collect(run, [tmp_path / "copies"])
    assert collected_uids(found) == [[2, 3]] and found.missing == {2: [4, 5]} and found.left_out == []
    assert read_files(run) == {**before, **read_files(other)}
    assert found.taken[0].size == sum(len(data) for name, data in read_files(other).items() if name != "mapping.yaml")
    again = collect(run, [other, tmp_path / "copies", run])
    assert collected_uids(again) == [[]] and again.taken[0].size == 0
    assert read_files(run) == {**before, **read_files(other)}


def test_results_of_the_first_machine_are_collected_once_and_not_overwritten(tmp_path: Path) -> None:
    run = make_folder(tmp_path / "run", 2)
    first = make_folder(tmp_path / "first", 0, summary__json=b"{}")
    (first / "models" / "merged.safetensors").write_bytes(b"merged")
    (first / "models" / "strange.safetensors").write_bytes(b"strange")
    assert collect(run, [first]).taken[0].whole == ["summary.json", "models/merged.safetensors"]
    assert read_files(run).keys() == {*read_files(first), *read_files(run)} - {"models/strange.safetensors"}
    (first / "summary.json").write_bytes(b"{} ")
    assert collect(run, [first]).taken[0].whole == [] and (run / "summary.json").read_bytes() == b"{}"


@pytest.mark.parametrize("run_id", [OTHER, None, 7, "../../etc", "0123456789ABCDEF"])
def test_a_folder_of_another_run_or_without_a_run_id_is_refused(tmp_path: Path, run_id: Any) -> None:
    run, other = make_folder(tmp_path / "run", 0), make_folder(tmp_path / "other", 2, run=run_id)
    make_folder(tmp_path / "more", 3, run=OTHER)
    before = read_files(run)
    with pytest.raises(UsageError, match="belongs to another run" if run_id == OTHER else "has the run's id"):
        collect(run, [other])
    with pytest.raises(UsageError, match=r"no other folder of the run .*, but 2 of other runs"):
        collect(run, [tmp_path])
    with pytest.raises(UsageError, match="there is no folder"):
        collect(run, [tmp_path / "nowhere"])
    assert read_files(run) == before


def test_a_folder_with_the_nodes_of_two_runs_is_refused(tmp_path: Path) -> None:
    run, other = make_folder(tmp_path / "run", 0), make_folder(tmp_path / "other", 2)
    write_node(other, 3, 3, OTHER)
    for pair in ((run, other), (other, run)):
        with pytest.raises(UsageError, match=f"other must hold one run, got the nodes of {RUN}, {OTHER}"):
            collect(pair[0], [pair[1]])


def test_newer_files_of_a_running_run_replace_collected_ones_and_older_ones_do_not(tmp_path: Path) -> None:
    run, other = make_folder(tmp_path / "run", 0), make_folder(tmp_path / "other", 2, rounds=3)
    early = read_files(other)
    collect(run, [other])
    write_node(other, 2, 5)
    (other / "models" / "002.safetensors").write_bytes(b"a later model")
    assert collected_uids(collect(run, [other])) == [[2]]
    assert {name: read_files(run)[name] for name in read_files(other)} == read_files(other)
    late = read_files(run)
    for name, data in early.items():  # an earlier copy of the folder
        (other / name).write_bytes(data)
    assert collected_uids(collect(run, [other])) == [[]] and read_files(run) == late


def test_a_metrics_file_copied_in_the_middle_of_a_line_is_completed(tmp_path: Path) -> None:
    run, other = make_folder(tmp_path / "run", 0), make_folder(tmp_path / "other", 2)
    metrics = Path("nodes/002/metrics.jsonl")
    whole = (other / metrics).read_bytes()
    (other / metrics).write_bytes(whole[:-9])
    collect(run, [other])
    (other / metrics).write_bytes(whole)
    assert collected_uids(collect(run, [other])) == [[2]] and (run / metrics).read_bytes() == whole


@pytest.mark.parametrize("name", ["nodes/002/metrics.jsonl", "nodes/002/events.jsonl", "models/002.safetensors"])
@pytest.mark.parametrize("both_new", [False, True])
def test_contradictory_files_of_a_node_are_refused_before_anything_is_copied(
    tmp_path: Path, name: str, both_new: bool
) -> None:
    run, one = make_folder(tmp_path / "run", 0), make_folder(tmp_path / "one", 2)
    two = make_folder(tmp_path / "two", 2, 3)
    for folder, data in ((one, b"one\n"), (two, b"two, longer\n")):
        (folder / name).write_bytes(data)
    if not both_new:
        collect(run, [one])
    before = read_files(run)
    with pytest.raises(UsageError, match=rf"nothing was copied(.|\n)*node 2: {name} in .*two differs from the one in"):
        collect(run, [one, two] if both_new else [two])
    assert read_files(run) == before


def test_symbolic_links_fifos_and_unexpected_names_are_not_collected(tmp_path: Path) -> None:
    run, other = make_folder(tmp_path / "run", 0), make_folder(tmp_path / "other", 2)
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
    (tmp_path / "links" / "run").symlink_to(make_folder(tmp_path / "behind", 4))
    found = collect(run, [other])
    assert collected_uids(found) == [[2]]
    assert [line.split(":")[0].removeprefix(f"{other}/nodes/002/") for line in found.left_out] == [
        "dumps", "events.jsonl", "stderr.txt"]  # fmt: skip
    assert names(run / "nodes" / "002") == ["log.txt", "metrics.jsonl", "status.json"]
    assert names(run / "nodes") == ["000", "002"]
    assert b"secret" not in read_files(run).values() and not any(path.is_symlink() for path in run.rglob("*"))
    with pytest.raises(UsageError, match="no other folder"):
        collect(run, [tmp_path / "links"])


def write_checkpoint(folder: Path, uid: int, run: str = RUN, round: int = 2) -> Path:
    cut = Cut(run, round, 1, "", (0, 2))
    store.write(folder / "checkpoints", Snapshot(uid, cut, {}, {}, {"x": torch.ones(3)}))
    return folder / "checkpoints" / cut.folder / f"{uid:03d}.json"


def test_only_whole_checkpoints_of_the_run_are_collected(tmp_path: Path) -> None:
    run, other = make_folder(tmp_path / "run", 0), make_folder(tmp_path / "other", 2)
    good = write_checkpoint(other, 2)
    write_checkpoint(other, 2, OTHER, 3)
    write_checkpoint(other, 2, round=4).with_suffix(".safetensors").write_bytes(b"torn")
    write_checkpoint(other, 2, round=5).with_suffix(".safetensors").unlink()
    (other / "checkpoints" / "elsewhere").symlink_to(good.parent)
    store.mark_best(other / "checkpoints", 2, Cut(RUN, 2, 1, "", (0, 2)), "loss", 0.5)
    found = collect(run, [other])
    (kept,) = store.scan([run / "checkpoints"], 2)[0]
    assert torch.equal(kept.load()["x"], torch.ones(3)) and kept.cut.run == RUN
    assert store.read_best(run / "checkpoints", 2) == store.read_best(other / "checkpoints", 2)
    assert [sum(part in line for line in found.left_out) for part in (
        "another run, time or node", "must have", "is missing", good.parent.name)] == [1, 1, 1, 0]  # fmt: skip
    assert names(run / "checkpoints") == [good.parent.name, "best-002.json"]
    assert collected_uids(collect(run, [other])) == [[]]


def test_a_full_disk_leaves_no_partly_copied_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = make_folder(tmp_path / "run", 0), make_folder(tmp_path / "other", 2, 3)
    copy_bytes = module._Copy._copy_bytes
    copies_until_full = [5]

    def fill_disk(self: Any, *args: Any) -> int:
        copies_until_full[0] -= 1
        if copies_until_full[0] < 0:
            raise OSError(28, "No space left on device")
        return copy_bytes(self, *args)

    monkeypatch.setattr(module._Copy, "_copy_bytes", fill_disk)
    with pytest.raises(EnvironmentFault, match="No space left"):
        collect(run, [other])
    assert names(run / "nodes") == ["000", "002"]
    assert not list(run.glob(".collect*"))
    copies_until_full[0] = 100
    assert collected_uids(collect(run, [other])) == [[3]] and read_files(run).items() >= read_files(other).items()


def environment(machine: int, torch: str = "2.13.0", source: str = "aaaa") -> bytes:
    return json.dumps({"machine": machine, "host": f"host-{machine}", "time": f"t{machine}", "source": source,
                       "versions": {"decentnode": "0.1.0", "torch": torch}}).encode()  # fmt: skip


def test_what_a_killed_command_left_is_removed(tmp_path: Path) -> None:
    run, other = make_folder(tmp_path / "run", 0), make_folder(tmp_path / "other", 1)
    (run / ".collect-1-killed").mkdir()
    (run / ".collect-1-killed" / "003.safetensors").write_bytes(b"a part")
    (run / ".collect-1-link").symlink_to(other)
    collect(run, [other])
    assert [name for name in names(run) if name[0] == "."] == [".collect-1-link"]
    assert names(other / "nodes") == ["001"]


def test_only_one_command_at_a_time_copies_into_a_folder(tmp_path: Path) -> None:
    run, other = make_folder(tmp_path / "run", 0), make_folder(tmp_path / "other", 1)
    before = read_files(run)
    with module._temporary(run) as place:
        with pytest.raises(EnvironmentFault, match=f"another collect copies into {run}: repeat"):
            collect(run, [other])
        assert read_files(run) == before and names(place) == []
    assert collected_uids(collect(run, [other])) == [[1]]


def test_a_node_that_ends_while_it_is_copied_is_completed_by_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run, other = make_folder(tmp_path / "run", 0), make_folder(tmp_path / "other")
    write_node(other, 1, 2, doing="local steps")
    cut = Cut(RUN, 2, 1, "", (0, 1))
    store.mark_best(other / "checkpoints", 1, cut, "loss", 0.5)
    copy_bytes = module._Copy._copy_bytes

    def copy_while_it_ends(self: Any, share: Any, parts: Any, target: Path) -> int:
        size = copy_bytes(self, share, parts, target)
        if parts[-1] == "best-001.json":
            store.mark_best(other / "checkpoints", 1, cut, "loss", 0.2)
            write_node(other, 1, 5)
        return size

    monkeypatch.setattr(module._Copy, "_copy_bytes", copy_while_it_ends)
    collect(run, [other])
    monkeypatch.undo()
    assert collected_uids(collect(run, [other])) == [[1]]
    assert read_files(run).items() >= read_files(other).items()
    assert collected_uids(collect(run, [other])) == [[]]


def test_a_newer_state_is_collected_although_the_clock_was_set_back(tmp_path: Path) -> None:
    run, other = make_folder(tmp_path / "run", 0), make_folder(tmp_path / "other")
    status = write_node(other, 1, 3, doing="local steps") / "status.json"
    status.write_text(json.dumps({**json.loads(status.read_text()), "time": 3600.0}))
    collect(run, [other])
    write_node(other, 1, 5)
    assert collected_uids(collect(run, [other])) == [[1]]
    assert read_files(run).items() >= read_files(other).items()


def test_lines_that_a_log_got_after_the_last_status_are_collected(tmp_path: Path) -> None:
    run, other = make_folder(tmp_path / "run", 0), make_folder(tmp_path / "other", 1)
    collect(run, [other])
    with open(other / "nodes" / "001" / "log.txt", "a") as log:
        log.write("PeerLost\n")
    assert collected_uids(collect(run, [other])) == [[1]]
    assert (run / "nodes" / "001" / "log.txt").read_text() == "3\nPeerLost\n"


def test_the_environments_of_other_machines_are_collected_under_their_numbers(tmp_path: Path) -> None:
    commit = "5" * 40
    run = make_folder(tmp_path / "run", 0, env__json=environment(0), git__txt=f"repo {commit}\n".encode())
    files = {"env__json": environment(1, "2.12.0"), "git__txt": f"repo {commit} (changed)\n M a.py\n".encode(),
             "git__diff": b"+ a\n", "command__txt": b"decentnode launch\n"}  # fmt: skip
    second = make_folder(tmp_path / "second", 2, **files)
    newcomer = make_folder(tmp_path / "newcomer", 7, env__json=environment(4))
    own = (run / "env.json").read_bytes()
    taken = collect(run, [second, newcomer]).taken
    assert [source.machines for source in taken] == [[1], [4]]  # nodes 6 and 7 are newcomers: machines 3 and 4
    assert (run / "env.json").read_bytes() == own
    for name in ("env.json", "git.txt", "git.diff", "command.txt"):
        assert (run / "machines" / "1" / name).read_bytes() == (second / name).read_bytes()
    assert names(run / "machines" / "4") == ["env.json"]
    found = machines_of(run)
    assert [machine.number for machine in found] == [0, 1, 4] and found[1].environment["host"] == "host-1"
    differing = differences(found)
    assert differing[0] == "torch: 2.13.0 on machine 0, 4; 2.12.0 on machine 1"
    assert differing[1].startswith(f"git commit: {commit[:12]} on machine 0; {commit[:12]} with changes ")
    assert "; unknown on machine 4" in differing[1] and len(differing) == 2
    again = collect(run, [second, newcomer]).taken
    assert [each.machines for each in again] == [[], []] and again[0].size == 0
    third = make_folder(tmp_path / "third", 4, env__json=environment(2))
    assert collect(third, [run]).taken[0].machines == [0, 1, 4], "and what the other folder collected itself"


def test_uncommitted_changes_of_the_same_commit_are_a_difference(tmp_path: Path) -> None:
    git = f"repo {'5' * 40} (changed)\n M a.py\n".encode()
    run = make_folder(tmp_path / "run", 0, env__json=environment(0), git__txt=git, git__diff=b"+ a\n")
    same = make_folder(tmp_path / "same", 2, env__json=environment(1), git__txt=git, git__diff=b"+ a\n")
    other = make_folder(tmp_path / "other", 4, env__json=environment(2), git__txt=git, git__diff=b"+ b\n")
    collect(run, [same])
    assert differences(machines_of(run)) == []
    collect(run, [other])
    (differing,) = differences(machines_of(run))
    assert "with changes" in differing and "on machine 0-1; " in differing and differing.endswith("on machine 2")


@pytest.mark.parametrize("content", [
    b"", b"[]", b'{"versions": 7, "machine": "x", "modules": []}', b"{" * 10000, b"\xff",
])  # fmt: skip
def test_a_malformed_environment_of_another_machine_does_no_harm(tmp_path: Path, content: bytes) -> None:
    run = make_folder(tmp_path / "run", 0, env__json=environment(0))
    collect(run, [make_folder(tmp_path / "other", 2, env__json=content)])
    machines = machines_of(run)
    assert all(machine.number in (0, 1) for machine in machines) and isinstance(differences(machines), list)


def test_a_symbolic_link_named_env_json_is_not_followed(tmp_path: Path) -> None:
    run, other = make_folder(tmp_path / "run", 0, env__json=environment(0)), make_folder(tmp_path / "other", 2)
    (tmp_path / "secret").write_text("{}")
    (other / "env.json").symlink_to(tmp_path / "secret")
    assert collect(run, [other]).taken[0].machines == [] and not (run / "machines").exists()


def test_the_refusal_of_a_folder_without_a_run_id_says_how_to_copy_it(tmp_path: Path) -> None:
    run, old = make_folder(tmp_path / "run", 0), make_folder(tmp_path / "old" / "other", 2, run=None)
    with pytest.raises(UsageError, match=rf"only this folder has by hand: cp -rn {old}/nodes {old}/models {run}/$"):
        collect(run, [old])
    with pytest.raises(UsageError, match=r"1 of other runs \(1 of them do not say their run: give one"):
        collect(run, [tmp_path / "old"])


def test_a_folder_into_which_others_were_collected_keeps_its_machine_number(tmp_path: Path) -> None:
    first = make_folder(tmp_path / "first", 0, env__json=environment(0, "A"))
    second = make_folder(tmp_path / "second", 2, env__json=environment(1, "B"))
    third = make_folder(tmp_path / "third", 4, env__json=environment(2, "C"))
    collect(second, [first])  # then its first node is one of machine 0
    collect(third, [second])
    assert {machine.number: machine.versions["torch"] for machine in machines_of(third)} == {0: "A", 1: "B", 2: "C"}


def test_control_characters_from_other_machines_are_replaced_in_differences(tmp_path: Path) -> None:
    run = make_folder(tmp_path / "run", 0, env__json=environment(0))
    collect(run, [make_folder(tmp_path / "other", 2, env__json=environment(1, "2\x1b[2J\n13\x07"))])
    (differing,) = differences(machines_of(run))
    assert differing == "torch: 2.13.0 on machine 0; 2?[2J?13? on machine 1"


def test_own_modules_are_compared_only_between_machines_that_recorded_them(tmp_path: Path) -> None:
    known = {"modules": {"mine": {"sha256": "aa"}}}
    run = make_folder(tmp_path / "run", 0, env__json=json.dumps({**json.loads(environment(0)), **known}).encode())
    newcomer = make_folder(tmp_path / "newcomer", 7, env__json=environment(4))
    collect(run, [newcomer])
    assert differences(machines_of(run)) == []
    known["modules"]["mine"]["sha256"] = "bb"
    other = make_folder(tmp_path / "other", 2, env__json=json.dumps({**json.loads(environment(1)), **known}).encode())
    collect(run, [other])
    (differing,) = differences(machines_of(run))
    assert differing.startswith("own modules: ") and "machine 4" not in differing
