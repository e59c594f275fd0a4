"""Converts sections of an experiment that a program passes, which may contain classes and objects, to plain data."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from decentnode.errors import UsageError

MAKERS = ("model", "data", "training.loss", "training.optimizer", "graph", "parameters.fragments.graph")
"""Keys of components that may be given as objects, not only as classes; `decentnode.objects` has a function for each.
"""


class Sections:
    """Converts sections to plain data, and keeps the classes and objects that plain data can only refer to by name."""

    def __init__(self, objects: Mapping[str, type[Any]] | None = None) -> None:
        self.objects: dict[str, type[Any]] = dict(objects or {})
        """Name in `decentnode.objects` -> class."""

    def plain(self, sections: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the sections as dicts, lists, numbers and strings. Raises UsageError, which names the key, for a
        value that cannot be converted."""
        return {key: self._plain(value, key) for key, value in sections.items()}

    def _plain(self, value: Any, place: str) -> Any:
        if _takes_objects(place) and isinstance(value, bool | int | float):
            return self._component(value, place) or value
        if isinstance(value, float | int) and type(value) not in (bool, int, float):  # such as a numpy number
            return value.item() if hasattr(value, "item") else value
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if _takes_objects(place) or isinstance(value, type | functools.partial):
            found = self._component(value, place)
            if found is not None:
                return found
        if isinstance(value, Mapping):
            return {str(key): self._value_of(each, place, str(key)) for key, each in value.items()}
        if isinstance(value, list | tuple | set | frozenset | range):
            return [self._plain(each, f"{place}.{number}") for number, each in enumerate(value)]
        if hasattr(value, "model_dump"):
            return {"name": value.name, **value.model_dump(mode="json", exclude_unset=True)}
        if hasattr(value, "tolist"):
            return value.tolist()
        raise UsageError(f"{place} must be plain data or a component's class, got {value!r:.80}")

    def _value_of(self, value: Any, place: str, key: str) -> Any:
        if key == "name" and isinstance(value, type):
            return self._name_of(value, place)
        return self._plain(value, f"{place}.{key}")

    def _component(self, value: Any, place: str) -> dict[str, Any] | None:
        """Returns the section for a class, a class with arguments (functools.partial), or an object; None for other
        values."""
        if isinstance(value, type):
            return {"name": self._name_of(value, place)}
        if isinstance(value, functools.partial) and isinstance(value.func, type) and not value.args:
            return {"name": self._name_of(value.func, place), **self._arguments(value.keywords, place)}
        if not _takes_objects(place) or isinstance(value, Mapping | str) or hasattr(value, "model_dump"):
            return None
        if place.endswith("graph"):
            if type(value).__module__.split(".")[0] == "networkx":
                from decentnode.objects import edges_of

                return edges_of(value)
            if not hasattr(value, "num_nodes"):
                return None
        return self.keep(place, value)

    def _arguments(self, keywords: Mapping[str, Any], place: str) -> dict[str, Any]:
        return {key: self._value_of(each, place, key) for key, each in keywords.items()}

    def keep(self, place: str, *given: Any) -> dict[str, Any]:
        """Keeps an object as the component at the key `place`, and returns the section that names it. Raises UsageError
        if it cannot be a component there."""
        from decentnode import objects

        maker: Callable[..., tuple[type[Any], dict[str, Any]]] = getattr(
            objects, f"make_{place.rpartition('.')[2]}"
        )
        made, keys = maker(*given)
        return {"name": self._keep_class(made, place), **keys}

    def _name_of(self, chosen: type[Any], place: str) -> str:
        """Returns "module:Class" if every process can import the class; else keeps it and returns its name."""
        module = sys.modules.get(chosen.__module__)
        importable = chosen.__module__ != "__main__" and getattr(module, chosen.__qualname__, None) is chosen
        return f"{chosen.__module__}:{chosen.__qualname__}" if importable else self._keep_class(chosen, place)

    def _keep_class(self, chosen: type[Any], place: str) -> str:
        if place.startswith("run.trackers"):
            raise UsageError(f"{place} must be a class from a module, because trackers run in a process of their "
                             f"own, got {chosen.__qualname__} of this program: put it into a module")  # fmt: skip
        name = re.sub(r"\W", "_", place)
        self.objects[name] = chosen
        return f"decentnode.objects:{name}"


def _takes_objects(place: str) -> bool:
    return re.sub(r"\.\d+", "", place) in MAKERS
