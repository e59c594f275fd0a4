"""The modules of a package import each other without cycles, also in functions."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "decentnode"


def imports_of(path: Path, room: str) -> set[str]:
    """Returns the modules of the package `room` that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            found |= {alias.name for alias in node.names} if parts == ["decentnode", room] else set()
            found |= {parts[2]} if parts[:2] == ["decentnode", room] and len(parts) > 2 else set()
    return found


@pytest.mark.parametrize("room", ["launch", "wire", "node"])
def test_imports_between_modules_of_a_package_have_no_cycle(room: str) -> None:
    files = {path.stem: path for path in (PACKAGE / room).glob("*.py") if path.stem != "__init__"}
    files |= {path.parent.name: path for path in (PACKAGE / room).glob("*/__init__.py")}
    graph = {name: imports_of(path, room) & files.keys() - {name} for name, path in files.items()}
    assert any(graph.values())
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError
