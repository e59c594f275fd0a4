"""The pages of docs/: their commands and programs run, and what they and the code refer to exists."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import decentnode
from decentnode.cli import main
from decentnode.describe import KINDS, describe, names
from decentnode.experiment import Experiment, load
from decentnode.launch.one_process.in_process import run_in_process
from decentnode.metrics.events import EVENTS
from decentnode.metrics.figures import FIGURES
from decentnode.tasks import TASKS
from tests.conftest import scale
from tests.parallel.ranks import run_ranks
from tests.parallel.work import scripting
from tests.sharing import contract

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TUTORIAL = sorted((DOCS / "tutorial").glob("*.rst"))


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Returns (language, name, text) of a page's code blocks in order."""
    found = []
    lines = page.read_text().splitlines()
    for number, line in enumerate(lines):
        if match := re.match(r"\.\. code-block:: (\w+)", line):
            rest, name, text = lines[number + 1 :], "", []
            for each in rest:
                if each and not each.startswith("   "):
                    break
                if option := re.match(r"   :name: (\S+)", each):
                    name = option[1]
                elif not each.startswith("   :"):
                    text.append(each[3:])
            found.append((match[1], name, "\n".join(text).strip() + "\n"))
    return found


def test_keys_that_pages_name_with_a_value_exist() -> None:
    schema = (ROOT / "configs" / "schema.json").read_text()
    known, sections = set(re.findall(r'"(\w+)": ', schema)), "|".join(Experiment.model_fields)
    named = {(path.name, key) for path in DOCS.rglob("*.rst")
             for key in re.findall(rf"``((?:{sections})\.[a-z_.]+): [^`]*``", path.read_text())}  # fmt: skip
    assert len(named) > 10 and not {each for each in named if set(each[1].split(".")) - known}


def command_of_tests(words: list[str]) -> list[str]:
    """Returns a command of a page as the tests run it: with this Python's modules, and two rounds if it trains."""
    run = words[0] == ".venv/bin/decentnode" and words[1] in ("run", "simulate")
    programs = {".venv/bin/decentnode": ["-m", "decentnode"], ".venv/bin/python": [],
                ".venv/bin/torchrun": ["-m", "torch.distributed.run", "--standalone"]}  # fmt: skip
    return [sys.executable, *programs[words[0]], *words[1:], *(["--plain", "--set", "node.rounds=2"] if run else [])]


def run_in_calling_process(words: list[str], leaves: bool) -> None:
    """Runs a command of decentnode in this process, which has imported torch; if it trains, two rounds in one process.

    leaves: whether a run must leave its folder, because other commands of the page read it.
    """
    if words[0] == "run" and not leaves:
        overrides = [value for key, value in itertools.pairwise(words) if key == "--set"]
        nodes = run_in_process(load(words[1], [*overrides, "node.rounds=2", "communication=inproc", "faults=[]"]))
        rounds = [node.round for node in nodes]  # an asynchronous run ends when the first node has made all rounds
        assert max(rounds) == 2 and (min(rounds) == 2 or nodes[0].schedule.asynchronous)
        return
    if words[0] == "dashboard":  # it would serve until it is stopped
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("decentnode.dashboard.serve.serve", lambda listening, *_: listening.close())
            assert not main.main(words, prog_name="decentnode", standalone_mode=False)
        return
    more = ["--plain", "--set", "node.rounds=2"] if words[0] in ("run", "simulate") else []
    more += ["--set", "communication=inproc", "--set", "faults=[]"] if words[0] == "run" else []
    assert not main.main([*words, *more], prog_name="decentnode", standalone_mode=False)


def run_program(path: Path) -> None:
    """Runs a Python program of the page in this process, with its runs in this process unless it says otherwise."""
    run = decentnode.Experiment.run

    def run_in_this_process(self: Any, **options: Any) -> Any:
        return run(self, **{"processes": False, "progress": False, **options})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decentnode.Experiment, "run", run_in_this_process)
        runpy.run_path(str(path), run_name="__main__")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields a new current folder with the configs in it; modules imported from it are removed afterwards."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def tutorial_command(line: str, folder: Path) -> None:
    """Runs a console line of a tutorial. Commands that train have processes of their own, as for a reader."""
    assert line.startswith("$ "), line
    words = shlex.split(line[2:])
    path = str(ROOT)
    if words[0].startswith("PYTHONPATH="):
        path, words = f"{folder}:{ROOT}", words[1:]
    if words[0] == "bash":
        assert (ROOT / words[1]).is_file()
        words = [".venv/bin/decentnode", "run", "configs/quickstart.yaml"]  # what eval/run.sh runs
    if words[0] == ".venv/bin/decentnode" and words[1] != "run":
        run_in_calling_process(words[1:], True)
        return
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = command_of_tests(words)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", TUTORIAL, ids=lambda p: p.stem)
@pytest.mark.slow
def test_the_commands_of_the_tutorial_run(page: Path, folder: Path) -> None:
    ran = 0
    for language, name, text in blocks(page):
        if name:
            (folder / name).write_text(text)
        for line in text.splitlines() if language == "console" else ():
            tutorial_command(line, folder)
            ran += 1
    assert ran


HOWTO = sorted((DOCS / "howto").glob("*.rst"))


@pytest.mark.parametrize("page", HOWTO, ids=lambda p: p.stem)
@pytest.mark.slow
def test_the_commands_of_the_how_to_pages_run(page: Path, folder: Path) -> None:
    if page.stem == "privacy":
        pytest.importorskip("opacus")
    found = blocks(page)
    shown = [line for language, _, text in found if language == "console" for line in text.splitlines()]
    for included in re.findall(r"^\.\. literalinclude:: (\S+)", page.read_text(), re.M):
        shutil.copy(page.parent / included, folder)
    leaves = any(f"decentnode {command}" in line for command in ("plot", "compare", "replay") for line in shown)
    for language, name, text in found:
        if name:
            (folder / name).write_text(text)
        for line in text.splitlines() if language == "console" else ():
            assert line.startswith("$ "), line
            words = shlex.split(line[2:])
            if words[0] == ".venv/bin/decentnode":
                run_in_calling_process(words[1:], leaves)
            elif words[0] == ".venv/bin/python":
                run_program(folder / words[1])
            else:
                assert words[:2] == [".venv/bin/torchrun", "--nproc-per-node=2"], line
                first, second = run_ranks(2, scripting.run_script, str(folder / words[2]), words[3:])
                assert "loss" in first and not second
    assert shown or page.stem == "clusters", "a page without a command that runs"
    if page.stem == "repeat":
        entries = re.findall(r"^   \* - (``.*)$", page.read_text(), re.M)
        named = {name for entry in entries for name in re.findall(r"``([\w./-]+)``", entry)}
        missing = {name for name in named if not (folder / "runs" / "quickstart" / "latest" / name).exists()}
        # absent here: own modules, other machines, transports with events, and files of running runs only
        absent = {"code/", "machines/1/", "checkpoints/", "nodes/000/events.jsonl", "faults.jsonl", "supervisor.json"}
        assert len(named) > 10 and missing <= absent, missing


@pytest.mark.slow
def test_the_tutorial_s_rule_passes_the_contract(folder: Path) -> None:
    """It learns, and passes the checks for every rule."""
    (text,) = [text for _, name, text in blocks(DOCS / "tutorial" / "own_sharing_rule.rst") if name == "lazy.py"]
    (folder / "lazy.py").write_text(text)
    sys.path.insert(0, str(folder))
    overrides = ["sharing={name: 'lazy:Lazy', keep: 0.3}", "node.rounds=12", "communication=inproc"]
    nodes = run_in_process(load("configs/quickstart.yaml", overrides))
    assert float(nodes[0].figures()["accuracy_mean"]) > 0.7
    rule = type(nodes[0].sharing)
    for check in contract.CHECKS:
        check(lambda: rule(rule.Config(name="lazy:Lazy")))


WRITTEN = [page for page in sorted(DOCS.rglob("*.rst")) if "generated" not in page.parts]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda p: str(p.relative_to(DOCS)))
def test_folders_and_files_that_pages_name_exist(page: Path) -> None:
    for name in re.findall(r"``((?:decentnode|eval|configs|tests|docs)/[\w./]+)``", page.read_text()):
        assert (ROOT / name).exists(), name


CITED = re.compile(r'docs/([\w/]+\.rst)(?:,\s+(?:#\s+)?"([^"]+)")?')
CODE = [path for room in ("decentnode", "tests", "eval", "configs") for kind in ("py", "sh", "yaml", "sbatch")
        for path in sorted((ROOT / room).rglob(f"*.{kind}")) if path != Path(__file__)]  # fmt: skip


def test_pages_and_sections_that_the_code_names_exist() -> None:
    found = 0
    for path in [*CODE, ROOT / "README.rst", ROOT / "CONTRIBUTING.rst"]:
        text = path.read_text()
        for name in re.findall(r"\b[\w-]+\.md\b", text):
            assert (ROOT / name).exists(), f"{path} names {name}"
        for page, section in CITED.findall(text):
            found += 1
            assert (DOCS / page).exists(), f"{path} names docs/{page}"
            headings = re.findall(r"^(.+)\n(?:=+|-+|~+)$", (DOCS / page).read_text(), re.M)
            assert not section or " ".join(section.split()) in headings, f"{path}: {page} has no {section!r}"
    assert found > 10


@pytest.mark.parametrize("page", WRITTEN, ids=lambda p: str(p.relative_to(DOCS)))
def test_keys_that_pages_name_exist(page: Path) -> None:
    """Also in sections that are shown alone: they must load, laid over the quickstart."""
    text = page.read_text()
    for kind, key in re.findall(r"``(communication|node|training|sharing|data|mapping)\.([a-z_]+)(?:``|: )", text):
        known = {each.name.partition(".")[0] for name in names(kind) for each in describe(kind, name).keys}
        assert key in known | set(names(kind)) or f"{kind}.{key}" == "mapping.yaml", f"{kind}.{key}"
    for language, name, block in blocks(page):
        if language == "yaml" and not name:
            sections = [f"{key}={json.dumps(value)}" for key, value in yaml.safe_load(block).items()]
            load(ROOT / "configs" / "quickstart.yaml", sections)


def load_docs_module(name: str) -> Any:
    """Returns a module of docs/, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_drawing_is_on_a_page(tmp_path: Path) -> None:
    load_docs_module("drawings").write_all(tmp_path)
    drawn = {path.stem for path in tmp_path.glob("*.svg")}
    assert drawn == {name for page in WRITTEN for name in re.findall(r"image:: /drawings/(\w+)\.svg", page.read_text())}


@pytest.mark.skipif(not scale(0, 1), reason="docs/build.sh does the same in half a minute, which CI runs before")
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    """Runs the command of docs/build.sh, if its packages (extra `docs`) are installed."""
    for needed in ("sphinx", "furo", "sphinxcontrib.bibtex", "sphinx_copybutton"):
        pytest.importorskip(needed)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    load_docs_module("generate").write_all(folder)
    return {path.stem: path.read_text() for path in folder.iterdir()}


def test_the_reference_has_every_component_and_key(pages: dict[str, str]) -> None:
    for kind in KINDS:
        for name in names(kind):
            assert f".. _{kind}-{name}:" in pages[kind]
            assert all(f"``{key.name}``" in pages[kind] for key in describe(kind, name).keys)
    assert "decentnode graph make" in pages["cli"]
    assert all(f"``{kind}``" in pages["events"] for kind in EVENTS)
    assert all(f"``{figure.name}``" in pages["figures"] for figure in FIGURES)
    assert all(f":ref:`{task} <task-{task}>`" in pages["figures"] for task in TASKS)
    assert all(name in pages["figures"] for name in ("``perplexity``", "``rmse``", "``top5_accuracy_merged``"))
    codes = [int(code) for code in re.findall(r"\* - (\d+)$", pages["exit_codes"], re.M)]
    assert "0.949" in pages["rates"] and "718,672" in pages["graph_facts"] and "k = 2" in pages["base_lengths"]
    assert "29 (0.49)" in pages["equitopo"]
    assert codes == [0, 2, 3, 4, 5, 6, 7, 8, 130, 143]


def test_every_generated_page_is_in_a_table_of_contents(pages: dict[str, str]) -> None:
    made = {*KINDS, "cli", "figures", "events", "exit_codes"}
    assert made <= pages.keys()
    shown = {name for page in WRITTEN for name in re.findall(r"^   reference/generated/(\w+)$|^   generated/(\w+)$",
                                                            page.read_text(), re.M)}  # fmt: skip
    assert made <= {first or second for first, second in shown}


def test_every_rule_has_its_equation() -> None:
    text = (DOCS / "explanation" / "algorithms.rst").read_text()
    assert all(re.search(rf"^``.*\b{name}\b", text, re.M) for name in names("sharing"))


def test_every_paper_that_pages_cite_is_in_the_bibliography() -> None:
    known = set(re.findall(r"^@\w+\{(\w+),", (DOCS / "references.bib").read_text(), re.M))
    cited = {key for page in WRITTEN for group in re.findall(r":cite:p:`([^`]+)`", page.read_text())
             for key in group.split(",")}  # fmt: skip
    assert cited == known
