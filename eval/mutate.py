"""Mutation testing: makes small mistakes in the code, one at a time, and checks whether the tests notice. See
eval/mutate.sh."""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from queue import SimpleQueue

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).parents[1]
ROOMS = ("wire", "communication", "sharing", "node", "graph")
UNTESTED = {"communication/shared_memory/cuda_ipc.py": "needs a GPU"}
"""Files whose tests do not run here."""
CORE = {"communication": ("receive/test_exchange", "zeromq/test_tree_collectives",
                          "torch_distributed/test_group_collective", "test_faults", "test_limits")}  # fmt: skip
"""Rooms whose tests take long: for a mutant only these tests run, and those that name its file."""
PRELOADED = ("torch", "torch._dynamo", "torch.distributed", "numpy", "hypothesis", "pytest", "zmq", "msgpack",
             "networkx", "pydantic", "yaml", "safetensors.torch")  # fmt: skip
"""What every test run imports: imported once here, as the runs are forked from this process."""


@dataclass(frozen=True)
class Mutant:
    file: str
    """Relative to decentnode/."""
    line: int
    operator: str
    """cosmic-ray's name of the operator."""
    occurrence: int

    @property
    def room(self) -> str:
        return self.file.split("/")[0]

    @cache  # noqa: B019
    def code(self) -> str:
        """Returns the whole file with the mistake in it."""
        found = mutate_code(source_of(self.file), make_operator(self.operator), self.occurrence)
        assert found is not None
        return str(found)

    def diff(self) -> str:
        lines = difflib.unified_diff(source_of(self.file).splitlines(), self.code().splitlines(), lineterm="", n=0)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.operator.removeprefix('core/')}"


@cache
def source_of(file: str) -> str:
    """Returns a file's source; cached, as the working tree may change while the tests run."""
    return (ROOT / "decentnode" / file).read_text()


def make_operator(name: str) -> object:
    return cosmic_ray.plugins.get_operator(name)()


Span = tuple[tuple[int, int], tuple[int, int]]


def excluded_spans(source: str) -> list[Span]:
    """Returns the places where a mistake does not change correct behavior: annotations, log calls, imports for type
    checkers, and guards against bugs (assert, zip(strict=True), dataclass(frozen=True))."""
    found: list[ast.AST] = []
    for node in ast.walk(ast.parse(source)):
        found += [each for each in (getattr(node, "annotation", None), getattr(node, "returns", None)) if each]
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            found.append(node)
        if isinstance(node, ast.Assert) or (isinstance(node, ast.keyword) and node.arg in ("strict", "frozen")):
            found.append(node)
        if isinstance(node, ast.Expr) and ast.unparse(node).startswith(("logger.", "logging.")):
            found.append(node)
    return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in found if hasattr(n, "lineno")]  # type: ignore[attr-defined, misc]


def mutants_of(file: str) -> Iterator[tuple[tuple[int, int], Mutant]]:
    """Yields (place, mutant) for everything that cosmic-ray can do to a file."""
    source = source_of(file)
    tree = get_ast(source)
    spans = excluded_spans(source)
    for name in sorted(cosmic_ray.plugins.operator_names()):
        if cosmic_ray.plugins.get_operator(name).arguments():
            continue
        operator = make_operator(name)
        places = (place for node in ast_nodes(tree) for place in operator.mutation_positions(node))
        for occurrence, (start, _) in enumerate(places):
            if any(first <= tuple(start) < last for first, last in spans):
                continue
            yield tuple(start), Mutant(file, start[0], name, occurrence)


def draw_mutants(count: int, rooms: list[str], seed: int) -> list[Mutant]:
    """Returns randomly drawn mutants, equally many from each room. Within a room every place in the code is equally
    likely, however many mistakes are possible there."""
    chosen = []
    for number, room in enumerate(rooms):
        places: dict[tuple[str, tuple[int, int]], list[Mutant]] = {}
        for path in sorted((ROOT / "decentnode" / room).rglob("*.py")):
            file = str(path.relative_to(ROOT / "decentnode"))
            for place, mutant in () if file in UNTESTED else mutants_of(file):
                places.setdefault((file, place), []).append(mutant)
        draw = random.Random(f"{seed} {room}")
        share = count // len(rooms) + (number < count % len(rooms))
        order = draw.sample(sorted(places), len(places))
        found = (next(filter(compiles, draw.sample(places[place], len(places[place]))), None) for place in order)
        chosen += islice(filter(None, found), share)
    return chosen


def compiles(mutant: Mutant) -> bool:
    """Returns whether a mutant's code compiles: cosmic-ray takes the ** of {**x} for a power."""
    try:
        ast.parse(mutant.code())
    except SyntaxError:
        return False
    return True


def tests_of(file: str) -> list[str]:
    """Returns the room's tests, or for a room in CORE some of them; tests that name the file's module most often come
    first."""
    room, stem = file.split("/")[0], Path(file).stem
    if stem == "__init__":
        return [f"tests/{room}"]
    folder = ROOT / "tests" / room
    dotted = re.escape(file.removesuffix(".py").replace("/", "."))
    named = re.compile(rf"decentnode\.{dotted}\b|\b{stem}\b")
    times = {path: len(named.findall(path.read_text())) for path in sorted(folder.rglob("test_*.py"))}
    core = {folder / f"{name}.py" for name in CORE.get(room, ())}
    paths = sorted(times, key=lambda path: (path.stem != f"test_{stem}", -times[path]))
    return [str(path.relative_to(ROOT)) for path in paths if times[path] or not core or path in core]


def copy_tree() -> Path:
    """Copies the files of the working tree that git does not ignore into a new folder, and returns it."""
    folder = Path(tempfile.mkdtemp(prefix="mutate-"))
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True,
                            text=True, check=True).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run_tests(folder: Path, tests: list[str], log: Path, seconds: float) -> tuple[int | None, float]:
    """Runs tests in a forked process, whose children are killed with it. Returns (pytest's exit code, None after
    `seconds`; the seconds it took)."""
    started = time.monotonic()
    process = os.fork()
    if process == 0:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(folder)
        sys.path[0] = str(folder)
        sys.dont_write_bytecode = True
        import pytest

        os._exit(pytest.main(["-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=60", *tests]))
    code = None
    while time.monotonic() - started < seconds:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if code is None:
        os.waitpid(process, 0)
    return code, time.monotonic() - started


def try_mutant(mutant: Mutant, folders: SimpleQueue[Path], seconds: float) -> tuple[bool, str]:
    """Tries a mutant. Returns (whether the tests noticed, how). seconds: time limit; exceeding it counts as noticed."""
    folder = folders.get()
    path, log = folder / "decentnode" / mutant.file, folder / "log.txt"
    try:
        path.write_text(mutant.code())
        code, took = run_tests(folder, tests_of(mutant.file), log, seconds)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", log.read_text(errors="replace"), re.MULTILINE)
    finally:
        path.write_text(source_of(mutant.file))
        folders.put(folder)
    if code == 0:
        return False, f"no test fails, {took:.0f} s"
    how = f"no end within {seconds:g} s" if code is None else failed[1] if failed else f"exit code {code}"
    return True, f"{how}, {took:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("count", nargs="?", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", default=",".join(ROOMS))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", default="", help="FILE:LINE,...: of those drawn, the ones at these places")
    options = parser.parse_args()
    rooms = options.rooms.split(",")
    mutants = draw_mutants(options.count, rooms, options.seed)
    if options.only:
        mutants = [m for m in mutants if f"{m.file}:{m.line}" in options.only.split(",")]
    for name in PRELOADED:
        importlib.import_module(name)
    folders: SimpleQueue[Path] = SimpleQueue()
    copies = [copy_tree() for _ in range(options.jobs)]
    try:
        for copy in copies:
            folders.put(copy)
        limits = {}
        for room in sorted({m.room for m in mutants}):
            tests = [f"tests/{room}/{stem}.py" for stem in CORE.get(room, ())] or [f"tests/{room}"]
            code, took = run_tests(copies[0], tests, copies[0] / "log.txt", 900)
            limits[room] = options.seconds + 2 * took
            print(f"{room}: the tests of the code as it is, {took:.0f} s", flush=True)
            if code != 0:
                output = (copies[0] / "log.txt").read_text()[-3000:]
                sys.exit(f"{output}\n{room}: the tests of the code as it is must pass, got exit code {code}")
        survivors = []
        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes = pool.map(lambda m: try_mutant(m, folders, limits[m.room]), mutants)
            for number, (mutant, (noticed, how)) in enumerate(zip(mutants, outcomes, strict=True), 1):
                print(f"{number}/{len(mutants)} {'killed' if noticed else 'SURVIVED'} {mutant}: {how}", flush=True)
                if not noticed:
                    survivors.append(mutant)
    finally:
        for copy in copies:
            shutil.rmtree(copy, ignore_errors=True)
    for mutant in survivors:
        print(f"\nsurvived: {mutant}\n{mutant.diff()}")
    print(f"\nseed {options.seed}: {len(mutants) - len(survivors)} of {len(mutants)} killed")


if __name__ == "__main__":
    main()
