"""Rules of the code base that can be checked automatically: the direction of imports, and forbidden constructs."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "decentnode"

FLOORS: list[list[str]] = [
    ["errors", "logs", "rng", "tensors", "payload", "samples", "native", "clock", "entropy", "system",
     "formatting", "similar_words", "user_cache", "version"],
    ["config", "mixing", "metrics"],
    ["graph", "mapping", "wire", "compression", "optim", "models", "data", "tasks", "faults",
     "samplers", "trackers"],
    ["sharing", "training", "communication", "checkpoint"],
    ["node", "parallel"],
    ["experiment"],
    ["build", "compat", "describe", "objects"],
    ["simulate"],
    ["launch", "report"],
    ["sweeps", "dashboard"],
    ["cli"],
    ["api", "__main__", "__init__"],
]
ROOMS = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
SIDEWAYS = {  # within one floor, in this direction only
    ("training", "models"), ("logs", "clock"), ("system", "entropy"), ("native", "user_cache"),
}  # fmt: skip

FILES = sorted(path for path in PACKAGE.rglob("*.py") if "starter" not in path.parts)


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text()


@functools.cache
def parsed(path: Path) -> tuple[list[ast.Import | ast.ImportFrom], list[str]]:
    """Returns the imports of a file, also those in functions, and the locations of functions that do nothing."""
    nodes: list[ast.AST] = [ast.parse(text_of(path))]
    for node in nodes:  # only statements, as expressions contain no imports: a fifth of the time of ast.walk
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = getattr(node, block, [])
            nodes += inside if isinstance(inside, list) else []  # `body` of a lambda is no list
    empty = [f"{path}:{node.lineno}: {node.name} does nothing" for node in nodes
             if isinstance(node, ast.FunctionDef) and len(node.body) == 1 and isinstance(node.body[0], ast.Pass)]
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)], empty


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Returns the rooms of decentnode that a file imports, also in functions and under TYPE_CHECKING."""
    found = set()
    for node in parsed(path)[0]:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"decentnode.{a.name}" for a in node.names] if node.module == "decentnode" else [node.module]
        found |= {f"{name}.__init__".split(".")[1] for name in names if name.split(".")[0] == "decentnode"}
    return found


def test_every_room_has_a_floor() -> None:
    assert {room_of(path) for path in FILES} <= ROOMS.keys()


def test_imports_go_down() -> None:
    wrong = [f"{path}: {room} (floor {ROOMS[room]}) imports {other} (floor {ROOMS[other]})"
             for path in FILES for room in [room_of(path)] for other in imports_of(path) - {room}
             if room != "__init__" and (room, other) not in SIDEWAYS and ROOMS[other] >= ROOMS[room]]  # fmt: skip
    assert not wrong


READS_THE_WORLD = {"asyncio", "multiprocessing", "os", "random", "secrets", "select", "socket", "subprocess",
                   "tempfile", "time", "zmq"}  # fmt: skip
"""Modules with which code can read inputs besides its arguments, or have effects besides its results."""


@pytest.mark.parametrize("path", sorted((PACKAGE / "wire").rglob("*.py")), ids=lambda p: p.stem)
def test_the_protocol_knows_of_the_world_what_it_is_given(path: Path) -> None:
    """Bytes, messages, the time and random bytes are arguments, so that the same calls lead to the same state."""
    names = {alias.name for node in parsed(path)[0] if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in parsed(path)[0] if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in names} & READS_THE_WORLD
    assert "clock" not in imports_of(path)
    assert "threading" not in names or set(re.findall(r"threading\.\w+", text_of(path))) == {"threading.local"}


PURE = {"graph", "mixing", "compression", "optim", "models", "data", "sharing", "training", "wire",
        "samplers"}


def test_rooms_of_pure_functions_do_not_ask_for_the_time() -> None:
    assert not [path for path in FILES if room_of(path) in PURE and "clock" in imports_of(path)]


INSIDE: dict[str, list[list[str]]] = {
    "communication": [
        ["poller", "waker"],
        ["shared_process"],
        ["counters", "parts", "routing"],
        ["run_state"],
        ["hooks", "order_wait"],
        ["__init__", "base"],
        ["receive"],
        ["path"],
        ["inproc", "same_process", "shared_memory", "torch_distributed"],
        ["zeromq"],
        ["hybrid"],
    ],
    "communication/zeromq": [
        ["config"],
        ["protocol"],
        ["sockets"],
        ["relays"],
        ["chunk_path", "run_parts"],
        ["generations", "newcomers"],
        ["transport"],
    ],
    "node": [
        ["schedules", "faults"],
        ["config", "sampling", "stepping"],
        ["measuring", "rules"],
        ["resumable"],
        ["checkpoints"],
        ["generations", "orders"],
        ["rounds"],
        ["node"],
    ],
    "parallel": [
        ["process_group", "planning"],
        ["buckets", "checks", "membership"],
        ["averages", "transports", "methods"],
        ["steps"],
        ["states", "participants"],
        ["ddp", "comm_optimizer", "initialize"],
        ["recording"],
        ["train", "__init__"],
    ],
    "parallel/membership": [
        ["keys"],
        ["addresses", "socket_group"],
        ["control"],
        ["generation_groups"],
        ["job"],
        ["founding"],
        ["startup"],
    ],
    "parallel/transports": [
        ["base"],
        ["host_memory", "presence"],
        ["coded_memory", "collective", "point_to_point", "sockets", "shared_memory", "regrouping"],
        ["choice"],
    ],
    "launch": [
        ["children", "doctor"],
        ["files", "loading"],
        ["nodes", "evaluate", "reporting", "collecting"],
        ["one_process"],
        ["supervising"],
        ["supervisor", "calling_process"],
    ],
    "simulate": [
        ["timeline", "engines", "links_file"],
        ["traffic", "data_parallel", "world"],
        ["cliques", "asynchronous_rounds"],
        ["virtual"],
        ["planner"],
    ],
    "report": [
        ["reading", "latex", "trace"],
        ["pictures", "closing", "series_table", "table"],
        ["compare"],
        ["page"],
    ],
}
"""Layers inside the largest folders, from low to high. For example, paths do not import the transport that opens them,
messages not the sockets that carry them, and schedules not the node that they are part of."""


@pytest.mark.parametrize("folder", INSIDE)
def test_imports_go_down_inside_folders(folder: str) -> None:
    floors = {room: floor for floor, rooms in enumerate(INSIDE[folder]) for room in rooms}
    dotted = re.escape(f"decentnode.{folder.replace('/', '.')}")
    imports, wrong = re.compile(rf"^\s*from {dotted}(?:\.(\w+))?[\w.]* import (.*)", re.M), []
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        room = path.relative_to(PACKAGE / folder).parts[0].removesuffix(".py")
        for name, names in imports.findall(text_of(path)):
            others = [name] if name else [each.split()[0] for each in names.split(",")]
            wrong += [f"{path} of {room} imports {other}"
                      for other in (each if each in floors else "__init__" for each in others)
                      if other != room and floors[other] >= floors[room]]  # fmt: skip
    assert not wrong


@pytest.mark.parametrize("folder", INSIDE)
def test_a_folder_with_rooms_has_not_many_files_beside_them(folder: str) -> None:
    for room in {path.parent for path in (PACKAGE / folder).rglob("*.py")}:
        assert len(list(room.glob("*.py"))) <= 18, room
        assert text_of(room / "__init__.py").startswith('"""'), f"{room} does not say what it is for"


@pytest.mark.parametrize("folder", ["graph", "parallel", "sharing"])
def test_no_file_of_a_folder_imports_itself_through_others(folder: str) -> None:
    """Not even in functions or only for types, so that each file can be read after the files that it imports."""
    files = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
             for path in sorted((PACKAGE / folder).rglob("*.py"))}  # fmt: skip
    imported = {name: set[str]() for name in files}
    for name, path in files.items():
        for node in parsed(path)[0]:
            if isinstance(node, ast.ImportFrom):
                imported[name] |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)} & files.keys()
            else:
                imported[name] |= {each.name for each in node.names} & files.keys()
    while free := {name for name, others in imported.items() if not others & imported.keys()}:
        imported = {name: others for name, others in imported.items() if name not in free}
    assert not imported, f"among these is a circle: {sorted(imported)}"


def test_the_architecture_page_shows_these_floors() -> None:
    page = (PACKAGE.parent / "docs" / "explanation" / "architecture.rst").read_text()
    for floors in (FLOORS, *INSIDE.values()):
        for rooms in floors:
            line = "  ".join(room for room in rooms if room not in ("__main__", "__init__"))
            assert re.search(rf"^    {re.escape(line)}(  |$)", page, re.M), f"no line '{line}'"


DRIVEN = [
    "wire/membership/*.py", "wire/session*.py", "wire/stream.py", "wire/framing.py",
    "communication/receive/inbox_state.py", "communication/receive/absences.py",
    "communication/receive/payload_shapes.py", "communication/receive/arrival_wait.py",
    "communication/receive/partial_payload.py", "communication/receive/chunking.py",
    "communication/zeromq/protocol/*.py",
]  # fmt: skip
"""Files without I/O that get the time as an argument, so that a simulation can run them unchanged."""
NO_THREADS = ["communication/receive/exchange.py"]
"""Files without I/O or threads that read the time from decentnode.clock."""
IO_MODULES = {"zmq", "threading", "socket", "select", "time", "queue", "asyncio", "concurrent", "multiprocessing"}


def modules_of(path: Path) -> set[str]:
    """Returns the top-level names of all modules that a file imports, and the names that it imports from decentnode,
    such as "clock"."""
    found = set()
    for node in parsed(path)[0]:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
            if node.module == "decentnode":
                found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize(("pattern", "forbidden"), [
    *((pattern, IO_MODULES | {"clock"}) for pattern in DRIVEN), *((pattern, IO_MODULES) for pattern in NO_THREADS),
])  # fmt: skip
def test_the_protocol_has_no_sockets_threads_locks_or_clock(pattern: str, forbidden: set[str]) -> None:
    files = sorted(PACKAGE.glob(pattern))
    assert files, pattern
    for path in files:
        assert not modules_of(path) & forbidden, path


FORBIDDEN = [
    (r"^\s*(import|from) pickle\b|pickle\.loads", "pickle"),
    (r"_object_list\(|send_pyobj|recv_pyobj", "a call that pickles"),
    (r"torch\.load\((?!.*weights_only=True)", "torch.load without weights_only=True"),
    (r"(?<![\w.])eval\(", "eval of text"),
    (r"^\s*print\(", "print (only cli/ talks to people, with click)"),
    (r"\b(TODO|FIXME|XXX)\b", "an unfinished place"),
]


@pytest.mark.parametrize(("pattern", "what"), FORBIDDEN, ids=[what for _, what in FORBIDDEN])
def test_what_never_stands_in_the_code(pattern: str, what: str) -> None:
    assert not [f"{path}:{text_of(path).count(chr(10), 0, found.end()) + 1}: {what}"
                for path in FILES for found in re.finditer(pattern, text_of(path), re.M)]  # fmt: skip


def test_what_is_no_python_is_packaged() -> None:
    setup = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    packaged = {path for pattern in setup["package-data"]["decentnode"] for path in PACKAGE.glob(pattern)}
    others = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others <= packaged


@pytest.mark.slow
def test_nothing_is_empty() -> None:
    assert [each for path in FILES for each in parsed(path)[1]] == []
