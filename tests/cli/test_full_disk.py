"""Commands on a full disk report it in one sentence and keep existing files."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from decentnode.cli import completion, main
from decentnode.errors import EnvironmentFault
from decentnode.launch.files import run_dir
from decentnode.system import write_atomic
from tests.compat.test_decentralizepy import write as write_decentralizepy_config
from tests.launch.facts import FACTS
from tests.launch.faults import experiment


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Makes this process unable to write to files inside the block. It can create them, as on a full disk; only the
    error is another: "File too large"."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_write_names_the_file_and_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("before")
    with full_disk(), pytest.raises(OSError, match="File too large") as caught:
        write_atomic(tmp_path / "kept", "after")
    assert caught.value.filename == str(tmp_path / "kept")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["before"]


def test_writing_to_a_link_or_a_pipe_keeps_it_a_link_or_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for text in ("new", "again"):
        write_atomic(tmp_path / "link", text)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "again"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(tmp_path / "pipe", "text")
    assert os.read(reader, 10) == b"text" and (tmp_path / "pipe").is_fifo()
    os.close(reader)


@pytest.mark.parametrize("words", [["schema", "-o", "kept"], ["convert", "theirs.ini", "-o", "kept", "--force"]],
                         ids=lambda words: words[0])  # fmt: skip
def test_an_existing_output_file_is_kept_on_a_full_disk(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_decentralizepy_config(tmp_path, "theirs.ini")
    monkeypatch.chdir(tmp_path)
    Path("kept").write_text("before")
    with full_disk():
        found = CliRunner().invoke(main, words)
    assert found.exit_code == 3 and "kept: " in found.output and "File too large" in found.output, found.output
    assert Path("kept").read_text() == "before" and len(list(tmp_path.iterdir())) == 2
    assert CliRunner().invoke(main, words).exit_code == 0 and Path("kept").read_text() != "before"


@pytest.mark.parametrize("words", [["keygen", "2", "-o", "keys"], ["keygen", "--newcomer", "-o", "keys"],
                                   ["invite", "keys/run.secret"]], ids=lambda words: words[0])  # fmt: skip
def test_no_partial_key_is_left_that_would_stop_the_next_call(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("keys").mkdir(mode=0o700)
    with full_disk():
        found = CliRunner().invoke(main, words)
    assert found.exit_code == 3 and found.output.startswith("error: ") and "File too large" in found.output
    assert not list(Path("keys").iterdir())
    assert CliRunner().invoke(main, words).exit_code == 0


def test_secrets_without_their_public_keys_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    assert CliRunner().invoke(main, ["keygen", "2", "-o", str(keys)]).exit_code == 0
    (keys / "public.keys").write_text((public := (keys / "public.keys").read_text()) + "\n" * 400)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(public), hard))  # a secret still fits, the longer list does not
    try:
        found = CliRunner().invoke(main, ["keygen", "2-5", "-o", str(keys)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert found.exit_code == 3 and "public.keys" in found.output
    assert {each.name for each in keys.iterdir()} == {"public.keys", "node-0.secret", "node-1.secret"}


@pytest.mark.parametrize(("words", "message"), [
    (["sweep", "tiny.yaml", "-g", "seed=1", "--run-dir", "runs"], "error: No usable temporary directory found in "),
    (["list"], "error: cannot write: File too large"),
], ids=["sockets", "output"])  # fmt: skip
def test_a_process_that_cannot_write_at_all_ends_with_one_sentence(
    tmp_path: Path, words: list[str], message: str
) -> None:
    """The command has a process of its own: its fork server would keep the limit for all later tests."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(experiment()))
    command = [sys.executable, "-m", "decentnode", *words]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with full_disk(), (tmp_path / "output").open("w") as output:
        found = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=200, cwd=tmp_path,
                               env=environment)  # fmt: skip
    assert found.returncode == 3 and found.stderr.startswith(message) and found.stderr.count("\n") == 1, found.stderr


def test_a_run_that_cannot_start_leaves_no_folder_and_keeps_the_link_latest(tmp_path: Path) -> None:
    facts = dataclasses.replace(FACTS, runs_dir=str(tmp_path), config_text="a: 1\n")
    before = run_dir.Records(facts, "tiny.yaml", "run").directory
    with full_disk(), pytest.raises(EnvironmentFault, match=r"cannot write to the run directory .*File too large"):
        run_dir.Records(facts, "tiny.yaml", "run")
    assert {each.name for each in before.parent.iterdir()} == {before.name, "latest"}
    assert run_dir.resolve(before.parent) == before


def test_the_start_up_file_of_a_shell_is_kept_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    kept = tmp_path / "dotfiles"
    kept.write_text("alias ll='ls -l'\n")
    kept.chmod(0o600)
    (tmp_path / ".bashrc").symlink_to(kept)
    script, start = completion.script_paths("bash")
    assert start is not None
    with full_disk(), pytest.raises(OSError, match="File too large"):
        completion._add_line(script, start)
    assert kept.read_text() == "alias ll='ls -l'\n"
    completion._add_line(script, start)
    assert len(kept.read_text().splitlines()) == 2 and kept.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / ".bashrc").is_symlink()
