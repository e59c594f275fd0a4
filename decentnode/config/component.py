"""Turns a YAML section into a component: its `name`, in a table or as "package.module:Class", and its typed Config.

The table of a package maps a name to the text "module:Class", so that importing a table imports nothing heavy. The
class has an attribute `Config`: a frozen pydantic model with a docstring under every field.
"""

from __future__ import annotations

import functools
import importlib
import re
import stat
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pydantic
import yaml
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema

from decentnode.errors import UsageError
from decentnode.similar_words import did_you_mean

FLOAT32 = 3.4028234663852886e38
"""The largest finite float32."""


class Settings(pydantic.BaseModel):
    """A frozen group of typed keys: unknown keys, values of another type that pydantic would convert (booleans and
    quoted numbers for numbers, text and numbers for booleans), NaN and infinity are errors."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=False,
        allow_inf_nan=False,
        defer_build=True,
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _parse_untyped_numbers(cls, value: Any) -> Any:
        """Converts text such as 1e-3 to a number in keys unknown to the Config, which have no type to do so by."""
        if cls.model_config.get("extra") != "allow" or not isinstance(value, dict):
            return value
        return {key: each if key in cls.model_fields else number(each) for key, each in value.items()}

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _reject_booleans_for_numbers(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Rejects booleans for numbers: pydantic takes true for 1, but in a YAML file it is a mistake."""
        if _holds_boolean(value) and not _allows_boolean(cls, str(info.field_name)):
            raise PydanticCustomError("boolean", "must not be true or false")
        return value

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _reject_conversions(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Rejects values that pydantic would convert: "yes" and 1 to true, the quoted "3" to a number.

        Text such as 1e-3 stays, because YAML 1.1 reads it as text even without quotes.
        """
        types, options = _types_and_options(cls, str(info.field_name))
        if types & _TEXT or (isinstance(value, str) and value in options):
            return value
        if bool in types and _is_converted_to_boolean(value, types):
            rule = " or ".join(["must be true or false", *map(repr, options)])
            raise PydanticCustomError("bool_type", rule)
        if types & {int, float} and _holds(value, _is_quoted_number):
            kind, rule = ("float_type", "must be a number") if float in types else ("int_type", "must be an integer")
            raise PydanticCustomError(kind, rule)
        return value

    @pydantic.field_validator("*", mode="after")
    @classmethod
    def _reject_huge_numbers(cls, value: Any) -> Any:
        """Rejects integers beyond 64 bits and numbers beyond float32: torch, messages and files cannot hold them."""
        if _holds(value, lambda each: isinstance(each, int) and not -(1 << 63) <= each < 1 << 63):
            raise PydanticCustomError("bits", "must be within 64 bits, from -2^63 to 2^63 - 1")
        if _holds(value, lambda each: isinstance(each, float) and abs(each) > FLOAT32):
            raise PydanticCustomError("bits", "must be within float32, from -3.4e38 to 3.4e38")
        return value


@dataclass(frozen=True)
class Added:
    """Marks a key that was added to its section in a later version, as `Annotated[int, ADDED]`.

    While such a key has its default, it is left out of digests and of the description of the experiment in checkpoints,
    so that both stay what they were before the key existed.
    """


ADDED = Added()


def unchanged_added_keys(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the path of every `ADDED` key at or below `value` that has its default."""
    if isinstance(value, pydantic.BaseModel):
        fields = type(value).model_fields
        for key, child in value:
            if key in fields and ADDED in fields[key].metadata and child == fields[key].get_default():
                yield (*path, key)
            else:
                yield from unchanged_added_keys(child, (*path, key))
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield from unchanged_added_keys(child, (*path, str(index)))


class Config(Settings):
    """Base of every component's Config."""

    name: str = ""
    """Which component this section names: one of `decentnode list`, or "package.module:Class" for one of your own."""


class Component:
    """Base of every class that a YAML section can name."""

    Config: ClassVar[type[Config]] = Config


def number(value: Any) -> Any:
    """Returns a YAML value, or list of values, with text such as 1e-3 converted to the number."""
    if isinstance(value, list):
        return [number(each) for each in value]
    if isinstance(value, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+", value):
        return float(value)
    return value


def _holds_boolean(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, list) and any(_holds_boolean(v) for v in value))


def _holds(value: Any, wrong: Callable[[Any], bool]) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds(each, wrong) for each in value)
    return wrong(value)


_TEXT = frozenset((str, Path, Any))
"""The types whose values may be text."""
_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def _is_converted_to_boolean(value: Any, types: frozenset[Any]) -> bool:
    """Returns whether pydantic would convert text or a number to a boolean in a field of these types."""
    if isinstance(value, str):
        return value.lower() in ("0", "1", "off", "on", "f", "t", "n", "y", "false", "true", "no", "yes")
    return type(value) in (int, float) and not types & {int, float} and value in (0, 1)


def _is_quoted_number(value: Any) -> bool:
    """Returns whether a value is text that YAML reads as a number unless it is quoted."""
    if not isinstance(value, str) or not value.strip():
        return False
    tag = _resolver().resolve(yaml.ScalarNode, value.strip(), (True, False))
    return tag in _NUMBER_TAGS


@functools.cache
def _resolver() -> yaml.resolver.Resolver:
    return yaml.resolver.Resolver()


@functools.cache
def _types_and_options(model: type[pydantic.BaseModel], name: str) -> tuple[frozenset[Any], tuple[Any, ...]]:
    """Returns the types of a field's values, without those of a Literal, and the text that a Literal allows."""
    annotations, types, options = [model.model_fields[name].annotation], set(), []
    while annotations:
        annotation = annotations.pop()
        arguments = typing.get_args(annotation)
        if typing.get_origin(annotation) is typing.Literal:
            options += [each for each in arguments if isinstance(each, str)]
        elif typing.get_origin(annotation) is typing.Annotated:
            annotations.append(arguments[0])  # the rest are metadata, not types
        elif arguments:
            annotations.extend(arguments)
        else:
            types.add(annotation)
    return frozenset(types), tuple(options)


@functools.cache
def _allows_boolean(model: type[pydantic.BaseModel], name: str) -> bool:
    """Returns whether a field accepts booleans: every field whose type is not made of numbers alone."""
    leaves = set(_leaves(model.model_fields[name].annotation))
    return not leaves & {int, float} or bool in leaves


def _leaves(annotation: Any) -> Iterable[Any]:
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return [type(a) for a in arguments]
    if typing.get_origin(annotation) is typing.Annotated:
        arguments = arguments[:1]  # the rest are metadata, not types
    return [leaf for a in arguments for leaf in _leaves(a)] if arguments else [annotation]


def discriminated_by(key: str, known: Iterable[str]) -> pydantic.Discriminator:
    """Returns the discriminator of a union of Settings by the value of one key.

    It is used as `Annotated[A | B, discriminated_by("do", known)]`, where A and B have their value of the key as their
    `Tag`. A section with another value, or without the key, is an error that names `known`.
    """

    def tag(value: object) -> object:
        return value.get(key) if isinstance(value, dict) else getattr(value, key, None)

    context: dict[str, int | str | float] = {"key": key, "known": ", ".join(known)}
    return pydantic.Discriminator(
        tag, custom_error_type="kind", custom_error_message="must be one of {known}", custom_error_context=context
    )


class Table(dict[str, str]):
    """A package's table of components that also accepts the user's classes and names such as "timm:resnet18".

    adapt: the "module:function" that makes a component of a class that is none, or returns None. libraries: by the text
    before the colon, the component that looks up the name after the colon in a library.
    """

    def __init__(self, names: Mapping[str, str], adapt: str, libraries: Mapping[str, str] | None = None) -> None:
        super().__init__(names)
        self.adapt = adapt
        self.libraries = libraries or {}

    def component(self, found: type[Any]) -> type[Any]:
        """Returns the component for a class: the class itself if it is one or cannot be adapted. Raises UsageError."""
        config = getattr(found, "Config", None)
        if isinstance(config, type) and issubclass(config, Config):
            return found
        module, _, function = self.adapt.partition(":")
        made: type[Any] | None = getattr(importlib.import_module(module), function)(found)
        return found if made is None else made


def load_class(name: str, table: Mapping[str, str], kind: str) -> type[Any]:
    """Returns the class that a YAML `name` names.

    Raises UsageError if the name is not in the table, or the module or class cannot be found.
    """
    libraries = table.libraries if isinstance(table, Table) else {}
    target = table.get(name, libraries.get(name.partition(":")[0], name) if ":" in name else name)
    if ":" not in target:
        known = ", ".join([*table, *(f"{each}:NAME" for each in libraries)])
        raise UsageError(
            f"{kind} must be one of {known}, or 'package.module:Class', got {name!r}{did_you_mean(name, table)}"
        )
    found = imported(target, name, kind, "class")
    if not isinstance(found, type):
        raise UsageError(f"{kind} {name!r} must name a class, got {type(found).__name__}")
    return table.component(found) if target == name and name not in table and isinstance(table, Table) else found


def imported(target: str, name: str, kind: str, what: str = "function or class") -> Any:
    """Imports and returns what `target`, "package.module:Name", names. Raises UsageError.

    name: the name as written in the YAML file; kind, what: the nouns for it in errors.
    """
    module_name, colon, attribute = target.partition(":")
    if not colon:
        raise UsageError(f"{kind} must be of the form 'package.module:Name', got {name!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        where = f"; searched in {', '.join(_added_folders)} and on Python's path" if _added_folders else ""
        raise UsageError(f"{kind} {name!r}: no module named {error.name!r}{where}") from error
    except Exception as error:  # a user's module may raise anything; odd names raise ValueError or TypeError
        raise UsageError(f"{kind} {name!r}: importing {module_name!r} raised {error!r}") from error
    found = getattr(module, attribute, None)
    if found is None:
        near = [n for n, v in vars(module).items() if isinstance(v, type) or (what != "class" and callable(v))]
        raise UsageError(f"{kind} {name!r}: module {module_name!r} has no {what} {attribute!r}"
                         f"{did_you_mean(attribute, near)}")  # fmt: skip
    return found


_added_folders: list[str] = []
"""Folders of experiments that were added to the module search path for the user's own components."""


def added_module_folders() -> list[Path]:
    """Returns the folders that `add_module_folder` added to this process's module search path."""
    return [Path(each) for each in _added_folders]


def add_module_folder(folder: Path, first: bool = False) -> None:
    """Adds a folder to this process's module search path: at the end, or at the front if `first`.

    A folder that every user may write to (such as /tmp) is left out: other users could put a module there whose name
    Python merely tries to import.
    """
    try:
        if folder.stat().st_mode & stat.S_IWOTH:
            return
    except OSError:
        return
    text = str(folder)
    if text not in _added_folders:
        _added_folders.append(text)
    if first and text not in sys.path[:1]:
        sys.path.insert(0, text)
    elif text not in sys.path:
        sys.path.append(text)
    importlib.invalidate_caches()


@dataclass(frozen=True, eq=False)
class Section:
    """The annotation of a field that holds one component's section; made by `section`, which explains the fields."""

    table: Mapping[str, str]
    kind: str
    default: str | None = None
    implied: Mapping[str, str] = field(default_factory=dict)
    configs: Mapping[str, str] = field(default_factory=dict)

    def name_of(self, value: Any) -> Any:
        """Returns the component's name that a raw value gives or implies, or None."""
        if isinstance(value, dict):
            return value.get("name", next((n for key, n in self.implied.items() if key in value), self.default))
        return value

    def config_of(self, name: str) -> type[Config]:
        """Returns the Config of a component. Raises UsageError."""
        found = (imported(self.configs[name], name, self.kind) if name in self.configs
                 else getattr(load_class(name, self.table, self.kind), "Config", None))  # fmt: skip
        if not (isinstance(found, type) and issubclass(found, Config)):
            raise UsageError(f"{self.kind} {name!r} must name a class whose Config is a component.Config, such as one "
                             "derived from decentnode's own")  # fmt: skip
        return found

    def validate(self, value: Any) -> Config:
        """Returns the typed Config of a raw section, which is a dict or a bare name."""
        if isinstance(value, Config):
            return value
        name = self.name_of(value)
        known = ", ".join(self.table)
        if not isinstance(value, str | dict):
            example = f"{{name: {next(iter(self.table), '...')}}}"
            raise PydanticCustomError("section", "must be a section such as {example}", {"example": example})
        if name is None:
            raise PydanticCustomError("section_name", "needs a name: one of {known}", {"known": known})
        if not isinstance(name, str):
            raise self._at_name(name, "component_name", "must be one of {known}", {"known": known})
        try:
            chosen = self.config_of(name)
        except UsageError as error:
            if name not in self.table and ":" not in name:
                raise self._at_name(name, "component_name", "must be one of {known}", {"known": known}) from error
            raise self._at_name(name, "component", "{text}", {"text": str(error)}) from error
        return chosen.model_validate({**(value if isinstance(value, dict) else {}), "name": name})

    def _at_name(self, name: Any, kind: str, text: str, context: dict[str, Any]) -> pydantic.ValidationError:
        error = InitErrorDetails(type=PydanticCustomError(kind, text, context), loc=("name",), input=name)
        return pydantic.ValidationError.from_exception_data(self.kind, [error])

    def __get_pydantic_core_schema__(
        self, source: Any, handler: pydantic.GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        dump = core_schema.plain_serializer_function_ser_schema(
            lambda value, info: value.model_dump(mode=info.mode), info_arg=True
        )
        return core_schema.no_info_plain_validator_function(self.validate, serialization=dump)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: pydantic.GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Returns one alternative per component of the table, distinguished by the constant `name`."""
        alternatives: list[dict[str, Any]] = [
            {"enum": list(self.table), "description": f"A bare name: {self.kind} with the component's defaults."}
        ]
        libraries = self.table.libraries if isinstance(self.table, Table) else {}
        for name in [*self.table, *(f"{each}:" for each in libraries)]:
            chosen = self.config_of(name)
            chosen.model_rebuild()
            component = dict(handler.resolve_ref_schema(handler(chosen.__pydantic_core_schema__)))
            keys = {key: dict(value) for key, value in component.get("properties", {}).items()}
            written = {"const": name} if name in self.table else {"type": "string", "pattern": f"^{name}.+$"}
            keys["name"] = {**written, "description": _summary(load_class(name, self.table, self.kind))}
            implied = name == self.default or name in self.implied.values()
            required = [key for key in component.get("required", []) if key != "name"]
            component |= {"properties": keys, "required": required if implied else ["name", *required], "title": name}
            component.pop("description", None)
            alternatives.append(component)
        if libraries:
            alternatives.append({"type": "string", "pattern": f"^({'|'.join(libraries)}):.+$"})
        pattern = {"type": "string", "pattern": r"^[\w.]+:\w+$", "description": "package.module:Class"}
        alternatives.append({"type": "object", "properties": {"name": pattern}, "required": ["name"]})
        return {"anyOf": alternatives}


def _summary(owner: type[Any]) -> str:
    return " ".join((owner.__doc__ or "").strip().split("\n\n")[0].split())


def section(
    table: Mapping[str, str], kind: str, default: str | None = None, implied: Mapping[str, str] | None = None,
    configs: Mapping[str, str] | None = None,
) -> Section:
    """Returns the annotation of a Config field that holds a component's section: `Annotated[Config, section(TABLE,
    "graph")]`.

    The field's value becomes the Config of the class that `name` names, or `default` if there is no name. A bare string
    stands for `{name: string}`. implied: maps a key to the name that it implies, for sections that can be recognized by
    one of their keys, such as `{file: ...}`. configs: maps names to "module:Config", for components whose modules take
    long to import. Dumps and the JSON Schema hold every key of the chosen Config.
    """
    return Section(table, kind, default, implied or {}, configs or {})
