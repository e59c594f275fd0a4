"""Rules of the code base that can be checked automatically: the direction of imports, and forbidden constructs."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "decentnode"

LAYERS: list[list[str]] = [
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
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
ALLOWED_WITHIN_A_LAYER = {  # within one layer, in this direction only
    ("training", "models"), ("logs", "clock"), ("system", "entropy"), ("native", "user_cache"),
}  # fmt: skip

FILES = sorted(path for path in PACKAGE.rglob("*.py") if "starter" not in path.parts)


def package_of(path: Path) -> str:
    """Returns the top-level package or module of decentnode that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def read_text(path: Path) -> str:
    return path.read_text()


@functools.cache
def parse_file(path: Path) -> tuple[list[ast.Import | ast.ImportFrom], list[str]]:
    """Returns the imports of a file, also those in functions, and the locations of functions that do nothing."""
    nodes: list[ast.AST] = [ast.parse(read_text(path))]
    for node in nodes:  # only statements, as expressions contain no imports: a fifth of the time of ast.walk
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = getattr(node, block, [])
            nodes += inside if isinstance(inside, list) else []  # `body` of a lambda is no list
    empty = [f"{path}:{node.lineno}: {node.name} does nothing" for node in nodes
             if isinstance(node, ast.FunctionDef) and len(node.body) == 1 and isinstance(node.body[0], ast.Pass)]
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)], empty


@functools.cache
def imported_packages(path: Path) -> set[str]:
    """Returns the packages and modules of decentnode that a file imports, also in functions and under TYPE_CHECKING."""
    found = set()
    for node in parse_file(path)[0]:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"decentnode.{a.name}" for a in node.names] if node.module == "decentnode" else [node.module]
        found |= {f"{name}.__init__".split(".")[1] for name in names if name.split(".")[0] == "decentnode"}
    return found


def test_every_package_and_module_is_in_a_layer() -> None:
    assert {package_of(path) for path in FILES} <= LAYER_OF.keys()


def test_imports_go_to_lower_layers_only() -> None:
    wrong = [f"{path}: {package} (layer {LAYER_OF[package]}) imports {other} (layer {LAYER_OF[other]})"
             for path in FILES for package in [package_of(path)] for other in imported_packages(path) - {package}
             if package != "__init__" and (package, other) not in ALLOWED_WITHIN_A_LAYER
             and LAYER_OF[other] >= LAYER_OF[package]]  # fmt: skip
    assert not wrong


MODULES_WITH_EFFECTS = {"asyncio", "multiprocessing", "os", "random", "secrets", "select", "socket", "subprocess",
                   "tempfile", "time", "zmq"}  # fmt: skip
"""Modules with which code can read inputs besides its arguments, or have effects besides its results."""


@pytest.mark.parametrize("path", sorted((PACKAGE / "wire").rglob("*.py")), ids=lambda p: p.stem)
def test_the_wire_protocol_imports_no_module_with_inputs_or_effects_of_its_own(path: Path) -> None:
    """Bytes, messages, the time and random bytes are arguments, so that the same calls lead to the same state."""
    names = {alias.name for node in parse_file(path)[0] if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in parse_file(path)[0] if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in names} & MODULES_WITH_EFFECTS
    assert "clock" not in imported_packages(path)
    assert "threading" not in names or set(re.findall(r"threading\.\w+", read_text(path))) == {"threading.local"}


PURE_PACKAGES = {"graph", "mixing", "compression", "optim", "models", "data", "sharing", "training", "wire",
        "samplers"}


def test_packages_of_pure_functions_do_not_import_the_clock() -> None:
    assert not [path for path in FILES if package_of(path) in PURE_PACKAGES and "clock" in imported_packages(path)]


LAYERS_OF_FOLDERS: dict[str, list[list[str]]] = {
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
        ["schedules", "faults", "training_rounds"],
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
        ["children", "open_files"],
        ["files", "loading", "doctor"],
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


@pytest.mark.parametrize("folder", LAYERS_OF_FOLDERS)
def test_imports_inside_a_folder_go_to_lower_layers_only(folder: str) -> None:
    layers = {package: layer for layer, packages in enumerate(LAYERS_OF_FOLDERS[folder]) for package in packages}
    dotted = re.escape(f"decentnode.{folder.replace('/', '.')}")
    imports, wrong = re.compile(rf"^\s*from {dotted}(?:\.(\w+))?[\w.]* import (.*)", re.M), []
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        package = path.relative_to(PACKAGE / folder).parts[0].removesuffix(".py")
        for name, names in imports.findall(read_text(path)):
            others = [name] if name else [each.split()[0] for each in names.split(",")]
            wrong += [f"{path} of {package} imports {other}"
                      for other in (each if each in layers else "__init__" for each in others)
                      if other != package and layers[other] >= layers[package]]  # fmt: skip
    assert not wrong


@pytest.mark.parametrize("folder", LAYERS_OF_FOLDERS)
def test_a_folder_has_at_most_18_modules_and_a_docstring(folder: str) -> None:
    for package in {path.parent for path in (PACKAGE / folder).rglob("*.py")}:
        assert len(list(package.glob("*.py"))) <= 18, package
        assert read_text(package / "__init__.py").startswith('"""'), f"{package} does not say what it is for"


@pytest.mark.parametrize("folder", ["graph", "parallel", "sharing"])
def test_the_imports_inside_a_folder_have_no_cycle(folder: str) -> None:
    """Not even in functions or only for types, so that each file can be read after the files that it imports."""
    files = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
             for path in sorted((PACKAGE / folder).rglob("*.py"))}  # fmt: skip
    imported = {name: set[str]() for name in files}
    for name, path in files.items():
        for node in parse_file(path)[0]:
            if isinstance(node, ast.ImportFrom):
                imported[name] |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)} & files.keys()
            else:
                imported[name] |= {each.name for each in node.names} & files.keys()
    while free := {name for name, others in imported.items() if not others & imported.keys()}:
        imported = {name: others for name, others in imported.items() if name not in free}
    assert not imported, f"these files import each other in a cycle: {sorted(imported)}"


def test_the_architecture_page_shows_these_layers() -> None:
    page = (PACKAGE.parent / "docs" / "explanation" / "architecture.rst").read_text()
    for layers in (LAYERS, *LAYERS_OF_FOLDERS.values()):
        for packages in layers:
            line = "  ".join(package for package in packages if package not in ("__main__", "__init__"))
            assert re.search(rf"^    {re.escape(line)}(  |$)", page, re.M), f"no line '{line}'"


FILES_WITHOUT_CLOCK = [
    "wire/membership/*.py", "wire/session*.py", "wire/stream.py", "wire/framing.py",
    "communication/receive/inbox_state.py", "communication/receive/absences.py",
    "communication/receive/payload_shapes.py", "communication/receive/arrival_wait.py",
    "communication/receive/partial_payload.py", "communication/receive/chunking.py",
    "communication/zeromq/protocol/*.py",
]  # fmt: skip
"""Files without I/O that get the time as an argument, so that a simulation can run them unchanged."""
FILES_WITHOUT_THREADS = ["communication/receive/exchange.py"]
"""Files without I/O or threads that read the time from decentnode.clock."""
IO_MODULES = {"zmq", "threading", "socket", "select", "time", "queue", "asyncio", "concurrent", "multiprocessing"}


def imported_modules(path: Path) -> set[str]:
    """Returns the top-level names of all modules that a file imports, and the names that it imports from decentnode,
    such as "clock"."""
    found = set()
    for node in parse_file(path)[0]:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
            if node.module == "decentnode":
                found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize(("pattern", "forbidden"), [
    *((pattern, IO_MODULES | {"clock"}) for pattern in FILES_WITHOUT_CLOCK),
    *((pattern, IO_MODULES) for pattern in FILES_WITHOUT_THREADS),
])  # fmt: skip
def test_the_protocol_has_no_sockets_threads_locks_or_clock(pattern: str, forbidden: set[str]) -> None:
    files = sorted(PACKAGE.glob(pattern))
    assert files, pattern
    for path in files:
        assert not imported_modules(path) & forbidden, path


FORBIDDEN = [
    (r"^\s*(import|from) pickle\b|pickle\.loads", "pickle"),
    (r"_object_list\(|send_pyobj|recv_pyobj", "a call that pickles"),
    (r"torch\.load\((?!.*weights_only=True)", "torch.load without weights_only=True"),
    (r"(?<![\w.])eval\(", "eval of text"),
    (r"^\s*print\(", "print (only cli/ talks to people, with click)"),
    (r"\b(TODO|FIXME|XXX)\b", "an unfinished place"),
]


@pytest.mark.parametrize(("pattern", "what"), FORBIDDEN, ids=[what for _, what in FORBIDDEN])
def test_the_package_has_no_forbidden_construct(pattern: str, what: str) -> None:
    assert not [f"{path}:{read_text(path).count(chr(10), 0, found.end()) + 1}: {what}"
                for path in FILES for found in re.finditer(pattern, read_text(path), re.M)]  # fmt: skip


def test_all_files_that_are_not_python_are_in_package_data() -> None:
    setup = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    packaged = {path for pattern in setup["package-data"]["decentnode"] for path in PACKAGE.glob(pattern)}
    others = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others <= packaged


@pytest.mark.slow
def test_no_function_has_an_empty_body() -> None:
    assert [each for path in FILES for each in parse_file(path)[1]] == []
