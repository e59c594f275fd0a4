from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from decentnode import cli, errors
from decentnode.cli import COMMANDS, main
from tests.commands import ROOT
from tests.launch.faults import experiment


def modules_imported_by(*arguments: str) -> tuple[set[str], float]:
    """Returns the modules that are loaded after a command, and the CPU seconds of its process."""
    code = (
        "import sys, time, json, io, contextlib\n"
        "from decentnode.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    main({list(arguments)!r}, standalone_mode=False)\n"
        "print(json.dumps([sorted(sys.modules), time.process_time()]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    modules, seconds = json.loads(done.stdout)
    return set(modules), seconds


HEAVY = {"torch", "numpy", "pydantic", "matplotlib", "networkx", "yaml", "zmq"}


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("--version",), ("validate", "--help"), ("schema", "-h")])
def test_asking_for_help_imports_nothing_heavy(arguments):
    modules, _ = modules_imported_by(*arguments)
    assert not HEAVY & modules


def test_graph_does_not_import_torch():
    modules, _ = modules_imported_by("graph", "--help")
    assert not {"torch", "matplotlib"} & modules


def test_help_takes_less_than_a_fifth_of_a_second_of_cpu_time():
    assert min(modules_imported_by("--help")[1] for _ in range(3)) < 0.2


def test_help_lists_every_command_that_exists():
    text = CliRunner().invoke(main, ["--help"]).output
    for name in main.list_commands(click.Context(main)):
        assert name in text
        assert COMMANDS[name].split()[0] in text


def test_every_command_can_be_loaded():
    context = click.Context(main)
    for name in main.list_commands(context):
        assert isinstance(main.get_command(context, name), click.Command), name


def test_version_shows_the_versions_of_decentnode_and_its_libraries():
    text = CliRunner().invoke(main, ["--version"]).output
    assert text.startswith("decentnode 0.")
    assert "torch 2." in text
    assert "pyzmq " in text


@pytest.mark.parametrize("arguments", [["nope"], ["--nope"], ["validate"], ["validate", "a", "b"], []])
def test_usage_errors_end_with_2(arguments):
    assert CliRunner().invoke(main, arguments).exit_code == 2


def test_a_mistyped_command_gets_the_nearest_one():
    assert "did you mean 'validate'?" in CliRunner().invoke(main, ["validat"]).stderr


def add_failing_command(monkeypatch, error: BaseException) -> list[str]:
    """Adds a command that raises `error`, and returns its command line."""

    @click.command()
    def command() -> None:
        raise error

    monkeypatch.setitem(COMMANDS, "fail", "Fail.")
    monkeypatch.setitem(sys.modules, "decentnode.cli.fail", types.SimpleNamespace(command=command, __spec__=object()))
    monkeypatch.setattr(cli, "fail", sys.modules["decentnode.cli.fail"], raising=False)
    return ["fail"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("x"), 2),
        (errors.EnvironmentFault("x"), 3),
        (errors.AssemblyError("x"), 4),
        (errors.PeerLost("x"), 5),
        (errors.Diverged("x"), 6),
        (errors.CheckpointError("x"), 7),
        (errors.NodeFailed("x"), 8),
        (errors.Interrupted("x"), 130),
    ],
)
def test_errors_become_a_line_and_an_exit_code(monkeypatch, error, code):
    done = CliRunner().invoke(main, add_failing_command(monkeypatch, error))
    assert done.exit_code == code
    assert done.stderr == "error: x\n"


def test_an_error_that_nobody_reads_has_its_exit_code():
    """As in a terminal that was closed."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "decentnode", "plot", "nothing"], stderr=full, timeout=200)
    assert done.returncode == errors.UsageError.exit_code


def test_ctrl_c_ends_with_130(monkeypatch):
    assert CliRunner().invoke(main, add_failing_command(monkeypatch, KeyboardInterrupt())).exit_code == 130


AT_AN_IMPORT = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            del sys.argv[1]
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
runpy.run_module("decentnode", run_name="__main__", alter_sys=True)
"""
AS_AN_IMPORT_ENDS = """
import os, runpy, signal, sys

module = sys.argv.pop(1)

def profile(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename == "<frozen importlib._bootstrap>" and code.co_name == "cb":
        if frame.f_locals["name"] == module:
            os.kill(os.getpid(), signal.SIGINT)

sys.setprofile(profile)
runpy.run_module("decentnode", run_name="__main__", alter_sys=True)
"""
INSIDE_EXEC = """
import sys, types
sys.modules["decentnode.cli.plot"] = made = types.ModuleType("decentnode.cli.plot")
made.__spec__ = object()
import click
made.command = click.Command("plot", callback=lambda: exec("raise KeyboardInterrupt"))
sys.argv[1:] = ["plot"]
from decentnode.__main__ import main
main()
"""


@pytest.mark.parametrize(("code", "words"), [
    (AT_AN_IMPORT, ["click", "plot"]), (AT_AN_IMPORT, ["decentnode.cli.plot", "plot"]),
    (AS_AN_IMPORT_ENDS, ["decentnode.cli.plot", "plot"]), (INSIDE_EXEC, []),
], ids=["first", "command", "lock", "exec"])  # fmt: skip
def test_ctrl_c_while_modules_are_imported_prints_one_line(code, words):
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_command_that_was_started_with_ctrl_c_ignored_ignores_it():
    """As a shell does for commands in the background of a script."""
    text = f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{AT_AN_IMPORT}"
    done = subprocess.run([sys.executable, "-c", text, "click", "--version"], capture_output=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "0<&- 1>&- 2>&-"])
@pytest.mark.slow
def test_a_run_works_with_closed_streams(closed, tmp_path):
    """Else its sockets and files get the numbers of the streams."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(experiment(node={"rounds": 2})))
    words = [sys.executable, "-m", "decentnode", "run", "tiny.yaml"]
    done = subprocess.run(f"exec {shlex.join(words)} {closed}", shell=True, cwd=tmp_path, timeout=200,
                          capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len([*tmp_path.glob("runs/tiny/latest/models/0*.safetensors")]) == 4


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_while_python_exits_is_silent(number):
    """This is a second Ctrl-C, or one when a command is over: torch and multiprocessing take long to clean up."""
    text = (f"import atexit, os, signal, sys\natexit.register(os.kill, os.getpid(), signal.{number})\n"
            "sys.argv[1:] = ['--version']\nfrom decentnode.__main__ import main\nmain()\n")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("decentnode ")


def test_the_installed_command_and_python_m_have_the_same_entry_point():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"decentnode": "decentnode.__main__:main"}


def test_the_option_traceback_works_before_and_after_the_command(monkeypatch):
    arguments = add_failing_command(monkeypatch, errors.UsageError("x"))
    for line in (["--traceback", *arguments], [*arguments, "--traceback"]):
        done = CliRunner().invoke(main, line)
        assert done.exit_code == 2
        assert "Traceback (most recent call last)" in done.stderr
    assert "Traceback" not in CliRunner().invoke(main, arguments).stderr


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [
    ("keygen", "2", "-o", "OUTPUT"), ("schema", "-o", "OUTPUT/below"), ("keygen", "2", "-o", "OUTPUT/below"),
    ("graph", "make", "ring", "-n", "4", "-o", "OUTPUT/below.edges"),
], ids=["keygen", "schema", "keygen-below", "graph"])  # fmt: skip
def test_an_output_path_that_cannot_be_written_is_reported_in_one_line(tmp_path, arguments):
    (tmp_path / "a file").write_text("")
    found = CliRunner().invoke(main, [each.replace("OUTPUT", str(tmp_path / "a file")) for each in arguments])
    assert found.exit_code in (2, 3) and isinstance(found.exception, SystemExit), found.exception
    assert found.output.count("\n") == 1 and str(tmp_path / "a file") in found.output, found.output
