"""The process that serves the dashboard: where it listens, and when it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

pytest.importorskip("uvicorn")

from decentnode.cli import main
from decentnode.dashboard import serve
from decentnode.dashboard.serve import Child, is_loopback, listen, url
from decentnode.errors import EnvironmentFault
from tests.dashboard.folder import write_run_folder

TIMEOUT_SECONDS = 60.0


def get_json(address: str, path: str, token: str | None) -> tuple[int, dict]:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    try:
        request = urllib.request.Request(address + path, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, {}


def test_a_given_port_in_use_is_an_error_and_a_default_port_in_use_is_replaced(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=f"port {port}.*another --port"):
            listen("127.0.0.1", port)
        monkeypatch.setattr(serve, "PORT", port)
        with listen("127.0.0.1", None) as second:
            assert second.getsockname()[1] != port
    with pytest.raises(EnvironmentFault, match="cannot listen at no"):
        listen("no.such.host.invalid", 0)


@pytest.mark.parametrize(
    ("host", "loopback"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.9.9.9", True),
                           ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("gpu7", False)])  # fmt: skip
def test_loopback_hosts_are_recognized(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_the_url_has_the_token_in_its_fragment_which_browsers_do_not_send() -> None:
    with listen("127.0.0.1", 0) as listening:
        assert url(listening, "127.0.0.1", "abc") == f"http://127.0.0.1:{listening.getsockname()[1]}/#token=abc"
        assert url(listening, "::1", "abc").startswith("http://[::1]:")
        assert url(listening, "0.0.0.0", "abc").startswith(f"http://{socket.gethostname()}:")


def test_a_dashboard_in_a_child_process_serves_the_run_and_is_reaped(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path)
    child = Child("127.0.0.1", 0)
    address, _, token = child.url.partition("/#token=")
    try:
        child.start(run)
        assert get_json(address, "/api/runs", None)[0] == 401
        status, found = get_json(address, "/api/runs", token)
        assert (status, [each["id"] for each in found["runs"]]) == (200, ["ring/2026-01-01"])
        assert child._process is not None
        process = psutil.Process(child._process.pid)
        assert token not in " ".join(process.cmdline()), "other users of the machine read command lines"
    finally:
        child.close()
    assert not process.is_running()
    child.close()


@pytest.mark.slow
def test_a_dashboard_in_a_child_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path)
    program = ("import sys, time; from pathlib import Path; from decentnode.dashboard.serve import Child\n"
               "child = Child('127.0.0.1', 0); child.start(Path(sys.argv[1]))\n"
               "print(child._process.pid, flush=True); sys.stdin.read()")  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", program, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as parent:  # fmt: skip
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        gone, alive = psutil.wait_procs([child], timeout=TIMEOUT_SECONDS)
        assert gone and not alive


def test_the_dashboard_command_prints_one_line_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    write_run_folder(tmp_path / "runs")
    environ = {**os.environ, "COLUMNS": "40", "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-m", "decentnode", "dashboard", "ring/2026-01-01", "--port", "0"],
                          cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          start_new_session=True) as command:  # fmt: skip
        assert command.stdout is not None and command.stderr is not None
        address, _, token = command.stdout.readline().strip().partition("/#token=")
        assert get_json(address, "/api/runs", token)[1]["runs"][0]["named"] is True
        assert get_json(address, "/api/runs", "wrong")[0] == 401
        command.send_signal(signal.SIGINT)
        assert command.wait(TIMEOUT_SECONDS) == 0
        assert (command.stdout.read(), command.stderr.read()) == ("", "")


def run_command(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["dashboard", *arguments])
    return done.exit_code, done.output


def test_listening_on_all_interfaces_prints_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "serve", lambda listening, *_: listening.close())
    run = write_run_folder(tmp_path)
    code, output = run_command(str(run), "--port", "0", "--host", "0.0.0.0")
    assert code == 0
    assert "open to the network" in output and "#token=" in output
    code, output = run_command(str(run), "--port", "0")
    assert (code, output.count("\n")) == (0, 1)


def test_wrong_arguments_and_missing_packages_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command()[0] == 2
    assert run_command("nowhere")[0] == 2
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(EnvironmentFault, match=r"decentnode\[dashboard\]"):
        serve.check_installed()
