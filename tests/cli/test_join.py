"""decentnode join: problems are reported before the run has given the node a uid."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from decentnode.cli import main
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.experiment import load
from decentnode.launch.nodes import node_process
from tests.communication.test_newcomers import known_seats, run_of_two
from tests.config.experiments import BASE

OPEN = BASE.replace("nodes: 4", "nodes: 2") + """\
mapping: {machines: 1, nodes_per_machine: 2, base_port: 20100}
node: {missing: regroup, newcomers: 1, rounds: 3}
"""


@pytest.fixture
def members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[ZeroMQ], dict[int, str]]]:
    """Yields two members of a run and the addresses of their control sockets."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "open.yaml").write_text(OPEN)
    experiment = load("open.yaml", [], {})
    with run_of_two(experiment=(experiment.resolved_yaml().encode(), experiment.digest())) as found:
        yield found


def join(control: dict[int, str], *options: str) -> Result:
    return CliRunner().invoke(main, ["join", "--seed", control[0].removeprefix("tcp://"), *options])


@pytest.mark.parametrize(("options", "why"), [
    (["--set", "node.rounds=5"], "--set node.rounds=5 would change the experiment"),
    (["--set", "run.log_level=debug", "--set", "seed=2"], "error: --set seed=2 would change the experiment"),
    (["--set", "node.ruonds=5"], "did you mean 'rounds'?"),
    (["--samples-of", "2"], "--samples-of must be a node of the mapping, below 2, got 2"),
    (["--device", "cuda:99"], "cuda"),
])  # fmt: skip
def test_wrong_options_are_refused_before_the_run_gives_a_uid(
    members: tuple[list[ZeroMQ], dict[int, str]], options: list[str], why: str
) -> None:
    nodes, control = members
    done = join(control, *options)
    assert done.exit_code in (2, 3) and why in done.stderr, done.output
    assert "Traceback" not in done.output and "admitted" not in done.output
    assert not known_seats(nodes[0]) and not Path("runs").exists()


def test_without_a_folder_for_temporary_files_the_error_names_the_folders(
    members: tuple[list[ZeroMQ], dict[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, control = members
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    done = join(control)
    assert done.exit_code == 3 and "Traceback" not in done.output and not known_seats(nodes[0])
    assert "No usable temporary directory found in ['/nowhere']: free some space there, or set TMPDIR" in done.stderr


def test_environment_variables_that_would_change_the_experiment_are_refused(
    members: tuple[list[ZeroMQ], dict[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECENTNODE__NODE__ROUNDS", "5")
    done = join(members[1])
    assert done.exit_code == 2 and "DECENTNODE__NODE__ROUNDS would change the experiment" in done.stderr


def test_a_node_that_fails_before_it_has_joined_gives_its_uid_back(
    members: tuple[list[ZeroMQ], dict[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, control = members
    uids_during_build: list[int] = []
    before = {*threading.enumerate()}

    def fail_to_build(*_: object) -> None:
        uids_during_build.extend(known_seats(nodes[0]))
        raise MemoryError("no room for the model")

    monkeypatch.setattr(node_process, "build", fail_to_build)
    done = join(control)
    for each in {*threading.enumerate()} - before:
        if each.name == "output":
            each.join(20)
            assert not each.is_alive(), "the output thread must end, as a process can have only so many"
    assert done.exit_code == 8 and "no room for the model" in done.output + done.stderr
    assert uids_during_build == [2] and not known_seats(nodes[0])
