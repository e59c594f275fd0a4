"""Config sections whose keys are the arguments of a torch class, with checks of the names and arguments against the
class's signature."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pydantic
from pydantic_core import InitErrorDetails, PydanticCustomError

from decentnode.config.component import FLOAT32, Config, load_class
from decentnode.config.signature import parameters_of
from decentnode.errors import UsageError
from decentnode.similar_words import did_you_mean, nearest


class ArgumentsConfig(Config):
    """The base class of a Config that passes unknown keys to a torch class as arguments."""

    model_config = pydantic.ConfigDict(extra="allow")

    def arguments(self) -> dict[str, Any]:
        """Returns the keys that are not fields of this Config, which are the arguments of the torch class."""
        return dict(self.model_extra or {})


def problem_at(key: str, text: str, value: Any) -> pydantic.ValidationError:
    """Returns an error located at one key of a section. text: begins with "must" or "needs"."""
    error = PydanticCustomError("component", "{text}", {"text": text})
    return pydantic.ValidationError.from_exception_data(
        "arguments", [InitErrorDetails(type=error, loc=(key,), input=value)]
    )


def class_named(name: str, table: Mapping[str, type[Any]], kind: str, base: type[Any] = object) -> type[Any]:
    """Returns the class with that name in `table`, or the class "package.module:Class", which must be derived from
    `base`. Raises ValidationError that suggests the nearest name."""
    if ":" in name:
        return _load_own_class(name, kind, base)
    if name not in table:
        raise problem_at(
            "name", f"must be one of {', '.join(sorted(table))}, or 'package.module:Class', got {name!r}"
            + did_you_mean(name, table), name,
        )
    return table[name]


def _load_own_class(name: str, kind: str, base: type[Any]) -> type[Any]:
    try:
        found = load_class(name, {}, kind)
    except UsageError as error:
        raise problem_at("name", str(error), name) from error
    if not issubclass(found, base):
        raise problem_at("name", f"must name a class derived from {base.__module__}.{base.__name__}, got {name}", name)
    return found


BOOLEAN_TEXTS = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "0", "1", ""})
"""Texts that mean true or false. Torch would test such an argument for truth, and every non-empty text is true: a
quoted "no" would switch the option on."""


def check_arguments(
    name: str, cls: type[Any], given: Mapping[str, Any], reserved: tuple[str, ...],
    make: Callable[[dict[str, Any]], Any],
) -> None:
    """Raises ValidationError for an argument that `cls` does not take, that is missing, or whose value torch refuses.

    reserved: arguments that the caller sets itself or does not allow. make: constructs an object with the arguments on
    a parameter with one element, because the rules for values are only in torch's constructors.
    """
    try:
        parameters = {key: each for key, each in parameters_of(cls).items() if key not in reserved}
    except UsageError as error:
        raise problem_at("name", f"must be a class whose arguments are known: {error}", name) from error
    for key, value in given.items():
        if key not in parameters:
            hint = nearest(key, parameters)
            known = f"did you mean '{hint}'?" if hint else f"it takes {', '.join(parameters) or 'none'}"
            raise problem_at(key, f"must be an argument of {name}; {known}", value)
        if isinstance(value, float) and not math.isfinite(value):
            raise problem_at(key, f"must be a finite number, got {value}", value)
        if max(map(abs, numbers_in(value)), default=0) > FLOAT32:
            raise problem_at(key, f"must be within float32, from -3.4e38 to 3.4e38, got {value}", value)
        default = parameters[key].default
        if isinstance(default, int | float) and not isinstance(default, bool) and isinstance(value, bool | str):
            raise problem_at(key, f"must be a number, got {value!r}", value)
        if isinstance(default, bool) and isinstance(value, str) and value.lower() in BOOLEAN_TEXTS:
            raise problem_at(key, f"must be true or false, got the text {value!r}", value)
    needed = {key for key, p in parameters.items() if p.default is p.empty}
    for key in sorted(needed - set(given)):
        raise problem_at("name", f"needs {key!r} beside it for {name}", name)
    message = _refusal(make, given)
    if message is not None:
        subsets = ({k: v for k, v in given.items() if k == key or k in needed} for key in given)
        culprits = [key for key, subset in zip(given, subsets, strict=True) if _refusal(make, subset) == message]
        key = culprits[0] if culprits else "name"
        raise problem_at(key, f"must suit torch's {cls.__name__}: {message}", given.get(key, name))


def numbers_in(value: Any) -> Iterator[int | float]:
    """Yields the number or, recursively, the numbers that an argument consists of."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from numbers_in(each)
    elif isinstance(value, int | float):
        yield value


def _refusal(make: Callable[[dict[str, Any]], Any], given: Mapping[str, Any]) -> str | None:
    try:
        make(dict(given))
    except Exception as error:  # torch's constructors raise ValueError, TypeError, RuntimeError, KeyError ...
        return str(error) or repr(error)
    return None
