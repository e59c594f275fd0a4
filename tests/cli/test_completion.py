"""`decentnode completion`: its scripts, where they are installed, and what they propose."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from decentnode.cli import COMMANDS, completion, main


def complete(*words: str) -> list[str]:
    """Returns the completions of the last of `words`."""
    complete = ShellComplete(main, {}, "decentnode", completion.VARIABLE)
    return [item.value for item in complete.get_completions([*words[:-1]], words[-1])]


def test_commands_options_and_names_of_runs_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine" / "2026-11-27T10-00-00-aaaa" / "nodes").mkdir(parents=True)
    (tmp_path / "runs" / "empty").mkdir()
    assert complete("pl") == ["plan", "plot"]
    assert complete("") == [name for name in COMMANDS if find_spec(f"decentnode.cli.{name}")]
    assert "--paper" in complete("plot", "--p")
    assert complete("plot", "") == ["mine", "latest"] and complete("status", "m") == ["mine"]
    assert complete("cmopare", "x") == [], "an unknown command raises nothing"


def test_completing_a_command_name_imports_no_command(tmp_path: Path) -> None:
    """Otherwise pressing Tab would take seconds."""
    environment = {**os.environ, completion.VARIABLE: "bash_complete", "COMP_WORDS": "decentnode pl", "COMP_CWORD": "1"}
    code = ("import sys; sys.argv = ['decentnode']\nfrom decentnode.cli import main\ntry: main()\nfinally:\n"
            " print([m for m in sys.modules if m.startswith(('decentnode.cli.', 'torch', 'matplotlib', 'numpy'))])")
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert found.stdout.split() == ["plain,plan", "plain,plot", "[]"], found.stderr


@pytest.mark.parametrize(("shell", "script", "start"), [
    ("bash", ".local/share/decentnode/completion.bash", ".bashrc"),
    ("zsh", ".local/share/decentnode/completion.zsh", ".zshrc"),
    ("fish", ".config/fish/completions/decentnode.fish", None),
])  # fmt: skip
def test_installing_twice_leaves_one_script_and_one_line_in_the_start_up_file(
    shell: str, script: str, start: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "a home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    before = "alias a=b\n"
    if start:
        (home / start).write_text(before + f"[ -r /old ] && . /old  {completion.MARK}\n")
    for _ in range(2):
        found = CliRunner().invoke(main, ["completion", "--install"])
        assert found.exit_code == 0 and str(home / script) in found.output, found.output
    assert "_decentnode_completion" in (home / script).read_text()
    if start:
        lines = (home / start).read_text().splitlines()
        assert lines[0] == "alias a=b" and len(lines) == 2 and script in lines[1] and "/old" not in lines[1]
    assert CliRunner().invoke(main, ["completion", shell]).output == (home / script).read_text()


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="needs bash")
def test_bash_completes_decentnode_after_reading_its_start_up_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert CliRunner().invoke(main, ["completion", "bash", "--install"]).exit_code == 0
    found = subprocess.run(["/bin/bash", "--norc", "-c", "source ~/.bashrc && complete -p decentnode"],
                           capture_output=True, text=True, timeout=60)  # fmt: skip
    assert "-F _decentnode_completion decentnode" in found.stdout, found.stderr


def test_another_shell_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    found = CliRunner().invoke(main, ["completion"])
    assert found.exit_code == 2 and "bash, zsh, fish" in found.output and "tcsh" in found.output
