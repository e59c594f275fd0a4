"""Reads the docstrings under the fields of Configs from the source, on demand.

pydantic would read them as each class is made, which took a seventh of the computing time of a fork server before it
has nodes.
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
    """Returns the `Field(description=...)` or else the docstring of a field, or "" if it has neither."""
    return config.model_fields[name].description or _docstrings(config).get(name, "")


class DocumentedSchema(GenerateJsonSchema):
    """Generates JSON schemas whose key descriptions are the docstrings of the fields."""

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
    """Returns the docstring under each field of a class and of its base classes."""
    found: dict[str, str] = {}
    for each in reversed(config.__mro__):
        if issubclass(each, pydantic.BaseModel) and each is not pydantic.BaseModel:
            found |= _own_docstrings(each)
    return found


def _own_docstrings(config: type[pydantic.BaseModel]) -> dict[str, str]:
    try:
        source = inspect.getsource(config)
    except (OSError, TypeError):  # the class was made at a prompt, or its file was deleted
        return {}
    body = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in pairwise(body.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }  # fmt: skip
