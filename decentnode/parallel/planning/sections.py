"""Validates the sections by which a script names a topology and a sharing rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pydantic


def config_of(argument: str, component: type[Any], section: Mapping[str, Any]) -> Any:
    """Returns the Config of a component for a section. Raises ValueError that names all problems in one sentence.

    argument: the name of the argument that the section was given for, for messages.
    """
    try:
        return component.Config.model_validate(section)
    except pydantic.ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        takes = ", ".join(sorted(set(component.Config.model_fields) - {"name"})) or "no keys"
        raise ValueError(f"{argument} {section.get('name', '')} (takes {takes}): {problems}") from None
