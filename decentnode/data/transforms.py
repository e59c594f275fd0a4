"""Makes the transforms of a Dataset, which its constructor takes as objects, from what YAML can write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from decentnode.config.component import imported, number
from decentnode.errors import UsageError, describe_error

ARGUMENTS = ("transform", "target_transform", "transforms")
"""The names of constructor arguments for transforms in torchvision's datasets, and in those written like them."""


class Composed:
    """Calls transforms in order, as torchvision's Compose does; each gets what the previous one returned."""

    def __init__(self, parts: Sequence[Callable[..., Any]]) -> None:
        self.parts = parts

    def __call__(self, *given: Any) -> Any:
        for part in self.parts:
            found = part(*given)
            given = found if len(given) > 1 else (found,)
        return given if len(given) > 1 else given[0]


def transform_of(given: Any, key: str) -> Any:
    """Returns the transform that a YAML value describes. Raises UsageError.

    The value may be "module:callable" (a class is instantiated without arguments), a section whose `name` is of that
    form and whose other keys are its arguments, or a list of these. Any other value is returned unchanged, because a
    class may have names of its own. key: where `given` was written, for messages.
    """
    if isinstance(given, list) and any(map(_is_named, given)):
        for each in given:
            if not _is_named(each):
                raise UsageError(f"{key} must contain 'package.module:Name' of callables, or sections with such a "
                                 f"name, got {each!r}")  # fmt: skip
        return Composed([transform_of(each, f"{key}[{place}]") for place, each in enumerate(given)])
    if not _is_named(given):
        return given
    if isinstance(given, str):
        return _instantiate(given, {}, key)
    arguments = {at: _argument(value, f"{key}.{at}") for at, value in given.items() if at != "name"}
    return _instantiate(str(given["name"]), arguments, key)


def _is_named(given: Any) -> bool:
    return ":" in str(given.get("name") if isinstance(given, Mapping) else given if isinstance(given, str) else "")


def _argument(value: Any, key: str) -> Any:
    """Returns an argument of a transform; sections with such a name are transforms, such as those of RandomApply."""
    if isinstance(value, Mapping):
        return transform_of(value, key)
    if isinstance(value, list):
        return [_argument(each, f"{key}[{place}]") for place, each in enumerate(value)]
    return number(value)


def _instantiate(name: str, given: Mapping[str, Any], key: str) -> Callable[..., Any]:
    found = imported(name, name, key)
    try:
        made = found(**given) if isinstance(found, type) else functools.partial(found, **given) if given else found
    except Exception as error:  # a constructor may raise anything
        raise UsageError(f"{key}: making {name} raised {describe_error(error)}") from error
    if not callable(made):
        raise UsageError(f"{key} {name!r} must be something to call with a sample, got {type(made).__name__}")
    return made
