"""Makes a Config for a class that has none: its keys are the arguments of the constructor, with types and defaults."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pydantic

from decentnode.config.component import Config, Settings
from decentnode.errors import UsageError

SIMPLE = (int, float, str, bool, Path, type(None))


def config_of(
    chosen: type[Any], base: type[Config], filled: Collection[str] = (), objects: Collection[str] = ()
) -> type[Config]:
    """Returns a Config with the keys of `base` and one key for each argument of `chosen`'s constructor.

    filled: arguments that the caller can supply. They are optional, and null if they are not written, whatever their
    own default is: otherwise a run's resolved file, which has all keys, would look as if they had been written. The
    same holds for arguments whose default cannot be written in YAML, such as a class. objects: arguments whose keys
    accept any value, from which the caller makes what the constructor takes. An argument without annotation has the
    type of its default. Raises UsageError if an argument cannot be a key.
    """
    fields: dict[str, Any] = {}
    taken = {*base.model_fields}
    hints = _hints(chosen)
    for name, parameter in parameters_of(chosen).items():
        required = parameter.default is parameter.empty and name not in filled
        if parameter.kind is parameter.POSITIONAL_ONLY or name == "name" or name.startswith(("_", "model_")):
            if required:
                raise UsageError(f"argument {name!r} of {chosen.__name__} cannot be a key; give it a default")
            continue
        if name in taken:
            continue
        kind = Any if name in objects else _plain(hints.get(name, _kind_of(parameter.default)))
        unwritten = name in filled or not _writable(parameter.default)
        default = ... if required else None if unwritten else parameter.default
        if default is None and kind is not Any:
            kind = kind | None
        text = f"Argument of {chosen.__name__}."
        fields[name] = (kind, pydantic.Field(default, description=text))
    made = pydantic.create_model(f"{chosen.__name__}Config", __base__=base, __module__=chosen.__module__, **fields)
    if _takes_any_name(chosen):
        made.model_config = pydantic.ConfigDict(**{**made.model_config, "extra": "allow"})
        made.model_rebuild(force=True)
    return made


def parameters_of(chosen: type[Any]) -> dict[str, inspect.Parameter]:
    """Returns the named parameters of a constructor, by name: all but *args and **kwargs.

    Raises UsageError for a class without a signature, such as one written in C.
    """
    found = _signature(chosen).parameters
    return {name: each for name, each in found.items() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}


def _takes_any_name(chosen: type[Any]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in _signature(chosen).parameters.values())


def _signature(chosen: type[Any]) -> inspect.Signature:
    try:
        return inspect.signature(chosen)
    except ValueError as error:
        raise UsageError(f"{chosen.__module__}:{chosen.__name__} has a constructor without a signature; "
                         "derive a class from it that does") from error  # fmt: skip


def arguments(config: Settings, chosen: type[Any], filled: Collection[str] = ()) -> dict[str, Any]:
    """Returns the constructor arguments that were written, by name.

    A null does not count as written for arguments that the caller can supply (`filled`), and for those whose default
    cannot be written in YAML.
    """
    found = {}
    for name, parameter in parameters_of(chosen).items():
        if name == "name" or name not in config.model_fields_set:
            continue
        value = getattr(config, name)
        if value is not None or (name not in filled and _writable(parameter.default)):
            found[name] = value
    return {**found, **(config.model_extra or {})}


def _hints(chosen: type[Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(chosen.__init__)
    except Exception:  # an annotation that only a type checker can resolve
        return {}


def _kind_of(default: Any) -> Any:
    return type(default) if isinstance(default, int | float | str | tuple) and _writable(default) else Any


def _writable(value: Any) -> bool:
    """Returns whether YAML can write and read back a default unchanged; also true if there is no default."""
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(_writable, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _writable(each) for key, each in value.items())
    return type(value) in SIMPLE or isinstance(value, Path) or value is inspect.Parameter.empty


def _plain(kind: Any) -> Any:
    """Returns the type if YAML can write its values, else Any."""
    arguments_of = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin is typing.Literal or kind in SIMPLE or kind in (list, tuple, dict):
        return kind
    if origin is not None and all(each is Ellipsis or _plain(each) is not Any for each in arguments_of):
        return kind
    return Any
