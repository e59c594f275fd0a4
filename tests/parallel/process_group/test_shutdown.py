"""How scripts of several ranks end: without an abort on a busy machine, and with errors that name the rank at fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from decentnode.parallel.membership.generation_groups import GenerationGroups
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


def run_script(script: str, *arguments: str) -> str:
    """Returns the standard output of a script, which must succeed."""
    done = subprocess.run([sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True,
                          timeout=200)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "ranks"),
    [("subgroups", 4), ("destroyed", 4), ("closed", 4), ("kept", 2), ("wrapped", 2), ("initialize_dist", 2)],
)
def test_a_slow_gloo_thread_neither_aborts_nor_blocks_a_process_that_exits(
    case: str, ranks: int, tmp_path: Path
) -> None:
    codes, errors = run_cases(tmp_path, case)
    assert codes == {case: [0] * ranks}, errors


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


class NoGroups(GenerationGroups):
    def make(self, *_: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("maker", ["script", "wrapper", "earlier generation"])
def test_backends_outlive_their_group_with_an_old_torch(
    maker: str, single_rank_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joins the threads of a backend that goes with its group while it holds the interpreter's lock, which a thread
    needs that still has a tensor: a process of torch 2.6 hung for ever."""
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.6.0"))
    group: Any = shutdown.new_group([0]) if maker == "wrapper" else dist.group.WORLD
    generations = NoGroups(timeout_seconds=1.0)
    if maker == "script":
        shutdown.leave_at_exit()
    if maker == "earlier generation":
        generations._leave()
    ended: list[str] = []
    references = [weakref.ref(group, lambda _: ended.append("group")),
                  weakref.ref(group._get_backend(torch.device("cpu")), lambda _: ended.append("backend"))]  # fmt: skip
    if maker != "earlier generation":
        dist.destroy_process_group()
    assert ended == []
    del group
    generations.drop_old()
    assert ended == ["group", "backend"] and len(references) == 2


OPTIMIZING_SCRIPT = """
import weakref

import torch
import torch.distributed as dist

import decentnode.parallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
dist.destroy_process_group()
print("referenced" if group() is not None else "dropped")
"""


@pytest.mark.slow
def test_a_destroyed_group_is_dropped_although_torch_imported_its_compiler_meanwhile() -> None:
    """A module of it referenced the default group for ever, so that no script's end joined the group's threads."""
    assert run_script(OPTIMIZING_SCRIPT) == "dropped\n"


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
    assert run_script(DROPPING_SCRIPT, wraps) == "closed\n"
