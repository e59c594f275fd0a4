"""How scripts of several ranks end: without an abort on a busy machine, and with errors that name the rank at fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from decentnode.parallel.membership.generation_groups import _abort_operations
from decentnode.parallel.process_group import shutdown
from tests.conftest import free_ports
from tests.parallel.ranks import run_ranks
from tests.parallel.work import leaving

ROOT = Path(__file__).parents[3]


def run_cases(folder: Path, *cases: str) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Runs cases of tests/parallel/script_ends.py. Returns (case -> exit codes by rank, "CASE RANK" -> stderr)."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.parallel.script_ends", str(folder), str(free_ports(len(cases))), *cases],
        cwd=ROOT, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return json.loads(done.stdout), {file.name: file.read_text() for file in folder.iterdir()}


@pytest.mark.slow
def test_a_slow_gloo_thread_does_not_abort_a_process_that_exits(tmp_path: Path) -> None:
    codes, errors = run_cases(tmp_path, "subgroups", "destroyed", "wrapped", "initialize_dist")
    expected = {"subgroups": [0] * 4, "destroyed": [0] * 4, "wrapped": [0] * 2, "initialize_dist": [0] * 2}
    assert codes == expected, errors


@pytest.mark.slow
@pytest.mark.parametrize(("case", "when"), [("raises", " after 2 steps"), ("raises over gloo", "")])
def test_a_rank_reports_the_error_that_ended_another_ranks_script(case: str, when: str, tmp_path: Path) -> None:
    codes, errors = run_cases(tmp_path, case)
    last = errors[f"{case} 0"].splitlines()[-1]
    assert codes == {case: [1, 1]} and len(last) < 700, errors
    assert f"the script of rank 1 ended with an error{when}: KeyError: 'no such" in last, errors


@pytest.mark.slow
def test_initialize_dist_names_the_rank_that_is_missing(tmp_path: Path) -> None:
    expected = {  # (case, rank that reports) -> the beginning of its error
        ("1 exits", 0): "AssemblyError: rank 0: the 2 ranks cannot meet: the process of rank 1 is gone (",
        ("0 exits", 1): "AssemblyError: rank 1: the 2 ranks cannot meet: the process of rank 0 is gone (",
        ("1 is absent", 0): "AssemblyError: rank 0: the 2 ranks cannot meet: rank 1 has not come to initialize_dist (",
        ("0 is absent", 1): "AssemblyError: rank 1: nothing listens at 127.0.0.1:",
        ("0 exits later", 1): "PeerLost: ranks cannot meet again together, ",
    }
    _, errors = run_cases(tmp_path, *(case for case, _ in expected))
    for (case, rank), message in expected.items():
        stderr = errors[f"{case} {rank}"]
        assert f"decentnode.errors.{message}" in stderr, stderr
    assert "; the process of rank 0 is gone\n" in errors["0 exits later 1"]


@pytest.mark.sampled(one=["how"])
@pytest.mark.parametrize("how", ["error", "no error", "own store"])
def test_the_first_end_of_a_script_is_reported_printable_and_short(how: str) -> None:
    seen_by_0, seen_by_1 = run_ranks(2, leaving.report_ends, how)
    assert seen_by_1 == (1, seen_by_0), "both ranks know the end that was reported first"
    if how == "own store":
        assert seen_by_0 is None
    else:
        rank, text = seen_by_0
        assert rank == 0 and text.startswith("ValueError: bad? file xxx" if how == "error" else "") and len(text) < 400
        assert bool(text) == (how == "error")


@pytest.mark.parametrize(
    ("version", "calls"),
    [("2.6.0", ["sleep", "close wrapper", "sleep", "destroy", "sleep"]), ("2.13.0", ["close wrapper", "destroy"])],
)
def test_threads_release_their_tensors_before_a_group_is_destroyed_by_an_old_torch(
    version: str, calls: list[str], single_rank_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its destructor joins the threads while it holds the interpreter's lock, which a thread needs that still has a
    tensor: a process of torch 2.6 hung for ever, in a wrapper's `close` too if the script had destroyed the groups.
    Nothing there tells its threads from others by their names."""
    class Wrapper:
        def close(self) -> None:
            found.append("close wrapper")

    found: list[str] = []
    wrapper = Wrapper()
    monkeypatch.setattr(shutdown, "_wrappers", weakref.WeakKeyDictionary())
    monkeypatch.setattr(shutdown, "_kept", [])
    monkeypatch.setattr(shutdown, "_processes", set())
    monkeypatch.setattr(shutdown, "report_end", lambda: None)
    shutdown.close_at_exit(wrapper)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(shutdown.clock, "sleep", lambda _seconds: found.append("sleep"))
    monkeypatch.setattr(shutdown.dist, "destroy_process_group", lambda: found.append("destroy"))
    shutdown._close_all()
    monkeypatch.undo()
    assert found[: len(calls)] == calls  # threads that are left get another moment


@pytest.mark.parametrize(("version", "calls"), [("2.6.0", ["sleep", "dropped"]), ("2.13.0", ["dropped"])])
def test_threads_release_their_tensors_before_a_group_of_an_earlier_generation_is_dropped_by_an_old_torch(
    version: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Group:
        def size(self) -> int:
            return 1

        def __del__(self) -> None:
            found.append("dropped")

    found: list[str] = []
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(shutdown.clock, "sleep", lambda _seconds: found.append("sleep"))
    _abort_operations([Group()])
    assert found == calls


DROPPING_SCRIPT = """
import gc
import sys
import weakref

gc.disable()

import torch
import torch.distributed as dist

from decentnode.parallel import CommOptimizer, DecentralizedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def train():
    model = torch.nn.Linear(2, 2)
    if sys.argv[1] == "model":
        wrapped = DecentralizedDataParallel(model, optimizer=torch.optim.SGD)
    else:
        wrapped = CommOptimizer(torch.optim.SGD(model.parameters()))
    return weakref.ref(wrapped)


assert "torch._dynamo" not in sys.modules, "the first optimizer imports it"
print("open" if train()() is not None else "closed")
"""


@pytest.mark.slow
@pytest.mark.parametrize("wraps", ["model", "optimizer"])
def test_a_wrapper_that_the_script_drops_is_closed_although_torch_imported_its_compiler_meanwhile(wraps: str) -> None:
    """Without a garbage collection, which a script may have disabled: the other ranks see that this one has ended."""
    done = subprocess.run([sys.executable, "-c", DROPPING_SCRIPT, wraps], cwd=ROOT, capture_output=True, text=True,
                          timeout=200)  # fmt: skip
    assert done.stdout == "closed\n", done.stderr
