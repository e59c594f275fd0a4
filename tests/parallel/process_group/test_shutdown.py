"""Scripts come to their end, however busy the machine is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import free_ports
from tests.parallel.ranks import run_ranks
from tests.parallel.work import leaving

ROOT = Path(__file__).parents[3]


def ended(folder: Path, *cases: str) -> tuple[dict[str, list[int]], dict[str, str]]:
    """(Case -> exit codes, case and rank -> what was printed to stderr)."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.parallel.ends", str(folder), str(free_ports(len(cases))), *cases],
        cwd=ROOT, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return json.loads(done.stdout), {each.name: each.read_text() for each in folder.iterdir()}


@pytest.mark.slow
def test_a_thread_of_gloo_that_is_slow_does_not_abort_the_process(tmp_path: Path) -> None:
    codes, errors = ended(tmp_path, "groups", "destroyed", "wrapped", "ours")
    assert codes == {"groups": [0] * 4, "destroyed": [0] * 4, "wrapped": [0] * 2, "ours": [0] * 2}, errors


@pytest.mark.slow
@pytest.mark.parametrize(("case", "when"), [("raises", " after 2 steps"), ("raises over gloo", "")])
def test_the_error_that_ended_a_script_is_told_by_the_others(case: str, when: str, tmp_path: Path) -> None:
    codes, errors = ended(tmp_path, case)
    last = errors[f"{case} 0"].splitlines()[-1]
    assert codes == {case: [1, 1]} and len(last) < 700, errors
    assert f"the script of rank 1 ended with an error{when}: KeyError: 'no such" in last, errors


@pytest.mark.slow
def test_who_is_missing_is_named_before_there_is_a_process_group(tmp_path: Path) -> None:
    cases = {"killed 1": "AssemblyError: rank 0: the 2 ranks cannot meet: the process of rank 1 is gone (",
             "killed 0": "AssemblyError: rank 1: the 2 ranks cannot meet: the process of rank 0 is gone (",
             "absent 1": "AssemblyError: rank 0: the 2 ranks cannot meet: rank 1 has not come to initialize_dist (",
             "absent 0": "AssemblyError: rank 1: nothing listens at 127.0.0.1:",
             "killed later": "PeerLost: ranks cannot meet again together, "}  # fmt: skip
    _, errors = ended(tmp_path, *cases)
    for case, says in cases.items():
        told = errors[f"{case} {says.partition('rank ')[2][0] if 'rank ' in says else 1}"]
        assert f"decentnode.errors.{says}" in told, told
    assert "; the process of rank 0 is gone\n" in errors["killed later 1"]


@pytest.mark.sampled(one=["how"])
@pytest.mark.parametrize("how", ["error", "without", "alone"])
def test_how_a_script_ended_is_told_printable_and_short(how: str) -> None:
    first, second = run_ranks(2, leaving.both_end, how)
    assert second == (1, first), "what was told first"
    if how == "alone":
        assert first is None
    else:
        rank, text = first
        assert rank == 0 and text.startswith("ValueError: bad? file xxx" if how == "error" else "") and len(text) < 400
        assert bool(text) == (how == "error")
