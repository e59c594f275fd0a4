"""What the keys of a config mean: the docstrings under its fields, read from the source when somebody asks.

pydantic would read them as each class is made, which took a seventh of what a fork server computes before it has nodes.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pydantic
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema


def key_doc(config: type[pydantic.BaseModel], name: str) -> str:
    """Returns what a field of a config means, "" where neither `Field(description=...)` nor a docstring tells."""
    return config.model_fields[name].description or _docstrings(config).get(name, "")


class DocumentedSchema(GenerateJsonSchema):
    """JSON schemas that have the docstrings of keys as their descriptions."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        made = super().model_schema(schema)
        config: type[pydantic.BaseModel] = schema["cls"]
        properties: dict[str, Any] = made.get("properties", {})
        for name, field in config.model_fields.items():
            key = field.alias or name if self.by_alias else name
            if key in properties and (text := key_doc(config, name)):
                properties[key].setdefault("description", text)
        return made


@functools.cache
def _docstrings(config: type[pydantic.BaseModel]) -> Mapping[str, str]:
    """Returns the docstring under each field of a class and of those that it derives from."""
    found: dict[str, str] = {}
    for each in reversed(config.__mro__):
        if issubclass(each, pydantic.BaseModel) and each is not pydantic.BaseModel:
            found |= _own_docstrings(each)
    return found


def _own_docstrings(config: type[pydantic.BaseModel]) -> dict[str, str]:
    try:
        source = inspect.getsource(config)
    except (OSError, TypeError):  # made at a prompt, or its file is gone
        return {}
    body = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in pairwise(body.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }  # fmt: skip
