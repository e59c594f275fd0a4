"""From a YAML section to a component: the name in a table, or "package.module:Class", and its typed Config.

A room's table maps a name to "module:Class" text, so that reading a table imports nothing heavy. The class
carries its `Config`: a frozen pydantic model with a docstring under every field.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

import pydantic

from decentnode.errors import UsageError


class Config(pydantic.BaseModel):
    """Base of every component's Config: frozen, and unknown keys are errors."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=False
    )

    name: str = ""
    """Name of the component in its room's table, or "package.module:Class"."""


class Component:
    """Base of every class that a YAML section can name."""

    Config: ClassVar[type[Config]] = Config


def nearest(word: str, known: Mapping[str, Any] | list[str] | tuple[str, ...]) -> str | None:
    """The entry of `known` that `word` was probably meant to be, or None."""
    found = difflib.get_close_matches(word, list(known), 1)
    return found[0] if found else None


def load_class(name: str, table: Mapping[str, str], kind: str) -> type[Any]:
    """The class behind a YAML `name`.

    Raises UsageError when the name is in no table, or the module or class cannot be found.
    """
    target = table.get(name, name)
    module_name, colon, class_name = target.partition(":")
    if not colon:
        hint = nearest(name, table)
        known = ", ".join(table)
        raise UsageError(
            f"{kind} must be one of {known}, or 'package.module:Class', got {name!r}"
            + (f"; did you mean {hint!r}?" if hint else "")
        )
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except ModuleNotFoundError as error:
        raise UsageError(f"{kind} {name!r}: no module named {error.name!r}") from error
    except AttributeError as error:
        raise UsageError(f"{kind} {name!r}: module {module_name!r} has no class {class_name!r}") from error
    if not isinstance(found, type):
        raise UsageError(f"{kind} {name!r} must name a class, got {type(found).__name__}")
    return found


def section(table: Mapping[str, str], kind: str, default: str | None = None) -> pydantic.BeforeValidator:
    """Annotation of a Config field that holds one component's section: `Annotated[Config, section(TABLE, "graph")]`.

    The field's value becomes the Config of the class that `name` (or `default` when there is none) names. A bare
    string stands for `{name: string}`. Use `pydantic.SerializeAsAny[Config]` so that dumps keep all keys.
    """

    def validate(value: Any) -> Any:
        if isinstance(value, Config):
            return value
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, dict):
            raise ValueError(f"{kind} must be a section such as {{name: {next(iter(table))}}}, got {value!r}")
        name = value.get("name", default)
        if not isinstance(name, str):
            raise ValueError(f"{kind}.name must be one of {', '.join(table)}, got {name!r}")
        try:
            chosen = load_class(name, table, kind)
        except UsageError as error:
            raise ValueError(str(error)) from error
        return chosen.Config.model_validate({**value, "name": name})

    return pydantic.BeforeValidator(validate)
