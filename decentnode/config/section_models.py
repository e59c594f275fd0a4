"""Finds the class of a config section, also within lists and unions; its fields are the keys of the section."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence
from typing import Any

import pydantic

from decentnode.config.component import Section
from decentnode.config.yaml_source import Item
from decentnode.errors import UsageError


def model_at(
    path: Sequence[str | int], tree: Item, model: type[pydantic.BaseModel]
) -> type[pydantic.BaseModel] | None:
    """Returns the class whose fields are the keys of the section at `path`, or None."""
    item: Item | None = tree
    owner: type[pydantic.BaseModel] | None = model
    annotations: list[Any] = []
    for part in path:
        if isinstance(part, int):
            annotations = [*_entry_types(annotations, item.plain() if item else [])]
        else:
            found = owner.model_fields.get(part) if owner else None
            if found is None:
                return None
            annotations = [found.annotation, *found.metadata]
        item = item.get(part) if item else None
        owner = next(_models(annotations, item.plain() if item else {}), None)
    return owner


def _models(annotations: Sequence[Any], value: Any) -> Iterator[type[pydantic.BaseModel]]:
    for annotation in reversed(_selected_alternative(annotations, value)):
        if isinstance(annotation, Section):
            name = annotation.name_of(value)
            try:
                yield annotation.config_of(name)
            except (UsageError, TypeError, AttributeError):
                return
        elif isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
            yield annotation
        else:
            yield from _models(_type_arguments(annotation), value)


def _entry_types(annotations: Sequence[Any], value: list[Any]) -> Iterator[Any]:
    """Yields the annotations of the entries of a list."""
    for annotation in _selected_alternative(annotations, value):
        if typing.get_origin(annotation) in (list, tuple):
            yield typing.get_args(annotation)[0]
        elif not isinstance(annotation, type):
            yield from _entry_types(_type_arguments(annotation), value)


def _type_arguments(annotation: Any) -> list[Any]:
    return [each for each in typing.get_args(annotation) if not isinstance(each, str)]


def _selected_alternative(annotations: Sequence[Any], value: Any) -> Sequence[Any]:
    """Returns the member of a union with a discriminator that the value belongs to; otherwise all `annotations`."""
    by = next((each for each in annotations if isinstance(each, pydantic.Discriminator)), None)
    if by is None or not callable(by.discriminator):
        return annotations
    tag = by.discriminator(value)
    members = [member for each in annotations if each is not by for member in _type_arguments(each)]
    tagged = [m for m in members if any(isinstance(t, pydantic.Tag) and t.tag == tag for t in _type_arguments(m))]
    return tagged if isinstance(tag, str) else annotations
