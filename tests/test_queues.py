"""docs/queues.rst: its bounds are those of the code, and it lists every queue of the code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from decentnode.communication.zeromq.config import ZeroMQConfig

ROOT = Path(__file__).parents[1]
PAGE = " ".join((ROOT / "docs" / "queues.rst").read_text().split())
CONSTANTS = re.findall(r"``([a-z_.]+):([A-Z_]+)`` = ([\d.]*\d)", PAGE)
KEYS = re.findall(r"key ``communication\.([a-z_]+)`` = (\d+)", PAGE)
MADE = re.compile(r"(?:self\.)?(\w+)(?::[^=\n]*)? = \[?(?:field\(default_factory=(?:lambda: )?)?(?:queue\.)?"
                  r"(?:deque|SimpleQueue|Queue)\b")  # fmt: skip


@pytest.mark.parametrize(("module", "name", "value"), CONSTANTS)
def test_bounds_on_the_page_are_the_constants_of_the_code(module: str, name: str, value: str) -> None:
    assert getattr(importlib.import_module(f"decentnode.{module}"), name) == float(value)


@pytest.mark.parametrize(("key", "value"), KEYS)
def test_defaults_on_the_page_are_those_of_the_keys(key: str, value: str) -> None:
    assert getattr(ZeroMQConfig(name="zeromq"), key) == int(value)


def test_the_page_lists_every_queue_of_the_code() -> None:
    assert len(CONSTANTS) > 20 and KEYS
    found = 0
    for path in sorted((ROOT / "decentnode").rglob("*.py")):
        text, name = path.read_text(), str(path.relative_to(ROOT / "decentnode"))
        made = MADE.findall(text)
        assert len(made) == len(re.findall(r"\b(?:deque\(|default_factory=deque|SimpleQueue\()", text)), name
        for attribute in made:
            assert re.search(rf"``{re.escape(name)}`` ``(?:\w+\.)?{attribute}``", PAGE) or re.search(
                rf"``{re.escape(name)}`` ``(?:\w+\.)?\w+`` and ``{attribute}``", PAGE), f"{name}: {attribute}"
            found += 1
    assert found > 8
