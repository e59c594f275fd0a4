"""`decentnode keygen`, and a run whose nodes authenticate with its keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from decentnode import clock
from decentnode.cli import main
from decentnode.cli.keygen import parse_uids
from decentnode.communication.zeromq.sockets.security import read_secret
from decentnode.errors import UsageError
from decentnode.wire.invitation import opened
from tests.commands import ROOT, run


@pytest.mark.parametrize(("text", "uids"), [
    ("3", [0, 1, 2]), ("4-6", [4, 5, 6]), ("0,3,5", [0, 3, 5]), ("2,", [2]), ("0-1,7", [0, 1, 7]),
])  # fmt: skip
def test_the_uids_of_NODES(text: str, uids: list[int]) -> None:
    assert parse_uids(text) == uids


@pytest.mark.parametrize("text", ["0", "", "x", "3-1", "1,1", "-2", "9999999"])
def test_wrong_NODES_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="NODES must be"):
        parse_uids(text)


def test_existing_keys_are_not_overwritten(tmp_path: Path) -> None:
    runner = CliRunner()
    folder = tmp_path / "keys"
    result = runner.invoke(main, ["keygen", "2", "-o", str(folder)])
    assert result.exit_code == 0 and "2 secret keys" in result.output
    assert {path.name for path in folder.iterdir()} == {"public.keys", "node-0.secret", "node-1.secret"}
    secret = (folder / "node-0.secret").read_text().strip()
    assert secret not in result.output
    assert runner.invoke(main, ["keygen", "2-3", "-o", str(folder)]).exit_code == 0
    again = runner.invoke(main, ["keygen", "1", "-o", str(folder)])
    assert again.exit_code == 2 and "key of node 0 already" in again.output


@pytest.mark.parametrize("bulk", ["curve", "aes-gcm"])
@pytest.mark.slow
def test_a_run_with_required_security_needs_every_key_and_writes_none(bulk: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert CliRunner().invoke(main, ["keygen", "4", "-o", str(keys)]).exit_code == 0
    command = ["run", str(ROOT / "configs" / "quickstart.yaml"), "--plain",
               "--run-dir", str(tmp_path / "runs"), "--set", "graph={name: complete, nodes: 4}",
               "--set", "mapping={name: linear, nodes_per_machine: 4}", "--set", "node.rounds=3", "--set",
               f"communication={{name: zeromq, security: required, keys: {keys}, bulk_security: {bulk}}}"]  # fmt: skip
    code, out, err = run(ROOT, *command)
    assert code == 0, out + err
    (folder,) = (tmp_path / "runs").glob("quickstart/latest")
    assert json.loads((folder / "summary.json").read_text())["rounds"] == 3
    secrets = [path.read_bytes().strip() for path in keys.glob("*.secret")]
    for path in folder.resolve().rglob("*"):
        if path.is_file():
            assert not any(secret in path.read_bytes() for secret in secrets), path
    (keys / "node-2.secret").unlink()
    code, out, err = run(ROOT, *command)
    assert code == 3 and "node-2.secret" in out + err


def test_the_secret_of_invitations_is_made_once_and_stays_secret(tmp_path: Path) -> None:
    path, runner = tmp_path / "run.secret", CliRunner()
    first = runner.invoke(main, ["invite", str(path), "--nodes", "2", "--hours", "1"])
    again = runner.invoke(main, ["invite", str(path)])
    assert first.exit_code == again.exit_code == 0, first.output + again.output
    assert "was created: copy it to every machine" in first.stderr and not again.stderr
    found = opened(read_secret(path), first.stdout.strip(), clock.wall())
    assert found.uses == 2 and 3500 < found.until - clock.wall() <= 3601
    assert path.stat().st_mode & 0o777 == 0o600 and path.read_text().strip() not in first.output
    path.chmod(0o644)
    assert runner.invoke(main, ["invite", str(path)]).exit_code == 3
    (other := tmp_path / "other").write_text("not a secret")
    other.chmod(0o600)
    wrong = runner.invoke(main, ["invite", str(other)])
    assert wrong.exit_code == 3 and "not a secret of decentnode invite" in wrong.output


def test_the_secret_of_a_scripts_ranks_is_made_once_and_stays_secret(tmp_path: Path) -> None:
    path, runner = tmp_path / "ranks.secret", CliRunner()
    made = runner.invoke(main, ["keygen", "--secret", str(path)])
    assert made.exit_code == 0 and "copy it to every machine" in made.output
    assert path.stat().st_mode & 0o777 == 0o600 and path.read_text().strip() not in made.output
    again = runner.invoke(main, ["keygen", "--secret", str(path)])
    assert again.exit_code == 2 and "already exists" in again.output
    for more in (["2"], ["--newcomer"]):
        wrong = runner.invoke(main, ["keygen", "--secret", str(tmp_path / "other"), *more])
        assert wrong.exit_code == 2 and "give one of NODES, --newcomer and --secret" in wrong.output
    assert runner.invoke(main, ["keygen", "--secret", str(tmp_path / "no" / "x")]).exit_code == 3
