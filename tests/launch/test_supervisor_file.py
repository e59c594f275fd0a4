"""A dead supervisor is recognized by its file, and no other process is mistaken for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decentnode.launch.files import supervisor_file
from decentnode.launch.files.supervisor_file import FILE, Supervisor


def test_a_running_supervisor_does_not_count_as_dead(tmp_path: Path) -> None:
    assert supervisor_file.died(tmp_path) == ""
    supervisor_file.write(tmp_path)
    assert supervisor_file.died(tmp_path) == ""
    supervisor_file.remove(tmp_path)
    assert not list(tmp_path.iterdir())
    supervisor_file.remove(tmp_path)


def test_a_supervisor_whose_process_ended_counts_as_dead(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from decentnode.launch.files import supervisor_file as f; " \
           "f.write(Path(sys.argv[1]))"  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    assert process.wait(60) == 0
    assert f"process {process.pid}, is gone" in supervisor_file.died(tmp_path)


@pytest.mark.parametrize(("change", "gone"), [
    ({"began": "1"}, True), ({"boot": "another"}, True), ({"host": "elsewhere", "pid": 1}, False),
], ids=str)  # fmt: skip
def test_a_process_with_the_same_pid_is_not_mistaken_for_the_supervisor(
    tmp_path: Path, change: dict[str, Any], gone: bool
) -> None:
    supervisor_file.write(tmp_path)
    own = Supervisor(**json.loads((tmp_path / FILE).read_text()))
    assert own.pid == os.getpid() and not own.gone
    assert replace(own, **change).gone is gone


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', '{"pid": 3}'])
def test_with_a_damaged_file_no_supervisor_counts_as_dead(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert supervisor_file.died(tmp_path) == ""
