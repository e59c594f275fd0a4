"""Reads a YAML file with the keys of `simulate.links`, as `decentnode doctor --links` writes it."""

from __future__ import annotations

from pathlib import Path

import pydantic
import yaml

from decentnode.errors import UsageError
from decentnode.experiment.virtual_time import LinksConfig


def read_links(*paths: Path) -> LinksConfig:
    """Returns the links described by one file, or by several files merged in order: lists are concatenated, other keys
    of later files replace those of earlier ones. Raises UsageError."""
    found: dict[str, object] = {}
    for path in paths:
        try:
            plain = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
            raise UsageError(f"{path}: cannot be read: {error}") from error
        if isinstance(plain, dict) and set(plain) == {"links"}:
            plain = plain["links"]
        if not isinstance(plain, dict):
            raise UsageError(f"{path}: must have the keys of simulate.links")
        for key, value in plain.items():
            old = found.get(key)
            found[key] = [*old, *value] if isinstance(old, list) and isinstance(value, list) else value
    try:
        return LinksConfig.model_validate(found)
    except pydantic.ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise UsageError(f"{', '.join(map(str, paths))}: {problems}") from error
