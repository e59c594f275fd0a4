"""The docstrings under the keys of a config."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pydantic
import pytest
from pydantic import Field

from decentnode.config.component import Config, Settings
from decentnode.config.key_docs import DocumentedSchema, key_doc
from decentnode.describe import TABLES, describe, names


class Base(Config):
    name: str = "base"
    first: int = 1
    """Of the base.

    More of it.
    """
    second: int = 2
    """As the base has it."""
    without: int = 3
    described: int = Field(4, description="by hand")
    """A docstring that does not replace the description given by hand."""


class Derived(Base):
    second: int = 5
    """As the derived class has it."""
    renamed: int = Field(6, alias="other-name")
    """Under another name in files."""
    """A second text, which is no docstring of the key."""

    class Nested(Settings):
        inner: int = 0
        """Of a class inside."""

    group: Nested = Nested()


def test_the_doc_of_a_key_is_the_docstring_under_it() -> None:
    assert key_doc(Derived, "first") == "Of the base.\n\nMore of it."
    assert key_doc(Base, "second") == "As the base has it."
    assert key_doc(Derived, "second") == "As the derived class has it."
    assert key_doc(Derived, "without") == key_doc(Derived, "group") == "" and key_doc(Derived, "described") == "by hand"
    assert key_doc(Derived, "renamed") == "Under another name in files."
    assert key_doc(Derived.Nested, "inner") == "Of a class inside."


@pytest.mark.parametrize("by_alias", [False, True])
def test_the_schema_has_the_docs_although_the_class_was_used_before(by_alias: bool) -> None:
    assert Derived.model_validate({"other-name": 7}).renamed == 7
    schema = Derived.model_json_schema(by_alias=by_alias, schema_generator=DocumentedSchema)
    descriptions = {key: value.get("description") for key, value in schema["properties"].items()}
    assert descriptions == {
        "name": key_doc(Config, "name"), "first": "Of the base.\n\nMore of it.",
        "second": "As the derived class has it.", "without": None, "described": "by hand",
        "other-name" if by_alias else "renamed": "Under another name in files.", "group": None,
    }  # fmt: skip
    assert schema["$defs"]["Nested"]["properties"]["inner"]["description"] == "Of a class inside."


def test_keys_of_a_class_without_source_have_no_doc() -> None:
    made: dict[str, Any] = {}
    exec("import pydantic\nclass Made(pydantic.BaseModel):\n    key: int = 1\n    'Not to be read.'\n", made)
    assert key_doc(made["Made"], "key") == "" == key_doc(pydantic.create_model("More", key=(int, 1)), "key")


def test_every_key_of_every_component_has_a_doc() -> None:
    without = [f"{kind}.{name}: {key.name}" for kind in TABLES for name in names(kind)
               for key in describe(kind, name).keys if not key.text]  # fmt: skip
    assert not without


@pytest.mark.slow
def test_the_supervisor_of_a_run_imports_no_heavy_library() -> None:
    """The imports of the supervisor would compete with those of the nodes, which start at the same time."""
    code = (
        "import sys, decentnode.cli.console, decentnode.launch.supervising.run, decentnode.launch.reporting.trackers;"
        "sys.exit(str([name for name in ('torch', 'numpy', 'pydantic', 'networkx', 'zmq') if name in sys.modules]))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True,
                          timeout=100).stderr == "[]\n"  # fmt: skip
